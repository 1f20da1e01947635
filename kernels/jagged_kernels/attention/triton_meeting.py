"""Lists of key blocks and weights by policy inside the kernels (see `meeting`).

The kernels take `meets` (`meeting.MeetArguments`, or None) and, in S, what of it is known when they
are compiled. Rows are of one side and walk over blocks of the other, either way round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.blocks import visible
from jagged_kernels.schedule.keys.triton_token_rule import load_rule, token_visible
from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH

_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_USER = tl.constexpr(ROW_FIELDS.index("user"))
_LENGTH = tl.constexpr(ROW_FIELDS.index("length"))


@triton.jit
def list_ends(meets, rows_ptr, row, tile_start, range_end, shift, head, S: tl.constexpr):
    """[begin, end): the entries of a row's tile for this head, in `meets.col`.

    Tiles are numbered as `schedule.keys.lists` does it: a user's first is first // TILE + user.
    """
    base = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    TILE: tl.constexpr = S.TILE * S.PARTS
    first = range_end - shift - tl.load(base + _LENGTH)
    number = first // TILE + tl.load(base + _USER) + (tile_start - first) // TILE
    entry = meets.row_ptr + number.to(tl.int64) * S.GROUPS + head * S.GROUPS // S.HEADS
    return tl.load(entry), tl.load(entry + 1)


@triton.jit
def listed_block(
    meets, begin, index, range_start, range_end, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(first token, is it partial) of block number `index` of those that a list's entries from
    `begin` on are cut into: LISTED tokens an entry, BLOCK a block. What is no block of the range is
    one behind its end, which nobody sees."""
    PER_ENTRY: tl.constexpr = LISTED // BLOCK
    # The interpreter's loops count in Python integers.
    index += tl.full([], 0, tl.int32)
    # Entries of all tiles may be as many as int32 counts, and blocks of them more.
    entry = tl.load(meets.col + begin + index // PER_ENTRY)
    return block_of_entry(entry, index, range_start, range_end, LISTED, BLOCK)


@triton.jit
def block_of_entry(
    entry, index, range_start, range_end, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`listed_block` of the entry of block number `index`."""
    PER_ENTRY: tl.constexpr = LISTED // BLOCK
    block = entry >> 1
    exists = (block >= 0) & (block < tl.cdiv(range_end - range_start, LISTED))
    start = range_start + tl.where(exists, block, 0) * LISTED + (index % PER_ENTRY) * BLOCK
    return tl.where(exists, start, range_end), ((entry & 1) == 1) | (exists == 0)


@triton.jit
def is_cut(block_start, whole, S: tl.constexpr):
    """Whether some of a block is hidden; `whole`: from where to where none is, or that itself."""
    return whole if S.GROUPS else (block_start < whole[0]) | (block_start >= whole[1])


@triton.jit
def rule_of_row(meets, rows_ptr, row, range_start, range_end, shift, OF_KEYS: tl.constexpr):
    """(first key, keys, from a query to its place among the keys, history, contexts) of the row's
    user for `inside_block`; OF_KEYS: rows are of keys."""
    base = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    if OF_KEYS:
        length = tl.load(base + _LENGTH)
        first = range_end - shift - length
        places = -shift - first
    else:
        length = range_end - range_start
        first = range_start
        places = shift - first
    history, contexts = load_rule(meets.targets, meets.contexts, tl.load(base + _USER), length)
    return first, length, places, history, contexts


@triton.jit
def inside_block(
    rule, tile_start, block_start, range_end, shift, left, right,
    S: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK]: which pairs are visible; OF_KEYS: keys stand in the tile."""
    if S.RULED:
        first, length, places, history, contexts = rule
        tile = (tile_start + tl.arange(0, TILE))[:, None]
        block = (block_start + tl.arange(0, BLOCK))[None, :]
        if OF_KEYS:
            # Of keys the band is mirrored: its right side is the rule's left one.
            inside = token_visible(
                block + places, tile - first, length, right, S.FIRST, history, contexts
            )
        else:
            inside = token_visible(
                tile + places, block - first, length, left, S.FIRST, history, contexts
            )
    else:
        inside = visible(
            tile_start, block_start, range_end, shift, left, right,
            S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK,
        )  # fmt: skip
    return inside


@triton.jit
def factor_of_user(meets, rows_ptr, row):
    """1 / n of a policy's weights."""
    if meets.k_offsets is None:
        factor = meets.factor
    else:
        at = meets.k_offsets + tl.load(rows_ptr + row.to(tl.int64) * _ROW_WIDTH + _USER)
        keys = tl.load(at + 1) - tl.load(at)
        factor = 1.0 / tl.maximum(keys, 1).to(tl.float32)
    return factor
