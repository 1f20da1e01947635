"""Differences between all pairs of a user's numbers, and the sums that are their gradient."""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.interaction.triton_squares import (
    COLUMN_TILE,
    OPTIONS,
    ROW_TILE,
    line_addresses,
    lines,
    load_tokens,
)
from jagged_kernels.launch import cdiv, launch


def launch_difference(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    """x [T] -> x_i - x_j [total = sum of n ** 2], in the dtype of x."""
    x, out = x.contiguous(), torch.empty(total, dtype=x.dtype, device=x.device)
    if total == 0:
        return out
    tokens, numbers = ROW_TILE
    launch(
        _difference_kernel, cdiv(x.shape[0], tokens),
        (x, out, offsets, matrix_offsets, offsets.shape[0] - 1),
        {"TOKENS": tokens, "NUMBERS": numbers}, **OPTIONS,
    )  # fmt: skip
    return out


def launch_difference_backward(
    d_out: Tensor, offsets: Tensor, matrix_offsets: Tensor, tokens: int
) -> Tensor:
    """d_out [sum of n ** 2] -> [T]: the sum of each token's row less that of its column."""
    d_out, d_x = d_out.contiguous(), torch.empty(tokens, dtype=d_out.dtype, device=d_out.device)
    if tokens == 0:
        return d_x
    chunk, numbers = COLUMN_TILE
    launch(
        _difference_backward_kernel, cdiv(tokens, chunk),
        (d_out, d_x, offsets, matrix_offsets, offsets.shape[0] - 1),
        {"TOKENS": chunk, "NUMBERS": numbers}, **OPTIONS,
    )  # fmt: skip
    return d_x


@triton.jit(do_not_specialize=["users"])
def _difference_kernel(
    x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users,
    TOKENS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    _, place, count, matrix = load_tokens(offsets_ptr, matrix_offsets_ptr, users, token)
    start, step = lines(place, count, matrix, 1)
    mine = tl.load(x_ptr + token, mask=count > 0, other=0)
    for done in range(0, tl.max(count), NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = line_addresses(start, step, count, index, 1)
        others = tl.load(x_ptr + (token - place)[:, None] + index[None, :], mask=inside, other=0)
        tl.store(out_ptr + address, mine[:, None] - others, mask=inside)


@triton.jit(do_not_specialize=["users"])
def _difference_backward_kernel(
    d_out_ptr, d_x_ptr, offsets_ptr, matrix_offsets_ptr, users,
    TOKENS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    _, place, count, matrix = load_tokens(offsets_ptr, matrix_offsets_ptr, users, token)
    longest = tl.max(count)
    start, step = lines(place, count, matrix, 1)
    in_row = tl.zeros([TOKENS, NUMBERS], tl.float32)
    for done in range(0, longest, NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        row_address, in_matrix = line_addresses(start, step, count, index, 1)
        in_row += tl.load(d_out_ptr + row_address, mask=in_matrix, other=0.0).to(tl.float32)
    d_x = tl.sum(in_row, 1)
    start, step = lines(place, count, matrix, 0)
    in_column = tl.zeros([NUMBERS, TOKENS], tl.float32)
    for done in range(0, longest, NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = line_addresses(start, step, count, index, 0)
        in_column += tl.load(d_out_ptr + address, mask=inside, other=0.0).to(tl.float32)
    d_x -= tl.sum(in_column, 0)
    tl.store(d_x_ptr + token, d_x.to(d_x_ptr.dtype.element_ty), mask=count > 0)
