"""`cached_attention`: new queries of users over the keys and values that a cache has of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged_kernels.attention.flops import forward_flops, pairs_of_cache, pairs_of_offsets
from jagged_kernels.attention.meeting import MEET_SCHEMA, MeetTerms, meeting_of
from jagged_kernels.attention.operators.general import (
    empty_general_output,
    read_terms,
)
from jagged_kernels.attention.operators.native import attention_native
from jagged_kernels.attention.operators.plain import empty_output, given_lse
from jagged_kernels.attention.reference import attention_reference
from jagged_kernels.attention.scores.bias import Bias, RelativeTimeBias, bias_terms
from jagged_kernels.attention.scores.bias_terms import BIAS_SCHEMA, BiasTerms
from jagged_kernels.attention.scores.policy import Scores, check_scores
from jagged_kernels.cache.history import HistoryCache
from jagged_kernels.cache.schedule import (
    SMALLEST_TILE,
    CacheSchedule,
    cache_schedule,
    check_queries,
    check_schedule,
    shape_of_heads,
)
from jagged_kernels.cache.slots import gather_events
from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend, or_native
from jagged_kernels.core.contents import checking, readable
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_op, wants_gradient
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.spans import Partition, paged_fits
from jagged_kernels.tensors.checks import as_scale
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import cumulative

_MEETS = len(MeetTerms._fields)


@overload
def cached_attention(
    q: JaggedTensor,
    cache: HistoryCache,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    bias: Bias | Sequence[Bias] | None = ...,
    scores: Scores | None = ...,
    schedule: CacheSchedule | None = ...,
    backend: Backend = ...,
    return_lse: Literal[False] = ...,
) -> JaggedTensor: ...
@overload
def cached_attention(
    q: JaggedTensor,
    cache: HistoryCache,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    bias: Bias | Sequence[Bias] | None = ...,
    scores: Scores | None = ...,
    schedule: CacheSchedule | None = ...,
    backend: Backend = ...,
    return_lse: Literal[True],
) -> tuple[JaggedTensor, Tensor]: ...
@takes_nested
def cached_attention(
    q: JaggedTensor,
    cache: HistoryCache,
    *,
    causal: bool = True,
    scale: float | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    scores: Scores | None = None,
    schedule: CacheSchedule | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> JaggedTensor | tuple[JaggedTensor, Tensor]:
    """`jagged_attention` of new queries over what a cache holds: `q` over `cache.gather()`.

    Args:
        q: queries [Tq, H, D] of the cache's users, none or many of each, in its dtype. Hk divides
            H; head h reads key head h // (H / Hk).
        causal: aligned to the end, as in flash-attn: query i of n sees keys up to i + m - n of m.
            So new events are appended first, and see each other and those before. False for
            candidates, which see all.
        scale: of the scores, 1 / sqrt(D) when None.
        bias: added to the scaled scores, as in `jagged_attention`. Of a `RelativeTimeBias` `times`
            are those of what is cached, in the order of `cache.gather()`, and `query_times` those
            of q. Events that were dropped have no place any more: distances count those kept. All
            heads have the same `times`, which is wrong where key heads keep other events
            (`scissorhands`).
        scores: what a score becomes in place of its share of a softmax, as in `jagged_attention`.
            Divided by the number of keys, weights change as a user's history grows; HSTU divides by
            a number.
        schedule: from `cache_schedule` after the step's events were appended, to share it between
            layers; built here when None.
        backend: "triton" (CUDA, or Triton's interpreter), which reads keys and values where they
            lie; "native" and "reference", which gather them first and wait for a GPU; "auto" is
            triton for what it covers on CUDA tensors.
        return_lse: also return lse [Tq, H], natural log, float32 (float64 for float64).

    Returns:
        [Tq, H, Dv] with q's offsets. A query that sees no key returns 0, and lse -inf.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, or a schedule of
            another step; a list that leads outside of the store, where events are gathered.
        NotImplementedError: q or a bias wants a gradient (serving has none); or float64, a head_dim
            above 256, or more heads to a key head than shared memory holds, on the triton backend.

    Triton takes time by what is cached, whatever the capacity, in spans of equal cost
    (LeanAttention, arXiv 2405.10480). Nothing compiles again, and nobody waits, as lengths change.
    Triton hides what a list has outside of the store; with JAGGED_CHECK=1 it raises too.

    >>> cache = HistoryCache(2, 8, kv_heads=1, head_dim=4)
    >>> x = JaggedTensor(torch.randn(3, 1, 4), torch.tensor([0, 1, 3]))
    >>> cache.append(x, x)
    >>> out = cached_attention(x, cache)
    >>> torch.testing.assert_close(out.values, jagged_attention(x, x, x, causal=True).values)
    >>> out
    JaggedTensor(users=2, values=[3, 1, 4], dtype=torch.float32, device=cpu)
    """
    if torch._C._is_any_autocast_enabled():
        (q,) = as_autocast(q)
    check_queries(q, cache)
    if schedule is not None:
        check_schedule(schedule, q, cache, causal)
    terms = None
    if bias is not None:
        offsets = cumulative(cache.lengths) if schedule is None else schedule.k_offsets
        terms = _bias_terms(bias, q, offsets)
    learned = () if terms is None else terms.learned()
    if wants_gradient(q.values, *(x for x in learned if x is not None)):
        raise NotImplementedError(
            "cached_attention has no gradient: call it under torch.no_grad(), or train with "
            "jagged_attention"
        )
    if checking():
        cache.check_lists()
    scale = as_scale(scale, q.values.shape[2])
    if scores is not None:
        check_scores(scores, return_lse)
    general = terms is not None or scores is not None
    given = (*MeetTerms.of(None, scores), *(BiasTerms() if terms is None else terms))
    right = 0 if causal else NO_LIMIT
    chosen = _choose_backend(backend, q, cache, schedule)
    stored = (cache.k_store, cache.v_store, cache.pages)
    if chosen == "triton":
        if schedule is None:
            schedule = cache_schedule(q, cache, causal=causal)
        walk = (schedule.rows, schedule.partition.spans, schedule.partition.block, schedule.tile_q)
        rest = (cache.page_size, *walk, right, scale)
        if general:
            rest = (*rest, q.offsets, schedule.k_offsets, *given)
            o, lse2 = call(attention_cached_general, q.values, *stored, return_lse, *rest)
        else:
            o, lse2 = call(attention_cached, q.values, *stored, return_lse, *rest)
        lse = lse2 * math.log(2)
    elif chosen == "native":
        rest = (cache.lengths, q.offsets, cache.page_size, right, scale)
        o, lse = call(attention_cached_native, q.values, *stored, *rest, *given)
    else:
        k, v = cache.gather()
        mask: dict[str, Any] = {"window": (NO_LIMIT, right), "scale": scale, "scores": scores}
        mask["bias"] = terms
        o, lse = attention_reference(q.values, k.values, v.values, q.offsets, k.offsets, **mask)
    out = JaggedTensor._trusted(o, q.offsets)
    return (out, lse) if return_lse else out


def _bias_terms(
    bias: Bias | Sequence[Bias], q: JaggedTensor, k_offsets: Tensor
) -> BiasTerms | None:
    """`bias_terms` of queries over what is cached, of which the host does not know how much it is.

    Raises: as `bias_terms`, and ValueError for times of another number of events: where that cannot
        be read, a GPU stops at its next operation.
    """
    biases = bias if isinstance(bias, (tuple, list)) else (bias,)
    times = [one.times for one in biases if isinstance(one, RelativeTimeBias)]
    tokens = 0
    if times:
        given = times[0]
        if isinstance(given, Tensor) and given.is_nested:
            given = given.values()
        tokens = (given.values if isinstance(given, JaggedTensor) else given).numel()
        if readable(k_offsets):
            if int(k_offsets[-1]) != tokens:
                raise ValueError(
                    f"times must have a number for each of {int(k_offsets[-1])} events that are "
                    f"cached, got {tokens}"
                )
        else:
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                k_offsets[-1] == tokens, "times must have a number for each cached event"
            )
    # Nothing is asked of keys but how many there are, of whom and where.
    keys = JaggedTensor._trusted(k_offsets.new_empty(1).expand(tokens), k_offsets)
    return bias_terms(bias, q, keys)


def _choose_backend(
    backend: Backend, q: JaggedTensor, cache: HistoryCache, schedule: CacheSchedule | None
) -> str:
    """`choose_backend`, which does not know what the kernels take."""
    chosen = choose_backend(backend, q.values)
    if chosen != "triton":
        return chosen
    heads, kv_heads, dim, size = shape_of_heads(q, cache)
    if dim > MAX_HEAD_DIM:
        limit = f"the triton backend goes to head_dim {MAX_HEAD_DIM}, got {dim}"
        return or_native(backend, limit)
    tile = SMALLEST_TILE if schedule is None else schedule.tile_q
    if not paged_fits(heads, kv_heads, tile, dim, size, q.device):
        limit = f"tiles of {tile} queries of {heads} heads over {kv_heads} with head_dim {dim} do "
        return or_native(backend, f"{limit}not fit this GPU's shared memory; use backend='native'")
    return chosen


def _attention_cached(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    pages: Tensor,
    with_lse: bool,
    page_size: int,
    rows: Tensor,
    spans: Tensor,
    block: int,
    tile_q: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse2 [Tq, H], or [0] without), of a `CacheSchedule`'s rows and spans."""
    from jagged_kernels.attention.split.forward import launch_split_forward

    o, lse2 = launch_split_forward(
        q, k_store, v_store, rows, Partition(spans, block, cuts=True),
        tile_q=tile_q, left=NO_LIMIT, right=right, scale=scale, with_lse=with_lse,
        pages=pages, page_size=page_size,
    )  # fmt: skip
    return o, given_lse(lse2, q)


def _empty_cached(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, with_lse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty_output(q, k_store, v_store, with_lse)


def _attention_cached_general(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, with_lse: bool, page_size: int,
    rows: Tensor, spans: Tensor, block: int, tile_q: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, *terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_attention_cached` with `terms` as `general.read_terms` has them, of what is cached."""
    from jagged_kernels.attention.split.forward import launch_split_forward

    meets, _, bias = read_terms(None, 0.0, terms, q_offsets, k_offsets)
    o, lse2 = launch_split_forward(
        q, k_store, v_store, rows, Partition(spans, block, cuts=True),
        tile_q=tile_q, left=NO_LIMIT, right=right, scale=scale,
        with_lse=with_lse and not meets.scores, bias=bias, meeting=meeting_of(meets, k_offsets),
        pages=pages, page_size=page_size,
    )  # fmt: skip
    return o, given_lse(lse2, q)


def _empty_cached_general(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, with_lse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty_general_output(q, k_store, v_store, with_lse, *rest)


def _attention_cached_native(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, lengths: Tensor,
    q_offsets: Tensor, page_size: int, right: int, scale: float, *terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [Tq, H, Dv], lse [Tq, H]); terms: the fields of `MeetTerms`, then of `BiasTerms`."""
    k, v, k_offsets = gather_events(k_store, v_store, pages, lengths, page_size)
    meets, bias = MeetTerms(*terms[:_MEETS]), BiasTerms(*terms[_MEETS:])
    mask: dict[str, Any] = {"window": (NO_LIMIT, right), "scale": scale, "meets": meets}
    return attention_native(q, k, v, q_offsets, k_offsets, bias=bias, **mask)


def _empty_native(q: Tensor, k_store: Tensor, v_store: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], v_store.shape[2])), q.new_empty(q.shape[:2], dtype=lse_dtype)


_STORED = "(Tensor q, Tensor k_store, Tensor v_store, Tensor pages, "
attention_cached = define_op(_attention_cached, fake=_empty_cached)
attention_cached_general = define_op(
    _attention_cached_general,
    fake=_empty_cached_general,
    schema=f"{_STORED}bool with_lse, int page_size, Tensor rows, Tensor spans, int block, "
    "int tile_q, int right, float scale, Tensor q_offsets, Tensor k_offsets, "
    f"{MEET_SCHEMA}, {BIAS_SCHEMA}) -> (Tensor, Tensor)",
)
attention_cached_native = define_op(
    _attention_cached_native,
    fake=_empty_native,
    schema=f"{_STORED}Tensor lengths, Tensor q_offsets, int page_size, int right, float scale, "
    f"{MEET_SCHEMA}, {BIAS_SCHEMA}) -> (Tensor, Tensor)",
)


def _cached_flops(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, with_lse: bool, page_size: int,
    rows: Tensor, spans: Tensor, block: int, tile_q: int, right: int, scale: float,
    *rest: Any,
) -> Any:  # fmt: skip
    return forward_flops(q, v_store, pairs_of_cache(q, k_store, rows, pages.shape[0], right))


def _native_flops(
    q: Tensor, k_store: Tensor, v_store: Tensor, pages: Tensor, lengths: Tensor, q_offsets: Tensor,
    page_size: int, right: int, scale: float, *rest: Any,
) -> Any:  # fmt: skip
    k_offsets = cumulative(lengths)
    pairs = pairs_of_offsets(q, k_store, q_offsets, k_offsets, NO_LIMIT, right)
    return forward_flops(q, v_store, pairs)


define_flops(attention_cached, _cached_flops)
define_flops(attention_cached_general, _cached_flops)
define_flops(attention_cached_native, _native_flops)
