"""Lists of key blocks where rows are cut: a tile of candidates over some blocks of a long history,
walked by many programs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, Case, Inputs, queries_of
from bias_cases import Biases
from choice_cases import SPLIT, said_picks
from combinations import combined
from launch_keys import watch_launches
from meeting_cases import assert_as_exact, pointwise, run, softmax
from score_policies import POLICIES

from jagged_kernels import (
    JaggedTensor,
    KeyLists,
    SemiLocalKeys,
    SiLU,
    attention_schedule,
    explain_attention,
    jagged_attention,
    retrieved_blocks,
)
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.spans import listed_rows

DTYPES = [torch.float32, torch.float16]
SPLITS = ["stream", "split"]
# (queries of each user, keys, heads, key heads, groups that have lists of their own, block)
SHAPES = {
    "one query": ([1] * 5, [117, 0, 1, 200, 40], 2, 2, 1, 32),
    "a list for each head": ([1] * 3, [100, 33, 50], 4, 4, 4, 16),
    "heads that share keys": ([7] * 4, [130, 3, 0, 70], 4, 2, 2, 16),
    "two key heads to a list": ([16] * 2, [300, 70], 8, 4, 2, 64),
    "a tile for four of three": ([3] * 3, [150, 33, 1], 3, 1, 1, 32),
}


def problem(
    name: str, dtype: torch.dtype, window: tuple[int, int] = (-1, -1)
) -> tuple[Inputs, KeyLists, Any]:
    """(inputs, lists of about half of the blocks, the mask that they are)"""
    q_lengths, k_lengths, heads, kv_heads, groups, block = SHAPES[name]
    inputs = Case(q_lengths, k_lengths, heads=heads, kv_heads=kv_heads).inputs(dtype)
    generator = torch.Generator().manual_seed(0)
    entries: dict[int, list[torch.Tensor]] = {}
    chosen: dict[int, list[torch.Tensor]] = {}
    first = 0
    for user, (n, m) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        # One tile a user: it has no more queries than a block has tokens.
        blocks = -(-m // block)
        chosen[user] = [
            (torch.rand(blocks, generator=generator) < 0.3 + 0.2 * g).nonzero().flatten()
            for g in range(groups)
        ]
        entries[first // block + user] = chosen[user]
        first += n
    tiles = first // block + len(q_lengths)
    none = [torch.zeros(0, dtype=torch.int64)] * groups
    rows = [one for tile in range(tiles) for one in entries.get(tile, none)]
    row_ptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    lists = KeyLists.from_rows(
        row_ptr.to(DEVICE), torch.cat(rows).to(DEVICE), inputs.q_offsets, inputs.k_offsets,
        block=block, groups=groups, window=window,
    )  # fmt: skip

    def visible(user: int, queries: int, keys: int) -> torch.Tensor:
        seen = torch.zeros(groups, queries, keys, dtype=torch.bool)
        for group, blocks in enumerate(chosen[user]):
            for one in blocks.tolist():
                seen[group, :, one * block : one * block + block] = True
        i = torch.arange(keys - queries, keys)[:, None]
        j = torch.arange(keys)
        seen &= (j <= i + window[1]) | torch.tensor(window[1] < 0)
        seen &= (j >= i - window[0]) | torch.tensor(window[0] < 0)
        return seen.repeat_interleave(heads // groups, 0)

    return inputs, lists, visible


@pytest.mark.parametrize(("shape", "split", "dtype"), combined(SHAPES, SPLITS, DTYPES))
def test_as_exact_as_the_formula(shape, split, dtype):
    inputs, lists, visible = problem(shape, dtype)
    assert_as_exact(inputs, "triton", visible, softmax, keys=lists, split=split)


@pytest.mark.parametrize(("shape", "window", "split"), combined(SHAPES, [(-1, 0), (60, 2)], SPLITS))
def test_with_a_window(shape, window, split):
    inputs, lists, visible = problem(shape, torch.float32, window)
    assert_as_exact(inputs, "triton", visible, softmax, keys=lists, split=split)


@pytest.mark.parametrize(("shape", "policy", "split"), combined(SHAPES, POLICIES, SPLITS))
def test_with_weights_by_a_policy(shape, policy, split):
    scores, function = POLICIES[policy]
    inputs, lists, visible = problem(shape, torch.float32)
    weigh = pointwise(function, scores.divide_by)
    assert_as_exact(inputs, "triton", visible, weigh, keys=lists, scores=scores, split=split)


@pytest.mark.parametrize(("shape", "scores"), combined(SHAPES, [None, SiLU()]))
def test_with_biases_and_dropout(shape, scores):
    biases = Biases(position=8, time=12, alibi=True, scores=True)
    inputs, lists, _ = problem(shape, torch.float32)
    found = []
    calls: list[tuple[Any, Inputs]] = [("reference", inputs.double()), ("triton", inputs)]
    for backend, given in calls:
        leaves = biases.leaves(given)
        k, v = (JaggedTensor(x.requires_grad_(), inputs.k_offsets) for x in (given.k, given.v))
        q, schedule = queries_of(given, given.q.requires_grad_(), k, "split", keys=lists)
        torch.manual_seed(2)
        out: Any = jagged_attention(
            q, k, v, keys=lists, schedule=schedule, backend=backend, scores=scores,
            bias=biases.values(given, leaves), dropout_p=0.3,
        )  # fmt: skip
        out.flatten(0, 1).backward(given.d_o)
        learned = (given.q, given.k, given.v, *leaves.values())
        found.append([out.detach(), *(x.grad for x in learned)])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=5e-5)


def test_a_backward_goes_by_the_lists_of_tiles_alone():
    """Rows that are whole need the transpose."""
    inputs, lists, _ = problem("one query", torch.float32)
    for split in (*SPLITS, "rows"):
        assert lists.row_ptr_t is None
        run("triton", inputs, keys=lists, split=split)
    assert lists.row_ptr_t is not None


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
def test_what_is_hidden_touches_nothing(place):
    results = []
    for backend in ("native", "triton"):
        inputs, lists, _ = problem("heads that share keys", torch.float32, (-1, 0))
        getattr(inputs, place)[120 if place in "kv" else 0] = math.nan
        results.append(run(backend, inputs, keys=lists, split="split"))
    for name, expected in results[0].items():
        found = results[1][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_lse():
    inputs, lists, _ = problem("heads that share keys", torch.float32)
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    q, schedule = queries_of(inputs, inputs.q, k, "split", keys=lists)
    options = {"keys": lists, "schedule": schedule, "return_lse": True}
    exact, found = (
        jagged_attention(q, k, v, backend=backend, **options)[1]  # pyright: ignore
        for backend in ("reference", "triton")
    )
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_the_same_from_run_to_run():
    inputs, lists, _ = problem("heads that share keys", torch.float32)
    first, second = (run("triton", inputs, keys=lists, split="split") for _ in range(2))
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


def test_every_element_is_written(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    problems = [problem(shape, torch.float32) for shape in SHAPES]
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    for inputs, lists, _ in problems:
        for name, result in run("triton", inputs, keys=lists, split="stream").items():
            assert not result.isnan().any(), name


def test_retrieved_blocks_of_long_histories(monkeypatch):
    """Without a schedule rows are cut, and programs share them."""
    launches = watch_launches(monkeypatch)
    inputs = Case([3] * 2, [600, 90], heads=4, kv_heads=2).inputs(torch.float32)
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    q = inputs.q.view(2, 3, 4, 16)
    lists = retrieved_blocks(q, k, 4, block=16, newest=2)
    launches.clear()
    out = jagged_attention(q, k, v, keys=lists, backend="triton")
    kernels = {name for name, _ in launches}
    assert {"_split_forward_kernel", "_merge_states_kernel"} <= kernels
    assert "_forward_kernel" not in kernels
    expected = jagged_attention(q, k, v, keys=lists, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_a_partition_counts_what_the_longest_list_shows():
    inputs, lists, visible = problem("a list for each head", torch.float32)
    rows = build_rows(inputs.q_offsets, inputs.k_offsets, tokens=3, tile=16, left=-1, right=-1)
    by_user = rows[:3, 5].argsort()
    found = listed_rows(rows, lists, inputs.q_offsets)[by_user]
    rows = rows[by_user]
    for user, keys in enumerate((100, 33, 50)):
        blocks = [
            len(set((head.nonzero()[:, 1] // 16).tolist())) for head in visible(user, 1, keys)
        ]
        assert int(found[user, 3] - found[user, 2]) == 16 * max(blocks)
        assert torch.equal(found[user, [0, 1, 2, 4, 5, 6]], rows[user, [0, 1, 2, 4, 5, 6]])


def test_what_is_not_cut():
    inputs, lists, _ = problem("one query", torch.float32)
    k = JaggedTensor(inputs.k, inputs.k_offsets)

    def refused(queries: torch.Tensor, keys: Any, why: str) -> None:
        assert attention_schedule(queries, k, keys=keys).partition is None
        with pytest.raises(ValueError, match=f"with keys split must be auto or rows.*{why}"):
            attention_schedule(queries, k, keys=keys, split="stream")

    q = inputs.q.view(5, 1, 2, 16)
    assert attention_schedule(q, k, keys=lists).partition is not None
    assert attention_schedule(q, k, keys=lists, split="rows").partition is None
    refused(q, SemiLocalKeys(9, 3, block=16), "keys are those of a rule, it takes lists")
    many = JaggedTensor(q.expand(5, 20, 2, 16).flatten(0, 1), inputs.q_offsets * 20)
    per_head = [
        KeyLists.from_rows(
            torch.zeros(entries + 1, dtype=torch.int32, device=DEVICE),
            torch.zeros(0, dtype=torch.int32, device=DEVICE),
            offsets, inputs.k_offsets, block=16, groups=groups,
        )
        for entries, offsets, groups in (
            (100 // 16 + 5, many.offsets, 1), (4 * 5, inputs.q_offsets, 4)
        )
    ]  # fmt: skip
    dense = many.values.view(5, 20, 2, 16)
    refused(dense, per_head[0], "a block of the lists does not hold the queries of a user")
    refused(q.repeat(1, 1, 2, 1), per_head[1], "heads that share keys have lists of their own")


def test_it_is_said():
    inputs, lists, _ = problem("one query", torch.float32)
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    q = inputs.q.view(5, 1, 2, 16)
    assert said_picks(explain_attention(q, k, k, keys=lists, backend="triton")) == SPLIT


def test_compiles_whole():
    torch._dynamo.reset()

    def attend(q, values, offsets):
        k = JaggedTensor(values, offsets)
        lists = retrieved_blocks(q.detach(), k.detach(), 2, block=16, newest=1, longest=80)
        schedule = attention_schedule(q, k, keys=lists)
        return jagged_attention(q, k, k, keys=lists, schedule=schedule, backend="triton")

    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=True)
    for lengths in ([40, 0, 70], [33, 3]):
        inputs, results = Case([1] * len(lengths), lengths).inputs(torch.float32), []
        for function in (attend, compiled):
            leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k)]
            q = leaves[0].view(len(lengths), 1, 2, 16)
            out = function(q, leaves[1], inputs.k_offsets)
            (out * out).sum().backward()
            results.append((out.detach(), *(x.grad for x in leaves)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


# --- on the device --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "heads"), [(1, (8, 2)), (16, (4, 4)), (64, (2, 2))])
@pytest.mark.parametrize("dim", [64, 128])
def test_retrieval_on_the_device(dtype, queries, heads, dim):
    shape = {"heads": heads[0], "kv_heads": heads[1], "dim": dim}
    inputs = Case([queries] * 4, [20000, 17, 0, 3000], **shape).inputs(dtype)
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    lists = retrieved_blocks(inputs.q.view(4, queries, *inputs.q.shape[1:]), k, 16, newest=4)
    found, expected = (
        run(backend, x, keys=lists, split="stream")
        for backend, x in (("triton", inputs), ("reference", inputs.double()))
    )
    for name, result in expected.items():
        rounding = 5e-2 if dtype == torch.bfloat16 else 1e-2
        torch.testing.assert_close(found[name].double(), result, rtol=rounding, atol=rounding)
    again = run("triton", inputs, keys=lists, split="stream")
    for name, result in found.items():
        assert torch.equal(result, again[name]), name
