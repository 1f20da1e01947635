"""What a ranker loses when each history is compressed to the events that a policy keeps.

A ranker with target attention is trained on whole histories. Then every test request is scored from
a cache of its history's keys and values, of which each head keeps its own events. What says which
are worth keeping is what asked before: each past event, as the candidate that it was, over the
events before it.
"""

from __future__ import annotations

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
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.rows import difference_row, metric_row
from jagged_ranking.figures.cached_points import COMPRESSION, PERSISTENCE
from jagged_ranking.models.encoders.target_attention import TargetAttention
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import train

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


def compressed_quality(
    data: Path,
    *,
    policies: Sequence[str],
    compressions: Sequence[float],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    recent: int,
    replicates: int,
    device: str,
    run_id: str = "",
) -> pd.DataFrame:
    """Train target attention once a seed, and score the test split from compressed histories.

    Requests with histories of about as many events, up to n, share a budget of ceil(n /
    compression) events for each head, whatever the policy.

    Args:
        data: a prepared data set.
        policies: of `POLICIES`.
        compressions: 1 or more; 1, where nothing is dropped, is what the others are compared with,
            and always there.
        seeds: one training each.
        options: of `TrainConfig`, but for model and seed.
        recent: past events that "pivotal" asks, the last ones; "h2o" asks all.
        replicates: of the bootstrap over users and seeds.
        device: "cuda" or "cpu".
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
    if not seeds or not policies or replicates < 1:
        raise ValueError("there must be at least one policy, one seed and one replicate")
    if wrong := [one for one in compressions if not one >= 1]:
        raise ValueError(f"compressions must be at least 1, got {wrong[0]}")
    levels = sorted({1.0, *map(float, compressions)})
    settings = [Setting(policy, level) for policy in policies for level in levels]
    configs = [TrainConfig.from_dict({**options, "model": MODEL, "seed": s}) for s in seeds]

    dataset = open_dataset(data)
    rows: list[dict[str, Any]] = []
    found: dict[Setting, list[Evaluation]] = {}
    scored = None
    for config in configs:
        model = train(config, dataset, device=device, progress=False).model
        scored = _Scored(model, dataset, settings, recent=recent, device=torch.device(device))
        for setting, evaluation in scored.evaluations().items():
            found.setdefault(setting, []).append(evaluation)
        where = {"op": PERSISTENCE, "provider": MODEL, "config": {"seed": config.seed}}
        for metric, value in scored.persistence().items():
            rows.append(metric_row(metric, value, **_where(where, dataset, device, run_id)))
    assert scored is not None
    for setting, evaluations in found.items():
        facts = {"compression": setting.compression, **scored.kept(setting.compression)}
        where = {"op": COMPRESSION, "provider": setting.policy}
        for config, one in zip(configs, evaluations, strict=True):
            of_seed = {**where, "config": {**config.to_dict(), **facts}}
            for metric, value in one.metrics.items():
                row = metric_row(
                    metric, value, losses=[config.loss], **_where(of_seed, dataset, device, run_id)
                )
                rows.append(row)
        if setting.compression == 1.0:
            continue
        whole = found[Setting(setting.policy, 1.0)]
        for metric in evaluations[0].metrics:
            row = difference_row(
                metric,
                f"{metric}_difference",
                evaluations,
                whole,
                replicates=replicates,
                train_ctr=scored.model.positive_rate,
                losses=[config.loss for config in configs],
                **_where({**where, "config": facts}, dataset, device, run_id),
            )
            rows.append(row)
    return results.frame(rows)


def _where(
    fields: Mapping[str, Any], dataset: ClickDataset, device: str, run_id: str
) -> dict[str, Any]:
    config = {**fields["config"], "device": device, "digest": dataset.digest}
    return {**fields, "config": config, "workload": dataset.name, "mode": SPLIT, "run_id": run_id}


class _Scored:
    """A trained model, and the test split as it scores it from compressed histories."""

    def __init__(
        self,
        model: Ranker,
        dataset: ClickDataset,
        settings: Sequence[Setting],
        *,
        recent: int,
        device: torch.device,
    ) -> None:
        self.model, self.dataset, self.settings = model.to(device).eval(), dataset, settings
        self.recent, self.device = recent, device
        self.store = HistoryStore.from_dataset(dataset, device)
        self.columns = dataset.requests(SPLIT)
        self.requests = RequestTable.from_columns(self.columns, device)
        self.events = np.minimum(self.requests.host_prefix, model.max_history)

    @torch.no_grad()
    def evaluations(self) -> dict[Setting, Evaluation]:
        """Of the test split. Where nothing is dropped, policies are one."""
        compressed = [one for one in self.settings if one.compression > 1]
        whole = Setting(POLICIES[0], 1.0)
        scores = {one: np.zeros(len(self.columns.item)) for one in (whole, *compressed)}
        for batch in self._batches():
            kept = CompressedHistories(self.model, batch, recent=self.recent)
            place = batch.index.cpu().numpy()
            for setting, of_setting in scores.items():
                budget = budget_of(int(batch.longest[1]), setting.compression)
                logits = kept.logits(setting.policy, budget)
                of_setting[place] = logits[:, 0].double().sigmoid().cpu().numpy()
        rate = self.model.positive_rate
        found = {
            setting: Evaluation.of(SPLIT, self.columns, probability, train_ctr=rate)
            for setting, probability in scores.items()
        }
        return {one: found.get(one, found[whole]) for one in self.settings}

    @torch.no_grad()
    def persistence(self) -> dict[str, float]:
        """Means over the longest test history of each user, and over heads."""
        index = self.requests.last_of_users()
        batch = make_batch(self.store, self.requests, index, max_history=self.model.max_history)
        kept = CompressedHistories(self.model, batch, recent=self.recent)
        found = persistence_ratio(kept.asked, kept.key, kept.lse)
        parts = {
            "persistence_ratio": found.ratio,
            "pivotal_kept": found.kept,
            "pivotal": found.pivotal,
        }
        return {name: float(x.nanmean()) for name, x in parts.items()}

    def kept(self, compression: float) -> dict[str, float]:
        """Events of a request, on average: those kept, and all."""
        kept = 0
        for index in self._cuts():
            events = self.events[index]
            kept += int(np.minimum(events, budget_of(int(events[-1]), compression)).sum())
        return {"kept": kept / len(self.events), "whole": float(self.events.mean())}

    def _batches(self) -> Iterator[JaggedBatch]:
        for index in self._cuts():
            yield make_batch(self.store, self.requests, index, max_history=self.model.max_history)

    def _cuts(self) -> Iterator[np.ndarray]:
        """Requests in the order of their events, those of a batch with about as many."""
        order = np.argsort(self.events, kind="stable")
        events, first = self.events[order], 0
        while first < len(order):
            shortest = int(events[first])
            alike = np.searchsorted(events, shortest + shortest // ALIKE, side="right")
            end = min(int(alike), first + max(1, MOST_EVENTS // max(1, shortest)))
            yield order[first:end]
            first = end


def budget_of(events: int, compression: float) -> int:
    """Events kept of a history, at least 1."""
    return max(1, -int(-events // compression))


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
