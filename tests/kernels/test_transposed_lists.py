"""The transpose of lists: made when a backward needs it, by kernels as by sorting."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import BLOCK, LENGTHS, assert_same_lists, offsets_of
from retrieval_cases import jagged

from jagged_kernels import (
    KeyLists,
    attention_schedule,
    jagged_attention,
    retrieved_blocks,
)
from jagged_kernels.schedule.keys import transpose, triton_transpose
from jagged_kernels.schedule.keys.check import check_lists


def _use(monkeypatch, backend):
    monkeypatch.setattr(transpose, "triton_runs", lambda x: backend == "triton")


@st.composite
def _lists(draw):
    """Any blocks of any users' keys, for any band."""
    lengths, groups = draw(LENGTHS), draw(st.integers(1, 3))
    queries = [draw(st.integers(0, 90)) for _ in lengths]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    q_offsets, k_offsets = offsets_of(queries, dtype), offsets_of(lengths, dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    counts, blocks = [0] * (1 + (sum(queries) // BLOCK + len(lengths)) * groups), []
    for user, (n, m) in enumerate(zip(queries, lengths, strict=True)):
        first = int(q_offsets[user]) // BLOCK + user
        for entry in range(first * groups, (first - (-n // BLOCK)) * groups):
            shown = (torch.rand(-(-m // BLOCK), generator=generator) < 0.5).nonzero().flatten()
            counts[entry + 1] = len(shown)
            blocks += shown.tolist()
    return KeyLists.from_rows(
        torch.tensor(counts, device=DEVICE).cumsum(0),
        torch.tensor(blocks, dtype=torch.int32, device=DEVICE), q_offsets, k_offsets, block=BLOCK,
        groups=groups, window=(draw(st.integers(-1, 40)), draw(st.integers(-1, 40))),
    )  # fmt: skip


def test_kernels_list_what_sorting_does(monkeypatch):
    # More tiles and blocks of a user than a program looks at beside each other.
    monkeypatch.setattr(triton_transpose, "_KEYS", 2)
    monkeypatch.setattr(triton_transpose, "_TILES", 2)

    @settings(max_examples=30, deadline=None)
    @given(lists=_lists())
    def run(lists):
        assert lists.row_ptr_t is None
        others = copy.copy(lists)
        _use(monkeypatch, "triton")
        _, col_t = lists.transposed()
        _use(monkeypatch, "native")
        assert_same_lists(lists, others)
        end = int(lists.row_ptr[-1])
        assert not col_t[end:].any()
        tokens = {"q_tokens": int(lists.q_offsets[-1]), "k_tokens": int(lists.k_offsets[-1])}
        check_lists(lists, lists.q_offsets, lists.k_offsets, **tokens)

    run()


def _case():
    x = jagged([70, 0, 33], dim=16)
    return x, retrieved_blocks(x, x, 2, newest=1, block=BLOCK, causal=True)


def test_made_for_a_backward_alone_and_once(monkeypatch):
    x, lists = _case()
    made = []
    real = transpose.transposed_lists
    counted = lambda *inputs: made.append(1) or real(*inputs)  # noqa: E731
    monkeypatch.setattr("jagged_kernels.schedule.keys.lists.transposed_lists", counted)
    schedule = attention_schedule(x, keys=lists)
    options: dict[str, Any] = {"keys": lists, "schedule": schedule, "backend": "triton"}
    expected = jagged_attention(x, x, x, **options)
    assert not made
    values = x.values.clone().requires_grad_()
    y = x.with_values(values)
    with torch.no_grad():
        jagged_attention(y, y, y, **options)
    assert not made
    gradients = []
    for _ in range(2):
        out = jagged_attention(y, y, y, **options)
        assert torch.equal(out.values, expected.values)
        gradients += torch.autograd.grad(out.values.square().sum(), values)
    assert made == [1]
    out = jagged_attention(y, y, y, keys=lists, backend="reference")
    (gradient,) = torch.autograd.grad(out.values.square().sum(), values)
    for found in gradients:
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["before", "after"])
def test_copies_have_a_transpose_of_their_own(which):
    _, lists = _case()
    if which == "after":
        lists.transposed()
    for other in (copy.deepcopy(lists), pickle.loads(pickle.dumps(lists))):
        assert (other.row_ptr_t is None) == (which == "before")
        assert_same_lists(other, lists)


def test_a_trace_keeps_nothing():
    """What it makes has contents when it runs alone; lists made before it serve it each time."""
    x, lists = _case()
    schedule = attention_schedule(x, keys=lists)

    def attend(values):
        y = x.with_values(values)
        for _ in range(2):
            y = jagged_attention(y, y, y, keys=lists, schedule=schedule, backend="triton")
        return y.values

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (compiled, compiled, attend):
        values = x.values.clone().requires_grad_()
        gradients += torch.autograd.grad(function(values).square().sum(), values)
        assert (lists.row_ptr_t is None) == (function is compiled)
    for found in gradients[:2]:
        torch.testing.assert_close(found, gradients[2])
