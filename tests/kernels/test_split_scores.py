"""Weights by a policy where rows are cut: few dense queries over long histories, and queries of a
cache. The pieces of a row are sums, which are added up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, Case, Inputs, seen_keys
from cache_cases import filled
from combinations import combined
from launch_keys import record_launches, watch_launches
from meeting_cases import assert_as_exact, formula, pointwise, run
from score_policies import OWN, POLICIES

from jagged_kernels import (
    JaggedTensor,
    PointwiseScores,
    Sigmoid,
    SiLU,
    attention_schedule,
    cache_schedule,
    cached_attention,
    jagged_attention,
)
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.operators import split_general as ops_split_general
from jagged_kernels.attention.scores.bias_terms import BiasTerms
from jagged_kernels.cache import attention as ops_cached

DTYPES = [torch.float32, torch.float16]
MASKS = [{}, {"causal": True}, {"window": (60, 2)}, {"window": (3, -1)}]
# Blocks have 32 keys in float32 and 64 or 128 in float16: rows of one piece and of many.
ONE = Case([1] * 5, [117, 0, 1, 300, 40])
SEVERAL = Case([7] * 4, [130, 3, 0, 260], heads=4, kv_heads=2, dim=24, dim_v=40)
GROUPED = Case([3] * 3, [150, 33, 1], heads=5, kv_heads=1)
SPLITS = ["stream", "split"]


@triton.jit
def root(score):
    return tl.sqrt(score)


@triton.jit
def d_root(score, d_weight):
    return 0.5 / tl.sqrt(score) * d_weight


ROOT = PointwiseScores("square root", torch.sqrt, root, d_root)


def visible(mask: dict[str, Any]) -> Any:
    return lambda _user, queries, keys: seen_keys(queries, keys, **mask)[None]


def assert_exact(inputs: Inputs, policy: str, mask: dict[str, Any], **options: Any) -> None:
    scores, function = POLICIES[policy]
    weigh = pointwise(function, scores.divide_by)
    options = {"scores": scores, **mask, **options}
    assert_as_exact(inputs, "triton", visible(mask), weigh, **options)


# --- few dense queries ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mask", "case", "dtype", "split"),
    combined(POLICIES, MASKS, [ONE, SEVERAL, GROUPED], DTYPES, SPLITS),
)
def test_as_exact_as_the_formula(policy, mask, case, dtype, split):
    assert_exact(case.inputs(dtype), policy, mask, split=split)


@pytest.mark.parametrize("policy", ["silu", "sigmoid"])
def test_a_scale_below_zero(policy):
    """Of a formula with queries of the other sign."""
    inputs = SEVERAL.inputs(torch.float32)
    scores, function = POLICIES[policy]
    found = run("triton", inputs, scores=scores, scale=-(24**-0.5), split="split")
    inputs.q = -inputs.q
    expected = formula(inputs, visible({}), pointwise(function, scores.divide_by))
    for name, result in expected.items():
        sign = -1 if name == "dq" else 1
        torch.testing.assert_close(found[name], sign * result, rtol=1e-4, atol=1e-5)


def test_a_policy_of_what_is_not_there():
    """The square root of a score has no derivative where places without a query have theirs."""
    inputs = Case([3, 3], [50, 90], heads=3, kv_heads=1).inputs(torch.float32)
    inputs.q.abs_()
    inputs.k.abs_()
    options = {"scores": ROOT, "split": "split"}
    found, expected = (run(backend, inputs, **options) for backend in ("triton", "reference"))
    for name, result in expected.items():
        torch.testing.assert_close(found[name], result, rtol=1e-4, atol=1e-5)


def test_a_cut_changes_nothing_but_rounding():
    inputs = SEVERAL.inputs(torch.float32)
    options = {"scores": SiLU(), "causal": True}
    whole, *cut = (run("triton", inputs, **options, split=x) for x in ("rows", *SPLITS))
    for found in cut:
        for name, result in whole.items():
            torch.testing.assert_close(found[name], result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
def test_what_is_hidden_touches_nothing(place):
    results = []
    for backend in ("native", "triton"):
        inputs = Case([4, 4], [140, 70], heads=4, kv_heads=2).inputs(torch.float32)
        # The first query and the last key: causal, these do not meet.
        at = 139 if place in "kv" else 0
        getattr(inputs, place)[at] = math.nan
        results.append(run(backend, inputs, scores=SiLU(), causal=True, split="split"))
    for name, expected in results[0].items():
        found = results[1][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_an_enormous_score():
    inputs = ONE.inputs(torch.float32)
    inputs.q *= 1e4
    found = run("triton", inputs, scores=Sigmoid(), split="split")
    assert all(result.isfinite().all() for result in found.values())


def test_every_element_is_written(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    inputs = ONE.inputs(torch.float32)
    for window in ((-1, -1), (5, 0), (0, 5)):
        found = run("triton", inputs, scores=SiLU(), window=window, split="split")
        for name, result in found.items():
            assert not result.isnan().any(), name


def test_the_same_from_run_to_run():
    inputs = SEVERAL.inputs(torch.float32)
    first, second = (run("triton", inputs, scores=OWN, split="split") for _ in range(2))
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


def test_without_a_schedule_rows_are_cut(monkeypatch):
    launches = watch_launches(monkeypatch)
    inputs = ONE.inputs(torch.float32)
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    q = inputs.q.view(5, 1, 2, 16).requires_grad_()
    out = jagged_attention(q, k, v, scores=SiLU(), backend="triton")
    out.sum().backward()
    kernels = {name for name, _ in launches}
    assert {"_split_forward_kernel", "_split_backward_kernel", "_merge_sums_kernel"} <= kernels
    # Sums have no largest score.
    assert "_merge_states_kernel" not in kernels
    expected = jagged_attention(q, k, v, scores=SiLU(), backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_compiles_whole_and_for_other_batches():
    torch._dynamo.reset()

    def attend(q, values, offsets):
        k = JaggedTensor(values, offsets)
        options = {"schedule": attention_schedule(q, k), "backend": "triton"}
        return jagged_attention(q, k, k, scores=OWN, **options)

    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=True)
    for number, lengths in enumerate(([40, 0, 190], [70, 3], [30, 1, 2, 9, 5])):
        inputs, results = Case([2] * len(lengths), lengths).inputs(torch.float32), []
        for function in (attend, compiled):
            leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k)]
            q = leaves[0].view(len(lengths), 2, 2, 16)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(q, leaves[1], inputs.k_offsets)
            (out * out).sum().backward()
            results.append((out.detach(), *(x.grad for x in leaves)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_opcheck():
    inputs = SEVERAL.inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    schedule = attention_schedule(inputs.q.view(4, 7, 4, 24), k, split="split")
    assert schedule.partition is not None
    assert schedule.partition_t is not None
    spans = (schedule.partition.spans, schedule.partition.block)
    rest = (
        schedule.rows, schedule.rows_t, schedule.partition_t.spans, schedule.partition_t.block,
        schedule.tile_q, schedule.tile_k, -1, -1, 0.25, schedule.q_offsets, inputs.k_offsets,
        None, 0.0, *MeetTerms(scores="silu", divide_by=7.0), *BiasTerms(),
    )  # fmt: skip
    forward = ops_split_general.attention_split_general
    torch.library.opcheck(forward, (*leaves, True, *spans, *rest))
    results = forward(*leaves, True, *spans, *rest)
    detached = [t.detach() for t in (*leaves, *results)]
    backward = (inputs.d_o, None, *detached, [False] * 4, *rest)
    torch.library.opcheck(ops_split_general.attention_split_general_backward, backward)


def test_other_numbers_compile_nothing_again(monkeypatch):
    """A policy's n is an argument."""
    keys = record_launches(monkeypatch)
    found = []
    for divide_by in (7.0, 50):
        run("triton", ONE.inputs(torch.float32), scores=SiLU(divide_by=divide_by), split="split")
        found.append({key for key in keys if ".split." in key[1]})
        keys.clear()
    assert found[0] == found[1] != set()


# --- a cache --------------------------------------------------------------------------------------

CACHED = Case([3, 1, 0, 2, 1, 17, 2], [3, 1, 16, 15, 117, 33, 40])


@pytest.mark.parametrize(
    ("policy", "page_size", "causal", "heads", "dtype"),
    combined(POLICIES, [1, 16, 128], [True, False], [(2, 2), (4, 2), (9, 1)], DTYPES),
)
def test_cached_as_exact_as_the_formula(policy, page_size, causal, heads, dtype):
    scores, function = POLICIES[policy]
    shape = {"heads": heads[0], "kv_heads": heads[1]}
    inputs = Case(CACHED.q_lengths, CACHED.k_lengths, **shape).inputs(dtype)
    cache, q = filled(inputs, page_size), JaggedTensor(inputs.q, inputs.q_offsets)
    options = {"causal": causal, "scores": scores}
    exact = formula(
        inputs.double(), visible({"causal": causal}), pointwise(function, scores.divide_by)
    )["o"]
    peer = formula(inputs, visible({"causal": causal}), pointwise(function, scores.divide_by))["o"]
    error = (peer.double() - exact).abs().max()
    for backend in ("triton", "native", "reference"):
        found = cached_attention(q, cache, backend=backend, **options).values
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= 2 * error + 1e-6, backend


def test_a_page_that_the_store_does_not_have_is_hidden():
    """Whatever a policy has for a score of 0."""
    inputs = Case([2, 1], [200, 30]).inputs(torch.float32)
    cache, q = filled(inputs, 128, capacity=256), JaggedTensor(inputs.q, inputs.q_offsets)
    cache.pages[0, 0, 0] = -1
    out = cached_attention(q, cache, causal=False, scores=Sigmoid(), backend="triton").values
    scores = torch.einsum("nhd,mhd->hnm", inputs.q[:2], inputs.k[128:200]) / 4
    expected = torch.einsum("hnm,mhd->nhd", scores.sigmoid() / 200, inputs.v[128:200])
    torch.testing.assert_close(out[:2], expected, atol=2e-6, rtol=2e-5)


def test_cached_scores_have_no_lse_and_a_schedule_serves_all():
    inputs = CACHED.inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    with pytest.raises(ValueError, match="there is no lse to return"):
        cached_attention(q, cache, scores=SiLU(), return_lse=True)
    with pytest.raises(TypeError, match="scores must be SiLU"):
        cached_attention(q, cache, scores="silu")  # pyright: ignore
    schedule = cache_schedule(q, cache)
    first, second = (
        cached_attention(q, cache, scores=SiLU(), schedule=one, backend="triton").values
        for one in (schedule, None)
    )
    assert torch.equal(first, second)
    soft = cached_attention(q, cache, schedule=schedule, backend="triton").values
    assert torch.equal(soft, cached_attention(q, cache, backend="triton").values)


def test_opcheck_of_a_cache():
    inputs = CACHED.inputs(torch.float32)
    cache, q = filled(inputs, 1), JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = cache_schedule(q, cache)
    stored = (cache.k_store, cache.v_store, cache.pages)
    walk = (schedule.rows, schedule.partition.spans, schedule.partition.block, schedule.tile_q)
    terms = (*MeetTerms(scores="silu", divide_by=7.0), *BiasTerms())
    offsets = (inputs.q_offsets, schedule.k_offsets)
    arguments = (inputs.q, *stored, False, 1, *walk, 0, 0.25, *offsets, *terms)
    torch.library.opcheck(ops_cached.attention_cached_general, arguments)
    rest = (cache.lengths, inputs.q_offsets, 1, 0, 0.25, *terms)
    torch.library.opcheck(ops_cached.attention_cached_native, (inputs.q, *stored, *rest))


# --- on the device --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"window": (100, 3)}], ids=str)
def test_default_shapes_on_the_device(dtype, dim, mask):
    case = Case([8] * 6, [3000, 64, 129, 70, 0, 1], heads=4, kv_heads=2, dim=dim)
    assert_exact(case.inputs(dtype), "silu by a number", mask, split="stream")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("queries", "heads"), [(1, (8, 2)), (16, (4, 4)), (64, (2, 2))])
def test_policies_on_the_device(policy, queries, heads):
    shape = {"heads": heads[0], "kv_heads": heads[1], "dim": 64}
    case = Case([queries] * 4, [5000, 17, 0, 300], **shape)
    assert_exact(case.inputs(torch.bfloat16), policy, {}, split="stream")
    first, second = (
        run("triton", case.inputs(torch.bfloat16), scores=SiLU(), split="stream") for _ in "ab"
    )
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_cache_on_the_device(page_size, dim):
    case = Case([3, 1, 0, 40], [3000, 70, 5, 400], heads=8, kv_heads=2, dim=dim)
    inputs = case.inputs(torch.bfloat16)
    cache = filled(inputs, page_size, capacity=4096)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    options = {"causal": True, "scores": SiLU(divide_by=100)}
    found = cached_attention(q, cache, backend="triton", **options).values
    expected = cached_attention(q, cache, backend="reference", **options).values
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
