"""In which order tiles of keys add to dQ, so that its sums are the same in every run.

A user's keys are cut into tiles and his queries into blocks, both counted from his first token. A
tile meets its blocks step by step, and where a block of dQ waits for several tiles, they add to it
in turns. Tiles of a (user, head) pair have numbers next to each other; a program takes one number
after another, lowest first, and holds one tile at a time.

- With a limit on the keys' left (causal, windows), a tile of later keys starts with later blocks.
  Later keys have the lower number, and all walk to later blocks: a block gets the tile that starts
  with it first, and every other one `RATIO` steps after the one before, if all start at a time.
  They do not, since tiles of a pair differ in blocks: whoever comes to the end of his tile takes
  the next number that nobody has. So earlier keys, which meet more blocks, start later still, and
  queue for no block. Numbers dealt out beforehand, to and fro, started them the other way round.
- Without limits all tiles of a pair are as long, and a program takes every n-th number: one of each
  round of n. Those of a pair in one round start one behind another, `RATIO` blocks apart, and walk
  around (arXiv 2601.21824 calls it a shift): nobody waits for anybody. What a pair has in the next
  round adds behind them. If it were in their circle, they would wait for it all the round long.
- With a limit on the right alone all start with the first block, and the lower number adds first.

Nobody waits for ever, as long as all programs run at a time (a cooperative launch). In a walk
around, of the tiles that are not done, look at those of the lowest pair in its first round: their
programs have nothing before them, and they wait for each other alone. In the other orders a tile
waits for lower numbers alone, and a program takes a number, be it before its tile is done, after it
has taken lower ones: the lowest number that is not done was started, and waits for nobody. What a
block of dQ is added up in is used again by a later pair (`hopper.one_pass`), which waits for
earlier ones alone.

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
    rows_ptr, offsets_ptr, place, row_count, left, right,
    KV_HEADS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(key head, tile, tiles, start, length, before): `tiles` of its pair, from `start` on the
    tokens of its user; `before` counts the tiles of all pairs before. Without a tile, `tiles` is 0.

    Args:
        place: the tile's number among all: of a row, then of its key heads' tiles.
        rows_ptr: of tiles of TILE keys, as `schedule.rows` sorts them: those of a user follow each
            other. So a user's rows, times the heads, have places for his tiles, head by head.
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
    head = number // tl.maximum(tiles, 1)
    tile = tile_of_number(number - head * tiles, tiles, HAS_LEFT)
    return head, tile, tiles, start, length, row * KV_HEADS + head * tiles


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
def tiles_of_round(tile, tiles, before, programs):
    """(first, count): of a pair's tiles, in a walk around, those that run in the round of this one.
    It divides: once for a tile, and not for each of its blocks.

    Args:
        before: tiles of all pairs before.
    """
    begin = (before + tile) // programs * programs - before
    first = tl.maximum(begin, 0)
    return first, tl.minimum(begin + programs, tiles) - first


@triton.jit
def start_of_tile(
    tile, first,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first of the blocks that a tile meets, among them: it goes on from there and around.

    Args:
        first: of its round.
    """
    start = 0
    if not (HAS_LEFT or HAS_RIGHT):
        start = (tile - first) * (TILE // BLOCK)
    return start


@triton.jit
def turn_of_tile(
    tile, block, tiles, first, count, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(turn, turns): how many tiles add to this block before this one, and how many in all.

    Args:
        first, count: `tiles_of_round`.
    """
    lowest = 0
    highest = tiles - 1
    if HAS_LEFT:
        highest = tl.minimum(highest, ((block + 1) * BLOCK + left - 1) // TILE)
    if HAS_RIGHT:
        lowest = tl.maximum(block * BLOCK - right, 0) // TILE
    if HAS_LEFT:
        turn = highest - tile
    elif HAS_RIGHT:
        turn = tile - lowest
    else:
        # Of its round, who starts with the last block up to this one comes first.
        ahead = tl.minimum(block // (TILE // BLOCK), count - 1) - (tile - first)
        turn = first + tl.where(ahead < 0, ahead + count, ahead)
    return turn, highest - lowest + 1
