"""One rank of a scaling measurement: a process that `scaling_study` starts, once for each rank.

The steps are the trainer's on several ranks (`training/rank_group.py`), over batches that grow with
the ranks. The same batches are shared out by tokens and by users, in turns.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from click_data import open_dataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.shares import share_out
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.figures.scaling_points import BALANCES
from jagged_ranking.layers.id_table import IdTable, RowGradient
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.average import Average
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.determinism import deterministic
from jagged_ranking.training.join_ranks import joined
from jagged_ranking.training.optimisers import Optimisers
from jagged_ranking.training.rank_group import RankGroup

WARMUP = 3  # steps of each way to balance
# Of a step: its begin, and the ends of batch, forward, backward (where the exchange begins),
# exchange, and of all else, which is clipping and the update.
MARKS = 6


class MeasuredRanks(RankGroup):
    """Ranks that say when they begin and end to exchange gradients."""

    mark: Callable[[], None] = staticmethod(lambda: None)

    def by_users(self, tokens: np.ndarray) -> np.ndarray:
        """Which requests of a batch are this rank's, if all get as many."""
        return np.flatnonzero(share_out(np.ones_like(tokens), ranks=self.count) == self.number)

    def total_gradients(
        self,
        parameters: list[nn.Parameter],
        by_row: dict[str, RowGradient],
        tables: Mapping[str, IdTable],
    ) -> dict[str, RowGradient]:
        self.mark()
        found = super().total_gradients(parameters, by_row, tables)
        self.mark()
        return found


class _Clock:
    """Moments of the device, read when it is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moments: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def steps(self, marks: int) -> list[list[float]]:
        """ms between the marks of each step; forgets them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found, self._moments = self._moments, []
        steps = [found[first : first + marks] for first in range(0, len(found), marks)]
        return [[_between(*pair) for pair in pairwise(s)] for s in steps]


def _between(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return 1e3 * (after - before)
    return before.elapsed_time(after)


class _Training:
    """A model with all that its steps need, and batches shared out in each way."""

    def __init__(self, ranks: MeasuredRanks, asked: Mapping[str, Any]) -> None:
        self.ranks, self.device = ranks, ranks.own_device
        self.config = TrainConfig.from_dict(asked["options"])
        dataset = open_dataset(asked["data"])
        torch.manual_seed(self.config.seed)
        self.model = Ranker(self.config, DataShape.of(dataset)).to(self.device).train()
        self.optimisers = Optimisers(self.model, self.config, ranks)
        self.average = Average(self.model, decay=self.config.average_decay)
        self.clock, self.done = _Clock(self.device), 0
        ranks.mark = self.clock.mark
        store = HistoryStore.from_dataset(dataset, self.device)
        requests = RequestTable.from_columns(dataset.requests("train"), store.place)
        squared = getattr(self.model.encoder, "self_attention", False)
        shares = dict(zip(BALANCES, (ranks.share(squared=squared), ranks.by_users), strict=True))
        self.batches = {
            name: _without_end(
                RequestLoader(
                    store,
                    requests,
                    batch_size=asked["requests"] * ranks.count,
                    max_history=self.config.max_history,
                    shuffle=True,
                    seed=self.config.seed,
                    share=share,
                    arrivals=self.model.embedding.arrival,
                )
            )
            for name, share in shares.items()
        }

    def turn(self, balance: str, steps: int) -> dict[str, Any]:
        """So many steps: seconds of all, ms of the parts of each, and what each was of."""
        of: list[list[int]] = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.synchronize(self.device)
        self.ranks.each(lambda: None)  # all begin together
        began = time.perf_counter()
        for _ in range(steps):
            of.append(self._step(self.batches[balance]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"seconds": seconds, "parts": self.clock.steps(MARKS), "of": of, "peak": peak}

    def _step(self, batches: Iterator[JaggedBatch]) -> list[int]:
        """As the trainer's, with `MARKS` marks; returns requests, tokens and their squares."""
        self.ranks.begin_step(self.config.seed, self.done)
        self.optimisers.zero_grad()
        self.clock.mark()
        batch = next(batches)
        self.clock.mark()
        loss = self.ranks.loss(self.config, self.model, batch)
        self.clock.mark()
        if loss is not None:
            loss.backward()
        self.optimisers.step()
        self.average.update(self.done)
        self.ranks.total_loss([] if loss is None else [loss.detach()])
        self.clock.mark()
        self.done += 1
        tokens = batch.events + batch.asked
        return [len(batch), int(tokens.sum()), int((tokens.astype(np.int64) ** 2).sum())]


def _without_end(loader: RequestLoader) -> Iterator[JaggedBatch]:
    epoch = 0
    while True:
        yield from loader.batches(epoch)
        epoch += 1


def work(asked: Mapping[str, Any], out: Path) -> None:
    """Measures as this rank, and writes what it found to OUT and its number."""
    with joined(asked["device"], MeasuredRanks) as ranks, deterministic(ranks.own_device):
        torch.set_num_threads(asked["cpu_threads"])
        training = _Training(ranks, asked)
        dense = sum(p.numel() * p.element_size() for p in training.model.parameters())
        tables = {n: m for n, m in training.model.named_modules() if isinstance(m, IdTable)}
        by_row = sum(
            m.weight.numel() * m.weight.element_size() for m in tables.values() if m.by_row
        )
        found: dict[str, Any] = {name: [] for name in BALANCES}
        for name in BALANCES:
            training.turn(name, WARMUP)
        order = random.Random(asked["seed"])
        for _ in range(asked["rounds"]):
            for name in order.sample(BALANCES, len(BALANCES)):
                found[name].append(training.turn(name, asked["steps"]))
        said = {"turns": found, "dense_bytes": dense - by_row, "table_bytes": by_row}
        out.with_name(f"{out.name}{ranks.number}").write_text(json.dumps(said))


if __name__ == "__main__":
    try:
        work(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
