"""From users to their tokens, and from tokens to padded rows: one pass, no schedule.

Programs take equal chunks of tokens (or of padded rows), whoever they belong to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import address_of, column_tile, padded_rows
from jagged_kernels.device.search import user_of


def launch_spread(
    source: Tensor,
    offsets: Tensor,
    tokens: int,
    *,
    x: Tensor | None = None,
    join: str = "copy",
    at_end: bool = False,
    mean: bool = False,
) -> Tensor:
    """Joins each token with what its user has: [T, C] in the dtype of `source`.

    Args:
        source: [B, C], the same for all tokens of a user, or padded [B, L, C]: position i of a
            user gets row i, and 0 from L on.
        x: [T, C], for `join` "add" (x + source) and "mul" (x * source); "copy" gives the source.
        at_end: the rows of a padded source belong to the last L tokens; others get 0.
        mean: divide by the user's number of tokens.
    """
    padded, columns = source.dim() == 3, source.shape[-1]
    source = source.contiguous()
    x = None if x is None else rows_of_dims(x)
    out = torch.empty((tokens, columns), dtype=source.dtype, device=source.device)
    if out.numel() == 0:
        return out
    rows, block = column_tile(columns)
    blocks = cdiv(columns, block)
    launch(
        _spread_kernel, cdiv(tokens, rows) * blocks,
        (
            source, x, offsets, out, tokens, offsets.shape[0] - 1,
            source.shape[1] if padded else 1,
        ),
        {
            "PADDED": padded, "AT_END": at_end, "JOIN": join, "MEAN": mean,
            "X_STRIDE": 0 if x is None else x.stride(0),
            "COLUMNS": columns, "BLOCKS": blocks, "BLOCK": block, "ROWS": rows,
        },
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "users", "length"])
def _spread_kernel(
    source_ptr, x_ptr, offsets_ptr, out_ptr, tokens, users, length,
    PADDED: tl.constexpr, AT_END: tl.constexpr, JOIN: tl.constexpr, MEAN: tl.constexpr,
    X_STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    if JOIN != "copy":
        # Before the search for users, so that both are on their way.
        x = tl.load(address_of(x_ptr, token, column, X_STRIDE), mask=inside, other=0.0)
        x = x.to(tl.float32)

    known = tl.minimum(token, tokens - 1)
    user = user_of(offsets_ptr, users, known)
    row = user.to(tl.int64)
    there = inside
    if PADDED:
        if AT_END:
            place = length - tl.load(offsets_ptr + user + 1).to(tl.int32) + known
        else:
            place = known - tl.load(offsets_ptr + user).to(tl.int32)
        row = row * length + place
        there = inside & ((place >= 0) & (place < length))[:, None]
    value = tl.load(address_of(source_ptr, row, column, COLUMNS), mask=there, other=0.0)
    value = value.to(tl.float32)
    if MEAN:
        first = tl.load(offsets_ptr + user).to(tl.int32)
        value /= (tl.load(offsets_ptr + user + 1).to(tl.int32) - first).to(tl.float32)[:, None]
    if JOIN == "add":
        value = x + value
    if JOIN == "mul":
        value = x * value
    address = address_of(out_ptr, token, column, COLUMNS)
    tl.store(address, value.to(out_ptr.dtype.element_ty), mask=inside)


def launch_pad(
    x: Tensor, offsets: Tensor, length: int, *, times: Tensor | None = None, at_end: bool = False
) -> Tensor:
    """Padded rows [B, length, C] of x [T, C] (times `times`), 0 where a user has no token.

    Longer users keep their first tokens; with `at_end` their last, and row length - 1 is the last.
    """
    x, columns, users = rows_of_dims(x), x.shape[1], offsets.shape[0] - 1
    times = None if times is None else rows_of_dims(times)
    out = torch.empty((users, length, columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, block = column_tile(columns)
    blocks = cdiv(columns, block)
    launch(
        _pad_kernel, cdiv(users * length, rows) * blocks,
        (x, times, offsets, out, users, length),
        {
            "AT_END": at_end, "X_STRIDE": x.stride(0),
            "TIMES_STRIDE": 0 if times is None else times.stride(0),
            "COLUMNS": columns, "BLOCKS": blocks, "BLOCK": block, "ROWS": rows,
        },
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "length"])
def _pad_kernel(
    x_ptr, times_ptr, offsets_ptr, out_ptr, users, length,
    AT_END: tl.constexpr, X_STRIDE: tl.constexpr, TIMES_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first_row = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    user, place, there = padded_rows(first_row, length, users, ROWS)
    first = tl.load(offsets_ptr + user).to(tl.int32)
    end = tl.load(offsets_ptr + user + 1).to(tl.int32)
    token = first + place
    if AT_END:
        token = end - length + place
    has_column = (column < COLUMNS)[None, :]
    inside = (there & (token >= first) & (token < end))[:, None] & has_column
    x = tl.load(address_of(x_ptr, token, column, X_STRIDE), mask=inside, other=0.0)
    if times_ptr is not None:
        address = address_of(times_ptr, token, column, TIMES_STRIDE)
        times = tl.load(address, mask=inside, other=0.0)
        x = (x.to(tl.float32) * times.to(tl.float32)).to(x.dtype)
    row = first_row + tl.arange(0, ROWS)
    address = address_of(out_ptr, row, column, COLUMNS)
    tl.store(address, x, mask=there[:, None] & has_column)
