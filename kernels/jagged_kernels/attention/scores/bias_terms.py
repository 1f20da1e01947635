"""What biases mean, in plain PyTorch: buckets, the number added to each score, and gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BiasTerms(NamedTuple):
    """The sum of biases of one call, as operators take it: plain tensors and numbers.

    Fields:
        position: [num_buckets, H] for `RelativePositionBias`.
        time: [num_buckets, H] for `RelativeTimeBias`.
        slopes: [H] for `ALiBi`.
        scores: [sum of n_b * m_b, H]; user b's [n_b, m_b] scores row by row, users in order.
        q_times, k_times: [Tq] and [Tk], int64, of `time`.
        max_distance, bidirectional: of `position`.
        time_unit, time_base: of `time`.
    """

    position: Tensor | None = None
    time: Tensor | None = None
    slopes: Tensor | None = None
    scores: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None
    max_distance: int = 0
    bidirectional: bool = False
    time_unit: float = 1.0
    time_base: float = 2.0

    def learned(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The four tensors that can have a gradient."""
        return self[:4]

    @property
    def adds(self) -> bool:
        """Whether there is any bias."""
        return any(tensor is not None for tensor in self.learned())


# The fields as the last arguments of an operator.
BIAS_SCHEMA = (
    "Tensor? position, Tensor? time, Tensor? slopes, Tensor? scores, Tensor? q_times, "
    "Tensor? k_times, int max_distance, bool bidirectional, float time_unit, float time_base"
)


def given_gradients(
    gradients: tuple[Tensor, ...], d_bias: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """What an operator's gradient returns: `gradients` of the first inputs, and those of
    `BiasTerms.learned`, which begin the last inputs, where they are wanted."""
    fields = len(BiasTerms._fields)
    between = len(wanted) - len(gradients) - fields
    bias_wanted = wanted[-fields:][: len(d_bias)]
    given = (d if want else None for d, want in zip(d_bias, bias_wanted, strict=True))
    return (*gradients, *(None,) * between, *given)


class Places(NamedTuple):
    """Where scores stand; the shapes [..., N, M] broadcast.

    Fields:
        distance: key position - query position, aligned to the end, int64.
        elapsed: |t_q - t_k|, int64; None without a time bias.
        score: index into the flat bias; None without one.
    """

    distance: Tensor
    elapsed: Tensor | None
    score: Tensor | None


def bias_scores(terms: BiasTerms, places: Places, dtype: torch.dtype) -> Tensor:
    """[..., N, M, H]: what is added to the scaled scores."""
    parts = []
    if terms.position is not None:
        parts.append(terms.position.to(dtype)[_position_index(terms, places)])
    if terms.time is not None:
        parts.append(terms.time.to(dtype)[_time_index(terms, places)])
    if terms.slopes is not None:
        parts.append(-terms.slopes.to(dtype) * places.distance.abs()[..., None])
    if terms.scores is not None:
        parts.append(terms.scores[places.score].to(dtype))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class BiasGradients:
    """Sums the gradients of scores into gradients of the learned tensors, block by block.

    In float64 (but for the flat bias, where nothing is summed): sums of very many numbers, and
    float64 `index_put_` adds them in one order on every run.
    """

    def __init__(self, terms: BiasTerms) -> None:
        self._terms = terms
        *learned, scores = terms.learned()
        self._sums = [
            None if tensor is None else torch.zeros_like(tensor, dtype=torch.float64)
            for tensor in learned
        ] + [None if scores is None else torch.zeros_like(scores)]

    def add(self, d_scores: Tensor, places: Places) -> None:
        """d_scores: [..., N, M, H], 0 where there is no score."""
        terms = self._terms
        position, time, slopes, scores = self._sums
        if scores is not None:
            assert places.score is not None
            # Every score stands in one place; places without a score add 0 somewhere.
            scores.index_put_((places.score,), d_scores.to(scores.dtype), accumulate=True)
        d_scores = d_scores.double()
        if position is not None:
            index = _position_index(terms, places).expand(d_scores.shape[:-1])
            position.index_put_((index,), d_scores, accumulate=True)
        if time is not None:
            index = _time_index(terms, places).expand(d_scores.shape[:-1])
            time.index_put_((index,), d_scores, accumulate=True)
        if slopes is not None:
            slopes -= (d_scores * places.distance.abs()[..., None]).flatten(0, -2).sum(0)

    def results(self) -> list[Tensor | None]:
        pairs = zip(self._sums, self._terms.learned(), strict=True)
        return [None if s is None or t is None else s.to(t.dtype) for s, t in pairs]


def scores_before(q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    """[B] int64: where each user's scores begin in the flat bias."""
    sizes = q_offsets.diff().long() * k_offsets.diff().long()
    return sizes.cumsum(0) - sizes


def _position_index(terms: BiasTerms, places: Places) -> Tensor:
    assert terms.position is not None
    limit = terms.max_distance
    buckets = position_buckets(
        terms.position.shape[0], limit, terms.bidirectional, terms.position.device
    )
    return buckets[places.distance.clamp(-limit, limit) + limit]


def _time_index(terms: BiasTerms, places: Places) -> Tensor:
    assert terms.time is not None
    assert places.elapsed is not None
    starts = time_bucket_starts(
        terms.time.shape[0], terms.time_unit, terms.time_base, terms.time.device
    )
    return torch.bucketize(places.elapsed, starts, right=True) - 1


# Far above the relative error of a power in floating point.
_ROUNDING = 1e-10


@functools.cache
def position_buckets(
    num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """[2 * max_distance + 1] int32: the bucket of distances -max_distance ... max_distance.

    T5, Raffel et al. 2020, section 2.1, in integers: of b buckets on a side the first e = b // 2
    are distances, and distance d >= e has bucket
    e + floor((b - e) * log(d / e) / log(max_distance / e)), at most b - 1.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    steps = side - exact

    def start(step: int) -> int:
        """The first d with (d / exact) ** steps >= (max_distance / exact) ** step."""
        about = exact * (max_distance / exact) ** (step / steps) if exact else 0.0
        near = round(about)
        if abs(about - near) > _ROUNDING * about:
            return math.ceil(about)
        # Whole numbers alone can tell. They have thousands of digits where there are many buckets.
        reached = near**steps * exact**step >= max_distance**step * exact**steps
        return near if reached else near + 1

    starts = list(range(exact)) + [start(step) for step in range(steps)]
    with torch.inference_mode(False):
        near = torch.bucketize(torch.arange(max_distance + 1), torch.tensor(starts), right=True) - 1
        after = near + side if bidirectional else torch.zeros_like(near)
        both = torch.cat([near.flip(0), after[1:]])
        return both.int().to(device)


@functools.cache
def time_bucket_starts(num_buckets: int, unit: float, base: float, device: torch.device) -> Tensor:
    """[num_buckets] int64, non-decreasing: bucket b holds times from starts[b] to starts[b + 1].

    starts[b] = ceil(unit * (base ** b - 1)), so that a whole number of ticks t has bucket
    floor(log(1 + t / unit) / log(base)).
    """
    largest = 2**62
    starts = []
    for bucket in range(num_buckets):
        try:
            start = unit * (base**bucket - 1)
        except OverflowError:
            start = float(largest)
        starts.append(largest if start >= largest else -int(-start // 1))
    with torch.inference_mode(False):
        return torch.tensor(starts, dtype=torch.int64).to(device)
