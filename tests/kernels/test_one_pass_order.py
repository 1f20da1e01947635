"""The order in which tiles of keys add to dQ: programs that take tiles and wait for turns, run one
step at a time in any order, come to their end, and every block of dQ is added up in one order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE

from jagged_kernels.attention.hopper.one_pass_order import (
    blocks_of_tile,
    start_of_tile,
    tile_of_place,
    turn_of_tile,
)
from jagged_kernels.schedule.policy.hopper import HopperConfig, ring_blocks
from jagged_kernels.schedule.rows import build_rows

TILE, BLOCK = 128, 64
RATIO = TILE // BLOCK
CONFIG = HopperConfig(consumers=2, warps=4, block=BLOCK, stages=3)
WALK_AROUND = "full, around"  # without limits tiles walk around or not
# (left, right) of the queries; None for no limit.
MASKS = {
    "full": (None, None),
    WALK_AROUND: (None, None),
    "causal": (None, 0),
    "window": (64, 0),
    "two-sided window": (300, 100),
    "wide window": (100, 300),
    "left window": (5, None),
}


@triton.jit
def _tiles_kernel(
    rows_ptr, offsets_ptr, out_ptr, row_count, ring, programs, left, right,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    AROUND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of each place the fields of `Tile`."""
    number = tl.arange(0, SIZE)
    head, tile, tiles, start, length, base = tile_of_place(
        rows_ptr, offsets_ptr, number, row_count, ring, programs, left, right,
        KV_HEADS, GROUP, HAS_LEFT, HAS_RIGHT, AROUND, TILE, BLOCK,
    )  # fmt: skip
    first, count = blocks_of_tile(tile, length, left, right, HAS_LEFT, HAS_RIGHT, TILE, BLOCK)
    begin = start_of_tile(tile, tiles, programs, AROUND, TILE, BLOCK) + 0 * tile
    out_ptr += number * 9
    tl.store(out_ptr, head)
    tl.store(out_ptr + 1, tile)
    tl.store(out_ptr + 2, tiles)
    tl.store(out_ptr + 3, start)
    tl.store(out_ptr + 4, length)
    tl.store(out_ptr + 5, base)
    tl.store(out_ptr + 6, first + 0 * tile)
    tl.store(out_ptr + 7, count)
    tl.store(out_ptr + 8, begin)


@triton.jit
def _turns_kernel(
    tiles_ptr, blocks_ptr, counts_ptr, out_ptr, programs, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, AROUND: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """(turn, turns) of each (tile, block, tiles)."""
    number = tl.arange(0, SIZE)
    turn, turns = turn_of_tile(
        tl.load(tiles_ptr + number), tl.load(blocks_ptr + number), tl.load(counts_ptr + number),
        programs, left, right, HAS_LEFT, HAS_RIGHT, AROUND, TILE, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + 2 * number, turn)
    tl.store(out_ptr + 2 * number + 1, turns + 0 * turn)


class Tile(NamedTuple):
    head: int
    tile: int
    tiles: int
    start: int
    length: int
    base: int
    first: int
    met: int
    begin: int

    def blocks(self) -> list[int]:
        """In the order in which the kernel walks over them, for one query head."""
        return [self.first + (self.begin + step) % self.met for step in range(self.met)]


@dataclass
class Batch:
    """Tiles in the order of their numbers, and the turn of each tile at each block.

    Fields:
        around: whether tiles walk around, and programs take every n-th; else the next tile that
            nobody has.
    """

    tiles: list[Tile]
    programs: int
    around: bool
    turns: dict[tuple[int, int, int], tuple[int, int]]
    group: int
    blocks: int


def batch(
    lengths: list[int], mask: tuple[int | None, int | None], programs: int, kv_heads: int = 2,
    group: int = 1, ring: int = 2**20, *, around: bool = False,
) -> Batch:  # fmt: skip
    # From the keys' side.
    right, left = (-1 if side is None else side for side in mask)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = build_rows(offsets, offsets, tokens=sum(lengths), tile=TILE, left=left, right=right)
    assert not around or left < 0 > right
    limits: dict[str, Any] = {"HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "AROUND": around}
    sizes: dict[str, Any] = {"TILE": TILE, "BLOCK": BLOCK}
    places = rows.shape[0] * kv_heads
    programs = min(programs, places)
    found = torch.zeros(_power(places), 9, dtype=torch.int32, device=DEVICE)
    _tiles_kernel[(1,)](
        rows.to(DEVICE), offsets.to(DEVICE), found, rows.shape[0], ring, programs, left, right,
        KV_HEADS=kv_heads, GROUP=group, **limits, **sizes, SIZE=found.shape[0],
    )  # fmt: skip
    every = [Tile(*fields) for fields in found[:places].tolist()]
    tiles = [tile for tile in every if tile.tiles]
    # A program stops where there is no tile.
    assert tiles == every[: len(tiles)]
    asked = sorted({(t.tile, b, t.tiles) for t in tiles for b in t.blocks()})
    table = torch.zeros(_power(len(asked)), 3, dtype=torch.int32)
    table[:, 2] = 1
    table[: len(asked)] = torch.tensor(asked, dtype=torch.int32).view(-1, 3)
    told = torch.zeros(len(table), 2, dtype=torch.int32, device=DEVICE)
    columns = [column.contiguous().to(DEVICE) for column in table.unbind(1)]
    _turns_kernel[(1,)](*columns, told, programs, left, right, **limits, **sizes, SIZE=len(table))
    turns = dict(zip(asked, map(tuple, told.tolist()), strict=False))
    return Batch(tiles, programs, around, turns, group, places * group * RATIO)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


DONE = 1 << 30


def run(
    batch: Batch, ring: int, seed: int, *, early: bool = False
) -> dict[tuple[int, int, int], list[int]]:
    """Adds as the kernel does, programs in any order: (user's start, query head, block) -> tiles in
    the order in which they have added.

    Args:
        early: tiles that are counted out are taken when the one before begins, not when it ends;
            the kernel does so some blocks before it ends.

    Raises:
        AssertionError: all programs wait for each other, or a place of the ring has two users.
    """
    counts = [0] * batch.blocks
    owners: dict[int, int] = {}
    sums: dict[int, list[int]] = {}
    written: dict[tuple[int, int, int], list[int]] = {}

    def announce(owed: tuple[int, int] | None) -> None:
        if owed is not None:
            counts[owed[0]] += owed[1]

    taken = batch.programs

    def walk(number: int) -> Iterator[Tile]:
        nonlocal taken
        while number < len(batch.tiles):
            tile = batch.tiles[number]
            if batch.around:
                number += batch.programs
            elif early:
                number, taken = taken, taken + 1
            yield tile
            if not (batch.around or early):
                number, taken = taken, taken + 1

    def program(first_tile: int):
        """Yields what it waits for: (number, least count)."""
        for tile in walk(first_tile):
            for member in range(batch.group):
                base = tile.base + member * tile.tiles * RATIO
                owed = None  # an add that was not announced yet
                for block in tile.blocks():
                    turn, turns = batch.turns[tile.tile, block, tile.tiles]
                    number = base + block
                    place = number % ring
                    wanted = (number, turn)
                    if turn == 0 and number >= ring:
                        wanted = (number - ring, DONE)
                    if counts[wanted[0]] < wanted[1]:
                        announce(owed)
                        owed = None
                        yield wanted
                    if turn == 0:
                        assert place not in owners, "somebody else is not done"
                        owners[place] = number
                        sums[place] = []
                    assert owners[place] == number
                    sums[place].append(tile.tile)
                    if turn + 1 == turns:
                        head = tile.head * batch.group + member
                        written[tile.start, head, block] = sums[place]
                        del owners[place]
                    yield number, 0  # anybody may come in between
                    announce(owed)
                    owed = (number, DONE if turn + 1 == turns else 1)
                announce(owed)
                for block in range(-(-tile.length // BLOCK), (tile.tile + 1) * RATIO):
                    if base + block >= ring:
                        yield base + block - ring, DONE
                    counts[base + block] += DONE

    draw = random.Random(seed)
    waiting = {}
    for number in range(batch.programs):
        steps = program(number)
        waiting[number] = (steps, next(steps, None))
    waiting = {n: (steps, want) for n, (steps, want) in waiting.items() if want is not None}
    while waiting:
        able = [n for n, (_, (number, least)) in waiting.items() if counts[number] >= least]
        assert able, "all wait for each other"
        chosen = draw.choice(able)
        steps, _ = waiting.pop(chosen)
        want = next(steps, None)
        if want is not None:
            waiting[chosen] = (steps, want)
    return written


def expected_tiles(
    lengths: list[int], mask: tuple[int | None, int | None], heads: int
) -> dict[tuple[int, int, int], set[int]]:
    """Which tiles see each block, from the mask itself."""
    left, right = mask
    found: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    start = 0
    for length in lengths:
        token = torch.arange(length)
        seen = torch.ones(length, length, dtype=torch.bool)
        if left is not None:
            seen &= token[None, :] >= token[:, None] - left
        if right is not None:
            seen &= token[None, :] <= token[:, None] + right
        for block in range(-(-length // BLOCK)):
            for tile in range(-(-length // TILE)):
                part = seen[block * BLOCK : (block + 1) * BLOCK, tile * TILE : (tile + 1) * TILE]
                if part.any():
                    for head in range(heads):
                        found[start, head, block].add(tile)
        start += length
    return dict(found)


LENGTHS = [0, 1, 63, 64, 65, 129, 1000, 0, 128, 256, 7, 300, 700]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("lengths", "programs", "kv_heads", "group"),
    [(LENGTHS, 7, 2, 1), (LENGTHS, 132, 1, 2), (LENGTHS, 1, 2, 2), ([640] * 9, 11, 3, 1),
     ([2000, 1, 1, 900], 5, 1, 1), ([3, 90, 20] * 6, 4, 2, 1)],
    ids=["odd", "grouped", "one program", "equal", "more tiles than programs", "short"],
)  # fmt: skip
def test_every_block_is_added_up_in_one_order(name, lengths, programs, kv_heads, group):
    around = name == WALK_AROUND
    made = batch(lengths, MASKS[name], programs, kv_heads, group, around=around)
    ring = ring_blocks(made.blocks, sum(lengths), group, 2**20, CONFIG)  # as few as may be
    made = batch(lengths, MASKS[name], programs, kv_heads, group, ring, around=around)
    first = run(made, ring, seed=0)
    expected = expected_tiles(lengths, MASKS[name], kv_heads * group)
    assert {block: set(tiles) for block, tiles in first.items()} == expected
    assert all(len(tiles) == len(set(tiles)) for tiles in first.values())
    for seed in range(1, 6):
        assert run(made, ring, seed, early=seed % 2 == 0) == first


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    draw = random.Random(seed)
    for _ in range(3):
        lengths = [draw.choice([0, 5, 64, 128, 200, 333, 600]) for _ in range(draw.randint(1, 9))]
        if not sum(lengths):
            continue
        mask = (draw.choice([None, 0, 33, 200]), draw.choice([None, 0, 70, 500]))
        kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 3), (5, 1), (3, 2)])
        longest = -(-max(lengths) // TILE) * RATIO * group
        ring = draw.randint(longest, 4 * longest)
        around = mask == (None, None) and draw.random() < 0.5
        made = batch(lengths, mask, draw.randint(1, 20), kv_heads, group, ring, around=around)
        first = run(made, ring, seed=0)
        expected = expected_tiles(lengths, mask, kv_heads * group)
        assert {block: set(tiles) for block, tiles in first.items()} == expected
        assert run(made, ring, seed=1) == first
        assert run(made, ring, seed=2, early=True) == first


def test_a_deadlock_is_found():
    """Of two tiles that walk around, on one program."""
    made = batch([256], MASKS["full"], programs=2, kv_heads=1, around=True)
    assert run(made, made.blocks, seed=0)
    made.programs = 1
    with pytest.raises(AssertionError, match="all wait for each other"):
        run(made, made.blocks, seed=0)


def test_a_ring_that_is_too_small_is_found():
    made = batch([640, 640], MASKS["causal"], programs=3, kv_heads=1)
    with pytest.raises(AssertionError, match=r"all wait|not done"):
        run(made, 3, seed=0)


@pytest.mark.parametrize(
    ("ring", "programs", "heads"),
    [(9, 25, 1), (10, 25, 1), (20, 25, 2), (39, 25, 3), (40, 25, 4), (99, 25, 5),
     (99, 5, 1), (99, 6, 3), (99, 11, 3), (99, 12, 5)],
)  # fmt: skip
def test_heads_take_turns_as_programs_need_and_the_ring_has_place(ring, programs, heads):
    """Of five, in equal parts but for the last: so tiles of a pair, which meet ten blocks, are
    started apart. Five programs start one every second block, and six too often."""
    made = batch([640], MASKS["full"], programs=programs, kv_heads=5, ring=ring)
    expected = [
        (head, tile)
        for first in range(0, 5, heads)
        for tile in range(5)
        for head in range(first, min(first + heads, 5))
    ]
    assert [(one.head, one.tile) for one in made.tiles] == expected


@pytest.mark.parametrize("name", [WALK_AROUND, "causal", "window"])
def test_nobody_waits_at_the_start(name):
    """All tiles of a pair that begin at a time find their turn at once, for the first steps."""
    around = name == WALK_AROUND
    made = batch([1280], MASKS[name], programs=10, kv_heads=1, around=around)
    assert len(made.tiles) == made.programs
    for tile in made.tiles:
        for step, block in enumerate(tile.blocks()[:RATIO]):
            turn, _ = made.turns[tile.tile, block, tile.tiles]
            assert turn == 0, (tile.tile, step, block)
