"""From results of attention to some of the keys to what figures and tables show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from jagged_ranking.figures.points import EXTRA, FACTS, modes_of, of_group
from jagged_ranking.measure.lineup import BY_BLOCKS, BY_DENSITY, OURS, OURS_DENSE
from jagged_ranking.results import select, with_config

NOTEBOOK = "08_sparse_attention"
SPARSE, LISTS, SEEN = "sparse_attention", "lists", "keys_seen"
TURNED_LISTS = "lists_with_transpose"
# S2-Attention's abstract: its kernels over FlashAttention-2, for three models.
PAPER_SPEEDUPS = (8.79, 15.87, 25.3)
PEER_OF_THE_PAPER = "varlen_attn"
# Time over the density of blocks: a line (R2) that begins near zero, of the time on all keys.
FIT_GOAL, INTERCEPT_GOAL = 0.98, 0.10
_RULES = ("rule", "density", "stride", "local", "window", "first", "top_k", "newest", "block")


def sparse(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of op "sparse_attention" and one metric, facts of the workload as columns."""
    return with_config(select(results, op=SPARSE, metric=metric), *FACTS, *EXTRA, *_RULES, "causal")


def lists_ms(results: pd.DataFrame, mode: str = "forward") -> dict[str, float]:
    """workload -> median ms to build our schedule with its lists, all that a call in this mode
    needs, where it was measured. For a backward with the transpose, where that is not among the
    lists anyhow."""
    found = {}
    for op in (LISTS,) if mode == "forward" else (LISTS, TURNED_LISTS):
        rows = select(results, op=op, provider=OURS, metric="latency", status="ok")
        found |= dict(zip(rows["workload"], rows["value"], strict=True))
    return found


def seen(results: pd.DataFrame) -> pd.DataFrame:
    """Rows of the keys that the newest query sees, with columns max_len, H and those of rules."""
    return with_config(select(results, op=SEEN), "max_len", "H", *_RULES)


def against(table: pd.DataFrame, provider: str) -> dict[tuple[str, str], float]:
    """(workload, mode) -> how many times more the provider needs than we do."""
    good = table[table["status"] == "ok"]
    value = good.set_index(["provider", "workload", "mode"])["value"]
    return {
        (workload, mode): float(theirs / value[OURS, workload, mode])
        for (name, workload, mode), theirs in value.items()
        if name == provider and (OURS, workload, mode) in value.index
    }


@dataclass(frozen=True)
class DensitySweep:
    """Time over density, in one mode.

    title: which keys. density, relative: of each batch, ascending; relative is our time over ours
    on all keys. intercept, slope: of the line of least squares; r2: of the variance, what it
    explains (NaN for fewer than three points).
    """

    title: str
    mode: str
    density: np.ndarray
    relative: np.ndarray
    low: np.ndarray
    high: np.ndarray
    intercept: float
    slope: float
    r2: float

    @property
    def in_proportion(self) -> bool:
        """Whether time falls with the blocks."""
        return self.r2 >= FIT_GOAL and self.intercept <= INTERCEPT_GOAL

    def faster_at(self, density: float, within: float = 0.02) -> float:
        """Times faster than all keys at this density; NaN where it was not measured."""
        if not len(self.density):
            return math.nan
        nearest = int(np.abs(self.density - density).argmin())
        near = abs(self.density[nearest] - density) <= within
        return 1.0 / float(self.relative[nearest]) if near else math.nan


def density_sweeps(results: pd.DataFrame) -> Iterator[DensitySweep]:
    """Of S2-Attention, and of random blocks, causal and not; of each in each mode."""
    table = sparse(results, "latency")
    strided, blocks = of_group(table, BY_DENSITY), of_group(table, BY_BLOCKS)
    if len(strided):
        length = int(strided["max_len"].iloc[0])
        yield from _sweeps(strided, f"S2-Attention, {length:,} tokens")
    for causal, name in ((True, ", causal"), (False, ", not causal")):
        mine = blocks[blocks["causal"].astype(bool) == causal]
        if len(mine):
            length = int(mine["max_len"].iloc[0])
            yield from _sweeps(mine, f"random{name}, {length:,} tokens")


def _sweeps(table: pd.DataFrame, title: str) -> Iterator[DensitySweep]:
    good = table[table["status"] == "ok"]
    for mode in modes_of(good):
        mine = good[good["mode"] == mode]
        own = mine[mine["provider"] == OURS].set_index("workload")
        everything = mine[mine["provider"] == OURS_DENSE].set_index("workload")["value"]
        both = own[own.index.isin(everything.index)].sort_values("density", kind="stable")
        unit = everything[both.index].to_numpy(float)
        density = both["density"].to_numpy(float)
        relative, low, high = (both[c].to_numpy(float) / unit for c in ("value", "q25", "q75"))
        yield DensitySweep(title, mode, density, relative, low, high, *line(density, relative))


def line(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """(intercept, slope, R2) of least squares; NaN for fewer than three points."""
    if len(set(np.asarray(x).tolist())) < 3:
        return math.nan, math.nan, math.nan
    slope, intercept = np.polyfit(x, y, 1)
    y = np.asarray(y, float)
    rest = y - (intercept + slope * np.asarray(x, float))
    spread = float(((y - y.mean()) ** 2).sum())
    return float(intercept), float(slope), 1.0 - float((rest**2).sum()) / max(spread, 1e-300)
