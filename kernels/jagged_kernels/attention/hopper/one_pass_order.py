"""In which order tiles of keys add to dQ, so that its sums are the same in every run.

A user's keys are cut into tiles and his queries into blocks, both counted from his first token. A
tile meets its blocks step by step, and where a block of dQ waits for several tiles, they add to it
in turns. A program takes one number of a tile after another, lowest first, and holds one tile at a
time.

- With a limit on the keys' left (causal, windows), a tile of later keys starts with later blocks.
  Later keys have the lower number, and all walk to later blocks: a block gets the tile that starts
  with it first, and every other one `RATIO` steps after the one before, if all start at a time.
  They do not, since tiles of a pair differ in blocks: whoever comes to the end of his tile takes
  the next number that nobody has. So earlier keys, which meet more blocks, start later still, and
  queue for no block. Numbers dealt out beforehand, to and fro, started them the other way round.
  Tiles of a (user, head) pair have numbers next to each other.
- Without limits all tiles of a pair are as long. `AROUND`, a program takes every n-th number, and
  each tile starts with the block of its own tokens and walks around (arXiv 2601.21824 calls it a
  shift): nobody waits for anybody, if all tiles of a pair run at a time, and an add is seen before
  `RATIO` steps are over. Where a pair has more tiles than there are programs, all start with the
  first block, and the lower number adds first. So do tiles with a limit on the right alone.
- Not `AROUND`, all start with the first block, too, each some time after the one before, and by
  more than it takes until an add is seen: tiles of several heads of a user take turns with their
  numbers (`heads_in_turns`), and the next number is whose tile has ended. The first tiles of all
  begin together, and soon follow each other.

Nobody waits for ever, as long as all programs run at a time (a cooperative launch): of the tiles
that are not done, look at the pair with the lowest numbers. Its tiles were started, or their
programs hold tiles of earlier pairs, which are none, or of the same one. In a walk around no
program has two of one pair. In the other orders a tile waits for lower numbers alone, and a program
takes a number, be it before its tile is done, after it has taken lower ones: the lowest number that
is not done was started, and waits for nobody. What a block of dQ is added up in is used again by
later pairs (`hopper.one_pass`), which wait for earlier ones alone: heads that take turns have
places of their own.

Left and right are the keys' here: key i meets queries i - left ... i + right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH

_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_USER = tl.constexpr(ROW_FIELDS.index("user"))
_LENGTH = tl.constexpr(ROW_FIELDS.index("length"))

# Of a step, between the starts of two tiles of a pair. Closer ones wait for each other. Further
# apart, with as many heads in turns as there is place for, users of 64 tiles took a fiftieth less
# and of 94 a twenty-fifth more: more heads' rows are in use at a time.
_QUARTERS_APART = tl.constexpr(7)


@triton.jit
def tile_of_place(
    rows_ptr, offsets_ptr, place, row_count, ring, programs, left, right,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    AROUND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key head, tile, tiles, start, length, base): `tiles` of its pair, from `start` on the tokens
    of its user; `base` counts the blocks of all pairs before. Without a tile, `tiles` is 0.

    Args:
        place: the tile's number among all: of a row, then of its key heads' tiles.
        rows_ptr: of tiles of TILE keys, as `schedule.rows` sorts them: those of a user follow each
            other. So a user's rows, times the heads, have places for his tiles.
        ring: how many blocks of dQ are added up at a time, at least one pair's.
        programs: how many run.
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
    if HAS_LEFT or HAS_RIGHT or AROUND:
        head = number // tl.maximum(tiles, 1)
        number -= head * tiles
    else:
        blocks = tl.maximum(tiles * (GROUP * (TILE // BLOCK)), 1)
        heads = heads_in_turns(blocks, ring, programs, KV_HEADS)
        head = number // tl.maximum(heads * tiles, 1) * heads
        number -= head * tiles
        heads = tl.minimum(heads, KV_HEADS - head)
        head += number % heads
        number //= heads
    tile = tile_of_number(number, tiles, HAS_LEFT)
    base = (row * KV_HEADS + head * tiles) * (GROUP * (TILE // BLOCK))
    return head, tile, tiles, start, length, base


@triton.jit
def heads_in_turns(blocks, ring, programs, KV_HEADS: tl.constexpr):
    """How many heads of a user take turns, where each of their tiles meets as many blocks.

    As few as start a tile of a pair `_QUARTERS_APART` quarters of a step after the one before;
    programs start a tile every `blocks / programs` steps. Queries, dO and dQ of about so many heads
    are in use at a time. In the ring each has its places.
    """
    enough = tl.cdiv(_QUARTERS_APART * programs, 4 * blocks)
    parts = tl.maximum(KV_HEADS // enough, 1)
    heads = tl.cdiv(KV_HEADS, parts)
    return tl.minimum(heads, tl.maximum(ring // blocks, 1))


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
def start_of_tile(
    tile, tiles, programs, AROUND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first of the blocks that a tile meets, among them: it goes on from there and around."""
    start = 0
    if AROUND:
        start = tl.where(tiles <= programs, tile * (TILE // BLOCK), 0)
    return start


@triton.jit
def turn_of_tile(
    tile, block, tiles, programs, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, AROUND: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(turn, turns): how many tiles add to this block before this one, and how many in all."""
    lowest = 0
    highest = tiles - 1
    if HAS_LEFT:
        highest = tl.minimum(highest, ((block + 1) * BLOCK + left - 1) // TILE)
    if HAS_RIGHT:
        lowest = tl.maximum(block * BLOCK - right, 0) // TILE
    turn = highest - tile if HAS_LEFT else tile - lowest
    if AROUND:
        own = block // (TILE // BLOCK)
        around = tl.where(tile <= own, own - tile, own - tile + tiles)
        turn = tl.where(tiles <= programs, around, tile)
    return turn, highest - lowest + 1
