"""Softmax along the rows or the columns of each user's square matrix, forward and backward.

A line is read twice, the second time from cache: it is short beside it.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import LOG2_E
from jagged_kernels.interaction.triton_softmax import LOWEST, merge_softmax, online_softmax
from jagged_kernels.interaction.triton_squares import (
    COLUMN_TILE,
    OPTIONS,
    ROW_TILE,
    line_addresses,
    lines,
    load_tokens,
    token_bound,
)
from jagged_kernels.launch import cdiv, launch

_LOG2_E = tl.constexpr(LOG2_E)


def launch_softmax2(
    x: Tensor, offsets: Tensor, matrix_offsets: Tensor, *, by_row: bool, d_y: Tensor | None = None
) -> Tensor:
    """Softmax of values [sum of n ** 2]; with `d_y`, x is y and the result the gradient of x."""
    x, d_y = x.contiguous(), None if d_y is None else d_y.contiguous()
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    tokens, numbers = ROW_TILE if by_row else COLUMN_TILE
    launch(
        _softmax2_kernel, cdiv(token_bound(x, offsets), tokens),
        (x, d_y, out, offsets, matrix_offsets, offsets.shape[0] - 1),
        {
            "AXIS": 1 if by_row else 0, "BACKWARD": d_y is not None, "TOKENS": tokens,
            "NUMBERS": numbers,
        },
        **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users"])
def _softmax2_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users,
    AXIS: tl.constexpr, BACKWARD: tl.constexpr, TOKENS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    HEIGHT: tl.constexpr = TOKENS if AXIS == 1 else NUMBERS
    WIDTH: tl.constexpr = NUMBERS if AXIS == 1 else TOKENS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    _, place, count, matrix = load_tokens(offsets_ptr, matrix_offsets_ptr, users, token)
    start, step = lines(place, count, matrix, AXIS)
    longest = tl.max(count)

    top = tl.full([HEIGHT, WIDTH], LOWEST, tl.float32)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for done in range(0, longest, NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = line_addresses(start, step, count, index, AXIS)
        if BACKWARD:
            y = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
            total += y * tl.load(d_ptr + address, mask=inside, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + address, mask=inside, other=float("-inf")).to(tl.float32)
            top, total = online_softmax(top, total, x)
    if BACKWARD:
        total = tl.sum(total, AXIS, keep_dims=True)
    else:
        top, total = merge_softmax(top, total, AXIS)

    for done in range(0, longest, NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = line_addresses(start, step, count, index, AXIS)
        x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            result = x * (tl.load(d_ptr + address, mask=inside, other=0.0).to(tl.float32) - total)
        else:
            result = tl.exp2((x - top) * _LOG2_E) / total
        tl.store(out_ptr + address, result.to(out_ptr.dtype.element_ty), mask=inside)
