"""The backward for Hopper: long histories in half precision at head_dim 64 and 128.

Two passes as in `triton_backward`: dQ over the rows (3 products a block), then dK and dV over the
rows of the transpose (4 products). In both, probabilities and their gradients go from one product
to the next in registers, so that consumers write no shared memory, and nothing is summed by two
programs. Where tiles of queries are not those of `gluon_dq`, dQ is the plain one's.
"""

from __future__ import annotations

from torch import Tensor

from jagged_kernels.attention import triton_backward
from jagged_kernels.attention.gluon_dkv import launch_dkv
from jagged_kernels.attention.gluon_dq import launch_dq
from jagged_kernels.attention.hopper import dq_takes, tma_reads


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
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_backward.launch_backward` for what `hopper_fits`.

    Args:
        rows, rows_t: of tiles of `tile_q` queries, and of `tile_k` keys.
    """
    d_o = d_o if tma_reads(d_o) else d_o.contiguous()
    options = {"left": left, "right": right, "scale": scale}
    dq_launch = launch_dq if dq_takes(q, tile_q) else triton_backward.launch_dq
    dq, delta = dq_launch(d_o, d_lse2, q, k, v, o, lse2, rows, tile=tile_q, **options)
    dk, dv = launch_dkv(d_o, q, k, v, lse2, delta, rows_t, tile=tile_k, **options)
    return dq, dk, dv
