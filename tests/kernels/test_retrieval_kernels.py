"""Retrieval's kernels: as in PyTorch, few, and compiled once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import BLOCK, LENGTHS, offsets_of
from launch_keys import batches, record_launches, watch_launches
from processes import run_python
from retrieval_cases import BACKENDS, categories_of, expected_lists, jagged, listed, use
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_kernels import JaggedTensor, block_means, retrieved_blocks
from jagged_kernels.attention.retrieval import retrieval, triton_choice
from jagged_kernels.attention.retrieval.block_means import block_means_op
from jagged_kernels.attention.retrieval.choice import choose_blocks
from jagged_kernels.core import contents
from jagged_kernels.schedule.keys import build, transpose

# What costs a host little, and a device nothing.
VIEWS = ("view", "detach", "slice.Tensor", "select.int", "_unsafe_view")

# --- kernels as in PyTorch ------------------------------------------------------------------------


def _whole_means(length):
    """At most `length`; the last block has a power of two of tokens."""
    rest = length % BLOCK
    return length - rest + (1 << rest.bit_length() >> 1)


@st.composite
def _requests(draw):
    """(q, k, options), whose means and scores are exact, in any order of sums, and often equal."""
    lengths = [_whole_means(n) for n in draw(LENGTHS)]
    queries = [_whole_means(draw(st.integers(0, 40))) for _ in lengths]
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 4)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def whole_numbers(tokens, heads):
        values = torch.randint(-1, 2, (tokens, heads, 4), generator=generator)
        return (16 * values).to(DEVICE, draw(st.sampled_from([torch.float32, torch.float16])))

    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    q = JaggedTensor(whole_numbers(sum(queries), 4), offsets_of(queries, dtype))
    k = JaggedTensor(whole_numbers(sum(lengths), kv_heads), offsets_of(lengths, dtype))
    top_k, newest = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    options = {
        "top_k": top_k, "newest": max(newest, 1 - top_k), "block": BLOCK, "groups": groups,
        "causal": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()):
        options["categories"] = categories_of(q, k, kinds=draw(st.integers(1, 200)))
    if draw(st.booleans()):
        options["longest"] = draw(st.integers(0, 100))
    return q, k, options


def test_kernels_choose_what_pytorch_does(monkeypatch):
    monkeypatch.setattr(
        retrieval, "longest_user", lambda q, k, longest: 90 if longest is None else longest
    )

    @settings(max_examples=60, deadline=None)
    @given(request=_requests())
    def run(request):
        q, k, options = request
        use(monkeypatch, "triton")
        found = retrieved_blocks(q, k, **options)
        use(monkeypatch, "native")
        expected = retrieved_blocks(q, k, **options)
        assert torch.equal(found.row_ptr, expected.row_ptr)
        end = int(found.row_ptr[-1])
        assert torch.equal(found.col[:end], expected.col[:end])
        assert not found.col[end:].any()

    run()


@pytest.mark.parametrize("top_k", [1, 20, 30, 200])
def test_more_blocks_than_are_looked_at_at_once(top_k, monkeypatch):
    monkeypatch.setattr(triton_choice, "_CHUNK", 16)
    k, q = jagged([700, 40, 500], 1, 4), jagged([3, 1, 17], 1, 4, seed=1)
    options: dict[str, Any] = {"top_k": top_k, "newest": 2, "block": BLOCK}
    assert listed(retrieved_blocks(q, k, **options), q) == expected_lists(q, k, **options)


def test_scores_that_are_no_numbers(monkeypatch):
    """NaN is higher than all, as in `torch.topk`; infinities are scores."""
    q = JaggedTensor(torch.ones(1, 1, 4, device=DEVICE), offsets_of([1]))
    of_block = torch.tensor([1.0, math.nan, -math.inf, math.inf, 0.0, -0.0], device=DEVICE)
    values = of_block.repeat_interleave(BLOCK)[:, None, None].repeat(1, 1, 4)
    k = JaggedTensor(values, offsets_of([96]))
    for backend in ("triton", "native"):
        use(monkeypatch, backend)
        for top_k, expected in ((1, [1]), (2, [1, 3]), (4, [0, 1, 3, 4]), (5, [0, 1, 3, 4, 5])):
            lists = retrieved_blocks(q, k, top_k, block=BLOCK)
            assert (lists.col // 2).tolist() == expected
        # With categories a score of -inf is that of a block that has none of them.
        alike = torch.zeros(96, dtype=torch.int64, device=DEVICE)
        lists = retrieved_blocks(q, k, 6, block=BLOCK, categories=(alike[:1], alike))
        assert (lists.col[: lists.row_ptr[-1]] // 2).tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_means_in_a_kernel(dtype, monkeypatch):
    """Of users anywhere among others, in any layout that is read in place; with their gradient."""
    packed = jagged([100, 0, 3, 1100], heads=3, dim=100, dtype=dtype)
    values = packed.values[:, :2].requires_grad_()
    x = packed.with_values(values)
    results = []
    for backend in ("triton", "native"):
        use(monkeypatch, backend)
        for block in (16, 128):
            means = block_means(x, block)
            weights = torch.arange(means.values.numel(), device=DEVICE).view_as(means.values) % 7
            (gradient,) = torch.autograd.grad(means.values, values, weights.to(dtype))
            results.append((means.values, means.offsets, gradient))
    for found, expected in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(found, expected)


# --- operators ------------------------------------------------------------------------------------


@BACKENDS
def test_operators_are_such(backend, monkeypatch):
    use(monkeypatch, backend)
    x = jagged([40, 0, 3], heads=1)
    taken = []
    monkeypatch.setattr(retrieval, "call", lambda op, *inputs: taken.append(inputs) or op(*inputs))
    more: dict[str, Any] = {"categories": categories_of(x, x), "key_means": block_means(x, BLOCK)}
    for options in ({}, {**more, "causal": True}):
        lists = retrieved_blocks(x, x, 2, newest=1, block=BLOCK, **options)
        torch.library.opcheck(choose_blocks, taken.pop())
    inputs = (lists.row_ptr, lists.col, x.offsets, x.offsets, 43, 43, BLOCK, 1, *lists.window)
    torch.library.opcheck(transpose.transpose_lists, inputs)


def test_the_operator_of_means_is_one():
    x = jagged([40, 0, 3], heads=1)
    values = x.values.flatten(1).clone().requires_grad_()
    torch.library.opcheck(block_means_op, (values, x.offsets, BLOCK))


class _Operators(TorchDispatchMode):
    """Notes what PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def test_few_launches(monkeypatch):
    """What lists cost is what the host takes to ask for them. Nothing is read, nor waited for."""
    use(monkeypatch, "triton")
    monkeypatch.setattr(retrieval, "readable", lambda x: False)
    monkeypatch.setattr(build, "readable", lambda x: False)
    monkeypatch.setattr(contents, "readable", lambda x: False)
    q, k = jagged([20, 3, 33], 4, seed=1), jagged([100, 0, 70])
    means = block_means(k, BLOCK)
    launches = watch_launches(monkeypatch)
    chosen = ["_score_kernel", "_bound_kernel", "_fill_kernel"]
    for kept, of_means in ((None, 2), (means, 1)):
        launches.clear()
        with _Operators() as operators:
            lists = retrieved_blocks(
                q, k, 2, newest=1, block=BLOCK, groups=2, key_means=kept, longest=100
            )
        work = [name for name in operators.names if name not in VIEWS]
        assert work == ["block_means"] * of_means + ["choose_blocks"]
        names = [name for name, _ in launches]
        assert names == ["_block_means_kernel"] * of_means + chosen
    launches.clear()
    with _Operators() as operators:
        lists.transposed(56, 170)
    assert operators.names == ["transpose_lists"]
    assert [name for name, _ in launches] == ["_count_listing_kernel", "_fill_transpose_kernel"]


def test_batches_compile_nothing_again(monkeypatch):
    """Not even where lengths, `top_k`, `newest` and `longest` change."""
    use(monkeypatch, "triton")
    monkeypatch.setattr(retrieval, "longest_user", lambda q, k, longest: longest)
    keys = record_launches(monkeypatch)
    for count, lengths in enumerate(batches(10)):
        x = jagged(lengths)
        longest = max(lengths) + (count + 4) * BLOCK
        lists = retrieved_blocks(x, x, 2 + count, newest=1 + count, block=BLOCK, longest=longest)
        lists.transposed(sum(lengths), sum(lengths))
    assert len(keys) == 10 * 7
    assert len(set(keys)) == 6


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

from jagged_kernels.attention.retrieval.triton_block_means import _block_means_kernel
from jagged_kernels.attention.retrieval.triton_choice import (
    _bound_kernel, _fill_kernel, _score_kernel
)
from jagged_kernels.schedule.keys.triton_transpose import (
    _count_listing_kernel, _fill_transpose_kernel
)

BLOCK = {"BLOCK": 64}
CHOICE = {**BLOCK, "GROUPS": 2, "CAUSAL": True}
SCORE = {**CHOICE, "HEADS": 16, "KV_HEADS": 4, "DIM": 64, "KEYS": 16, "NUMBERS": 256}
OF_ITS_OWN = dict.fromkeys(["q_categories_ptr", "k_categories_ptr", "key_offsets_ptr"])
TURN = {**BLOCK, "GROUPS": 2, "KEYS": 32, "TILES": 64}
for kernel, warps, constants in [
    (_block_means_kernel, 4, {**BLOCK, "COLUMNS": 1024, "STRIDE": 3072, "WIDTH": 128}),
    (_score_kernel, 4, SCORE),
    (_score_kernel, 4, {**SCORE, "KV_HEADS": 16, "CAUSAL": False, **OF_ITS_OWN}),
    (_bound_kernel, 1, {**CHOICE, "CHUNK": 512}),
    (_fill_kernel, 1, {**CHOICE, "CHUNK": 512}),
    (_count_listing_kernel, 4, TURN),
    (_fill_transpose_kernel, 4, {**TURN, "LIMITED": True}),
]:
    kinds = {}
    for name in kernel.arg_names:
        pointer = name.endswith("_ptr") or name == "row_ptr"
        wide = name.endswith("_offsets_ptr") or name.endswith("_categories_ptr")
        half = name in ("x_ptr", "out_ptr", "queries_ptr", "keys_ptr")
        pointer = ("*i64" if wide else "*bf16" if half else "*i32") if pointer else "i32"
        kinds[name] = "constexpr" if name in constants else pointer
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, kinds, places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
"""


def test_kernels_compile_for_a_gpu(tmp_path):
    """What the interpreter lets pass: types that change in a loop, and None where it must not."""
    result = run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]


def test_lists_are_made_in_a_compiled_function(monkeypatch):
    use(monkeypatch, "triton")

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def run(q, k, q_offsets, k_offsets):
        sides = JaggedTensor(q, q_offsets), JaggedTensor(k, k_offsets)
        lists = retrieved_blocks(*sides, 2, newest=1, block=BLOCK, causal=True, longest=112)
        return lists.row_ptr, lists.col, *lists.transposed(q.shape[0], k.shape[0])

    for lengths in ([40, 9], [100, 0, 20, 8]):
        x = jagged(lengths)
        found = run(x.values, x.values, x.offsets, x.offsets)
        lists = retrieved_blocks(x, x, 2, newest=1, block=BLOCK, causal=True, longest=112)
        for one, other in zip(found, (lists.row_ptr, lists.col, *lists.transposed()), strict=True):
            assert torch.equal(one, other)
