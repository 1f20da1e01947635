"""Time and peak memory of a training step by each kind of attention, on the same batches.

A step is what the trainer does with a batch: the loss, its gradients, the update of the weights and
of their average. All kinds begin with the same weights, and give the same logits, which is checked
before anything is timed. All of a model but its attention is jagged, whatever the kind: so this is
what padding costs there, and no more. PyTorch may use its faster kernels, which the trainer forbids
since they do not repeat themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from click_data import ClickDataset, open_dataset
from click_data.split import SPLITS
from jagged_ranking import results
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.prefetch import tensors_of
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.devices import device_name
from jagged_ranking.figures.affordability import STEP
from jagged_ranking.measure import timing
from jagged_ranking.measure.contest import explain
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.peak_memory import Peak, allocated, peak_memory, storage_bytes
from jagged_ranking.measure.reference import compare
from jagged_ranking.measure.timing import Effort
from jagged_ranking.models.model_config import ATTENTIONS
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.average import Average
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.optimisers import Optimisers

# Relative error of the logits against float32, beyond which a kind is wrong: five roundings to
# bfloat16, and in float32 what the tf32 mode of the matrix units needs.
LOWER_PRECISION_ERROR = 5 * torch.finfo(torch.bfloat16).eps
FLOAT32_ERROR = 1e-3
_PEAKS = ("peak_memory", "peak_memory_minus_inputs")


def step_costs(
    data: Path,
    *,
    models: Sequence[str],
    attentions: Sequence[str] = ATTENTIONS,
    caps: Sequence[int],
    options: Mapping[str, Any],
    requests: int,
    device: str,
    effort: Effort,
    seed: int = 0,
    cpu_threads: int = 1,
    run_id: str = "",
) -> pd.DataFrame:
    """Measure training steps over the history cap.

    Args:
        data: a prepared data set.
        models: names of rankers.
        attentions: kinds, see `ModelConfig.attention`.
        caps: most events that a request sees, at each point.
        options: of `TrainConfig`, of all models.
        requests: of the train split in the batch, drawn at random, the same for all caps.
        device: "cuda" or "cpu".
        effort: see `Effort`.
        seed: of the requests and of the weights.
        cpu_threads: on a CPU.
        run_id: for the column `id`.

    Returns:
        Rows of op "training_step", mode "train", the workload being the data set and the provider
        the kind of attention; model, cap and what the batch holds are in config. Metrics "latency"
        (ms; on a GPU the device's), "host_time" (ms; on a GPU only), "peak_memory" and
        "peak_memory_minus_inputs" (bytes; the inputs are weights, state of the optimiser and the
        batch), "rel_error" (of the logits against jagged attention in float32).

    Raises:
        ValueError: an option that `TrainConfig` does not have, a model or a kind that there is not.
    """
    where = torch.device(device)
    configs = [
        [
            TrainConfig.from_dict(
                {**options, "model": model, "max_history": cap, "attention": kind, "seed": seed}
            )
            for kind in attentions
        ]
        for model in models
        for cap in caps
    ]
    dataset = open_dataset(data)
    rows: list[dict[str, Any]] = []
    with timing.threads(where, cpu_threads), timing.earlier_objects_apart():
        table = RequestTable.from_columns(dataset.requests("train"), where)
        drawn = np.random.default_rng(seed).permutation(len(table))[:requests]
        store, longest = HistoryStore.from_dataset(dataset, where), longest_history(dataset)
        for of_kinds in configs:
            batch = make_batch(store, table, drawn, max_history=of_kinds[0].max_history)
            rows += _Measurement(dataset, of_kinds, batch, effort, longest, run_id).rows()
    return results.frame(rows)


def longest_history(dataset: ClickDataset) -> int:
    """The most events that any request sees; at least 1."""
    return max(1, *(int(np.max(dataset.requests(s).prefix, initial=0)) for s in SPLITS))


class _Step:
    """A model with all that a step of it needs."""

    def __init__(self, config: TrainConfig, shape: DataShape, batch: JaggedBatch) -> None:
        torch.manual_seed(config.seed)
        self.config, self.batch = config, batch
        self.model = Ranker(config, shape).to(batch.user.device)
        self.optimisers = Optimisers(self.model, config)
        self.average = Average(self.model, decay=config.average_decay)
        self.steps = 0

    def __call__(self) -> None:
        """One step, which leaves no gradient."""
        self.model.train()
        loss_of(
            self.config.loss, self.model, self.batch, negatives=self.config.negatives
        ).backward()
        self.optimisers.step(scale=1.0)
        self.average.update(self.steps)
        self.steps += 1
        self.optimisers.zero_grad()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Without dropout."""
        return self.model.eval()(self.batch)

    def tensors(self) -> Iterator[Tensor]:
        """What exists before a step, and stays."""
        for model in (self.model, self.average.model):
            yield from model.parameters()
            yield from model.buffers()
        yield from _tensors_in(self.optimisers.state_dict())
        yield from tensors_of(self.batch)


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors_in(value)


class _Measurement:
    """All kinds of attention of one model on one batch."""

    def __init__(
        self,
        dataset: ClickDataset,
        configs: Sequence[TrainConfig],
        batch: JaggedBatch,
        effort: Effort,
        longest: int,
        run_id: str,
    ) -> None:
        self.dataset, self.batch, self.effort, self.run_id = dataset, batch, effort, run_id
        self.configs = {config.attention: config for config in configs}
        self.shape, self.device = DataShape.of(dataset), batch.user.device
        self.failed: dict[str, tuple[str, str]] = {}
        self.facts = {
            "cap": configs[0].max_history,
            "longest": longest,
            "B": len(batch),
            "tokens": int(batch.events.sum()),
            "candidates": int(batch.asked.sum()),
            "waste": 1 - float(batch.events.mean()) / max(1, batch.longest[1]),
            "device": device_name(self.device),
            "digest": dataset.digest,
        }
        if self.device.type == "cpu":
            self.facts["threads"] = torch.get_num_threads()

    def rows(self) -> list[dict[str, Any]]:
        """Check, time, and weigh each alone; a kind that fails is not measured further."""
        found = self._checked()
        ready = self._steps()
        timed = timing.interleaved(ready, device=self.device, effort=self.effort)
        del ready
        for kind, one in timed.items():
            if one.failure:
                self._fail(kind, one.failure)
                continue
            found.append(self._row(kind, "latency", "ms", samples=one.samples))
            if one.host:
                found.append(self._row(kind, "host_time", "ms", samples=one.host))
        for kind in self.configs:
            found += self._peaks(kind)
        for kind, (status, message) in self.failed.items():
            told = {row["metric"] for row in found if row["provider"] == kind}
            for metric, unit in (("latency", "ms"), *((peak, "bytes") for peak in _PEAKS)):
                if metric not in told:
                    found.append(self._row(kind, metric, unit, status=status, message=message))
        return found

    def _checked(self) -> list[dict[str, Any]]:
        """Rows of the error of each kind's logits; what is wrong has failed."""
        exact = dataclasses.replace(
            next(iter(self.configs.values())), attention=OURS, precision="float32"
        )
        expected = _Step(exact, self.shape, self.batch).logits()
        rows = []
        for kind, config in self.configs.items():
            lower = self.device.type == "cuda" and config.precision != "float32"
            allowed = LOWER_PRECISION_ERROR if lower else FLOAT32_ERROR
            error = self._tried(kind, lambda c=config: compare([(self._logits(c), expected)]))
            if error is None:
                continue
            if not error.relative <= allowed:  # NaN too
                said = f"wrong: relative error {error.relative:.3g}, allowed is {allowed:.3g}"
                self.failed[kind] = ("error", said)
            elif np.isfinite(error.relative):
                extra = {"allowed_rel_error": allowed}
                row = self._row(kind, "rel_error", "1", value=error.relative, extra=extra)
                rows.append(row)
        return rows

    def _logits(self, config: TrainConfig) -> Tensor:
        return _Step(config, self.shape, self.batch).logits()

    def _steps(self) -> dict[str, Callable[[], object]]:
        ready: dict[str, Callable[[], object]] = {}
        for kind, config in self.configs.items():
            if kind not in self.failed:
                step = self._tried(kind, lambda c=config: _Step(c, self.shape, self.batch))
                if step is not None:
                    ready[kind] = step
        return ready

    def _peaks(self, kind: str) -> list[dict[str, Any]]:
        """Rows of the memory of a kind, alone on the device."""
        if kind in self.failed:
            return []
        peak = self._tried(kind, lambda: self._peak(self.configs[kind]))
        if peak is None:
            return []
        values = zip(_PEAKS, (peak.total, peak.beyond_inputs), strict=True)
        return [self._row(kind, metric, "bytes", value=float(value)) for metric, value in values]

    def _peak(self, config: TrainConfig) -> Peak:
        timing.release(self.device)
        # the batch counts, the data set that it was cut out of does not
        floor = allocated(self.device) - storage_bytes(tensors_of(self.batch))
        step = _Step(config, self.shape, self.batch)
        step()  # the optimiser makes its state in the first
        return peak_memory(step, inputs=step.tensors(), device=self.device, floor=floor)

    def _tried(self, kind: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._fail(kind, error)
            return None

    def _fail(self, kind: str, error: Exception) -> None:
        status, message = explain(error)
        # What the seam itself says that a kind cannot do here.
        if isinstance(error, ValueError) and str(error).startswith(f"attention {kind} "):
            status, message = "unsupported", str(error)
        self.failed[kind] = (status, message)
        timing.release(self.device)

    def _row(
        self,
        kind: str,
        metric: str,
        unit: str,
        *,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        config = {**self.configs[kind].to_dict(), **self.facts, **(extra or {})}
        return results.row(
            op=STEP,
            provider=kind,
            workload=self.dataset.name,
            mode="train",
            metric=metric,
            unit=unit,
            config=config,
            run_id=self.run_id,
            **options,
        )
