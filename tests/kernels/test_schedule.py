"""The schedule: every visible (query, key) pair in one row, and nothing twice."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged_kernels import JaggedTensor, attention_schedule, lengths_to_offsets
from jagged_kernels.attention.schedule import build_rows

LENGTHS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6)
SIDE = st.integers(-1, 60)


def _jagged(lengths, dtype=torch.int64):
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).to(DEVICE)
    return JaggedTensor(torch.zeros(sum(lengths), device=DEVICE), offsets)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, left=SIDE, right=SIDE, tile=st.sampled_from([16, 32]))
def test_rows_cover_exactly_what_is_visible(lengths, left, right, tile):
    q, k = (_jagged(side) for side in zip(*lengths, strict=True))
    schedule = attention_schedule(q, k, window=(left, right), tile_q=tile, tile_k=tile)
    for name, rows, ours, theirs, sides in (
        ("rows", schedule.rows, q, k, (left, right)),
        ("rows_t", schedule.rows_t, k, q, (right, left)),
    ):
        tiles = []
        for start, end, range_start, range_end, shift in rows[:, :5].tolist():
            if start == end:
                continue
            assert end - start <= tile
            tiles.append((start, end))
            user = int(torch.searchsorted(ours.offsets, start, right=True)) - 1
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


def test_longest_rows_come_first_and_unused_ones_last():
    offsets = lengths_to_offsets(torch.tensor([5, 200, 0, 40])).to(DEVICE)
    rows = build_rows(offsets, offsets, tokens=245, tile=16, left=-1, right=-1)
    cost = (rows[:, 3] - rows[:, 2]).tolist()
    used = (rows[:, 1] > rows[:, 0]).tolist()
    assert sum(used) == 1 + 13 + 3
    assert used == sorted(used, reverse=True)
    assert cost == sorted(cost, reverse=True)


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
