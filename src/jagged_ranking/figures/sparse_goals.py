"""Attention to some of the keys against its goals."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from jagged_ranking.figures.points import modes_of, of_group, ours_of
from jagged_ranking.figures.sparse_points import (
    FIT_GOAL,
    INTERCEPT_GOAL,
    PAPER_SPEEDUPS,
    PEER_OF_THE_PAPER,
    against,
    density_sweeps,
    lists_ms,
    sparse,
)
from jagged_ranking.figures.tables import number
from jagged_ranking.figures.verdicts import at_least, both, bound, met
from jagged_ranking.measure.lineup import BY_LENGTH, OURS_DENSE, RETRIEVAL

# S2-Attention at 9% of the blocks over our own attention to all keys; and at long lengths over the
# best kernel for all keys what its paper has over FlashAttention-2.
OURS_GOAL, OURS_GOAL_AT = 5.0, (16_384,)
PEER_GOAL, PEER_GOAL_AT, PEER = PAPER_SPEEDUPS[1], (65_536, 131_072), "flash_attn_4"
# Random blocks at a quarter of them, over ours on all keys.
QUARTER, QUARTER_GOAL = 0.25, 3.0
# Building the lists of retrieval, of the time of the attention to all keys that they spare.
LISTS_GOAL = 0.05

LENGTH_NOTE = (
    "Medians of one interleaved run. *All / seen* is the number of blocks of keys that dense "
    "attention has over that of S2-Attention: how many times faster it would be if a block took "
    "it as long as our dense kernel, which takes longer a block where it is faster than that. "
    f"Goals: {OURS_GOAL:g}x over our own dense attention at "
    f"{OURS_GOAL_AT[0]:,} tokens, and over flash-attn 4 at {PEER_GOAL_AT[0]:,} and "
    f"{PEER_GOAL_AT[1]:,} the {PEER_GOAL:g}x that the paper (arXiv 2407.17678) has over "
    "FlashAttention-2. *Lists* are built with the schedule, once a batch, and not part of *ours*."
)
DENSITY_NOTE = (
    "A line of least squares through our time over ours on all keys, by the share of blocks that "
    "are seen: S2-Attention with other strides and numbers of local blocks, and random blocks "
    f"(FlashAttention, section 3.3). Goals: R² {FIT_GOAL:g}, an intercept of {INTERCEPT_GOAL:.0%} "
    f"of the time on all keys, and with a quarter of random blocks {QUARTER_GOAL:g} times faster. "
    "Where no list sees exactly *a quarter*, the one next to it stands there."
)
RETRIEVAL_NOTE = (
    "*Lists* are the mean keys of all blocks, the scores of each tile of candidates, its best "
    "blocks and the schedule: all of what a batch needs before its attention. A backward needs "
    "their transpose too, the tiles that see each block: with it they stand in the rows of "
    "forward+backward. The goal is of the attention to all keys that they spare: "
    f"{LISTS_GOAL:.0%} of its forward. *All told* counts them with one attention."
)


def length_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each length and mode."""
    points = of_group(sparse(table, "latency"), BY_LENGTH)
    own, built = ours_of(points), lists_ms(table)
    dense, peer, paper = (against(points, n) for n in (OURS_DENSE, PEER, PEER_OF_THE_PAPER))
    rows = []
    for mode in modes_of(points):
        for row in points.drop_duplicates("workload").itertuples():
            key, length = (str(row.workload), mode), int(str(row.max_len))
            faster, over_peer = dense.get(key, math.nan), peer.get(key, math.nan)
            goals = (
                OURS_GOAL if length in OURS_GOAL_AT else math.nan,
                PEER_GOAL if length in PEER_GOAL_AT else math.nan,
            )
            rows.append(
                {
                    "tokens": f"{length:,}",
                    "mode": mode,
                    "ours (ms)": number(own.get(key, math.nan)),
                    "lists (ms)": number(built.get(key[0], math.nan)),
                    "all / seen": number(1 / float(str(row.density)), 1),
                    "times faster than ours, all keys": number(faster, 2),
                    "at least": bound(goals[0]),
                    "than flash-attn 4": number(over_peer, 2),
                    "at least ": bound(goals[1]),
                    "than FA2": number(paper.get(key, math.nan), 2),
                    "met": both(at_least(faster, goals[0]), at_least(over_peer, goals[1])),
                }
            )
    return rows


def density_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each kind of list and mode."""
    rows = []
    for sweep in density_sweeps(table):
        quarter = QUARTER_GOAL if sweep.title.startswith("random") else math.nan
        faster = sweep.faster_at(QUARTER)
        fit = both(
            at_least(sweep.r2, FIT_GOAL, digits=3), met(sweep.intercept, INTERCEPT_GOAL, digits=3)
        )
        rows.append(
            {
                "keys": sweep.title,
                "mode": sweep.mode,
                "points": str(len(sweep.density)),
                "densities": f"{sweep.density.min():.1%} to {sweep.density.max():.0%}",
                "R²": number(sweep.r2, 3),
                "at least": bound(FIT_GOAL),
                "intercept": number(100 * sweep.intercept, 1) + "%",
                "at most": f"{INTERCEPT_GOAL:.0%}",
                "a quarter: times faster": number(faster, 2),
                "at least ": bound(quarter),
                "met": both(fit, at_least(faster, quarter)),
            }
        )
    return rows


def retrieval_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each number of candidates and of blocks, and each mode."""
    points = of_group(sparse(table, "latency"), RETRIEVAL)
    own = ours_of(points)
    dense = points[(points["provider"] == OURS_DENSE) & (points["status"] == "ok")]
    dense = dense.set_index(["workload", "mode"])["value"]
    rows = []
    for mode in modes_of(points):
        built = lists_ms(table, mode)
        for row in points.drop_duplicates("workload").itertuples():
            key = str(row.workload), mode
            ours, everything = own.get(key, math.nan), float(dense.get(key, np.nan))
            lists = built.get(key[0], math.nan)
            share = lists / everything
            goal = LISTS_GOAL if mode == "forward" else math.nan
            rows.append(
                {
                    "candidates": str(int(str(row.queries).removesuffix(".0"))),
                    "blocks": str(int(float(str(row.top_k)))),
                    "mode": mode,
                    "lists (ms)": number(lists),
                    "ours (ms)": number(ours),
                    "ours, all keys (ms)": number(everything),
                    "lists / all keys": number(share, 2),
                    "at most": bound(goal),
                    "times faster": number(everything / ours, 2),
                    "all told": number(everything / (ours + lists), 2),
                    "met": met(share, goal),
                }
            )
    return rows
