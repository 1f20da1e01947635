"""The partition: every key block in one span, in equal shares; on the device as in PyTorch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged_kernels import lengths_to_offsets
from jagged_kernels.schedule.row_layout import ROW_WIDTH
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.spans import (
    Partition,
    build_partition,
    reference_stream_spans,
    split_forward_config,
    split_partitions,
    stream_programs,
    stream_spans,
)


def _rows(lengths: list[tuple[int, int]]) -> Tensor:
    q, k = (
        lengths_to_offsets(torch.tensor(side)).to(DEVICE) for side in zip(*lengths, strict=True)
    )
    return build_rows(q, k, tokens=int(q[-1]), tile=16, left=-1, right=-1)


def _walks(rows: Tensor, partition: Partition) -> list[list[tuple[int, list[int]]]]:
    """For each program, the rows that it visits and their blocks."""
    ranges = rows[:, :4].tolist()
    spans = partition.spans.tolist()
    walks = []
    for (row, block, *_), (last_row, last_block, *_) in itertools.pairwise(spans):
        assert (row, block) <= (last_row, last_block)
        walk = []
        for visited in range(row, last_row + (last_block > 0)):
            start, end = ranges[visited][2:]
            blocks = list(range(math.ceil((end - start) / partition.block)))
            upto = last_block if visited == last_row else len(blocks)
            walk.append((visited, blocks[block if visited == row else 0 : upto]))
        walks.append(walk)
    return walks


LENGTHS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 700)), min_size=1, max_size=8
).filter(lambda lengths: any(q for q, _ in lengths))


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    policy=st.sampled_from(["stream", "split", "rows"]),
    programs=st.integers(1, 40),
    row_cost=st.integers(1, 3),
)
def test_every_block_is_walked_once_and_every_cut_is_merged(lengths, policy, programs, row_cost):
    rows = _rows(lengths)
    partition = build_partition(rows, block=16, programs=programs, policy=policy, row_cost=row_cost)
    walks = _walks(rows, partition)
    assert partition.programs == len(walks)
    assert partition.spans.dtype == torch.int32

    visitors: dict[int, list[int]] = {}
    walked: dict[int, list[int]] = {}
    for program, walk in enumerate(walks):
        for row, blocks in walk:
            visitors.setdefault(row, []).append(program)
            walked.setdefault(row, []).extend(blocks)
    used = [row for row, (start, end, *_) in enumerate(rows.tolist()) if start < end]
    assert sorted(walked) == used
    for row, blocks in walked.items():
        start, end = rows[row, 2:4].tolist()
        assert blocks == list(range(math.ceil((end - start) / 16)))

    pieces = [0] * (len(walks) + 1)
    for row, programs_of_row in visitors.items():
        first, count = programs_of_row[0], len(programs_of_row)
        assert programs_of_row == list(range(first, first + count))
        if count > 1:
            assert partition.cuts
            assert walks[first][-1][0] == row
            pieces[first] = count
            # No piece without a block: nobody would have written its partial result.
            assert all(dict(walks[program])[row] for program in programs_of_row)
    assert partition.spans[:, 2].tolist() == pieces


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, programs=st.integers(1, 40), row_cost=st.integers(1, 3))
def test_a_stream_balances_costs_within_one_step(lengths, programs, row_cost):
    rows = _rows(lengths)
    walks = _walks(rows, build_partition(rows, block=16, programs=programs, row_cost=row_cost))
    seen = set()
    costs = []
    for walk in walks:
        costs.append(sum(len(blocks) for _, blocks in walk))
        costs[-1] += row_cost * len({row for row, _ in walk} - seen)
        seen |= {row for row, _ in walk}
    working = max(min(programs, sum(costs) // (row_cost + 1)), 1)
    share = sum(costs) / working
    # A cut moves by at most the cost of a row's beginning, and a program has two ends.
    assert all(abs(cost - share) < 1 + row_cost for cost in costs[:working])
    assert not any(costs[working:])


def test_a_whale_does_not_wait():
    """One user with half of all keys: its programs are half of all."""
    rows = _rows([(1, 64 * 16), *[(1, 16)] * 32])
    partition = build_partition(rows, block=16, programs=16)
    assert partition.spans[0, 2] == 9
    assert all(len(walk) <= 5 for walk in _walks(rows, partition))


def test_programs_follow_the_machine_and_the_work():
    config = split_forward_config(64, 2, 16)
    options: Any = {"config": config}
    many = stream_programs(132, groups=1, rows=100, k_tokens=10**6, **options)
    assert stream_programs(132, groups=4, rows=100, k_tokens=10**6, **options) == many // 4
    assert stream_programs(132, groups=1, rows=1, k_tokens=2 * config.block + 2, **options) == 3
    assert stream_programs(132, groups=10**4, rows=1, k_tokens=0, **options) == 1


def test_rows_of_few_keys_take_smaller_blocks():
    usual = split_forward_config(64, 2, 16)
    short = split_forward_config(64, 2, 16, short=True)
    assert short.block < usual.block
    # Who launches knows the block alone.
    assert short.options() == usual.options()
    rows = _rows([(1, 100)] * 8)
    options: Any = {"heads": 1, "kv_heads": 1, "tile_q": 16, "head_dim": 64, "element_size": 2}
    for k_tokens, config in ((800, short), (8000, usual)):
        forward, _ = split_partitions(rows, k_tokens=k_tokens, **options)
        assert forward.block == config.block


@pytest.mark.parametrize("options", [{"programs": 0}, {"programs": 2, "row_cost": 0}])
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match="must be 1 or more"):
        build_partition(_rows([(1, 5)]), block=16, **options)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy must be"):
        build_partition(_rows([(1, 5)]), block=16, programs=2, policy="fair")  # pyright: ignore[reportArgumentType]


# --- stream_spans against its specification -------------------------------------------------------


def _assert_as_specified(rows: Tensor, blocks: list[int], programs: list[int], row_cost: int):
    spans = stream_spans(rows, blocks, programs, row_cost)
    expected = [
        reference_stream_spans(rows, *shape, row_cost)
        for shape in zip(blocks, programs, strict=True)
    ]
    assert spans.dtype == expected[0].dtype
    assert torch.equal(spans, torch.cat(expected))


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    shapes=st.lists(
        st.tuples(st.sampled_from([16, 64]), st.integers(1, 100)), min_size=1, max_size=2
    ),
    row_cost=st.integers(1, 3),
)
def test_both_partitions_as_specified(lengths, shapes, row_cost):
    blocks, programs = (list(numbers) for numbers in zip(*shapes, strict=True))
    _assert_as_specified(_rows(lengths), blocks, programs, row_cost)


@pytest.mark.parametrize("used", [0, 1, 135_000, 140_000])
def test_more_rows_than_chunks_hold_at_a_time(used):
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros((140_000, ROW_WIDTH), dtype=torch.int32)
    rows[:used, 1] = 1
    rows[:used, 3] = torch.randint(0, 200, (used,), generator=generator)
    _assert_as_specified(rows.to(DEVICE), [32, 64], [264, 33], 1)


def test_no_rows():
    _assert_as_specified(_rows([(1, 5)])[:0], [16, 32], [3, 4], 1)


def test_opcheck():
    torch.library.opcheck(stream_spans, (_rows([(3, 90), (20, 5)]), [16, 32], [3, 4], 1))


def test_costs_beyond_int32():
    rows = torch.zeros((4096, ROW_WIDTH), dtype=torch.int32)
    rows[:4000, 1] = 1
    rows[:4000, 3] = 2**31 - 64 - torch.arange(4000)
    _assert_as_specified(rows.to(DEVICE), [16, 32], [200, 33], 1)
