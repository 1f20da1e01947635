"""The backward for Hopper: long histories in half precision at head_dim 64 and 128.

Two passes as in `triton_backward`: dQ over the rows (`gluon_dq`, 3 products a block), then dK and
dV over the rows of the transpose (`gluon_dkv`, 4 products). In both, probabilities and their
gradients go from one product to the next in registers, so that consumers write no shared memory,
and nothing is summed by two programs.
"""

from __future__ import annotations

from torch import Tensor

from jagged_kernels.attention.gluon_dkv import launch_dkv
from jagged_kernels.attention.gluon_dq import launch_dq
from jagged_kernels.attention.hopper import tma_reads


def launch_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_backward.launch_backward` for what `hopper_fits`.

    Args:
        rows, rows_t: of tiles of `dq_config.tile_q` queries and `dkv_config.tile_q` keys.
    """
    d_o = d_o if tma_reads(d_o) else d_o.contiguous()
    band = {"left": left, "right": right}
    dq, numbers = launch_dq(d_o, d_lse2, q, k, v, o, lse2, rows, **band, scale=scale)
    dk, dv = launch_dkv(d_o, q, k, v, numbers, rows_t, **band, scale=scale)
    return dq, dk, dv
