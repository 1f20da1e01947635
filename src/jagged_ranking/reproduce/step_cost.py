"""Time and peak memory of a training step by each kind of attention, over the history cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from click_data import ClickDataset, open_dataset
from click_data.split import SPLITS
from jagged_ranking import results
from jagged_ranking.data.batch import RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.figures.affordability import STEP
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort
from jagged_ranking.models.model_config import ATTENTIONS
from jagged_ranking.reproduce.step_contest import PEAKS, Entry, StepContest
from jagged_ranking.training.config import TrainConfig

_MODE = "train"


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
        batch), "rel_error" and "loss_rel_error" (of the logits, and of the loss after a step,
        against jagged attention in float32).

    Raises:
        ValueError: an option that `TrainConfig` does not have, a model or a kind that there is not,
            or no kind at all.
    """
    if not attentions:
        raise ValueError("there must be at least one kind of attention")
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
        store, longest = HistoryStore.from_dataset(dataset, where), longest_history(dataset)
        table = RequestTable.from_columns(dataset.requests("train"), store.place)
        drawn = np.random.default_rng(seed).permutation(len(table))[:requests]
        for of_kinds in configs:
            batch = make_batch(
                store,
                table,
                drawn,
                max_history=of_kinds[0].max_history,
                arrivals=of_kinds[0].event_time == "arrival",
            )
            contest = StepContest(
                op=STEP,
                workload=dataset.name,
                configs={Entry(config.attention, _MODE): config for config in of_kinds},
                shape=DataShape.of(dataset),
                batch=batch,
                facts={
                    "cap": of_kinds[0].max_history,
                    "longest": longest,
                    "digest": dataset.digest,
                },
                run_id=run_id,
            )
            rows += _measured(contest, effort)
    return results.frame(rows)


def longest_history(dataset: ClickDataset) -> int:
    """The most events that any request sees; at least 1."""
    return max(1, *(int(np.max(dataset.requests(s).prefix, initial=0)) for s in SPLITS))


def _measured(contest: StepContest, effort: Effort) -> list[dict[str, Any]]:
    """Check, time, and weigh each alone; a kind that fails is not measured further."""
    contest.check()
    calls = {
        entry.provider: (lambda step=step: step(contest.batch))
        for entry, step in contest.ready().items()
    }
    timed = timing.interleaved(calls, device=contest.device, effort=effort)
    del calls
    for kind, one in timed.items():
        entry = Entry(kind, _MODE)
        if one.failure:
            contest.fail(entry, one.failure)
            continue
        contest.row(entry, "latency", "ms", samples=one.samples)
        if one.host:
            contest.row(entry, "host_time", "ms", samples=one.host)
    contest.weigh(contest.configs)
    contest.say_failures({"latency": "ms", **dict.fromkeys(PEAKS, "bytes")})
    return contest.found
