"""Layer and RMS normalisation with an optional residual sum, forward and backward.

The backward computes a token's statistics again from the token, which it has to read anyway. Its
programs add up gradients of weight and bias over their tokens, and a second launch adds those sums
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import address_of, row_tile

# Programs of the backward: a few waves on any device, and few sums for the second launch.
PROGRAMS = 528
# Sums and columns that a program of the second launch takes at a time.
_SUMS, _SUM_COLUMNS = 256, 16


def launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """(y, x + residual) [rows, D] in the dtype of x; the second empty without a residual."""
    x, residual = rows_of_dims(x), None if residual is None else rows_of_dims(residual)
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    total = torch.empty(0 if residual is None else y.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y, total
    chunk, block, warps = row_tile(columns)
    launch(
        _norm_kernel, cdiv(rows, chunk),
        (x, residual, _packed(weight), _packed(bias), y, total, rows, float(eps)),
        {
            "RMS": rms, "X_STRIDE": x.stride(0),
            "RESIDUAL_STRIDE": 0 if residual is None else residual.stride(0),
            "COLUMNS": columns, "BLOCK": block, "ROWS": chunk,
        },
        num_warps=warps,
    )  # fmt: skip
    return y, total


def launch_norm_backward(
    d_y: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `total` (the sum that was normalised) [rows, D], weight and bias [D]."""
    d_y, total = rows_of_dims(d_y), rows_of_dims(total)
    d_total = None if d_total is None else rows_of_dims(d_total)
    rows, columns = total.shape
    d_x = torch.empty((rows, columns), dtype=total.dtype, device=total.device)
    d_weight, d_bias = (
        total.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias)
    )
    if rows == 0:
        return d_x, d_weight.zero_(), d_bias.zero_()
    chunk, block, warps = row_tile(columns)
    # The sums of two parameters beside the tokens: more threads a token for as many registers.
    chunk, warps = (chunk // 2, warps) if chunk > 1 else (chunk, 2 * warps)
    tiles_each = cdiv(cdiv(rows, chunk), PROGRAMS)
    programs = cdiv(cdiv(rows, chunk), tiles_each)
    sums = torch.empty((2, programs, columns), dtype=torch.float32, device=total.device)
    parameters = {"WEIGHT": weight is not None, "BIAS": bias is not None, "COLUMNS": columns}
    launch(
        _norm_backward_kernel, programs,
        (
            d_y, d_total, total, _packed(weight), d_x, sums, rows, tiles_each, programs,
            float(eps),
        ),
        {
            "RMS": rms, "D_STRIDE": d_y.stride(0), "X_STRIDE": total.stride(0),
            "SUM_STRIDE": 0 if d_total is None else d_total.stride(0),
            **parameters, "BLOCK": block, "ROWS": chunk,
        },
        num_warps=warps,
    )  # fmt: skip
    if weight is not None or bias is not None:
        launch(
            _parameter_kernel, cdiv(columns, _SUM_COLUMNS),
            (sums, d_weight, d_bias, programs),
            {**parameters, "SUMS": _SUMS, "BLOCK": _SUM_COLUMNS},
            num_warps=4,
        )  # fmt: skip
    return d_x, d_weight, d_bias


def _packed(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


@triton.jit
def _normalised(x, has_column, eps, RMS: tl.constexpr, COLUMNS: tl.constexpr):
    """(normalised rows, [ROWS] reciprocal of the deviation); columns without data must be 0."""
    if not RMS:
        mean = tl.sum(x, 1) / COLUMNS
        x = tl.where(has_column, x - mean[:, None], 0.0)
    reciprocal = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / COLUMNS + eps)
    return x * reciprocal[:, None], reciprocal


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, rows, eps,
    RMS: tl.constexpr, X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    has_column = (column < COLUMNS)[None, :]
    inside = (row < rows)[:, None] & has_column
    x = tl.load(address_of(x_ptr, row, column, X_STRIDE), mask=inside, other=0.0)
    x = x.to(tl.float32)
    if residual_ptr is not None:
        address = address_of(residual_ptr, row, column, RESIDUAL_STRIDE)
        x += tl.load(address, mask=inside, other=0.0).to(tl.float32)
        # What the backward reads is what is normalised.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(address_of(total_ptr, row, column, COLUMNS), rounded, mask=inside)
        x = rounded.to(tl.float32)
    y, _ = _normalised(x, has_column, eps, RMS, COLUMNS)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0)
        y += bias.to(tl.float32)[None, :]
    address = address_of(y_ptr, row, column, COLUMNS)
    tl.store(address, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles_each", "programs"])
def _norm_backward_kernel(
    d_y_ptr, d_total_ptr, x_ptr, weight_ptr, d_x_ptr, sums_ptr, rows, tiles_each, programs, eps,
    RMS: tl.constexpr, D_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr, SUM_STRIDE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    has_column = (column < COLUMNS)[None, :]
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(program * tiles_each, (program + 1) * tiles_each):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & has_column
        x = tl.load(address_of(x_ptr, row, column, X_STRIDE), mask=inside, other=0.0)
        d_y = tl.load(address_of(d_y_ptr, row, column, D_STRIDE), mask=inside, other=0.0)
        d_y = d_y.to(tl.float32)
        y, reciprocal = _normalised(x.to(tl.float32), has_column, eps, RMS, COLUMNS)
        if BIAS:
            d_bias += d_y
        if WEIGHT:
            d_weight += d_y * y
            d_y *= weight[None, :]
        d_x = d_y - y * (tl.sum(d_y * y, 1) / COLUMNS)[:, None]
        if not RMS:
            d_x -= (tl.sum(d_y, 1) / COLUMNS)[:, None]
        d_x *= reciprocal[:, None]
        if d_total_ptr is not None:
            address = address_of(d_total_ptr, row, column, SUM_STRIDE)
            d_x += tl.load(address, mask=inside, other=0.0).to(tl.float32)
        result = d_x.to(d_x_ptr.dtype.element_ty)
        tl.store(address_of(d_x_ptr, row, column, COLUMNS), result, mask=inside)
    if WEIGHT:
        address = sums_ptr + program * COLUMNS + column
        tl.store(address, tl.sum(d_weight, 0), mask=column < COLUMNS)
    if BIAS:
        address = sums_ptr + (programs + program) * COLUMNS + column
        tl.store(address, tl.sum(d_bias, 0), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["programs"])
def _parameter_kernel(
    sums_ptr, d_weight_ptr, d_bias_ptr, programs,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WEIGHT:
        total = _sum_of_programs(sums_ptr, 0, programs, column, COLUMNS, SUMS, BLOCK)
        d_weight = total.to(d_weight_ptr.dtype.element_ty)
        tl.store(d_weight_ptr + column, d_weight, mask=column < COLUMNS)
    if BIAS:
        total = _sum_of_programs(sums_ptr, programs, programs, column, COLUMNS, SUMS, BLOCK)
        d_bias = total.to(d_bias_ptr.dtype.element_ty)
        tl.store(d_bias_ptr + column, d_bias, mask=column < COLUMNS)


@triton.jit
def _sum_of_programs(
    sums_ptr, first, programs, column, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK] totals of the rows first ... first + programs - 1."""
    total = tl.zeros([SUMS, BLOCK], tl.float32)
    for done in range(0, programs, SUMS):
        row = done + tl.arange(0, SUMS)
        inside = (row < programs)[:, None] & (column < COLUMNS)[None, :]
        total += tl.load(address_of(sums_ptr, first + row, column, COLUMNS), mask=inside, other=0.0)
    return tl.sum(total, 0)
