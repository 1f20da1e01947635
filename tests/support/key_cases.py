"""Batches and rules that tests of key lists walk through."""

from __future__ import annotations

import torch
from attention_cases import DEVICE
from hypothesis import strategies as st
from torch import Tensor

from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import RequestKeys, SemiLocalKeys, StridedKeys

BLOCK = 16
# Edges of blocks among them.
LENGTHS = st.lists(
    st.one_of(st.integers(0, 90), st.sampled_from([0, 1, 15, 16, 17, 32, 33, 64])), max_size=5
)
STRIDED = st.builds(
    StridedKeys,
    stride=st.integers(1, 8),
    local=st.integers(1, 4),
    step=st.none() | st.integers(0, 9),
    offset=st.integers(-9, 9),
    block=st.just(BLOCK),
)
SEMI_LOCAL = st.builds(
    SemiLocalKeys,
    window=st.integers(1, 90),
    first=st.integers(0, 80),
    block=st.sampled_from([BLOCK, 32]),
)


@st.composite
def requests(draw: st.DrawFn, lengths: list[int]) -> RequestKeys:
    """A rule whose targets and contexts users of these lengths have."""
    targets = [draw(st.integers(0, min(n, 40))) for n in lengths]
    contexts = [draw(st.integers(0, n - t)) for n, t in zip(lengths, targets, strict=True)]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    known = [
        draw(st.sampled_from([None, torch.tensor(x, dtype=dtype, device=DEVICE)]))
        for x in (targets, contexts)
    ]
    return RequestKeys(known[0], known[1], draw(st.none() | st.integers(1, 80)), BLOCK)


def offsets_of(
    lengths: list[int], dtype: torch.dtype = torch.int64, device: str = DEVICE
) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def assert_same_lists(lists: KeyLists, expected: KeyLists) -> None:
    """To the bit, but for what is behind the last entry."""
    assert (lists.block, lists.groups, lists.window) == (
        expected.block, expected.groups, expected.window
    )  # fmt: skip
    sides = (lists.row_ptr, lists.col), lists.transposed()
    expected_sides = (expected.row_ptr, expected.col), expected.transposed()
    for (row_ptr, col), (expected_ptr, expected_col) in zip(sides, expected_sides, strict=True):
        assert row_ptr.dtype == col.dtype == torch.int32
        assert torch.equal(row_ptr, expected_ptr)
        end = int(row_ptr[-1])
        assert end <= col.shape[0]
        assert torch.equal(col[:end], expected_col[:end])
