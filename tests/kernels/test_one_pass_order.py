"""The order in which tiles of keys add to dQ: programs that take tiles and wait for turns, run one
step at a time in any order, come to their end, and every block of dQ is added up in one order."""

from __future__ import annotations

import random
from collections import defaultdict
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
    tiles_of_round,
    turn_of_tile,
)
from jagged_kernels.schedule.policy.hopper import HopperConfig, ring_blocks
from jagged_kernels.schedule.rows import build_rows

TILE, BLOCK = 128, 64
RATIO = TILE // BLOCK
CONFIG = HopperConfig(consumers=2, warps=4, block=BLOCK, stages=3)
# (left, right) of the queries; None for no limit.
MASKS = {
    "full": (None, None),
    "causal": (None, 0),
    "window": (64, 0),
    "two-sided window": (300, 100),
    "wide window": (100, 300),
    "left window": (5, None),
}


@triton.jit
def _tiles_kernel(
    rows_ptr, offsets_ptr, out_ptr, row_count, programs, left, right,
    KV_HEADS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of each place the fields of `Tile`."""
    number = tl.arange(0, SIZE)
    head, tile, tiles, start, length, before = tile_of_place(
        rows_ptr, offsets_ptr, number, row_count, left, right, KV_HEADS, HAS_LEFT, HAS_RIGHT, TILE,
    )  # fmt: skip
    first, count = blocks_of_tile(tile, length, left, right, HAS_LEFT, HAS_RIGHT, TILE, BLOCK)
    in_round, _ = tiles_of_round(tile, tiles, before, programs)
    begin = start_of_tile(tile, in_round, HAS_LEFT, HAS_RIGHT, TILE, BLOCK)
    out_ptr += number * 9
    tl.store(out_ptr, head)
    tl.store(out_ptr + 1, tile)
    tl.store(out_ptr + 2, tiles)
    tl.store(out_ptr + 3, start)
    tl.store(out_ptr + 4, length)
    tl.store(out_ptr + 5, before)
    tl.store(out_ptr + 6, first + 0 * tile)
    tl.store(out_ptr + 7, count)
    tl.store(out_ptr + 8, begin + 0 * tile)


@triton.jit
def _turns_kernel(
    tiles_ptr, blocks_ptr, counts_ptr, before_ptr, out_ptr, programs, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """(turn, turns) of each (tile, block, tiles, before)."""
    number = tl.arange(0, SIZE)
    tile, tiles = tl.load(tiles_ptr + number), tl.load(counts_ptr + number)
    first, count = tiles_of_round(tile, tiles, tl.load(before_ptr + number), programs)
    turn, turns = turn_of_tile(
        tile, tl.load(blocks_ptr + number), tiles, first, count, left, right,
        HAS_LEFT, HAS_RIGHT, TILE, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + 2 * number, turn)
    tl.store(out_ptr + 2 * number + 1, turns + 0 * turn)


class Tile(NamedTuple):
    head: int
    tile: int
    tiles: int
    start: int
    length: int
    before: int
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
        counted_out: whether programs take the next tile that nobody has; else every n-th.
    """

    tiles: list[Tile]
    programs: int
    counted_out: bool
    turns: dict[tuple[int, int, int, int], tuple[int, int]]
    group: int
    blocks: int


def batch(
    lengths: list[int], mask: tuple[int | None, int | None], programs: int, kv_heads: int = 2,
    group: int = 1,
) -> Batch:  # fmt: skip
    # From the keys' side.
    right, left = (-1 if side is None else side for side in mask)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = build_rows(offsets, offsets, tokens=sum(lengths), tile=TILE, left=left, right=right)
    limits: dict[str, Any] = {"HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0}
    sizes: dict[str, Any] = {"TILE": TILE, "BLOCK": BLOCK}
    places = rows.shape[0] * kv_heads
    programs = min(programs, places)
    found = torch.zeros(_power(places), 9, dtype=torch.int32, device=DEVICE)
    _tiles_kernel[(1,)](
        rows.to(DEVICE), offsets.to(DEVICE), found, rows.shape[0], programs, left, right,
        KV_HEADS=kv_heads, **limits, **sizes, SIZE=found.shape[0],
    )  # fmt: skip
    every = [Tile(*fields) for fields in found[:places].tolist()]
    tiles = [tile for tile in every if tile.tiles]
    # A program stops where there is no tile.
    assert tiles == every[: len(tiles)]
    asked = sorted({(t.tile, b, t.tiles, t.before) for t in tiles for b in t.blocks()})
    table = torch.zeros(_power(len(asked)), 4, dtype=torch.int32)
    table[:, 2] = 1
    table[: len(asked)] = torch.tensor(asked, dtype=torch.int32).view(-1, 4)
    told = torch.zeros(len(table), 2, dtype=torch.int32, device=DEVICE)
    columns = [column.contiguous().to(DEVICE) for column in table.unbind(1)]
    _turns_kernel[(1,)](*columns, told, programs, left, right, **limits, **sizes, SIZE=len(table))
    turns = dict(zip(asked, map(tuple, told.tolist()), strict=False))
    counted_out = left >= 0 or right >= 0
    return Batch(tiles, programs, counted_out, turns, group, places * group * RATIO)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


DONE = 1 << 30
SLOTS = 4


def run(
    batch: Batch, ring: int, seed: int, *, early: bool = False, adders: int = 1
) -> dict[tuple[int, int, int], list[int]]:
    """Adds as the kernel does, programs in any order: (user's start, query head, block) -> tiles in
    the order in which they have added.

    Args:
        early: tiles that are counted out are taken when the one before begins, not when it ends;
            the kernel does so some blocks before it ends.
        adders: how many of a program take its blocks by turns, each without waiting for the
            others, but that no block is there before all up to the one `SLOTS` before are added.
            One alone announces an add when it has the next turn, or waits for it.

    Raises:
        AssertionError: all programs wait for each other, or a place of the ring has two users.
    """
    counts = [0] * batch.blocks
    owners: dict[int, int] = {}
    sums: dict[int, list[int]] = {}
    written: dict[tuple[int, int, int], list[int]] = {}
    taken = batch.programs
    walks: list[list[int]] = [[number] for number in range(batch.programs)]
    # Of each program, which of its blocks were added.
    added: list[set[int]] = [set() for _ in walks]

    def announce(owed: tuple[int, int] | None) -> None:
        if owed is not None:
            counts[owed[0]] += owed[1]

    def take(walk: list[int], place: int) -> None:
        """The tile after number `place` of a program, unless another adder took it."""
        nonlocal taken
        if len(walk) > place + 1:
            return
        if batch.counted_out:
            walk.append(taken)
            taken += 1
        else:
            walk.append(walk[-1] + batch.programs)

    def adder(program: int, me: int):
        """Yields what it waits for: (number, least count), or a function that says whether it
        goes on."""
        walk, mine = walks[program], added[program]
        place, of_program = 0, 0
        while walk[place] < len(batch.tiles):
            tile = batch.tiles[walk[place]]
            if early or not batch.counted_out:
                take(walk, place)
            for member in range(batch.group):
                base = (tile.before * batch.group + member * tile.tiles) * RATIO
                owed = None  # an add that was not announced yet
                for block in tile.blocks():
                    step, of_program = of_program, of_program + 1
                    if step % adders != me:
                        continue
                    turn, turns = batch.turns[tile.tile, block, tile.tiles, tile.before]
                    number = base + block
                    wanted = (number, turn)
                    if turn == 0 and number >= ring:
                        wanted = (number - ring, DONE)
                    if counts[wanted[0]] < wanted[1]:
                        announce(owed)
                        owed = None
                        yield wanted
                    yield lambda step=step: mine.issuperset(range(step - SLOTS + 1))
                    at = number % ring
                    if turn == 0:
                        assert at not in owners, "somebody else is not done"
                        owners[at] = number
                        sums[at] = []
                    assert owners[at] == number
                    sums[at].append(tile.tile)
                    if turn + 1 == turns:
                        head = tile.head * batch.group + member
                        written[tile.start, head, block] = sums[at]
                        del owners[at]
                    mine.add(step)
                    yield number, 0  # anybody may come in between
                    announce(owed)
                    owed = (number, DONE if turn + 1 == turns else 1)
                    if adders > 1:
                        announce(owed)
                        owed = None
                announce(owed)
                for block in range(-(-tile.length // BLOCK), (tile.tile + 1) * RATIO):
                    if me == 0:
                        if base + block >= ring:
                            yield base + block - ring, DONE
                        counts[base + block] += DONE
            take(walk, place)
            place += 1

    def goes_on(want: Any) -> bool:
        return want() if callable(want) else counts[want[0]] >= want[1]

    draw = random.Random(seed)
    waiting = {}
    for program in range(batch.programs):
        for me in range(adders):
            steps = adder(program, me)
            waiting[program, me] = (steps, next(steps, None))
    waiting = {n: (steps, want) for n, (steps, want) in waiting.items() if want is not None}
    while waiting:
        able = [n for n, (_, want) in waiting.items() if goes_on(want)]
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
    made = batch(lengths, MASKS[name], programs, kv_heads, group)
    ring = ring_blocks(made.blocks, sum(lengths), group, 2**20, CONFIG)  # as few as may be
    first = run(made, ring, seed=0)
    expected = expected_tiles(lengths, MASKS[name], kv_heads * group)
    assert {block: set(tiles) for block, tiles in first.items()} == expected
    assert all(len(tiles) == len(set(tiles)) for tiles in first.values())
    for seed in range(1, 6):
        assert run(made, ring, seed, early=seed % 2 == 0) == first
        assert run(made, ring, seed, early=seed % 2 == 0, adders=2) == first


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    draw = random.Random(seed)
    for _ in range(3):
        lengths = [draw.choice([0, 5, 64, 128, 200, 333, 600]) for _ in range(draw.randint(1, 9))]
        if not sum(lengths):
            continue
        mask = (draw.choice([None, 0, 33, 200]), draw.choice([None, 0, 70, 500]))
        kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 3)])
        made = batch(lengths, mask, draw.randint(1, 20), kv_heads, group)
        longest = -(-max(lengths) // TILE) * RATIO * group
        first = run(made, min(longest, made.blocks), seed=0)
        expected = expected_tiles(lengths, mask, kv_heads * group)
        assert {block: set(tiles) for block, tiles in first.items()} == expected
        for adders in (1, 2):
            assert run(made, min(longest, made.blocks), seed=1, adders=adders) == first


def test_a_deadlock_is_found():
    """Of two tiles that walk around, on one program."""
    made = batch([256], MASKS["full"], programs=2, kv_heads=1)
    assert run(made, made.blocks, seed=0)
    made.programs = 1
    with pytest.raises(AssertionError, match="all wait for each other"):
        run(made, made.blocks, seed=0)


def test_a_ring_that_is_too_small_is_found():
    made = batch([640, 640], MASKS["causal"], programs=3, kv_heads=1)
    with pytest.raises(AssertionError, match=r"all wait|not done"):
        run(made, 3, seed=0)


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_nobody_waits_at_the_start(name):
    """All tiles of a pair that begin at a time find their turn at once, for the first steps."""
    made = batch([1280], MASKS[name], programs=10, kv_heads=1)
    assert len(made.tiles) == made.programs
    for tile in made.tiles:
        for step, block in enumerate(tile.blocks()[:RATIO]):
            turn, _ = made.turns[tile.tile, block, tile.tiles, tile.before]
            assert turn == 0, (tile.tile, step, block)


@pytest.mark.parametrize(("tiles", "programs"), [(10, 10), (3, 5), (4, 7), (7, 5), (16, 5)])
def test_nobody_waits_in_step(tiles, programs):
    """Pairs that begin in one round of programs and end in a later one among them."""
    users = 5
    made = batch([tiles * TILE] * users, MASKS["full"], programs, kv_heads=2)
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    for begin in range(0, len(made.tiles), programs):
        of_round = made.tiles[begin : begin + programs]
        for step in range(tiles * RATIO):
            added = []
            for tile in of_round:
                block = tile.blocks()[step]
                turn, turns = made.turns[tile.tile, block, tile.tiles, tile.before]
                place = (tile.start, tile.head, block)
                assert counts[place] == turn, (begin, step, tile)
                assert turns == tiles
                added.append(place)
            for place in added:
                counts[place] += 1
    assert set(counts.values()) == {tiles}
    assert len(counts) == users * 2 * tiles * RATIO
