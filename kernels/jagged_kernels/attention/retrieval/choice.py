"""`choose_blocks`: for each tile of queries the key blocks that fit it best, as lists."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.attention.retrieval.asked import Asked
from jagged_kernels.attention.retrieval.native_choice import native_choice
from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.operators import define_op
from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.pairs import Batch


def _choose_blocks(
    queries: Tensor,
    keys: Tensor,
    key_offsets: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_categories: Tensor | None,
    k_categories: Tensor | None,
    q_tokens: int,
    k_tokens: int,
    block: int,
    groups: int,
    best: int,
    newest: int,
    most: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(row_ptr, col) of `KeyLists`; `col` has room for best + newest blocks of each entry.

    Args:
        queries: [Nq, H, D], a mean of each tile's, numbered as in `schedule.keys.blocks`.
        keys: [M, Hk, D], of each key block's, numbered likewise; or from key_offsets[b] to
            key_offsets[b + 1] of user b's first blocks, of which those without one are not scored.
        q_tokens, k_tokens: what the offsets end at.
        q_categories, k_categories: [Tq] and [Tk] integers, or None for both.
        best, newest, most, causal: of `Asked`.
    """
    batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, block, groups)
    asked = Asked(best, newest, most, causal)
    categories = None
    if q_categories is not None and k_categories is not None:
        categories = (q_categories, k_categories)
    if batch.entries()[0] == 0:
        return _empty(q_offsets, batch, asked, zeros=True)
    if triton_runs(queries) and queries.dtype != torch.float64:
        from jagged_kernels.attention.retrieval.triton_choice import launch_choice

        return launch_choice(queries, keys, key_offsets, batch, asked, categories)
    return native_choice(queries, keys, key_offsets, batch, asked, categories)


def _empty_lists(
    queries: Tensor, keys: Tensor, key_offsets: Tensor | None, q_offsets: Tensor,
    k_offsets: Tensor, q_categories: Tensor | None, k_categories: Tensor | None, q_tokens: int,
    k_tokens: int, block: int, groups: int, best: int, newest: int, most: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, block, groups)
    return _empty(q_offsets, batch, Asked(best, newest, most, causal))


def _empty(
    like: Tensor, batch: Batch, asked: Asked, *, zeros: bool = False
) -> tuple[Tensor, Tensor]:
    entries = tile_count(batch.q_tokens, like.shape[0] - 1, batch.block) * batch.groups
    make = like.new_zeros if zeros else like.new_empty
    row_ptr, col = (make(n, dtype=torch.int32) for n in (entries + 1, entries * asked.width))
    return row_ptr, col


choose_blocks = define_op(_choose_blocks, fake=_empty_lists)
