"""In which order tiles of keys add to dQ, so that its sums are the same in every run.

A user's keys are cut into tiles and his queries into blocks, both counted from his first token. A
tile meets its blocks step by step, from the first to the last, and where a block of dQ waits for
several tiles, they add to it in turns, the lower number first. Whoever comes to the end of a tile
takes the next number that nobody has, and holds one tile at a time.

- With a limit on the keys' left (causal, windows), a tile of later keys starts with later blocks.
  Later keys have the lower number: a block gets the tile that starts with it first, and every other
  one `RATIO` steps after the one before, if all start at a time. They do not, since tiles of a pair
  differ in blocks, and earlier keys, which meet more of them, start later still: they queue for no
  block. Tiles of a (user, head) pair have numbers next to each other.
- Without limits all tiles of a pair are as long, and each has to stay a step behind the one before,
  and by what it takes until an add is seen. So tiles of several heads of a user take turns with
  their numbers, and two of one pair are started as many numbers apart. Heads are as many as the
  ring has place for (`hopper.one_pass`), but for the first tiles of all, which begin together, and
  soon follow each other.

Each tile starting with the block of its own tokens and walking around (arXiv 2601.21824 calls it a
shift) lets nobody wait if all tiles of a pair run at a time. Where programs are no multiple of them
they do not: some begin when others end, and those who have begun wait for them.

Nobody waits for ever, as long as all programs run at a time (a cooperative launch): a tile waits
for lower numbers alone, and a program takes a number, be it before its tile is done, after it has
taken lower ones: the lowest number that is not done was started, and waits for nobody. What a block
of dQ is added up in is used again by later pairs, which wait for earlier ones alone: heads that
take turns have places of their own.

Left and right are the keys' here: key i meets queries i - left ... i + right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH

_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_USER = tl.constexpr(ROW_FIELDS.index("user"))
_LENGTH = tl.constexpr(ROW_FIELDS.index("length"))


@triton.jit
def tile_of_place(
    rows_ptr, offsets_ptr, place, row_count, ring, left, right,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key head, tile, tiles, start, length, base): `tiles` of its pair, from `start` on the tokens
    of its user; `base` counts the blocks of all pairs before. Without a tile, `tiles` is 0.

    Args:
        place: the tile's number among all: of a row, then of its key heads' tiles.
        rows_ptr: of tiles of TILE keys, as `schedule.rows` sorts them: those of a user follow each
            other. So a user's rows, times the heads, have places for his tiles.
        ring: how many blocks of dQ are added up at a time, at least one pair's.
        offsets_ptr: of the users, of queries and keys alike.
    """
    there = place < row_count * KV_HEADS
    row = place // KV_HEADS
    fields = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    first = tl.load(fields, mask=there, other=0)
    user = tl.load(fields + _USER, mask=there, other=0)
    length = tl.load(fields + _LENGTH, mask=there, other=0)
    start = tl.load(offsets_ptr + user).to(tl.int32)
    tiles = (length + TILE - 1) // TILE
    # The first row of the user. They may stand from his last tile on: `rows.later_first`.
    index = (first - start) // TILE
    if HAS_LEFT and HAS_RIGHT:
        index = tl.where(left > right, tiles - 1 - index, index)
    elif HAS_RIGHT:
        index = tiles - 1 - index
    row -= index
    number = place - row * KV_HEADS
    blocks = tiles * (GROUP * (TILE // BLOCK))
    # As many heads take turns, from `first_head` on.
    heads = 1
    if not (HAS_LEFT or HAS_RIGHT):
        heads = tl.minimum(tl.maximum(ring // tl.maximum(blocks, 1), 1), KV_HEADS)
    turn = number // tl.maximum(heads * tiles, 1)
    first_head = turn * heads
    number -= first_head * tiles
    heads = tl.minimum(heads, KV_HEADS - first_head)
    tile = number // tl.maximum(heads, 1)
    head = first_head + number - tile * heads
    tile = tile_of_number(tile, tiles, HAS_LEFT)
    base = row * KV_HEADS * (GROUP * (TILE // BLOCK)) + head * blocks
    return head, tile, tiles, start, length, base


@triton.jit
def blocks_of_tile(
    tile, length, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(first, count): the blocks of queries that a tile of keys meets; of itself at least one."""
    first = 0
    end = length
    if HAS_LEFT:
        first = tl.maximum(tile * TILE - left, 0) // BLOCK
    if HAS_RIGHT:
        end = tl.minimum(length, (tile + 1) * TILE + right)
    return first, (end + BLOCK - 1) // BLOCK - first


@triton.jit
def tile_of_number(number, tiles, HAS_LEFT: tl.constexpr):
    """The tile that stands at place `number` of its pair's."""
    return tiles - 1 - number if HAS_LEFT else number


@triton.jit
def turn_of_tile(
    tile, block, tiles, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(turn, turns): how many tiles add to this block before this one, and how many in all."""
    lowest = 0
    highest = tiles - 1
    if HAS_LEFT:
        highest = tl.minimum(highest, ((block + 1) * BLOCK + left - 1) // TILE)
    if HAS_RIGHT:
        lowest = tl.maximum(block * BLOCK - right, 0) // TILE
    turn = highest - tile if HAS_LEFT else tile - lowest
    return turn, highest - lowest + 1
