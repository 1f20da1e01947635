"""Means of blocks of tokens: one launch, a program a block and some of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv, power_of_two
from jagged_kernels.device.search import search_steps, user_of_tile
from jagged_kernels.schedule.keys.blocks import tile_count

# Of a program: all of them are on their way from memory at once.
_ELEMENTS = 8192


def launch_block_means(x: Tensor, offsets: Tensor, block: int) -> Tensor:
    """[T, C] -> [T // block + B, C] in the dtype of x; 0 for numbers of no block."""
    x, columns, users = rows_of_dims(x), x.shape[1], offsets.shape[0] - 1
    numbers = tile_count(x.shape[0], users, block)
    out = torch.empty((numbers, columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = min(power_of_two(columns), _ELEMENTS // block)
    launch(
        _block_means_kernel, (numbers, cdiv(columns, width)),
        (x, offsets.contiguous(), out, users, search_steps(users)),
        {"BLOCK": block, "COLUMNS": columns, "STRIDE": x.stride(0), "WIDTH": width}, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _block_means_kernel(
    x_ptr, offsets_ptr, out_ptr, users, steps,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    user = user_of_tile(offsets_ptr, users, steps, number, BLOCK)
    first = tl.load(offsets_ptr + user).to(tl.int64)
    length = (tl.load(offsets_ptr + user + 1) - first).to(tl.int32)
    place = (number - (first // BLOCK).to(tl.int32) - user) * BLOCK
    left = length - place
    token = tl.arange(0, BLOCK)
    inside = (token < left)[:, None]
    if COLUMNS % WIDTH != 0:
        inside = inside & (column < COLUMNS)[None, :]
    x_ptr += (first + place) * STRIDE
    x = tl.load(x_ptr + token[:, None] * STRIDE + column[None, :], mask=inside, other=0.0)
    count = tl.maximum(tl.minimum(left, BLOCK), 1)
    mean = tl.sum(x.to(tl.float32), 0) / count.to(tl.float32)
    address = out_ptr + number.to(tl.int64) * COLUMNS + column
    tl.store(address, mean.to(out_ptr.dtype.element_ty), mask=column < COLUMNS)
