"""Training: one loop, decided by a `TrainConfig`, exact to the bit when it is interrupted.

Nothing random is left in a state: the order of the requests follows from `(seed, epoch)`, and
dropout is seeded anew at each step from `(seed, step)`. A checkpoint is therefore the parameters,
their average, the optimisers, the early-stopping state and the position; the best weights have a
file of their own. A run that resumes at the end of an epoch or inside one has the losses of a run
that never stopped, to the bit. Torch's global generators are put back as they were when training
ends.

No step waits for the device: losses stay there until a checkpoint or the end of an epoch.

Several processes (`ranks`) take the steps that one would, up to rounding: all of them know the
order and the batches, each makes and trains on its share of the requests, and whatever is decided
is decided on numbers that all have. Where a run stands does not say how many they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from jagged_ranking.data.batch import JaggedBatch, RequestTable
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.devices import default_device
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.average import Average
from jagged_ranking.training.board import Board
from jagged_ranking.training.captured_step import CapturedStep
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.determinism import deterministic, generators_of
from jagged_ranking.training.optimisers import Optimisers, share_rows
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.refusals import check_loss
from jagged_ranking.training.run_files import CHECKPOINT, MODEL, RunFiles, load_weights, run_folder
from jagged_ranking.training.run_progress import Progress, StepNumbers, TrainingError
from jagged_ranking.training.schedule import lower_on_plateau, rate_scale
from jagged_ranking.training.selection import check_select, settled, validated
from jagged_ranking.training.table_files import TableFiles
from jagged_ranking.training.torchrec_tables import check_torchrec

if TYPE_CHECKING:
    from click_data import ClickDataset

# Losses are read at the end of an epoch, before a checkpoint, and every so many steps.
READ_STEPS = 100


@dataclass(frozen=True)
class TrainResult:
    """The model with the averaged weights of its best epoch, and how it came about.

    losses: of every step. history: one dict an epoch: epoch, train_loss, learning_rate, seconds
    and the validation metrics as valid_auc, valid_gauc, ....
    """

    model: Ranker
    shape: DataShape
    config: TrainConfig
    losses: list[float]
    history: list[dict[str, float]]
    best_epoch: int


def train(
    config: TrainConfig,
    dataset: ClickDataset,
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str | None = None,
    after_step: Callable[[int], None] | None = None,
    board: Path | None = None,
    ranks: Ranks | None = None,
    from_disk: bool | None = None,
    through: Callable[[Iterator[JaggedBatch]], Iterator[JaggedBatch]] | None = None,
) -> TrainResult:
    """Trains on the train split, choosing the epoch on the validation split.

    With `out`, the state is saved there after each epoch (and each `config.checkpoint_steps`);
    `resume` goes on from it, and starts afresh when there is none yet. `device` is the GPU where
    there is one. `after_step(step)` is called behind each optimiser step and its checkpoint.
    `board` is a folder for TensorBoard: the loss of each step, and what is known of each epoch.
    `ranks` are the processes that train together, of which each calls this alike: rank 0 alone
    reads and writes `out` and `board`. `from_disk`: see `HistoryStore.from_dataset`. The batches
    of an epoch go `through` a function, which may watch them, such as a `BatchClock`.

    Raises TrainingError when `out` cannot be a folder, before anything is trained, and when the
    loss is NaN or infinite, or a checkpoint cannot be written; CheckpointError where the checkpoint
    belongs to other options or other data; BusyError where another run is at work in `out`.
    """
    device = torch.device(device or default_device())
    on_gpu = [device] if device.type == "cuda" else []
    ranks = ranks or Ranks()
    config = ranks.each(lambda: settled(config, dataset))
    with ExitStack() as stack:

        def hold() -> None:
            stack.enter_context(run_folder(out))

        ranks.lead(hold)
        stack.enter_context(torch.random.fork_rng(devices=on_gpu))
        stack.enter_context(deterministic(device))
        if config.tables == "torchrec" and ranks.count > 1:
            ranks.each(check_torchrec)
        if config.captured and ranks.count > 1:
            raise ValueError(f"compile {config.compile} is of one process; here are {ranks.count}")
        run = ranks.each(
            lambda: _Run(config, dataset, device=device, out=out, ranks=ranks, from_disk=from_disk)
        )
        if resume:
            run.restore()
        run.through = through or run.through
        run.go(progress=progress, after_step=after_step, board=board)
        model = run.best_model()
    return TrainResult(
        model=model,
        shape=run.shape,
        config=config,
        losses=run.progress.losses,
        history=run.progress.history,
        best_epoch=run.progress.best_epoch,
    )


class _Run:
    """A run's parts, made from the configuration alone and then perhaps restored."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: ClickDataset,
        *,
        device: torch.device,
        out: Path | None,
        ranks: Ranks | None = None,
        from_disk: bool | None = None,
    ) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        self.ranks = ranks or Ranks()
        self.out, self.files = out, None
        if out is not None and self.ranks.leads:
            self.files = RunFiles(out, config, dataset.digest)
        if config.tables != "replicated" and out is None:
            raise ValueError(f"tables {config.tables} needs a folder for the run")
        self.rows = TableFiles(out, self.ranks) if config.tables != "replicated" and out else None
        self.shape = DataShape.of(dataset)
        self.valid = dataset.requests("valid")
        if len(self.valid.item) == 0:
            raise ValueError(f"{dataset.name}: there are no validation requests to stop on")
        torch.manual_seed(config.seed)
        model = Ranker(config, self.shape)
        check_loss(config.loss, model, dataset)
        check_select(config, dataset, self.valid)
        shared = share_rows(model, config, self.ranks)
        self.model = model.to(device)
        self.optimisers = Optimisers(self.model, config, self.ranks, shared)
        self.average = Average(self.model, decay=config.average_decay)
        if config.backend:
            self.model.compile(backend=config.backend, dynamic=True)
        self.progress, self.numbers = Progress(), StepNumbers()
        self.generators = generators_of(device)
        self.best_weights: dict[str, Tensor] = {}
        self.best_rows = ""
        self.board = Board(None)
        self.through: Callable[[Iterator[JaggedBatch]], Iterator[JaggedBatch]] = iter
        store = HistoryStore.from_dataset(dataset, device, from_disk=from_disk)
        requests = RequestTable.from_columns(dataset.requests("train"), store.place)
        share = self.ranks.share(squared=getattr(self.model.encoder, "self_attention", False))
        self.loader = RequestLoader(
            store,
            requests,
            batch_size=config.batch_size,
            batch_tokens=config.batch_tokens,
            max_history=config.max_history,
            shuffle=True,
            seed=config.seed,
            # every event of a history is asked about: that of the last request holds all others'
            rows=requests.last_of_users() if config.loss == "next_item" else None,
            share=share,
            arrivals=self.model.embedding.arrival,
        )
        self.captured = self._captured(requests) if config.captured else None
        self.valid_loader = RequestLoader(
            store,
            RequestTable.from_columns(self.valid, store.place),
            batch_size=config.batch_size,
            batch_tokens=config.batch_tokens,
            max_history=config.max_history,
            share=share,
            arrivals=self.model.embedding.arrival,
        )

    def _captured(self, requests: RequestTable) -> CapturedStep:
        seen = min(self.config.max_history, int(requests.host_prefix.max(initial=0)))
        asked = int(np.diff(requests.host_offsets).max(initial=0))
        return CapturedStep(self.config, self.model, self.optimisers, longest=(asked, seen))

    def go(
        self, *, progress: bool, after_step: Callable[[int], None] | None, board: Path | None
    ) -> None:
        now, requests = self.progress, len(self.loader)
        self.board = Board(board if self.ranks.leads else None, step=now.step)
        bar = tqdm(
            total=self.config.epochs * requests,
            initial=now.epoch * requests,
            desc=f"{self.config.model} seed {self.config.seed}",
            unit=" requests",
            disable=not (progress and self.ranks.leads),
            leave=False,
        )
        try:
            with bar:
                while now.epoch < self.config.epochs and not now.stopped:
                    self._epoch(bar, after_step)
                    row = now.history[-1]
                    bar.set_postfix_str(
                        f"epoch {now.epoch} loss {row['train_loss']:.4f} "
                        f"valid auc {row['valid_auc']:.4f} gauc {row['valid_gauc']:.4f}"
                    )
        finally:
            self.board.close()

    def _epoch(self, bar: tqdm, after_step: Callable[[int], None] | None) -> None:
        now, config = self.progress, self.config
        started = time.perf_counter()
        self.model.train()
        cuts = self.loader.cuts(self.loader.order(now.epoch))
        # where each step begins, and the last one ends, in batches
        places = [*range(0, len(cuts) - 1, config.accumulate), len(cuts) - 1]
        steps = len(places) - 1
        batches = self.through(self.loader.batches(now.epoch, start=places[now.epoch_step]))
        bar.update(int(cuts[places[now.epoch_step]]))
        scale = 1.0
        for first, end in pairwise(places[now.epoch_step :]):
            scale = rate_scale(config, now, epoch_steps=steps)
            self._step(batches, count=end - first, scale=scale)
            bar.update(int(cuts[end] - cuts[first]))
            every = config.checkpoint_steps
            if every and now.step % every == 0 and now.epoch_step < steps:
                self.save()
            elif len(self.numbers) >= READ_STEPS:
                self.read_numbers()
            if after_step:
                after_step(now.step)
        self.read_numbers()
        valid = validated(
            self.average.model,
            self.valid_loader,
            self.valid,
            select=config.select,
            train_ctr=self.shape.positive_rate,
            ranks=self.ranks,
        )
        value = valid[config.select] * (1 if config.select == "log_loss" else -1)
        row = {
            "epoch": now.epoch,
            "train_loss": float(np.mean(now.losses[-now.epoch_step :])),
            "learning_rate": config.learning_rate * scale,
            "seconds": time.perf_counter() - started,
            **{f"valid_{name}": metric for name, metric in valid.items()},
        }
        self.board.add(now.step, {name: row[name] for name in row if name != "epoch"})
        better = now.record(row, value=value, patience=config.patience)
        lower_on_plateau(config, now, better=better)
        self.ranks.check_alike(self.model, epoch=now.epoch - 1)
        if better:
            self.keep_best()
        self.save()

    def _step(self, batches: Iterator[JaggedBatch], *, count: int = 1, scale: float = 1.0) -> None:
        """One step on the next `count` batches, which the device may still be at when this
        returns."""
        now = self.progress
        # dropout's seed is a function of the step, so that no generator state need be saved
        seed = self.ranks.begin_step(self.config.seed, now.step)
        for generator in self.generators:
            generator.manual_seed(seed)
        self.optimisers.set_scale(scale)
        take = self._launched if self.captured is None else self._replayed
        self.numbers.add(*take(islice(batches, count), count))
        self.average.update(now.step)
        now.step += 1
        now.epoch_step += 1

    def _launched(self, batches: Iterator[JaggedBatch], count: int) -> tuple[Tensor, Tensor]:
        """Loss and gradient's norm of a step on the mean of so many batches, [] each."""
        self.optimisers.zero_grad()
        losses = []
        for batch in batches:
            part = self.ranks.loss(self.config, self.model, batch)
            if part is not None:
                loss = part / count
                loss.backward()
                losses.append(loss.detach())
        norm = self.optimisers.step()
        return self.ranks.total_loss(losses), norm

    def _replayed(self, batches: Iterator[JaggedBatch], count: int) -> tuple[Tensor, Tensor]:
        """The same of one batch, by CUDA graphs."""
        assert self.captured is not None
        assert count == 1
        try:
            return self.captured(next(batches))
        except NotImplementedError as error:
            raise TrainingError(f"compile {self.config.compile}: {error}") from error

    def read_numbers(self) -> None:
        known = len(self.progress.losses)
        self.numbers.read(self.progress, model=self.config.model)
        for step, loss in enumerate(self.progress.losses[known:], start=known):
            self.board.add(step, {"loss": loss})

    def save(self) -> None:
        self.read_numbers()  # behind a checkpoint there is no loss that is none
        rows = self._save_rows()
        if self.files is not None:
            content = {
                "model": self.model.state_dict(),
                "average": self.average.state_dict(),
                "optimisers": self.optimisers.state_dict(),
                "progress": asdict(self.progress),
                # the folders of tables that are saved apart, now and of the best epoch
                "rows": rows,
                "best_rows": self.best_rows,
            }
            self.files.save(content)
            if self.rows is not None:
                self.rows.keep(rows, self.best_rows)

    def _save_rows(self) -> str:
        """The folder of the tables that are saved apart; none has no name."""
        if self.rows is None:
            return ""
        return self.rows.save(self.progress.step, self.optimisers.rows_apart())

    def keep_best(self) -> None:
        weights = self.average.model.state_dict()
        self.best_rows = self._save_rows()
        if self.files is not None:
            epoch = self.progress.best_epoch
            self.files.save_model(weights, self.shape, epoch=epoch, rows=self.best_rows)
        elif self.ranks.leads:
            self.best_weights = {name: value.clone() for name, value in weights.items()}

    def best_model(self) -> Ranker:
        """The model, with the weights of its best epoch."""
        if self.progress.best_epoch < 0:
            raise TrainingError(
                f"{self.dataset.name}: {self.config.select} was no number in any epoch"
            )
        self.ranks.lead(self._load_best)
        self.ranks.copy(self.model)
        if self.rows is not None:
            self.rows.load(self.best_rows, self.optimisers.rows_apart())
        return self.model.eval()

    def _load_best(self) -> None:
        if self.files is not None:
            self.best_weights = self.files.best(self.device, epoch=self.progress.best_epoch)
        self.model.load_state_dict(self.best_weights)

    def restore(self) -> None:
        """Goes on from the checkpoint in `out`; stays at the start when there is none."""
        content = self.ranks.lead(self._saved)
        if content is not None and self.out is not None:
            path = self.out / CHECKPOINT
            self.ranks.each(lambda: self._take(content, path))
            if self.rows is not None:
                self.best_rows = content["best_rows"]
                self.rows.load(content["rows"], self.optimisers.rows_apart())

    def _take(self, content: dict[str, Any], path: Path) -> None:
        load_weights(self.model, content["model"], path)
        load_weights(self.average, content["average"], path)
        load_weights(self.optimisers, content["optimisers"], path)
        self.progress = Progress(**content["progress"])

    def _saved(self) -> dict[str, Any] | None:
        if self.files is None:
            return None
        # for other ranks it goes through the host
        content = self.files.load(self.device if self.ranks.count == 1 else torch.device("cpu"))
        model = self.files.folder / MODEL
        if content is not None and content["progress"]["best_epoch"] >= 0 and not model.is_file():
            raise CheckpointError(f"{model}: no such checkpoint")
        return content
