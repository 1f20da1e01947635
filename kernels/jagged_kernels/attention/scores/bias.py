"""Additive biases of attention scores: relative positions, relative times, ALiBi, or any numbers.

A bias is a plain value around a learned tensor that lives in the user's own module:

>>> position = RelativePositionBias(torch.zeros(32, 4), max_distance=128)
>>> time = RelativeTimeBias(torch.zeros(32, 4), torch.arange(7) * 3600)

`jagged_attention(..., bias=(position, time))` adds them up. None of them needs a number for each
score in memory, except the plain tensor, which is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from jagged_kernels.attention.scores.bias_terms import BiasTerms
from jagged_kernels.core.contents import known_to_differ, readable
from jagged_kernels.core.sizes import as_int
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.jagged import JaggedTensor

# Floating times are rounded to this fraction of a unit, so that buckets are decided by integers.
_TICKS_PER_UNIT = 1024


@dataclass(frozen=True, eq=False)
class RelativePositionBias:
    """A learned number for each bucket of the distance from query to key, and each head.

    Distance is key position - query position, aligned to the end like the causal mask: key j of
    m is at j - i - (m - n) from query i of n. Near distances have buckets of their own, far ones
    share buckets that grow with the logarithm of the distance; from `max_distance` on all is one
    bucket. Source: T5, Raffel et al. 2020 (arXiv 1910.10683), section 2.1.

    Args:
        table: [num_buckets, H], floating; gets a gradient.
        max_distance: where the last bucket begins; more than a quarter of the buckets if
            bidirectional, more than half of them if not.
        bidirectional: half of the buckets for keys after the query. If False, all buckets are
            for keys before the query, and later keys share the bucket of distance 0.

    >>> x = JaggedTensor(torch.zeros(3, 1, 4), torch.tensor([0, 3]))  # all scores are 0
    >>> v = x.with_values(torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1))
    >>> bias = RelativePositionBias(torch.tensor([[0.0], [99.0]]), bidirectional=False)
    >>> jagged_attention(x, x, v, causal=True, bias=bias).values.flatten()  # keys before win
    tensor([1.0000, 1.0000, 1.5000])
    """

    table: Tensor
    _: KW_ONLY
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        sides = 2 if self.bidirectional else 1
        _check_table("RelativePositionBias", self.table, at_least=2 * sides)
        object.__setattr__(self, "max_distance", as_int("max_distance", self.max_distance))
        if self.table.shape[0] % sides:
            raise ValueError(
                "a bidirectional RelativePositionBias needs an even number of buckets, "
                f"got table {tuple(self.table.shape)}"
            )
        exact = self.table.shape[0] // sides // 2
        if self.max_distance <= exact:
            raise ValueError(
                f"max_distance must be more than the {exact} distances that have a bucket of "
                f"their own in table {tuple(self.table.shape)}, got {self.max_distance}"
            )


@dataclass(frozen=True, eq=False)
class RelativeTimeBias:
    """A learned number for each bucket of the time between query and key, and each head.

    The bucket of two events is floor(log(1 + |t_q - t_k| / unit) / log(base)), at most
    num_buckets - 1. It is decided by comparing integers, so that all backends agree on it. Times
    need no order. Source: HSTU, Zhai et al. 2024 (arXiv 2402.17152), section 3, whose code takes
    128 buckets of base exp(0.301).

    Args:
        table: [num_buckets, H], floating; gets a gradient.
        times: of the keys (and of the queries in self-attention): a `JaggedTensor` [Tk] or a
            tensor [Tk] (or nested, [B, n*]). Integers in any unit, exact up to differences of
            2^62; or floating numbers, which are rounded to 1/1024 of `unit`.
        query_times: in cross attention, and of all dense queries: a `JaggedTensor` or tensor [Tq],
            or [B, N] for dense queries; of the kind and unit of `times`.
        unit: what counts as a short time, in the unit of `times`: 1 second if these are seconds.
            At least 1e-9.
        base: the ratio of one bucket's end to the end before; at least 1.1.

    >>> x = JaggedTensor(torch.zeros(3, 1, 4), torch.tensor([0, 3]))  # all scores are 0
    >>> v = x.with_values(torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1))
    >>> times = torch.tensor([60, 70, 500])
    >>> bias = RelativeTimeBias(torch.tensor([[99.0], [0.0]]), times, unit=60.0)
    >>> jagged_attention(x, x, v, bias=bias).values.flatten()  # keys of the same minute win
    tensor([1.5000, 1.5000, 4.0000])
    """

    table: Tensor
    times: JaggedTensor | Tensor
    _: KW_ONLY
    query_times: JaggedTensor | Tensor | None = None
    unit: float = 1.0
    base: float = 2.0

    def __post_init__(self) -> None:
        _check_table("RelativeTimeBias", self.table, at_least=1)
        if not isinstance(self.times, JaggedTensor | Tensor):
            raise _no_times("times", self.times)
        if not (self.query_times is None or isinstance(self.query_times, JaggedTensor | Tensor)):
            raise _no_times("query_times", self.query_times)
        if not (1e-9 <= self.unit < math.inf and 1.1 <= self.base < math.inf):
            raise ValueError(
                "RelativeTimeBias needs a unit of at least 1e-9 and a base of at least 1.1, got "
                f"unit {self.unit} and base {self.base}"
            )


@dataclass(frozen=True, eq=False)
class ALiBi:
    """-slope * |distance|, the distance of `RelativePositionBias`.

    Source: Press et al. 2022 (arXiv 2108.12409), section 3.

    Args:
        slopes: [H], floating; gets a gradient if it requires one.

    >>> x = JaggedTensor(torch.zeros(2, 1, 4), torch.tensor([0, 2]))  # all scores are 0
    >>> v = x.with_values(torch.tensor([0.0, 1.0]).view(2, 1, 1))
    >>> jagged_attention(x, x, v, bias=ALiBi(torch.tensor([1.0]))).values.flatten()
    tensor([0.2689, 0.7311])
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, Tensor):
            raise not_a_tensor("ALiBi's slopes", self.slopes)
        if self.slopes.dim() != 1 or not self.slopes.is_floating_point():
            raise ValueError(
                f"ALiBi's slopes must be [H], floating, got {tuple(self.slopes.shape)} "
                f"{self.slopes.dtype}"
            )


Bias = RelativePositionBias | RelativeTimeBias | ALiBi | Tensor


def bias_terms(
    bias: Bias | Sequence[Bias] | None, q: JaggedTensor, k: JaggedTensor, *, dense: bool = False
) -> BiasTerms | None:
    """The biases of one call as tensors and numbers, checked; None if there are none.

    Args:
        dense: q came as dense queries, which are never the keys.

    Raises:
        TypeError: something that is no bias.
        ValueError: two biases of a kind, or shapes or devices that do not fit q and k.
    """
    if bias is None:
        return None
    biases = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    terms = BiasTerms()
    seen: list[type] = []
    for one in biases:
        if isinstance(one, RelativePositionBias):
            _check_heads("RelativePositionBias's table", one.table, q)
            terms = terms._replace(
                position=one.table,
                max_distance=one.max_distance,
                bidirectional=one.bidirectional,
            )
        elif isinstance(one, RelativeTimeBias):
            terms = _with_times(terms, one, q, k, dense)
        elif isinstance(one, ALiBi):
            _check_heads("ALiBi's slopes", one.slopes, q)
            terms = terms._replace(slopes=one.slopes)
        elif isinstance(one, Tensor):
            _check_scores(one, q, k)
            terms = terms._replace(scores=one)
        else:
            raise TypeError(
                "a bias is a RelativePositionBias, RelativeTimeBias, ALiBi or tensor, "
                f"got {type(one).__name__}"
            )
        kind = Tensor if isinstance(one, Tensor) else type(one)
        if kind in seen:
            raise ValueError(f"at most one bias of each kind, got two of {kind.__name__}")
        seen.append(kind)
    return terms if seen else None


def _with_times(
    terms: BiasTerms, bias: RelativeTimeBias, q: JaggedTensor, k: JaggedTensor, dense: bool
) -> BiasTerms:
    _check_heads("RelativeTimeBias's table", bias.table, q)
    k_times = _times("times", bias.times, k)
    if bias.query_times is not None:
        q_times = _times("query_times", bias.query_times, q)
        if q_times.is_floating_point() != k_times.is_floating_point():
            raise ValueError(
                f"times and query_times must both be integers or both floating, got "
                f"{k_times.dtype} and {q_times.dtype}"
            )
    else:
        other_tokens = q.values.shape[0] != k.values.shape[0]
        if dense or other_tokens or known_to_differ(q.offsets, k.offsets):
            raise ValueError(
                "RelativeTimeBias needs query_times where the queries are not the keys: "
                f"{'dense ' if dense else ''}q {tuple(q.values.shape)}, k {tuple(k.values.shape)}"
            )
        q_times = k_times
    unit = bias.unit
    if k_times.is_floating_point():
        rate = _TICKS_PER_UNIT / bias.unit
        k_times, q_times = ((t.double() * rate).round() for t in (k_times, q_times))
        unit = float(_TICKS_PER_UNIT)
    return terms._replace(
        time=bias.table,
        k_times=k_times.long().contiguous(),
        q_times=q_times.long().contiguous(),
        time_unit=unit,
        time_base=bias.base,
    )


def _times(name: str, times: JaggedTensor | Tensor, x: JaggedTensor) -> Tensor:
    """[T], one for each token of x."""
    if isinstance(times, Tensor) and times.is_nested:
        times = JaggedTensor.from_nested(times, validate=readable(times))
    values = times.values if isinstance(times, JaggedTensor) else times
    tokens, users = x.values.shape[0], len(x)
    flat = values.dim() == 1 or (values.dim() == 2 and values.shape[0] == users)
    if not flat or values.numel() != tokens or values.device != x.device:
        raise ValueError(
            f"{name} must have a number for each of {tokens} tokens on {x.device}, "
            f"got {tuple(values.shape)} on {values.device}"
        )
    if isinstance(times, JaggedTensor) and known_to_differ(times.offsets, x.offsets):
        raise ValueError(f"{name} must have the offsets of the tokens that they belong to")
    if values.dtype == torch.bool or values.is_complex():
        raise ValueError(f"{name} must be integers or floating, got {values.dtype}")
    return values.reshape(tokens)


def _no_times(name: str, given: object) -> TypeError:
    return TypeError(
        f"RelativeTimeBias's {name} must be a JaggedTensor or a tensor, got {type(given).__name__}"
    )


def _check_table(name: str, table: Tensor, *, at_least: int) -> None:
    if not isinstance(table, Tensor):
        raise not_a_tensor(f"{name}'s table", table)
    if table.dim() != 2 or table.shape[0] < at_least or not table.is_floating_point():
        raise ValueError(
            f"{name}'s table must be [num_buckets, H], floating, with {at_least} buckets or more, "
            f"got {tuple(table.shape)} {table.dtype}"
        )


def _check_heads(name: str, tensor: Tensor, q: JaggedTensor) -> None:
    heads = q.values.shape[1]
    if tensor.shape[-1] != heads or tensor.device != q.device:
        raise ValueError(
            f"{name} must have H = {heads} columns on {q.device}, "
            f"got {tuple(tensor.shape)} on {tensor.device}"
        )


def _check_scores(bias: Tensor, q: JaggedTensor, k: JaggedTensor) -> None:
    heads = q.values.shape[1]
    if bias.dim() != 2 or bias.shape[1] != heads or bias.device != q.device:
        raise ValueError(
            f"bias must be [sum of n_b * m_b, H = {heads}] on {q.device}, "
            f"got {tuple(bias.shape)} on {bias.device}"
        )
    if not bias.is_floating_point():
        raise ValueError(f"bias must be floating, got {bias.dtype}")
    scores = (q.lengths.long() * k.lengths.long()).sum()
    if readable(q.offsets):
        if bias.shape[0] != int(scores):
            raise ValueError(f"bias must have a row for each of {scores} scores, got {len(bias)}")
    else:
        # The device compares for itself, and stops the kernels that come after: nobody waits.
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            scores == bias.shape[0], "bias must have a row for each score"
        )
