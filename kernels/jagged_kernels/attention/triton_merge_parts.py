"""Two parts of an attention put together, and the gradients of both: a pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import finite
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import address_of, row_tile


def launch_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of o1 and o2 [T, H, Dv], lse1 and lse2 [T, H] float32."""
    o = torch.empty(o1.shape, dtype=o1.dtype, device=o1.device)
    lse = torch.empty(lse1.shape, dtype=lse1.dtype, device=o1.device)
    rows, columns = lse.numel(), o.shape[2]
    if rows == 0:
        return o, lse
    o1, o2 = _rows(o1), _rows(o2)
    chunk, block, warps = row_tile(columns)
    launch(
        _merge_kernel, cdiv(rows, chunk),
        (o1, lse1.contiguous(), o2, lse2.contiguous(), o, lse, rows),
        {
            "STRIDE_1": o1.stride(0), "STRIDE_2": o2.stride(0),
            "COLUMNS": columns, "BLOCK": block, "ROWS": chunk,
        },
        num_warps=warps,
    )  # fmt: skip
    return o, lse


def launch_merge_backward(
    d_o: Tensor, d_lse: Tensor | None, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of o1, lse1, o2 and lse2."""
    d_o1, d_o2 = (torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in (o1, o2))
    d_lse1, d_lse2 = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (lse1, lse2))
    rows, columns = lse1.numel(), o1.shape[2]
    if rows == 0:
        return d_o1, d_lse1, d_o2, d_lse2
    d_o, o1, o2 = _rows(d_o), _rows(o1), _rows(o2)
    d_lse = None if d_lse is None else d_lse.contiguous()
    chunk, block, warps = row_tile(columns)
    # Three rows at a time where the forward has two: half as many for as many registers.
    chunk, warps = (chunk // 2, warps) if chunk > 1 else (chunk, 2 * warps)
    launch(
        _merge_backward_kernel, cdiv(rows, chunk),
        (
            d_o, d_lse, o1, lse1.contiguous(), o2, lse2.contiguous(),
            d_o1, d_lse1, d_o2, d_lse2, rows,
        ),
        {
            "D_STRIDE": d_o.stride(0), "STRIDE_1": o1.stride(0), "STRIDE_2": o2.stride(0),
            "COLUMNS": columns, "BLOCK": block, "ROWS": chunk,
        },
        num_warps=warps,
    )  # fmt: skip
    return d_o1, d_lse1, d_o2, d_lse2


def _rows(x: Tensor) -> Tensor:
    """[T, H, Dv] as rows [T * H, Dv]."""
    return rows_of_dims(x.reshape(-1, x.shape[2]))


@triton.jit
def _shares(lse1_ptr, lse2_ptr, row, inside):
    """(share of part 1, of part 2, largest lse, sum of exponentials above it), float32 [ROWS]."""
    lse1 = tl.load(lse1_ptr + row, mask=inside, other=0.0)
    lse2 = tl.load(lse2_ptr + row, mask=inside, other=0.0)
    top = finite(tl.maximum(lse1, lse2))
    first, second = tl.exp(lse1 - top), tl.exp(lse2 - top)
    total = first + second
    # Both parts see nothing.
    divisor = tl.where(total == 0.0, 1.0, total)
    return first / divisor, second / divisor, top, total


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    o1_ptr, lse1_ptr, o2_ptr, lse2_ptr, o_ptr, lse_ptr, rows,
    STRIDE_1: tl.constexpr, STRIDE_2: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # int64: tokens x heads passes 2^31 in large batches.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = row < rows
    inside = there[:, None] & (column < COLUMNS)[None, :]
    share1, share2, top, total = _shares(lse1_ptr, lse2_ptr, row, there)
    o1 = tl.load(address_of(o1_ptr, row, column, STRIDE_1), mask=inside, other=0.0)
    o2 = tl.load(address_of(o2_ptr, row, column, STRIDE_2), mask=inside, other=0.0)
    o = share1[:, None] * o1.to(tl.float32) + share2[:, None] * o2.to(tl.float32)
    address = address_of(o_ptr, row, column, COLUMNS)
    tl.store(address, o.to(o_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + row, lse, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _merge_backward_kernel(
    d_o_ptr, d_lse_ptr, o1_ptr, lse1_ptr, o2_ptr, lse2_ptr,
    d_o1_ptr, d_lse1_ptr, d_o2_ptr, d_lse2_ptr, rows,
    D_STRIDE: tl.constexpr, STRIDE_1: tl.constexpr, STRIDE_2: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = row < rows
    inside = there[:, None] & (column < COLUMNS)[None, :]
    share1, share2, _, total = _shares(lse1_ptr, lse2_ptr, row, there)
    d_o = tl.load(address_of(d_o_ptr, row, column, D_STRIDE), mask=inside, other=0.0)
    o1 = tl.load(address_of(o1_ptr, row, column, STRIDE_1), mask=inside, other=0.0)
    o2 = tl.load(address_of(o2_ptr, row, column, STRIDE_2), mask=inside, other=0.0)
    d_o = d_o.to(tl.float32)
    # What moves weight from one part to the other.
    d_share = share1 * share2 * tl.sum(d_o * (o1.to(tl.float32) - o2.to(tl.float32)), 1)
    d_lse1, d_lse2 = d_share, -d_share
    if d_lse_ptr is not None:
        d_lse = tl.load(d_lse_ptr + row, mask=there, other=0.0)
        # Of a query that sees nothing lse is constant, and its gradient often NaN.
        d_lse = tl.where(total == 0.0, 0.0, d_lse)
        d_lse1 += share1 * d_lse
        d_lse2 += share2 * d_lse
    address = address_of(d_o1_ptr, row, column, COLUMNS)
    tl.store(address, (share1[:, None] * d_o).to(d_o1_ptr.dtype.element_ty), mask=inside)
    address = address_of(d_o2_ptr, row, column, COLUMNS)
    tl.store(address, (share2[:, None] * d_o).to(d_o2_ptr.dtype.element_ty), mask=inside)
    tl.store(d_lse1_ptr + row, d_lse1, mask=there)
    tl.store(d_lse2_ptr + row, d_lse2, mask=there)
