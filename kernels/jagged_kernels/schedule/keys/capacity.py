"""How many entries lists can have: what the host knows of it before they are made."""

from __future__ import annotations

from torch import Tensor

from jagged_kernels.core.contents import can_be_read
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.schedule.keys.rules import KeyRule, RequestKeys, SemiLocalKeys, StridedKeys

_MOST_ENTRIES = 2**31 - 1


def most_entries(
    rule: KeyRule, *, tiles: int, blocks: int, groups: int, most: int, aligned: bool
) -> int:
    """A bound for one direction of a rule's lists, and so for the other.

    A longer user lists more blocks a tile, so that tiles list no more than if all were of users
    that are as long as the longest.

    Args:
        tiles, blocks: numbers of query tiles and key blocks.
        most: blocks of the longest user.
        aligned: each user has as many queries as keys.

    Raises:
        ValueError: more than int32 can count.
    """
    if not most:
        return 0
    if aligned:
        bound = cdiv(tiles * _of_user(rule, most), most)
    else:
        assert isinstance(rule, SemiLocalKeys)
        # A tile's first query may stand anywhere in a key block, which costs one more.
        row = _near(rule.window - 1, rule.block) + 1 + cdiv(rule.first, rule.block)
        bound = tiles * min(most, row)
    bound *= groups
    if max(bound, tiles * groups, blocks * groups) > _MOST_ENTRIES:
        raise ValueError(
            f"lists hold at most {_MOST_ENTRIES} blocks, and these could have {bound}; use a "
            "larger block, a smaller batch, or say longest"
        )
    return bound


def _of_user(rule: KeyRule, tiles: int) -> int:
    """The most blocks that one group of a user with so many tiles can list."""
    if isinstance(rule, StridedKeys):
        # Tile q lists its local blocks and at most 1 + (q - local) // stride before them.
        older = max(tiles - rule.local, 0)
        rounds = older // rule.stride
        strided = rule.stride * rounds * (rounds + 1) // 2
        strided += (older - rule.stride * rounds) * (rounds + 1)
        return _ramp(tiles, rule.local) + strided
    if isinstance(rule, SemiLocalKeys):
        first = cdiv(rule.first, rule.block)
        return _ramp(tiles, _near(rule.window - 1, rule.block) + first)
    contexts = _most_contexts(rule)
    if contexts is None:
        return tiles * tiles
    row = tiles
    if rule.window is not None:
        # One more for a target's own block.
        row = _near(rule.window + contexts, rule.block) + 1
    return _ramp(tiles, row) + min(cdiv(contexts, rule.block), tiles) * tiles


def _near(left: int, block: int) -> int:
    """Blocks that a tile in line with them sees `left` tokens back from its queries."""
    return cdiv(left, block) + 1


def _ramp(tiles: int, row: int) -> int:
    """1 + 2 + ... blocks of so many tiles, at most `row` of each."""
    row = min(row, tiles)
    return row * (row + 1) // 2 + (tiles - row) * row


def _most_contexts(rule: RequestKeys) -> int | None:
    """The most contexts of a user, None where only a device knows."""
    contexts = rule.contexts
    if not isinstance(contexts, Tensor):
        return contexts or 0
    if contexts.device.type != "cpu" or not can_be_read(contexts):
        return None
    return max(0, int(contexts.max())) if contexts.numel() else 0
