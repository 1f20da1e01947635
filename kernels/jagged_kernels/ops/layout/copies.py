"""Rows of tokens from one layout into another: what slices and padding have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jagged_kernels.core.operators import call, define_gradient, define_op


def _place_rows(
    values: Tensor,
    source_offsets: Tensor | None,
    out_offsets: Tensor | None,
    shift: Tensor | None,
    sign: int,
    users: int,
    tokens: int,
    source_len: int,
    out_len: int,
    source_end: bool,
    out_end: bool,
    value: float,
) -> Tensor:
    """[tokens, ...]: token p of each user, in the layout of the output, is token p + sign * shift
    of the same user in the source, or `value` where the source has no such token.

    A side without offsets is dense: `source_len` or `out_len` rows for each user. Where lengths
    differ, `source_end` takes the last tokens of the source in place of the first, and `out_end`
    puts them last. The gradient is the same operation with the sides exchanged.

    Args:
        shift: [users] integers; None for 0.
        sign: 1 or -1.
    """
    from jagged_kernels.ops.layout.triton_copies import launch_place_rows

    return launch_place_rows(
        values, source_offsets, out_offsets, shift, sign,
        users=users, tokens=tokens, source_len=source_len, out_len=out_len,
        source_end=source_end, out_end=out_end, value=value,
    )  # fmt: skip


def _empty_rows(
    values: Tensor,
    source_offsets: Tensor | None,
    out_offsets: Tensor | None,
    shift: Tensor | None,
    sign: int,
    users: int,
    tokens: int,
    *rest: Any,
) -> Tensor:
    return values.new_empty((tokens, *values.shape[1:]))


place_rows = define_op(_place_rows, fake=_empty_rows)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return (inputs[0].shape[0], *inputs[1:])


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    tokens, source_offsets, out_offsets, shift, sign, users, _, source_len, out_len, *ends, _ = (
        saved
    )
    source_end, out_end = ends
    d_values = call(place_rows,
        d_out, out_offsets, source_offsets, shift, -sign, users, tokens, out_len, source_len,
        out_end, source_end, 0.0,
    )  # fmt: skip
    return (d_values,)


define_gradient(place_rows, save=_save, gradient=_gradient)
