"""The schedule: every visible (query, key) pair in one row, and nothing twice; long users first."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attention_cases import DEVICE
from choice_cases import pass_for_hopper
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged_kernels import JaggedTensor, attention_schedule, lengths_to_offsets
from jagged_kernels.schedule.policy.plain import DEFAULT_TILES
from jagged_kernels.schedule.row_layout import COST_UNIT, MOST_UNITS
from jagged_kernels.schedule.rows import build_rows, reference_rows, schedule_rows
from jagged_kernels.schedule.spans import build_partition, split_forward_config

LENGTHS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6)
SIDE = st.integers(-1, 60)
OFFSETS = st.sampled_from([torch.int32, torch.int64])


def _jagged(lengths, dtype=torch.int64):
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).to(DEVICE)
    return JaggedTensor(torch.zeros(sum(lengths), 1, 16, device=DEVICE), offsets)


def _used(rows):
    return [row for row in rows.tolist() if row[0] < row[1]]


def _assert_covers(schedule, q, k):
    """Both tables hold each token in one tile, with the range that its mask asks for."""
    left, right = schedule.window
    for name, rows, tile, ours, theirs, sides in (
        ("rows", schedule.rows, schedule.tile_q, q, k, (left, right)),
        ("rows_t", schedule.rows_t, schedule.tile_k, k, q, (right, left)),
    ):
        tiles = []
        for start, end, range_start, range_end, shift, user, *_ in _used(rows):
            assert end - start <= tile
            tiles.append((start, end))
            own, other = (x.offsets[user : user + 2].tolist() for x in (ours, theirs))
            assert own[0] <= start < end <= own[1]
            assert shift == other[1] - own[1]
            seen = {
                j
                for i in range(start, end)
                for j in range(*other)
                if (sides[0] < 0 or j >= i + shift - sides[0])
                and (sides[1] < 0 or j <= i + shift + sides[1])
            }
            expected = (min(seen), max(seen) + 1) if seen else None
            given_range = (range_start, range_end) if range_start < range_end else None
            assert given_range == expected, (name, start)
        covered = sorted(token for tile_ in tiles for token in range(*tile_))
        assert covered == list(range(ours.values.shape[0])), name


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, left=SIDE, right=SIDE, tile=st.sampled_from([16, 32]))
def test_rows_cover_exactly_what_is_visible(lengths, left, right, tile):
    q, k = (_jagged(side) for side in zip(*lengths, strict=True))
    schedule = attention_schedule(q, k, window=(left, right), tile_q=tile, tile_k=tile)
    _assert_covers(schedule, q, k)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    queries=st.integers(0, 40),
    left=SIDE,
    right=SIDE,
    split=st.sampled_from(["auto", "rows"]),
)
def test_rows_of_dense_queries_cover_exactly_what_is_visible(lengths, queries, left, right, split):
    k = _jagged(lengths)
    dense = torch.zeros(queries, 1, 16, device=DEVICE)
    schedule = attention_schedule(dense, k, window=(left, right), split=split, tile_k=16)
    _assert_covers(schedule, _jagged([queries] * len(lengths)), k)
    used = [start < end for start, end, *_ in schedule.rows.tolist()]
    assert used == sorted(used, reverse=True)


# --- the order ------------------------------------------------------------------------------------


def _bucket(cost):
    """Blocks of 64 tokens, to three bits; none up to 32 tokens and none above 7 x 64 blocks."""
    if cost <= 32:
        return 0
    blocks = min(math.ceil(cost / 64), 7 * 64)
    mantissa, exponent = math.frexp(blocks)
    return math.floor(mantissa * 8) * 2.0 ** (exponent - 3)


def _assert_ordered(rows, left, right):
    """Used rows first; users by what their longest tile sees; a user's tiles longest first."""
    used = (rows[:, 0] < rows[:, 1]).tolist()
    assert used == sorted(used, reverse=True)
    groups = [list(group) for _, group in itertools.groupby(_used(rows), key=lambda row: row[5])]
    users = [group[0][5] for group in groups]
    assert len(set(users)) == len(users)
    costs = [[row[3] - row[2] for row in group] for group in groups]
    if left < 0 or right < 0:
        # Stable: users of one bucket stay in batch order.
        keys = [(-_bucket(max(cost)), user) for cost, user in zip(costs, users, strict=True)]
        assert keys == sorted(keys)
        assert all(cost == sorted(cost, reverse=True) for cost in costs)
    else:
        # From the end of the user if that side of the window is the narrower one.
        backwards = left > right
        assert all(group == sorted(group, reverse=backwards) for group in groups)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2000)), min_size=1, max_size=12),
    left=st.sampled_from([-1, 0, 30, 300]),
    right=st.sampled_from([-1, 0, 30, 300]),
)
def test_long_users_first_and_their_longest_tiles_first(lengths, left, right):
    q, k = (_jagged(side) for side in zip(*lengths, strict=True))
    schedule = attention_schedule(q, k, window=(left, right), tile_q=16, tile_k=32)
    _assert_ordered(schedule.rows, left, right)
    _assert_ordered(schedule.rows_t, right, left)


def test_the_order_of_one_batch():
    """Causal: the user of 200 from its end, then the two of one bucket as they came, then the one
    of few tokens."""
    offsets = lengths_to_offsets(torch.tensor([5, 33, 200, 0, 40])).to(DEVICE)
    options = {"tile_q": 16, "tile_k": 16, "left": -1, "right": 0}
    table = schedule_rows(
        offsets, offsets, q_tokens=278, k_tokens=278, sort=True, transpose=False, **options
    )
    used = _used(table)
    assert [row[5] for row in used] == [2] * 13 + [1] * 3 + [4] * 3 + [0]
    assert [row[3] - row[2] for row in used[:13]] == [200, *range(192, 0, -16)]
    assert [row[0] for row in used[13:]] == [37, 21, 5, 238 + 32, 238 + 16, 238, 0]
    assert [row[6] for row in used] == [200] * 13 + [33] * 3 + [40] * 3 + [5]


# --- schedule_rows against its specification ------------------------------------------------------


def _assert_as_specified(q_offsets, k_offsets, **options):
    tokens = {"q_tokens": int(q_offsets[-1]), "k_tokens": int(k_offsets[-1])}
    table = schedule_rows(q_offsets, k_offsets, **tokens, **options)
    expected = reference_rows(q_offsets, k_offsets, **tokens, **options)
    assert table.dtype == expected.dtype
    assert torch.equal(table, expected)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 2000)), max_size=150),
    left=st.sampled_from([-1, 0, 30]),
    right=st.sampled_from([-1, 0, 30]),
    tile_k=st.sampled_from([16, 64]),
    dtypes=st.tuples(OFFSETS, OFFSETS),
    sort=st.booleans(),
    transpose=st.booleans(),
)
def test_as_specified(lengths, left, right, tile_k, dtypes, sort, transpose):
    q, k = (
        _jagged([pair[side] for pair in lengths], dtype).offsets
        for side, dtype in enumerate(dtypes)
    )
    _assert_as_specified(
        q, k, tile_q=16 if sort else 1024, tile_k=tile_k, left=left, right=right,
        sort=sort, transpose=transpose,
    )  # fmt: skip


def test_more_users_than_chunks_hold_at_a_time():
    generator = torch.Generator().manual_seed(0)
    q, k = (
        lengths_to_offsets(torch.randint(0, 300, (8300,), generator=generator)).to(DEVICE)
        for _ in range(2)
    )
    options = {"tile_q": 512, "tile_k": 512, "left": -1, "right": 0}
    _assert_as_specified(q, k, sort=True, transpose=False, **options)


def test_users_on_both_sides_of_every_border_between_buckets():
    borders = torch.arange(MOST_UNITS + 3) * COST_UNIT
    lengths = torch.cat([borders, borders + 1])
    lengths = lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))]
    q, k = (lengths_to_offsets(x).to(DEVICE) for x in (torch.ones_like(lengths), lengths))
    options = {"tile_q": 16, "tile_k": 4096, "left": -1, "right": -1}
    _assert_as_specified(q, k, sort=True, transpose=False, **options)


@pytest.mark.parametrize("sort", [True, False])
def test_opcheck(sort):
    q, k = _jagged([3, 0, 20], torch.int32).offsets, _jagged([90, 5, 1]).offsets
    torch.library.opcheck(schedule_rows, (q, k, 23, 96, 32, 16, -1, 0, sort, True))


def test_no_users():
    assert attention_schedule(_jagged([])).rows.shape[0] == 0


def test_wrong_arguments():
    x = _jagged([3, 4])
    with pytest.raises(ValueError, match="power of two"):
        attention_schedule(x, tile_q=24)
    with pytest.raises(ValueError, match="2 users and k has 1"):
        attention_schedule(x, _jagged([7]))
    with pytest.raises(ValueError, match="need k"):
        attention_schedule(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"got \(-2, 0\)"):
        attention_schedule(x, window=(-2, 0))
    with pytest.raises(ValueError, match=r"a tile_q that holds them, .*got 20 queries.* tile_q=16"):
        attention_schedule(torch.zeros(2, 20, 2, 16, device=DEVICE), x, split="stream", tile_q=16)


@pytest.mark.parametrize("dim", [16, 128, 256])
def test_tiles_are_those_of_the_head_dim_of_q(dim, monkeypatch):
    """Those that `jagged_attention` takes, which knows head_dim."""
    pass_for_hopper(monkeypatch, False)
    k = _jagged([300, 5])
    x = k.with_values(torch.zeros(305, 2, dim, device=DEVICE, dtype=torch.bfloat16))
    for q in (x, x.values[:80]):
        schedule, named = attention_schedule(q, x), attention_schedule(q, x, head_dim=dim)
        assert (schedule.tile_q, schedule.tile_k) == (named.tile_q, named.tile_k)
        assert schedule.tile_k == DEFAULT_TILES[1]
    few = attention_schedule(x.values[:8], x)
    assert few.partition is not None
    assert few.partition.block == split_forward_config(dim, 2, 16, short=True).block
    # Values without heads do not say it; whoever has larger values than keys does.
    assert attention_schedule(k.with_values(torch.zeros(305, dim, device=DEVICE))).tile_q == 64


# --- on the device --------------------------------------------------------------------------------

SIZES = {
    "one event each": torch.ones(100_000, dtype=torch.int64),
    "a hundred thousand users": torch.arange(100_000) * 7919 % 21,
    "one user": torch.tensor([2_000_000]),
    "one user among many": torch.cat([torch.arange(5000) % 100, torch.tensor([2_000_000])]),
    "more than chunks hold": torch.arange(1_000_000) % 3,
}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)], ids=str)
def test_sizes_on_the_device(lengths, window):
    left, right = window
    offsets = lengths_to_offsets(lengths).cuda()
    options = {"tile_q": 64, "tile_k": 32, "left": left, "right": right, "transpose": True}
    _assert_as_specified(offsets, offsets, sort=True, **options)
    queries = torch.arange(len(lengths) + 1, device="cuda") * 8
    _assert_as_specified(queries, offsets, sort=False, **options)
    tokens = int(offsets[-1])
    rows = build_rows(offsets, offsets, tokens=tokens, tile=64, left=left, right=right)
    spans = build_partition(rows, block=64, programs=264).spans
    assert torch.equal(spans.cpu(), build_partition(rows.cpu(), block=64, programs=264).spans)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["self", "dense queries"])
def test_a_captured_schedule_follows_new_offsets(kind):
    offsets = torch.tensor([0, 100, 100, 600, 900, 1000, 1024], device="cuda")
    x = JaggedTensor(torch.zeros(1024, 1, 16, device="cuda"), offsets)
    queries = torch.zeros(8, 1, 16, device="cuda")

    def build():
        if kind == "self":
            schedule = attention_schedule(x, causal=True)
            return [schedule.rows, schedule.rows_t]
        schedule = attention_schedule(queries, x)
        assert schedule.partition is not None
        assert schedule.partition_t is not None
        spans = [schedule.partition.spans, schedule.partition_t.spans]
        return [schedule.rows, schedule.rows_t, *spans]

    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build()
    for new in ([0, 1, 2, 3, 4, 5, 1024], [0, 300, 600, 601, 800, 1024, 1024]):
        offsets.copy_(torch.tensor(new))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, build(), strict=True))
