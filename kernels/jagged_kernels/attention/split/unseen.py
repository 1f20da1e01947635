"""dK and dV of keys that no query sees: what walks the others does not come by."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.row_layout import NO_LIMIT


def zero_unseen(
    dk: Tensor, dv: Tensor, rows_t: Tensor, *, tile_k: int, left: int, right: int
) -> None:
    """Writes 0 into dk [Tk, Hk, D] and dv [Tk, Hk, Dv] of keys that no query sees.

    Args:
        rows_t, tile_k: tiles of keys and the queries that see them.
        left, right: of the queries' window.
    """
    # From the keys' side the band is mirrored.
    launch(
        _zero_unseen_kernel,
        rows_t.shape[0],
        (dk, dv, rows_t, right, left),
        {
            "HAS_LEFT": right != NO_LIMIT,
            "HAS_RIGHT": left != NO_LIMIT,
            "WIDTH": dk.shape[1] * dk.shape[2],
            "WIDTH_V": dv.shape[1] * dv.shape[2],
            "TILE": tile_k,
        },
        num_warps=4,
    )


@triton.jit(do_not_specialize=["left", "right"])
def _zero_unseen_kernel(
    dk_ptr, dv_ptr, rows_ptr, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dK = dV = 0 for the keys of a tile that no query sees: those outside of every row's range.

    That of the backward writes whole ranges, and the windows of neighbouring queries leave no gap
    in them.
    """
    k_start, k_end, q_start, q_end, shift = load_row(rows_ptr, tl.program_id(0))
    token = k_start + tl.arange(0, TILE)
    seen_from = tl.zeros([TILE], tl.int32) + q_start
    seen_to = tl.zeros([TILE], tl.int32) + q_end - 1
    if HAS_LEFT:
        seen_from = tl.maximum(seen_from, token + shift - left)
    if HAS_RIGHT:
        seen_to = tl.minimum(seen_to, token + shift + right)
    unseen = (token < k_end) & (seen_from > seen_to)
    if tl.max(unseen.to(tl.int32), 0) == 0:
        return
    CHUNK: tl.constexpr = 64
    column = tl.arange(0, CHUNK)
    at = token.to(tl.int64)[:, None]
    zeros = tl.zeros([TILE, CHUNK], dk_ptr.dtype.element_ty)
    for first in range(0, WIDTH, CHUNK):
        mask = unseen[:, None] & (first + column < WIDTH)[None, :]
        tl.store(dk_ptr + at * WIDTH + (first + column)[None, :], zeros, mask=mask)
    for first in range(0, WIDTH_V, CHUNK):
        mask = unseen[:, None] & (first + column < WIDTH_V)[None, :]
        tl.store(dv_ptr + at * WIDTH_V + (first + column)[None, :], zeros, mask=mask)
