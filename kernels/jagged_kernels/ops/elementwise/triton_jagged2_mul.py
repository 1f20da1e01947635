"""Each user's square matrix times a padded one, and products laid out as padded ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import padded_rows
from jagged_kernels.device.squares import OPTIONS, ROW_TILE, load_tokens, row_addresses, token_bound


def launch_mul2(m: Tensor, other: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> Tensor:
    """m [sum of n ** 2] times other [B, L, L]; 0 outside of it."""
    m, other = m.contiguous(), other.contiguous()
    out = torch.empty_like(m)
    if out.numel() == 0:
        return out
    tokens, numbers = ROW_TILE
    launch(
        _mul2_kernel, cdiv(token_bound(m, offsets), tokens),
        (m, other, out, offsets, matrix_offsets, offsets.shape[0] - 1, other.shape[1]),
        {"TOKENS": tokens, "NUMBERS": numbers}, **OPTIONS,
    )  # fmt: skip
    return out


def launch_pad2(
    a: Tensor, b: Tensor, offsets: Tensor, matrix_offsets: Tensor, length: int
) -> Tensor:
    """a * b, both [sum of n ** 2], as [B, length, length]; 0 where a user has no token."""
    a, b, users = a.contiguous(), b.contiguous(), offsets.shape[0] - 1
    out = torch.empty((users, length, length), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    rows, numbers = ROW_TILE
    launch(
        _pad2_kernel, cdiv(users * length, rows),
        (a, b, out, offsets, matrix_offsets, users, length),
        {"ROWS": rows, "NUMBERS": numbers}, **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "length"])
def _mul2_kernel(
    m_ptr, other_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, length,
    TOKENS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    user, place, count, matrix = load_tokens(offsets_ptr, matrix_offsets_ptr, users, token)
    start = matrix + place.to(tl.int64) * count
    row = (user.to(tl.int64) * length + place) * length
    # A row behind the padded ones has none of their columns.
    columns = tl.where(place < length, length, 0)
    for done in range(0, tl.max(count), NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = row_addresses(start, count, index)
        m = tl.load(m_ptr + address, mask=inside, other=0.0)
        there = inside & (index[None, :] < columns[:, None])
        other = tl.load(other_ptr + row[:, None] + index[None, :], mask=there, other=0.0)
        product = m.to(tl.float32) * other.to(tl.float32)
        tl.store(out_ptr + address, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["users", "length"])
def _pad2_kernel(
    a_ptr, b_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, length,
    ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    user, place, there = padded_rows(first_row, length, users, ROWS)
    first = tl.load(offsets_ptr + user).to(tl.int32)
    count = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    columns = tl.where(there & (place < count), count, 0)
    start = tl.load(matrix_offsets_ptr + user) + place.to(tl.int64) * count
    row = (first_row + tl.arange(0, ROWS)) * length
    for done in range(0, length, NUMBERS):
        index = done + tl.arange(0, NUMBERS)
        address, inside = row_addresses(start, columns, index)
        a = tl.load(a_ptr + address, mask=inside & (index < length)[None, :], other=0.0)
        b = tl.load(b_ptr + address, mask=inside & (index < length)[None, :], other=0.0)
        product = a.to(tl.float32) * b.to(tl.float32)
        tl.store(
            out_ptr + row[:, None] + index[None, :],
            product.to(out_ptr.dtype.element_ty),
            mask=there[:, None] & (index < length)[None, :],
        )
