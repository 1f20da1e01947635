"""The plain kernels with all that a call can ask for as operators: bias, dropout, lists of key
blocks, and what a score becomes; and others that are faster for some of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from jagged_kernels.attention.choice import (
    HOPPER_DKV,
    HOPPER_FORWARD,
    HOPPER_ONE_PASS,
    SHORT,
    Family,
    Pass,
    pick,
)
from jagged_kernels.attention.flops import (
    backward_flops,
    forward_flops,
    pairs_of_lists,
    pairs_of_rows,
)
from jagged_kernels.attention.meeting import MEET_SCHEMA, MeetTerms, meeting_of
from jagged_kernels.attention.operators.plain import (
    empty_gradients,
    empty_output,
    given_lse,
    output_gradients,
    save_with_lse,
)
from jagged_kernels.attention.scores.bias_terms import BIAS_SCHEMA, BiasTerms, given_gradients
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.schedule.policy.plain import parts_of_tile
from jagged_kernels.schedule.rows import rows_to_walk

_LEARNED = len(BiasTerms().learned())
# What follows an operator's schedule.
TERMS_SCHEMA = f"Tensor? dropout_seed, float dropout_p, {MEET_SCHEMA}, {BIAS_SCHEMA}"
_ARGUMENTS = (
    "Tensor rows, Tensor rows_t, int tile_q, int tile_k, int left, int right, float scale, "
    f"Tensor q_offsets, Tensor k_offsets, Tensor? offsets, {TERMS_SCHEMA}"
)
_MEETS = len(MeetTerms._fields)


def read_terms(
    dropout_seed: Tensor | None, dropout_p: float, terms: Sequence[Any],
    q_offsets: Tensor, k_offsets: Tensor,
) -> tuple[MeetTerms, BiasTerms, dict[str, Any] | None]:  # fmt: skip
    """(how queries meet keys, biases, the kernels' arguments of biases and dropout or None).

    terms: the fields of `MeetTerms`, then those of `BiasTerms`.
    """
    from jagged_kernels.attention.scores.bias_launch import bias_arguments

    meets, bias_terms = MeetTerms(*terms[:_MEETS]), BiasTerms(*terms[_MEETS:])
    bias = None
    if dropout_seed is not None or bias_terms.adds:
        bias = bias_arguments(bias_terms, q_offsets, k_offsets, dropout_seed, dropout_p)
    return meets, bias_terms, bias


def _attention_triton_general(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, rows: Tensor, rows_t: Tensor,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, offsets: Tensor | None, dropout_seed: Tensor | None,
    dropout_p: float, *terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [Tq, H, Dv], lse2 [Tq, H], or [0] without), as `operators.plain.attention_triton`;
    `terms` as `read_terms` has them."""
    meets, _, bias = read_terms(dropout_seed, dropout_p, terms, q_offsets, k_offsets)
    band = {"left": left, "right": right, "scale": scale}
    options = {
        "meeting": meeting_of(meets, k_offsets), "with_lse": with_lse and not meets.scores
    }  # fmt: skip
    terms = (bias, meets, left, right)
    family = _family("forward", (q, k, v), rows, tile_q, tile_k, offsets, *terms)
    if family is HOPPER_FORWARD:
        from jagged_kernels.attention.hopper import forward as gluon_forward

        listed = tile_q if meets.groups else 0
        o, lse2 = gluon_forward.launch_forward(q, k, v, rows, **band, **options, listed=listed)
    else:
        from jagged_kernels.attention.plain.forward import launch_forward

        short = offsets if family is SHORT else None
        o, lse2 = launch_forward(
            q, k, v, rows, tile_q=tile_q, **band, **options, bias=bias, short_offsets=short
        )
    return o, given_lse(lse2, q)


def _attention_triton_general_backward(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    wanted: list[bool], rows: Tensor, rows_t: Tensor,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, offsets: Tensor | None, dropout_seed: Tensor | None,
    dropout_p: float, *terms: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and the gradients of `BiasTerms.learned` where `wanted`, else empty."""
    from jagged_kernels.attention.scores.bias_launch import bias_slots, reduce_slots

    meets, bias_terms, bias = read_terms(dropout_seed, dropout_p, terms, q_offsets, k_offsets)
    band = {"left": left, "right": right, "scale": scale}
    meeting = meeting_of(meets, k_offsets)
    terms = (bias, meets, left, right)
    family = _family("dkv", (q, k, v), rows, tile_q, tile_k, offsets, *terms)
    if family in (HOPPER_DKV, HOPPER_ONE_PASS):
        from jagged_kernels.attention.hopper import backward as gluon_backward

        gradients = gluon_backward.launch_backward(
            d_o, d_lse2, q, k, v, o, lse2, rows, rows_t,
            **band, meeting=meeting, listed=tile_q if meets.groups else 0,
        )  # fmt: skip
        return *gradients, *given_tensors([None] * _LEARNED, q)
    from jagged_kernels.attention.plain.backward import launch_backward

    short = offsets if family is SHORT else None
    # Without a query no row has a program, and an empty sum is 0.
    programs = 0
    if q.shape[0]:
        small_memory = has_small_memory(q.device)
        parts = parts_of_tile(
            tile_q, padded_dim(max(q.shape[2], v.shape[2])), q.element_size(), small_memory
        )
        programs = rows_to_walk(rows, q.shape[0], tile_q, skips=short is not None) * parts
    if short is not None:
        programs += short.shape[0] - 1
    slots = bias_slots(bias_terms, wanted, programs, q.shape[1])
    gradients = launch_backward(
        d_o, d_lse2, q, k, v, o, None if meets.scores else lse2, rows, rows_t,
        tile_q=tile_q, tile_k=tile_k, **band,
        bias=bias, bias_slots=None if bias is None else slots,
        meeting=meeting, short_offsets=short,
    )  # fmt: skip
    return *gradients, *given_tensors(reduce_slots(bias_terms, slots), q)


def given_tensors(d_bias: Sequence[Tensor | None], q: Tensor) -> list[Tensor]:
    """An operator's outputs must be tensors."""
    return [q.new_empty(0) if d is None else d for d in d_bias]


def _family(
    of_pass: Pass, qkv: tuple[Tensor, Tensor, Tensor], rows: Tensor, tile_q: int, tile_k: int,
    offsets: Tensor | None, bias: dict[str, Any] | None, meets: MeetTerms,
    left: int, right: int,
) -> Family:  # fmt: skip
    return pick(
        of_pass, *qkv, rows, tile_q, tile_k, offsets,
        bias=bias is not None and bias["BIAS"].ADDS,
        dropout=bias is not None and bias["BIAS"].DROPS,
        policy=meets.scores,
        keys="lists" if meets.groups else "ranges",
        left=left,
        right=right,
    )  # fmt: skip


def empty_general_gradients(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    wanted: list[bool], *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    learned = BiasTerms(*rest[-len(BiasTerms._fields) :]).learned()
    d_bias = [
        t.new_empty(t.shape) if t is not None and want else q.new_empty(0)
        for t, want in zip(learned, wanted, strict=True)
    ]
    return *empty_gradients(d_o, d_lse2, q, k, v), *d_bias


def empty_general_output(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty_output(q, k, v, with_lse and not meets_of(rest).scores)


def meets_of(rest: Sequence[Any]) -> MeetTerms:
    """Of the last arguments."""
    end = len(rest) - len(BiasTerms._fields)
    return MeetTerms(*rest[end - _MEETS : end])


attention_triton_general = define_op(
    _attention_triton_general,
    fake=empty_general_output,
    schema=f"(Tensor q, Tensor k, Tensor v, bool with_lse, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
attention_triton_general_backward = define_op(
    _attention_triton_general_backward,
    fake=empty_general_gradients,
    schema="(Tensor d_o, Tensor? d_lse2, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse2, "
    f"bool[] wanted, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def gradient_by(backward: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of an operator, by that of its backward."""

    def gradient(
        saved: Sequence[Any], wanted: Sequence[bool], d_o: Tensor | None, d_lse2: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse2, *rest = saved
        wanted_bias = list(wanted[-len(BiasTerms._fields) :][:_LEARNED])
        given = (*output_gradients(d_o, d_lse2, o, lse2), q, k, v, o, lse2, wanted_bias)
        dq, dk, dv, *d_bias = call(backward, *given, *rest)
        return given_gradients((dq, dk, dv), d_bias, wanted)

    return gradient


define_gradient(
    attention_triton_general,
    save=save_with_lse,
    gradient=gradient_by(attention_triton_general_backward),
)


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, with_lse: bool, *call: Any) -> Any:
    return forward_flops(q, v, _pairs(q, k, *call))


def _backward_flops(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    wanted: list[bool], *call: Any,
) -> Any:  # fmt: skip
    return backward_flops(q, v, _pairs(q, k, *call))


def _pairs(
    q: Tensor, k: Tensor, rows: Tensor, rows_t: Tensor,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
    q_offsets: Tensor, k_offsets: Tensor, offsets: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    lists = meets_of(rest).lists(tile_q, left)
    if lists is not None:
        return pairs_of_lists(q, k, lists, q_offsets, k_offsets, (left, right))
    return pairs_of_rows(q, k, rows, rows_t, tile_k, left, right)


define_flops(attention_triton_general, _forward_flops)
define_flops(attention_triton_general_backward, _backward_flops)
