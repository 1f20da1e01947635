"""The block mask of a jagged batch for FlexAttention, straight from the offsets.

`create_block_mask` evaluates the mask at all T x T places unless it is compiled; the blocks of a
document mask follow from where the documents begin and end.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def document_block_mask(offsets: Tensor, *, tokens: int, causal: bool = False) -> BlockMask:
    """Users may attend to themselves only.

    Args:
        offsets: [B + 1] on the device; offsets[B] == tokens.
        tokens: T, known on the host.
        causal: and only to what came before.
    """
    device = offsets.device
    position = torch.arange(tokens, device=device, dtype=offsets.dtype)
    user = torch.searchsorted(offsets[1:].contiguous(), position, right=True)

    start = torch.arange(0, tokens, BLOCK, device=device)
    last = (start + BLOCK - 1).clamp(max=tokens - 1)
    first_user, last_user = user[start], user[last]
    lowest = offsets[first_user] // BLOCK  # first and last block that a block's users touch
    highest = (offsets[last_user + 1] - 1) // BLOCK
    block = torch.arange(len(start), device=device)
    touched = (lowest[:, None] <= block) & (block <= highest[:, None])
    # Full blocks need no mask: one user owns all rows and all columns, and none is cut off by T.
    whole = (first_user == last_user) & (start + BLOCK <= tokens)
    full = whole[:, None] & whole & (first_user[:, None] == first_user)
    if causal:
        touched &= block <= block[:, None]
        full &= block < block[:, None]

    def visible(b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        same = user[q_index] == user[kv_index]
        return same & (q_index >= kv_index) if causal else same

    partial_count, partial_blocks = _listed(touched & ~full)
    full_count, full_blocks = _listed(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_blocks,
        full_count,
        full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, blocks] bool -> counts [1, 1, rows] and block ids [1, 1, rows, blocks], int32,
    the wanted ones first and in order."""
    count = wanted.sum(1, dtype=torch.int32)
    order = torch.sort(wanted.to(torch.int8), dim=1, descending=True, stable=True).indices
    return count[None, None], order.int()[None, None].contiguous()
