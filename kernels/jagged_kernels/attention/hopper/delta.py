"""delta = rowsum(o * dO) - d_lse of each query, for a backward that reads O nowhere else."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv, padded_dim
from jagged_kernels.device.arithmetic import LOG2_E

# Queries and heads of a program: of 64 numbers each, four loads of 16 bytes a thread.
_ROWS = 64
_LOG2_E = tl.constexpr(LOG2_E)


def launch_delta(d_o: Tensor, d_lse2: Tensor | None, o: Tensor, out: Tensor) -> None:
    """Writes [Tq, H] float32 to `out`.

    Args:
        d_o: [Tq, H, D] with unit stride in D.
        d_lse2: [Tq, H], contiguous, of the logarithm in base 2.
        o: [Tq, H, D], contiguous.
    """
    tokens, heads, dim = o.shape
    launch(
        _delta_kernel,
        cdiv(tokens * heads, _ROWS),
        (d_o, d_lse2, o, out, tokens),
        {
            "HEADS": heads,
            "D": dim,
            "PAD_D": padded_dim(dim),
            "DO_STRIDE_T": d_o.stride(0),
            "DO_STRIDE_H": d_o.stride(1),
            "ROWS": _ROWS,
        },
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens"])
def _delta_kernel(
    do_ptr, d_lse2_ptr, o_ptr, delta_ptr, tokens,
    HEADS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, DO_STRIDE_T: tl.constexpr,
    DO_STRIDE_H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = place < tokens.to(tl.int64) * HEADS
    token, head = place // HEADS, place % HEADS
    dim = tl.arange(0, PAD_D)[None, :]
    inside = there[:, None] & (dim < D)
    o = tl.load(o_ptr + place[:, None] * D + dim, mask=inside, other=0.0)
    own = token * DO_STRIDE_T + head * DO_STRIDE_H
    d_o = tl.load(do_ptr + own[:, None] + dim, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    if d_lse2_ptr is not None:
        delta -= tl.load(d_lse2_ptr + place, mask=there, other=0.0) * _LOG2_E
    tl.store(delta_ptr + place, delta, mask=there)
