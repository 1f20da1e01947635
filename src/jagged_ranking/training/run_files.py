"""The files of a run: where to go on, and the best model so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from click_data.schema import is_prepared
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.processes import alone_in, sweep
from jagged_ranking.training import checkpoint
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_progress import TrainingError
from jagged_ranking.training.table_files import load_tables

# In a run's folder.
CHECKPOINT = "checkpoint.pt"  # where to go on
MODEL = "model.pt"  # the weights of the best epoch so far

# options that a resumed run may change: how long it may go on, and how often it saves
MAY_DIFFER = ("epochs", "checkpoint_steps")


@contextmanager
def run_folder(out: Path | None) -> Iterator[None]:
    """Make and hold a run's folder, if there is to be one, without what a killed run was writing
    there."""
    if out is None:
        yield
        return
    if is_prepared(out):
        raise TrainingError(f"{out}: is a prepared data set; name another folder for the run")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be the run's folder ({error.strerror})") from error
    with alone_in(out):
        for name in (CHECKPOINT, MODEL):
            sweep(out, name)
        yield


@dataclass(frozen=True)
class RunFiles:
    """The folder of one run, made from `config` on data of `digest`.

    The best weights lie in `MODEL` alone. It is written before the checkpoint that counts on it:
    a run that is killed between the two finds the weights of an epoch that it comes to again.
    """

    folder: Path
    config: TrainConfig
    digest: str

    def save(self, content: dict[str, Any]) -> None:
        """The state to go on from."""
        self._write(CHECKPOINT, content)

    def save_model(
        self, weights: dict[str, Tensor], shape: DataShape, *, epoch: int, rows: str = ""
    ) -> None:
        """The weights of the best epoch so far, and the folder of tables that are saved apart."""
        content = {"model": weights, "shape": shape.to_dict(), "epoch": epoch, "rows": rows}
        self._write(MODEL, content)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """What `save` wrote last; None where it did not."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        # where the rate falls over all epochs, another number of them is another rate
        may_differ = MAY_DIFFER[1:] if self.config.schedule == "cosine" else MAY_DIFFER
        return checkpoint.load(
            path,
            device=device,
            config=self.config.to_dict(),
            digest=self.digest,
            may_differ=may_differ,
        ).content

    def best(self, device: torch.device, *, epoch: int) -> dict[str, Tensor]:
        """The weights of the best epoch, a CheckpointError where they are another epoch's."""
        path = self.folder / MODEL
        content = checkpoint.load(path, device=device, digest=self.digest).content
        if (found := content.get("epoch")) != epoch:
            raise CheckpointError(
                f"{path}: holds epoch {found}, the best one of {CHECKPOINT} is {epoch}; "
                f"resume with more than {found} epochs"
            )
        return content["model"]

    def _write(self, name: str, content: dict[str, Any]) -> None:
        path = self.folder / name
        try:
            checkpoint.save(path, content, config=self.config.to_dict(), digest=self.digest)
        except (OSError, RuntimeError) as error:  # torch raises the latter where a disk is full
            raise TrainingError(f"{path}: cannot be written ({error})") from error


def load_weights(into: Any, weights: dict[str, Any], path: Path) -> None:
    """`into.load_state_dict`, of the same names and shapes; a CheckpointError for any others."""
    try:
        into.load_state_dict(weights)
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: holds the weights of another model") from error


def load_model(
    run: Path, *, digest: str, device: torch.device | str = "cpu"
) -> tuple[Ranker, TrainConfig]:
    """The best model in a run's folder; its ids mean nothing on data of another digest."""
    saved = checkpoint.load(run / MODEL, device=device, digest=digest)
    config = TrainConfig.from_dict(saved.config)
    model = Ranker(config, DataShape.from_dict(saved.content["shape"])).to(device)
    tables = model.embedding.id_tables
    if rows := saved.content.get("rows"):
        weights = {f"embedding.{n}.weight": t.weight.detach() for n, t in tables.items()}
        load_tables(run / rows, weights)
    for table in tables.values():
        table.saved_apart = bool(rows)
    load_weights(model, saved.content["model"], run / MODEL)
    for table in tables.values():
        table.saved_apart = False
    return model.eval(), config
