"""What a training step takes on more ranks than there are, from the parts that were measured.

A step is modelled as: the slowest rank's forward and backward, then the exchange of gradients, then
the update, one behind the other, as `training/rank_group.py` does them. Forward and backward of a
rank are fitted to its tokens and their squares. Exchanges are modelled by their volume, with the
bandwidths that are given (Thakur, Rabenseifner and Gropp, IJHPCA 2005, for the ring).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from jagged_ranking.data.shares import share_out
from jagged_ranking.figures.scaling_points import BALANCES

FLOAT, ID = 4, 8  # bytes
# Of a batch with some long histories one rank says little of what a step takes.
RANKS_DRAWN = 2048


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a simulation takes for granted.

    Args:
        gpus_a_node: that NVLink joins.
        nvlink_gb_s: of each GPU, in each direction, as all-reduce and all-to-all see it.
        network_gb_s: the same between nodes.
        latency_us: of a message.
        table_rows: of all tables of ids, whose rows the ranks share out.
        dim: of a row.
    """

    gpus_a_node: int = 8
    nvlink_gb_s: float = 200.0
    network_gb_s: float = 40.0
    latency_us: float = 10.0
    table_rows: int = 1_000_000_000
    dim: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class StepFit:
    """ms of a rank's forward and backward: fixed + per_token * tokens + per_square * their squares,
    summed over requests; and of its update. error: median relative error of the fit."""

    fixed: float
    per_token: float
    per_square: float
    update: float
    error: float

    def compute(self, tokens: NDArray[Any], squares: NDArray[Any]) -> NDArray[np.float64]:
        """ms of ranks with so many."""
        return self.fixed + self.per_token * tokens + self.per_square * squares


def fitted(
    tokens: Sequence[float],
    squares: Sequence[float],
    compute: Sequence[float],
    update: Sequence[float],
) -> StepFit:
    """From steps of ranks that had something to do; non-negative least squares of relative errors,
    so that a step of a few tokens counts as much as one of many."""
    took = np.asarray(compute, np.float64)
    parts = np.stack([np.ones_like(took), np.asarray(tokens), np.asarray(squares)], axis=1)
    scale = parts.max(0).clip(1)
    weights, _ = nnls(parts / scale / took[:, None], np.ones_like(took))
    fixed, per_token, per_square = weights / scale
    found = parts @ (weights / scale)
    error = float(np.median(np.abs(found / took - 1)))
    return StepFit(fixed, per_token, per_square, float(np.median(update)), error)


def lengths_of_skew(
    logged: NDArray[np.int64], sigma: float, size: int, rng: np.random.Generator, most: int
) -> NDArray[np.int64]:
    """Tokens of requests, lognormal with this sigma and the mean of the logged ones, at least 1 and
    at most `most`; drawn from the logged ones where sigma is NaN."""
    if math.isnan(sigma):
        return rng.choice(logged, size)
    mean = max(1.0, float(logged.mean()))
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, size)
    return np.clip(drawn.round(), 1, most).astype(np.int64)


def simulated(
    fit: StepFit,
    logged: NDArray[np.int64],
    *,
    ranks: int,
    requests: int,
    sigma: float,
    squared: bool,
    dense_bytes: float,
    assumed: Assumptions,
    draws: int,
    seed: int,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each way to balance, the parts of a step, means over draws of a batch: who trains for
    long has all of them.

    Args:
        fit: of a rank's step.
        logged: tokens of requests, int64 [R].
        ranks: how many.
        requests: a rank, on average.
        sigma: of lengths, see `lengths_of_skew`.
        squared: whether tokens are balanced by their squares.
        dense_bytes: of gradients that all ranks sum.
        assumed: what else decides it.
        draws: batches, at least; of few ranks as many more as make `RANKS_DRAWN`.
        seed: of them.

    Returns:
        ms of "compute" (the mean of the ranks), "waiting" (how much longer the slowest takes),
        "dense", "rows", "update", "step"; bytes that a rank sends, "dense_bytes" and "rows_bytes",
        and that it keeps of the tables, "table_bytes".
    """
    rng = np.random.default_rng((seed, ranks))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in BALANCES}
    for _ in range(max(draws, RANKS_DRAWN // ranks)):
        tokens = lengths_of_skew(logged, sigma, requests * ranks, rng, int(logged.max()))
        by_tokens = tokens**2 if squared else tokens
        for name, cost in zip(BALANCES, (by_tokens, np.ones_like(tokens)), strict=True):
            owner = share_out(cost, ranks=ranks)
            of_rank = np.bincount(owner, tokens, minlength=ranks)
            compute = fit.compute(of_rank, np.bincount(owner, tokens**2.0, minlength=ranks))
            parts = _exchanges(ranks, dense_bytes, float(of_rank.max()), assumed)
            parts["compute"] = float(compute.mean())
            parts["waiting"] = float(compute.max() - compute.mean())
            parts["update"] = fit.update
            took = ("compute", "waiting", "dense", "rows", "update")
            parts["step"] = sum(parts[part] for part in took)
            found[name].append(parts)
    for name, mine in found.items():
        yield name, {part: float(np.mean([one[part] for one in mine])) for part in mine[0]}


def _exchanges(
    ranks: int, dense_bytes: float, rows: float, assumed: Assumptions
) -> dict[str, float]:
    """Of dense gradients a ring all-reduce; of rows, one a token (repeats within a batch would make
    them fewer), an all-to-all there and one back, and of their ids one. Between nodes the network
    is what all wait for."""
    others = (ranks - 1) / ranks
    sent = {
        "dense": 2 * others * dense_bytes,
        "rows": others * rows * (2 * assumed.dim * FLOAT + ID),
    }
    fast = ranks <= assumed.gpus_a_node
    gb_s = assumed.nvlink_gb_s if fast else assumed.network_gb_s
    messages = {"dense": 2 * math.log2(ranks), "rows": 3.0 * (ranks > 1)}
    found = {
        name: 1e-3 * messages[name] * assumed.latency_us + 1e3 * size / (1e9 * gb_s)
        for name, size in sent.items()
    }
    found |= {f"{name}_bytes": size for name, size in sent.items()}
    # rows and one accumulator each
    found["table_bytes"] = assumed.table_rows * (assumed.dim + 1) * FLOAT / ranks
    return found
