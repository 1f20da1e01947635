"""The backward of weighted sums: both gradients in one pass over the tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import address_of, row_tile
from jagged_kernels.device.search import user_of


def launch_weighted_sum_backward(
    d_out: Tensor, x: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, C] and weights [T, H], for d_out [B, H, C]."""
    x, weights, d_out = rows_of_dims(x), rows_of_dims(weights), d_out.contiguous()
    (tokens, columns), heads = x.shape, weights.shape[1]
    d_x = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    d_weights = torch.empty((tokens, heads), dtype=weights.dtype, device=x.device)
    if tokens == 0 or columns == 0 or heads == 0:
        return d_x.zero_(), d_weights.zero_()
    rows, block, warps = row_tile(columns)
    launch(
        _weighted_sum_backward_kernel, cdiv(tokens, rows),
        (d_out, x, weights, offsets, d_x, d_weights, tokens, offsets.shape[0] - 1),
        {
            "X_STRIDE": x.stride(0), "WEIGHT_STRIDE": weights.stride(0),
            "COLUMNS": columns, "HEADS": heads, "BLOCK": block, "ROWS": rows,
        },
        num_warps=warps,
    )  # fmt: skip
    return d_x, d_weights


@triton.jit(do_not_specialize=["tokens", "users"])
def _weighted_sum_backward_kernel(
    d_out_ptr, x_ptr, weights_ptr, offsets_ptr, d_x_ptr, d_weights_ptr, tokens, users,
    X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(address_of(x_ptr, token, column, X_STRIDE), mask=inside, other=0.0)
    x = x.to(tl.float32)
    user = user_of(offsets_ptr, users, tl.minimum(token, tokens - 1)).to(tl.int64)
    d_x = tl.zeros([ROWS, BLOCK], tl.float32)
    for head in range(0, HEADS):
        address = address_of(d_out_ptr, user * HEADS + head, column, COLUMNS)
        d_out = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        address = weights_ptr + token.to(tl.int64) * WEIGHT_STRIDE + head
        weight = tl.load(address, mask=token < tokens, other=0.0).to(tl.float32)
        d_x += weight[:, None] * d_out
        d_weight = tl.sum(x * d_out, 1).to(d_weights_ptr.dtype.element_ty)
        address = d_weights_ptr + token.to(tl.int64) * HEADS + head
        tl.store(address, d_weight, mask=token < tokens)
    address = address_of(d_x_ptr, token, column, COLUMNS)
    tl.store(address, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
