"""Several tables looked up and added up in one pass over the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.device.memory import row_addresses, row_tiles


def launch_embed(tables: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    """[T, D], added up in float32."""
    tokens, width = ids[0].shape[0], tables[0].shape[1]
    out = tables[0].new_empty((tokens, width))
    if out.numel():
        grid, tiles = row_tiles(tokens, width, torch.float32.itemsize)
        packed = tuple(tuple(x.contiguous() for x in part) for part in (tables, ids))
        sizes = tuple(table.shape[0] for table in tables)
        launch(_embed_kernel, grid, (out, *packed, tokens), {"SIZES": sizes, **tiles})
    return out


@triton.jit(do_not_specialize=["tokens"])
def _embed_kernel(
    out_ptr, tables, ids, tokens, SIZES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for feature in tl.static_range(len(tables)):
        row = tl.load(ids[feature] + token, mask=inside, other=-1)
        exists = (row >= 0) & (row < SIZES[feature])
        address, column = row_addresses(row, WIDTH, WIDTH, COLUMNS)
        vectors = tl.load(tables[feature] + address, mask=exists[:, None] & column, other=0.0)
        acc += vectors.to(tl.float32)
    address, column = row_addresses(token, WIDTH, WIDTH, COLUMNS)
    block = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + address, block, mask=inside[:, None] & column)
