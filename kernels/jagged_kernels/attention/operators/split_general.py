"""Attention over rows that a partition cuts, with all that a call can ask for, as operators: bias,
dropout, lists of key blocks, and what a score becomes. Without them `split` takes less of the
host's time. With lists, tiles of keys are blocks of these."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jagged_kernels.attention.flops import (
    backward_flops,
    forward_flops,
    pairs_of_lists,
    pairs_of_rows,
)
from jagged_kernels.attention.meeting import meeting_of
from jagged_kernels.attention.operators.general import (
    TERMS_SCHEMA,
    empty_general_gradients,
    empty_general_output,
    given_tensors,
    gradient_by,
    meets_of,
    read_terms,
)
from jagged_kernels.attention.operators.plain import given_lse, save_with_lse
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import define_gradient, define_op
from jagged_kernels.schedule.spans import Partition

_ARGUMENTS = (
    "Tensor rows, Tensor rows_t, Tensor spans_t, int block_t, int tile_q, int tile_k, int left, "
    f"int right, float scale, Tensor q_offsets, Tensor k_offsets, {TERMS_SCHEMA}"
)


def _attention_split_general(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, spans: Tensor, block: int,
    rows: Tensor, rows_t: Tensor, spans_t: Tensor, block_t: int,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, dropout_seed: Tensor | None, dropout_p: float,
    *terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [Tq, H, Dv], lse2 [Tq, H], or [0] without), as `operators.split.attention_split`; `terms`
    as `general.read_terms` has them."""
    from jagged_kernels.attention.split.forward import launch_split_forward

    meets, _, bias = read_terms(dropout_seed, dropout_p, terms, q_offsets, k_offsets)
    mask = {"tile_q": tile_q, "left": left, "right": right, "scale": scale}
    o, lse2 = launch_split_forward(
        q, k, v, rows, Partition(spans, block, cuts=True), **mask,
        with_lse=with_lse and not meets.scores, bias=bias, meeting=meeting_of(meets, k_offsets),
        listed=tile_k if meets.groups else 0,
    )  # fmt: skip
    return o, given_lse(lse2, q)


def _attention_split_general_backward(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    wanted: list[bool], rows: Tensor, rows_t: Tensor, spans_t: Tensor, block_t: int,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, dropout_seed: Tensor | None, dropout_p: float,
    *terms: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and the gradients of `BiasTerms.learned` where `wanted`, else empty."""
    from jagged_kernels.attention.scores.bias_launch import bias_slots, reduce_slots
    from jagged_kernels.attention.split.backward import launch_split_backward

    meets, bias_terms, bias = read_terms(dropout_seed, dropout_p, terms, q_offsets, k_offsets)
    partition = Partition(spans_t, block_t, cuts=True)
    slots = bias_slots(bias_terms, wanted, partition.programs, q.shape[1])
    # Every user has queries: without a window, every key is seen.
    all_seen = left == right == -1
    mask = {"tile_q": tile_q, "tile_k": tile_k, "left": left, "right": right, "scale": scale}
    gradients = launch_split_backward(
        d_o, d_lse2, q, k, v, o, None if meets.scores else lse2, rows,
        partition, rows_t=None if all_seen else rows_t, **mask,
        bias=bias, bias_slots=None if bias is None else slots,
        # Dense ones, as many of each user.
        queries=q.shape[0] // (q_offsets.shape[0] - 1), meeting=meeting_of(meets, k_offsets),
        listed=tile_k if meets.groups else 0,
    )  # fmt: skip
    return *gradients, *given_tensors(reduce_slots(bias_terms, slots), q)


attention_split_general = define_op(
    _attention_split_general,
    fake=empty_general_output,
    schema="(Tensor q, Tensor k, Tensor v, bool with_lse, Tensor spans, int block, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor)",
)
attention_split_general_backward = define_op(
    _attention_split_general_backward,
    fake=empty_general_gradients,
    schema="(Tensor d_o, Tensor? d_lse2, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, "
    f"bool[] wanted, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    q, k, v, o, lse2, _spans, _block, *rest = save_with_lse(inputs, output)
    return (q, k, v, o, lse2, *rest)


define_gradient(
    attention_split_general, save=_save, gradient=gradient_by(attention_split_general_backward)
)


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, spans: Tensor, block: int, *walk: Any
) -> Any:
    return forward_flops(q, v, _pairs(q, k, *walk))


def _backward_flops(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    wanted: list[bool], *walk: Any,
) -> Any:  # fmt: skip
    return backward_flops(q, v, _pairs(q, k, *walk))


def _pairs(
    q: Tensor, k: Tensor, rows: Tensor, rows_t: Tensor, spans_t: Tensor, block_t: int,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, *rest: Any,
) -> Any:  # fmt: skip
    lists = meets_of(rest).lists(tile_k, left)
    if lists is not None:
        return pairs_of_lists(q, k, lists, q_offsets, k_offsets, (left, right))
    return pairs_of_rows(q, k, rows, rows_t, tile_k, left, right)


define_flops(attention_split_general, _forward_flops)
define_flops(attention_split_general_backward, _backward_flops)
