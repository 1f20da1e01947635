"""Training: one loop, decided by a `TrainConfig`, exact to the bit when it is interrupted.

Nothing random is left in a state: the order of the requests follows from `(seed, epoch)`, and
dropout is seeded anew at each step from `(seed, step)`. A checkpoint is therefore the parameters,
their average, the optimiser, the scheduler, the early-stopping state and the position. A run that
resumes at the end of an epoch or inside one has the losses of a run that never stopped, to the
bit. Torch's global generators are put back as they were when training ends.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from jagged_ranking.data.batch import JaggedBatch, RequestTable
from jagged_ranking.data.data_shape import DataShape, is_next_items
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.devices import default_device
from jagged_ranking.evaluation.evaluate import Evaluation, predict
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.processes import alone_in, sweep
from jagged_ranking.training import checkpoint
from jagged_ranking.training.average import Average
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.optimisers import Optimisers
from jagged_ranking.training.run_progress import Progress, StepNumbers, TrainingError
from jagged_ranking.training.schedule import lower_on_plateau

if TYPE_CHECKING:
    from click_data import ClickDataset

# In a run's folder.
CHECKPOINT = "checkpoint.pt"  # where to go on
MODEL = "model.pt"  # the weights of the best epoch so far

# options that a resumed run may change: how long it may go on, and how often it saves
MAY_DIFFER = ("epochs", "checkpoint_steps")
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
) -> TrainResult:
    """Trains on the train split, choosing the epoch on the validation split.

    With `out`, the state is saved there after each epoch (and each `config.checkpoint_steps`);
    `resume` goes on from it, and starts afresh when there is none yet. `device` is the GPU where
    there is one. `after_step(step)` is called behind each optimiser step and its checkpoint.

    Raises TrainingError when `out` cannot be a folder, before anything is trained, and when the
    loss is NaN or infinite, or a checkpoint cannot be written; CheckpointError where the checkpoint
    belongs to other options or other data; BusyError where another run is at work in `out`.
    """
    device = torch.device(device or default_device())
    on_gpu = [device] if device.type == "cuda" else []
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"{out}: cannot be the run's folder ({error.strerror})") from error
    with _alone(out), torch.random.fork_rng(devices=on_gpu), _deterministic(device):
        run = _Run(config, dataset, device=device, out=out)
        if resume:
            run.restore()
        run.go(progress=progress, after_step=after_step)
    run.model.load_state_dict(run.best_state)
    return TrainResult(
        model=run.model.eval(),
        shape=run.shape,
        config=config,
        losses=run.progress.losses,
        history=run.progress.history,
        best_epoch=run.progress.best_epoch,
    )


def _check_loss(loss: str, model: Ranker, dataset: ClickDataset) -> None:
    if loss == "next_item" and not model.follows_sequences:
        able = [name for name in MODEL_NAMES if hasattr(encoder_of(name), "states")]
        raise ValueError(
            f"loss next_item needs a model that answers after every event: {', '.join(able)}"
        )
    if loss != "next_item" and is_next_items(dataset):
        raise ValueError(
            f"{dataset.name}: has next items alone, without others to tell them from: "
            "loss next_item draws these, with head dot"
        )


def load_model(
    run: Path, *, digest: str, device: torch.device | str = "cpu"
) -> tuple[Ranker, TrainConfig]:
    """The best model in a run's folder; its ids mean nothing on data of another digest."""
    saved = checkpoint.load(run / MODEL, device=device, digest=digest)
    config = TrainConfig.from_dict(saved.config)
    model = Ranker(config, DataShape.from_dict(saved.content["shape"])).to(device)
    model.load_state_dict(saved.content["model"])
    return model.eval(), config


@contextmanager
def _alone(out: Path | None) -> Iterator[None]:
    """Hold a run's folder, where there is one, without what a killed run was writing there."""
    if out is None:
        yield
        return
    with alone_in(out):
        for name in (CHECKPOINT, MODEL):
            sweep(out, name)
        yield


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Kernels of PyTorch that repeat themselves, where it has two: by default a GPU adds up the
    gradient of an embedding by atomics, in whatever order they come.

    Not for a CPU, where nothing would change but the time.
    """
    if device.type != "cuda":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is a property that type checks miss
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        # It warns of cuBLAS, which only varies with several streams, and of sums of integers.
        warnings.filterwarnings("ignore", message=".*determinis.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warns)
            memory.fill_uninitialized_memory = fills


class _Run:
    """A run's parts, made from the configuration alone and then perhaps restored."""

    def __init__(
        self, config: TrainConfig, dataset: ClickDataset, *, device: torch.device, out: Path | None
    ) -> None:
        self.config, self.dataset, self.device, self.out = config, dataset, device, out
        self.shape = DataShape.of(dataset)
        self.valid = dataset.requests("valid")
        if len(self.valid.item) == 0:
            raise ValueError(f"{dataset.name}: there are no validation requests to stop on")
        torch.manual_seed(config.seed)
        self.model = Ranker(config, self.shape).to(device)
        _check_loss(config.loss, self.model, dataset)
        self.optimisers = Optimisers(self.model, config)
        self.average = Average(self.model, decay=config.average_decay)
        self.progress, self.numbers = Progress(), StepNumbers()
        self.best_state: dict[str, Tensor] = {}
        store = HistoryStore.from_dataset(dataset, device)
        requests = RequestTable.from_columns(dataset.requests("train"), device)
        self.loader = RequestLoader(
            store,
            requests,
            batch_size=config.batch_size,
            max_history=config.max_history,
            shuffle=True,
            seed=config.seed,
            # every event of a history is asked about: that of the last request holds all others'
            rows=requests.last_of_users() if config.loss == "next_item" else None,
        )
        self.valid_loader = RequestLoader(
            store,
            RequestTable.from_columns(self.valid, device),
            batch_size=config.batch_size,
            max_history=config.max_history,
        )

    def go(self, *, progress: bool, after_step: Callable[[int], None] | None) -> None:
        steps = len(self.loader)
        bar = tqdm(
            total=self.config.epochs * steps,
            initial=self.progress.step,
            desc=f"{self.config.model} seed {self.config.seed}",
            unit="step",
            disable=not progress,
            leave=False,
        )
        with bar:
            while self.progress.epoch < self.config.epochs and not self.progress.stopped:
                self._epoch(bar, after_step)
                row = self.progress.history[-1]
                bar.set_postfix_str(
                    f"epoch {self.progress.epoch} loss {row['train_loss']:.4f} "
                    f"valid auc {row['valid_auc']:.4f} gauc {row['valid_gauc']:.4f}"
                )

    def _epoch(self, bar: tqdm, after_step: Callable[[int], None] | None) -> None:
        now, steps = self.progress, len(self.loader)
        started = time.perf_counter()
        self.model.train()
        for batch in self.loader.batches(now.epoch, start=now.epoch_step):
            self._step(batch)
            bar.update()
            every = self.config.checkpoint_steps
            if every and now.step % every == 0 and now.epoch_step < steps:
                self.save()
            elif len(self.numbers) >= READ_STEPS:
                self.read_numbers()
            if after_step:
                after_step(now.step)
        self.read_numbers()
        valid = Evaluation.of(
            "valid",
            self.valid,
            predict(self.average.model, self.valid_loader),
            train_ctr=self.shape.positive_rate,
        ).metrics
        if self.config.select not in valid:
            raise TrainingError(
                f"{self.dataset.name}: select is {self.config.select}, which needs lists of "
                f"candidates; there are: {', '.join(valid)}"
            )
        value = valid[self.config.select] * (1 if self.config.select == "log_loss" else -1)
        row = {
            "epoch": now.epoch,
            "train_loss": float(np.mean(now.losses[-now.epoch_step :])),
            "learning_rate": self.config.learning_rate * now.lr_scale,
            "seconds": time.perf_counter() - started,
            **{f"valid_{name}": metric for name, metric in valid.items()},
        }
        better = now.record(row, value=value, patience=self.config.patience)
        lower_on_plateau(self.config, now, better=better)
        if better:
            self.best_state = {
                name: value.clone() for name, value in self.average.model.state_dict().items()
            }
            self.save_model()
        self.save()

    def _step(self, batch: JaggedBatch) -> None:
        """One step, which the device may still be at when this returns."""
        now = self.progress
        # dropout's seed is a function of the step, so that no generator state need be saved
        entropy = (self.config.seed, now.step)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
        loss = loss_of(self.config.loss, self.model, batch, negatives=self.config.negatives)
        self.optimisers.zero_grad()
        loss.backward()
        norm = self.optimisers.step(scale=now.lr_scale)
        self.average.update(now.step)
        self.numbers.add(loss, norm)
        now.step += 1
        now.epoch_step += 1

    def read_numbers(self) -> None:
        self.numbers.read(self.progress, model=self.config.model)

    def save(self) -> None:
        self.read_numbers()  # behind a checkpoint there is no loss that is none
        if self.out is not None:
            content = {
                "model": self.model.state_dict(),
                "optimisers": self.optimisers.state_dict(),
                "average": self.average.state_dict(),
                "best": self.best_state,
                "progress": asdict(self.progress),
            }
            self._write(CHECKPOINT, content)

    def save_model(self) -> None:
        if self.out is not None:
            self._write(MODEL, {"model": self.best_state, "shape": self.shape.to_dict()})

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self.out is not None
        path = self.out / name
        try:
            checkpoint.save(path, content, config=self.config.to_dict(), digest=self.dataset.digest)
        except (OSError, RuntimeError) as error:  # torch raises the latter where a disk is full
            raise TrainingError(f"{path}: cannot be written ({error})") from error

    def restore(self) -> None:
        """Goes on from the checkpoint in `out`; stays at the start when there is none."""
        path = (self.out or Path()) / CHECKPOINT
        if self.out is None or not path.exists():
            return
        content = checkpoint.load(
            path,
            device=self.device,
            config=self.config.to_dict(),
            digest=self.dataset.digest,
            may_differ=MAY_DIFFER,
        ).content
        self.model.load_state_dict(content["model"])
        self.optimisers.load_state_dict(content["optimisers"])
        self.average.load_state_dict(content["average"])
        self.best_state = content["best"]
        self.progress = Progress(**content["progress"])
