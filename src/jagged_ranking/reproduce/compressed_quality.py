"""What a ranker loses when each history is compressed to the events that a policy keeps.

A ranker with target attention is trained on whole histories. Then every test request is scored from
a cache of its history's keys and values, of which each head keeps its own events. What says which
are worth keeping is what asked before: each past event, as the candidate that it was, over the
events before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from click_data import ClickDataset, open_dataset
from jagged_kernels import (
    HistoryCache,
    KeyStatistics,
    cached_attention,
    jagged_attention,
    key_statistics,
    persistence_ratio,
    scissorhands,
)
from jagged_ranking import results
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.rows import Differences, metric_row
from jagged_ranking.figures.cached_points import COMPRESSION, PERSISTENCE
from jagged_ranking.models.encoders.target_attention import TargetAttention
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.reproduce.quality_study import Trainings
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome
from jagged_ranking.training.runs import Run, train_all

MODEL = "target_attention"
POLICIES = ("pivotal", "h2o", "newest", "random")
SPLIT = "test"
# The newest events, which Scissorhands keeps whatever is counted of them.
NEWEST = 10
# Requests that share a budget have histories that differ by less than one part in so many.
ALIKE = 16
# In a batch, about.
MOST_EVENTS = 2**20


class Setting(NamedTuple):
    """A policy, and how many events of a history there are for each that it keeps."""

    policy: str
    compression: float


# Where nothing is dropped, policies are one.
WHOLE = Setting(POLICIES[0], 1.0)


class Plan(NamedTuple):
    """What is trained on a prepared data set: once a seed, with options of `TrainConfig` but for
    model and seed."""

    folder: Path
    seeds: Sequence[int]
    options: Mapping[str, Any]


def compressed_quality(
    plans: Sequence[Plan],
    *,
    policies: Sequence[str],
    compressions: Sequence[float],
    recent: int,
    replicates: int,
    device: str,
    workers: int | None = None,
    run_id: str = "",
) -> pd.DataFrame:
    """Train target attention once a seed, and score the test split from compressed histories.

    Requests with histories of about as many events, up to n, share a budget of ceil(n /
    compression) events for each head, whatever the policy. Each training is kept in `build/cache`
    with its scores, as soon as it is done.

    Args:
        plans: of the data sets.
        policies: of `POLICIES`.
        compressions: 1 or more; 1, where nothing is dropped, is what the others are compared with,
            and always there.
        recent: past events that "pivotal" asks, the last ones; "h2o" asks all.
        replicates: of the bootstrap over users and seeds.
        device: "cuda" or "cpu".
        workers: trainings side by side, with their scores; see `train_all`.
        run_id: for the column `id`.

    Returns:
        Rows with the policy as the provider and the data set as the workload, mode "test":
        - op "ranking_by_compression", metrics as `compare_models` has them, one a seed;
        - metric "<metric>_difference": the mean over seeds minus that of whole histories, with the
          bounds of its 95% paired bootstrap interval over users and seeds as "low" and "high" in
          config;
        - op "persistence", provider the model: metrics "persistence_ratio", "pivotal_kept" and
          "pivotal", see `jagged_kernels.cache.Persistence`: means over the users' longest test
          histories and over heads, one a seed.
        config has compression, and the mean number of events kept and of whole histories.

    Raises:
        ValueError: an unknown policy or option, no seed, no replicate, or a compression below 1.
    """
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ValueError(f"no policy {unknown[0]!r}; known: {', '.join(POLICIES)}")
    if not policies or replicates < 1 or not all(len(plan.seeds) for plan in plans):
        raise ValueError("there must be at least one policy, one seed and one replicate")
    if wrong := [one for one in compressions if not one >= 1]:
        raise ValueError(f"compressions must be at least 1, got {wrong[0]}")
    levels = sorted({1.0, *map(float, compressions)})
    settings = (WHOLE, *(Setting(p, level) for p in policies for level in levels if level > 1))
    score = CompressionScore(settings, recent)
    runs = []
    for plan in plans:
        dataset, store = open_dataset(plan.folder), Trainings(plan.folder, __name__, device)
        for seed in plan.seeds:
            config = TrainConfig.from_dict({**plan.options, "model": MODEL, "seed": seed})
            runs.append(Run(dataset, config, store))
    splits = score.names()
    trained = iter(
        train_all(
            runs, splits=splits, device=device, workers=workers, what="compressions", score=score
        )
    )
    rows: list[dict[str, Any]] = []
    for plan in plans:
        outcomes = list(itertools.islice(trained, len(plan.seeds)))
        dataset = open_dataset(plan.folder)
        scored = _Scored(dataset, outcomes, settings, device, run_id, replicates=replicates)
        rows += scored.persistence()
        for policy, level in itertools.product(policies, levels):
            rows += scored.rows(policy, level)
    return results.frame(rows)


class _Scored:
    """The trainings on one data set, as rows of results."""

    def __init__(
        self,
        dataset: ClickDataset,
        outcomes: Sequence[Outcome],
        settings: Sequence[Setting],
        device: str,
        run_id: str,
        *,
        replicates: int,
    ) -> None:
        self.dataset, self.outcomes, self.settings = dataset, outcomes, list(settings)
        self.common = {"workload": dataset.name, "mode": SPLIT, "run_id": run_id}
        self.facts = {"device": device, "digest": dataset.digest}
        self.events = events_of(dataset, outcomes[0].config.max_history)
        whole = self._of(WHOLE)
        self.lost = Differences(
            whole,
            whole[0].metrics,
            replicates=replicates,
            train_ctr=DataShape.of(dataset).positive_rate,
            paired=True,  # the same weights score whole and compressed histories
        )

    def persistence(self) -> Iterator[dict[str, Any]]:
        """Rows, one a seed."""
        for one in self.outcomes:
            of_seed = {"config": {"seed": one.config.seed, **self.facts}}
            where = {"op": PERSISTENCE, "provider": MODEL, **self.common, **of_seed}
            for metric, value in one.evaluations[-1].metrics.items():
                yield metric_row(metric, value, **where)

    def rows(self, policy: str, level: float) -> Iterator[dict[str, Any]]:
        """Rows of a policy: the scores of each seed, and what is lost to whole histories."""
        scored = self._of(Setting(policy, level))
        facts = {"compression": level, **kept_of(self.events, level), **self.facts}
        where = {"op": COMPRESSION, "provider": policy, **self.common}
        configs = [one.config for one in self.outcomes]
        for config, one in zip(configs, scored, strict=True):
            of_seed = {**where, "config": {**config.to_dict(), **facts}}
            for metric, value in one.metrics.items():
                yield metric_row(metric, value, losses=[config.loss], **of_seed)
        if level > 1:
            losses = [config.loss for config in configs]
            yield from self.lost.rows(scored, losses=losses, **{**where, "config": facts})

    def _of(self, setting: Setting) -> list[Evaluation]:
        place = self.settings.index(setting if setting.compression > 1 else WHOLE)
        return [one.evaluations[place] for one in self.outcomes]


def events_of(dataset: ClickDataset, max_history: int) -> np.ndarray:
    """[R] int64: events of the history of each test request, as a model sees it."""
    return np.minimum(np.asarray(dataset.requests(SPLIT).prefix, np.int64), max_history)


def kept_of(events: np.ndarray, compression: float) -> dict[str, float]:
    """Events of a request, on average: those kept, and all."""
    kept = 0
    for index in cuts(events):
        mine = events[index]
        kept += int(np.minimum(mine, budget_of(int(mine[-1]), compression)).sum())
    return {"kept": kept / len(events), "whole": float(events.mean())}


def cuts(events: np.ndarray) -> Iterator[np.ndarray]:
    """Requests in the order of their events, those of a batch with about as many."""
    order = np.argsort(events, kind="stable")
    ordered, first = events[order], 0
    while first < len(order):
        shortest = int(ordered[first])
        alike = np.searchsorted(ordered, shortest + shortest // ALIKE, side="right")
        end = min(int(alike), first + max(1, MOST_EVENTS // max(1, shortest)))
        yield order[first:end]
        first = end


def budget_of(events: int, compression: float) -> int:
    """Events kept of a history, at least 1."""
    return max(1, -int(-events // compression))


class CompressionScore(NamedTuple):
    """Scores the test split with a trained model from compressed histories: a `Score` of
    `train_all`.

    settings: whole histories before all others. recent: past events that "pivotal" asks.
    """

    settings: Sequence[Setting]
    recent: int

    def names(self) -> tuple[str, ...]:
        """Of the evaluations that come of it: one a setting, and behind them the persistence of
        what matters, which has metrics alone."""
        of_settings = [f"{SPLIT}, {policy}, {level!r}x" for policy, level in self.settings]
        return tuple(f"{name}, {self.recent} asked" for name in (*of_settings, PERSISTENCE))

    @torch.no_grad()
    def __call__(
        self, model: Ranker, dataset: ClickDataset, config: TrainConfig, splits: tuple[str, ...]
    ) -> list[Evaluation]:
        """See `names`, which `splits` are."""
        model.eval()
        device = next(model.parameters()).device
        store, columns = HistoryStore.from_dataset(dataset, device), dataset.requests(SPLIT)
        requests, most = RequestTable.from_columns(columns, store.place), model.max_history
        seen: dict[str, Any] = {"max_history": most, "arrivals": model.embedding.arrival}
        found = np.zeros((len(self.settings), len(columns.item)))
        for index in cuts(events_of(dataset, most)):
            batch = make_batch(store, requests, index, **seen)
            kept, longest = self._compressed(model, batch), int(batch.longest[1])
            place = batch.index.cpu().numpy()
            for scores, (policy, level) in zip(found, self.settings, strict=True):
                logits = kept.logits(policy, budget_of(longest, level))
                scores[place] = logits[:, 0].double().sigmoid().cpu().numpy()
        evaluations = [
            Evaluation.of(name, columns, scores, train_ctr=model.positive_rate)
            for name, scores in zip(splits, found, strict=False)
        ]
        last = make_batch(store, requests, requests.last_of_users(), **seen)
        nothing = dict.fromkeys(("probability", "user", "request", "label"), np.zeros(0))
        matters = self._persistence(self._compressed(model, last))
        return [*evaluations, Evaluation(split=splits[-1], metrics=matters, **nothing)]

    def _compressed(self, model: Ranker, batch: JaggedBatch) -> CompressedHistories:
        return CompressedHistories(model, batch, recent=self.recent)

    def _persistence(self, kept: CompressedHistories) -> dict[str, float]:
        """Means over the longest test history of each user, and over heads."""
        found = persistence_ratio(kept.asked, kept.key, kept.lse)
        parts = {
            "persistence_ratio": found.ratio,
            "pivotal_kept": found.kept,
            "pivotal": found.pivotal,
        }
        return {name: float(x.nanmean()) for name, x in parts.items()}


class CompressedHistories:
    """A batch's histories as target attention reads them, and what they are compressed by.

    Attributes:
        key, value: [T, H, D] of the events. asked: [T, H, D], for each event the next one as the
            candidate that it was, which saw those up to it.
        lse: [T, H], of what that saw.
    """

    def __init__(self, model: Ranker, batch: JaggedBatch, *, recent: int) -> None:
        self.model, self.batch = model, batch
        self.pool = cast(TargetAttention, model.encoder).pool
        history, candidates = model.embedding(batch)
        heads = self.pool.heads
        self.candidates = candidates
        self.query = candidates.with_values(
            self.pool.query(candidates.values).unflatten(1, (heads, -1))
        )
        parts = self.pool.key_value(history.values).unflatten(1, (2, heads, -1)).unbind(1)
        self.key, self.value = (history.with_values(part.contiguous()) for part in parts)
        known = batch.item.values.long()
        known = known.masked_fill(known >= model.num_items, 0)
        before = model.embedding.items(known, batch.items)[self._next()]
        self.asked = history.with_values(self.pool.query(before).unflatten(1, (heads, -1)))
        _, self.lse = jagged_attention(
            self.asked, self.key, self.value, causal=True, return_lse=True
        )
        self._statistics = {"pivotal": self._counted(recent), "h2o": self._counted(None)}

    def _next(self) -> Tensor:
        """[T]: the event that came when this one was the newest; of the last, which no event
        followed, itself."""
        offsets, tokens = self.batch.offsets, len(self.batch.item.values)
        last = torch.repeat_interleave(offsets[1:] - 1, offsets.diff(), output_size=tokens)
        return torch.minimum(torch.arange(1, tokens + 1, device=offsets.device), last)

    def _counted(self, recent: int | None) -> KeyStatistics:
        return key_statistics(self.asked, self.key, self.lse, recent=recent)

    def logits(self, policy: str, budget: int) -> Tensor:
        """[C, tasks], from what a policy keeps of each history: `budget` events for each head."""
        tokens, heads, dim = self.key.values.shape
        cache = HistoryCache(
            len(self.batch), max(1, self.batch.longest[1]), kv_heads=heads, head_dim=dim,
            page_size=1, dtype=self.key.values.dtype, device=self.key.device,
        )  # fmt: skip
        cache.append(self.key, self.value)
        newest = {"pivotal": min(NEWEST, budget // 2), "h2o": budget // 2}.get(policy, 0)
        scissorhands(
            cache,
            self._statistics.get(policy),
            budget=budget,
            recent=newest,
            drop=0.0,
            policy=cast(Any, policy),
            seed=tokens,
        )
        out, lse = cached_attention(self.query, cache, causal=False, return_lse=True)
        # As `layers.attention.attend` has the sink.
        shown = (lse - self.pool.sink).sigmoid()[..., None]
        answer = self.pool.out((out.values * shown.to(out.values.dtype)).flatten(1))
        return self.model.head(answer.float(), self.candidates.values.float(), self.batch)
