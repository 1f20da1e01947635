"""Biases and dropout where rows are cut: few dense queries over long histories; outputs and all
gradients against the formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, Case, Inputs, assert_no_worse, run
from bias_cases import Biases, assert_as_exact_as_pytorch, drawn_seed, plain, run_biased
from cache_cases import filled
from combinations import combined
from launch_keys import record_launches, watch_launches

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    SiLU,
    attention_schedule,
    cached_attention,
    jagged_attention,
)
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.operators import split_general as ops_split_general
from jagged_kernels.attention.scores.bias_terms import BiasTerms
from jagged_kernels.attention.scores.dropout import keep_mask

# Blocks have 32 keys in float32 and 64 or 128 in float16: rows of one piece and of many.
ONE = Case([1] * 5, [117, 0, 1, 200, 40])
SEVERAL = Case([7] * 4, [130, 3, 0, 70], heads=4, kv_heads=2, dim=24, dim_v=40)
GROUPED = Case([3] * 3, [100, 33, 1], heads=3, kv_heads=1)
CASES = [ONE, SEVERAL, GROUPED]
MASKS = [{}, {"causal": True}, {"window": (40, 2)}, {"window": (3, -1)}, {"scale": -0.3}]
KINDS = {
    "position": Biases(position=8),
    "position before": Biases(position=10, bidirectional=False, max_distance=50),
    "one for each position": Biases(position=80, bidirectional=False, max_distance=41),
    "time": Biases(time=12),
    "alibi": Biases(alibi=True),
    "scores": Biases(scores=True),
    "position and time": Biases(position=32, time=9, max_distance=128, unit=7.0, base=1.5),
}
EVERYTHING = Biases(position=8, time=12, alibi=True, scores=True)
SPLITS = ["stream", "split"]


@pytest.mark.parametrize(("kind", "case", "split"), combined(KINDS, CASES, SPLITS))
def test_each_bias(kind, case, split):
    inputs = case.inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, KINDS[kind], ["triton"], split=split)


@pytest.mark.parametrize(("mask", "case", "split"), combined(MASKS, CASES, SPLITS))
def test_everything_at_once(mask, case, split):
    inputs = case.inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, EVERYTHING, ["triton"], split=split, **mask)


@pytest.mark.parametrize(("mask", "case", "split"), combined(MASKS, CASES, SPLITS))
def test_dropout(mask, case, split):
    inputs = case.inputs(torch.float32)
    options = {"dropout_p": 0.3, "torch_seed": 5, "split": split, **mask}
    assert_as_exact_as_pytorch(inputs, Biases(), ["triton"], **options)


def test_dropout_with_biases():
    inputs = SEVERAL.inputs(torch.float32)
    options = {"dropout_p": 0.2, "torch_seed": 7, "causal": True}
    assert_as_exact_as_pytorch(inputs, EVERYTHING, ["triton"], split="split", **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("leaf_dtype", [torch.float16, torch.float32], ids=str)
def test_float16(leaf_dtype, dropout_p):
    inputs = Case([3] * 3, [300, 1, 90], heads=4, kv_heads=2).inputs(torch.float16)
    biases = Biases(position=8, time=12, alibi=True)
    options = {"leaf_dtype": leaf_dtype, "dropout_p": dropout_p, "torch_seed": 3}
    assert_as_exact_as_pytorch(inputs, biases, ["triton"], split="split", **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_it_drops_exactly_what_others_drop(p):
    """Equal scores and one-hot values show each kept probability: bit for bit `keep_mask`."""
    lengths, queries, heads = [70, 9, 100], 3, 4
    inputs = Case([queries] * 3, lengths, heads=heads, kv_heads=2, dim_v=128).inputs(torch.float32)
    inputs.q.zero_()
    rows = torch.cat([torch.eye(128)[:m] for m in lengths]).to(DEVICE)
    inputs.v = rows[:, None].expand(-1, 2, -1).contiguous()
    torch.manual_seed(1)
    out = run("triton", inputs, dropout_p=p, split="split")["o"].view(3, queries, heads, 128)
    seed, head = drawn_seed(1), torch.arange(heads, device=DEVICE)[:, None]
    row = torch.arange(queries, device=DEVICE)[:, None, None]
    for user, m in enumerate(lengths):
        keep = keep_mask(seed, user, head, row, torch.arange(m, device=DEVICE), p)
        assert torch.equal(out[user, ..., :m] > 0, keep)
        expected = keep / ((1 - p) * m)
        torch.testing.assert_close(out[user, ..., :m], expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("split", SPLITS)
def test_with_weights_by_a_policy(split):
    """Against the specification: its formula for softmax is another."""
    inputs = SEVERAL.inputs(torch.float32)
    found = []
    calls: list[tuple[Any, Inputs]] = [("reference", inputs.double()), ("triton", inputs)]
    for backend, given in calls:
        leaves = EVERYTHING.leaves(given)
        k, v = (JaggedTensor(x, inputs.k_offsets) for x in (given.k, given.v))
        learned = [x.detach().requires_grad_() for x in (given.q, k.values, v.values)]
        q = learned[0].view(4, 7, 4, 24)
        torch.manual_seed(2)
        out = jagged_attention(
            q, k.with_values(learned[1]), v.with_values(learned[2]),
            schedule=attention_schedule(q, k, split=split, causal=True), backend=backend,
            causal=True, scores=SiLU(), bias=EVERYTHING.values(given, leaves), dropout_p=0.3,
        )  # fmt: skip
        out.flatten(0, 1).backward(given.d_o)
        found.append([out.detach(), *(x.grad for x in (*learned, *leaves.values()))])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=2e-5)


def test_a_cut_changes_nothing_but_rounding():
    inputs = SEVERAL.inputs(torch.float32)
    results = []
    for split in ("rows", *SPLITS):
        torch.manual_seed(4)
        results.append(run_biased("triton", inputs, EVERYTHING, split=split, dropout_p=0.3))
    for found in results[1:]:
        for name, result in results[0].items():
            torch.testing.assert_close(found[name], result, rtol=1e-4, atol=2e-5, msg=name)


def test_the_same_from_run_to_run():
    inputs, results = SEVERAL.inputs(torch.float32), []
    for _ in range(2):
        torch.manual_seed(4)
        results.append(run_biased("triton", inputs, EVERYTHING, split="stream", dropout_p=0.3))
    for name, result in results[0].items():
        assert torch.equal(result, results[1][name]), name


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
def test_what_is_hidden_touches_nothing(place):
    """Nor a bias' gradient."""
    results = []
    for backend in ("native", "triton"):
        inputs = Case([4, 4], [140, 70], heads=4, kv_heads=2).inputs(torch.float32)
        # The first query and the last key: causal, these do not meet.
        at = 139 if place in "kv" else 0
        getattr(inputs, place)[at] = math.nan
        options = {"causal": True, "split": "split"}
        results.append(run_biased(backend, inputs, Biases(scores=True), **options))
    for name, expected in results[0].items():
        found = results[1][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_every_element_is_written(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    inputs = ONE.inputs(torch.float32)
    for window in ((-1, -1), (5, 0), (0, 5)):
        found = run_biased("triton", inputs, EVERYTHING, window=window, split="stream")
        for name, result in found.items():
            assert not result.isnan().any(), name


def test_gradients_that_nobody_wants_cost_no_launch(monkeypatch):
    launches = watch_launches(monkeypatch)
    inputs = ONE.inputs(torch.float32)
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    slopes = torch.rand(2, device=DEVICE)
    for wanted in (False, True):
        q = inputs.q.detach().view(5, 1, 2, 16).requires_grad_()
        bias = ALiBi(slopes.clone().requires_grad_(wanted))
        launches.clear()
        # Without a schedule: rows are cut.
        out = jagged_attention(q, k, v, bias=bias, dropout_p=0.1, backend="triton")
        out.sum().backward()
        kernels = {name for name, _ in launches}
        assert {"_split_forward_kernel", "_split_backward_kernel"} <= kernels
        assert ("_bias_sums_kernel" in kernels) == wanted


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batches_without_events(lengths):
    inputs = Case([0] * len(lengths), lengths).inputs(torch.float32)
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    q = torch.randn(len(lengths), 2, 2, 16, device=DEVICE).requires_grad_()
    slopes = torch.rand(2, device=DEVICE).requires_grad_()
    out = jagged_attention(q, k, v, bias=ALiBi(slopes), backend="triton")
    out.sum().backward()
    for result in (out, q.grad, slopes.grad):
        assert result is not None
        assert (result == 0).all()


def test_compiles_whole_and_for_other_batches():
    torch._dynamo.reset()

    def attend(q, values, offsets, slopes):
        k = JaggedTensor(values, offsets)
        options = {"schedule": attention_schedule(q, k), "backend": "triton"}
        return jagged_attention(q, k, k, bias=ALiBi(slopes), **options)

    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=True)
    for number, lengths in enumerate(([40, 0, 70], [33, 3], [30, 1, 2])):
        inputs, results = Case([1] * len(lengths), lengths).inputs(torch.float32), []
        for function in (attend, compiled):
            slopes = torch.tensor([0.2, 0.1], device=DEVICE)
            leaves = [
                x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, slopes)
            ]  # fmt: skip
            q = leaves[0].view(len(lengths), 1, 2, 16)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(q, leaves[1], inputs.k_offsets, leaves[2])
            (out * out).sum().backward()
            results.append((out.detach(), *(x.grad for x in leaves)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_opcheck():
    inputs = Case([1, 1], [40, 3]).inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    schedule = attention_schedule(inputs.q.view(2, 1, 2, 16), k, split="split")
    assert schedule.partition is not None
    assert schedule.partition_t is not None
    spans = (schedule.partition.spans, schedule.partition.block)
    table = torch.randn(8, 2, device=DEVICE).requires_grad_()
    terms = BiasTerms(position=table, max_distance=20, bidirectional=True)
    rest = (
        schedule.rows, schedule.rows_t, schedule.partition_t.spans, schedule.partition_t.block,
        schedule.tile_q, schedule.tile_k, -1, -1, 0.25, schedule.q_offsets, inputs.k_offsets,
        torch.tensor(3, device=DEVICE), 0.1, *MeetTerms(), *terms,
    )  # fmt: skip
    forward = ops_split_general.attention_split_general
    torch.library.opcheck(forward, (*leaves, True, *spans, *rest))
    results = forward(*leaves, True, *spans, *rest)
    detached = [t.detach() for t in (*leaves, *results)]
    rest = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in rest)
    backward = (inputs.d_o, None, *detached, [True, False, False, False], *rest)
    torch.library.opcheck(ops_split_general.attention_split_general_backward, backward)


def test_no_batch_compiles_anything_again(monkeypatch):
    keys = record_launches(monkeypatch)
    found = []
    for queries, lengths in ((1, [117, 1]), (3, [300, 0, 1, 20]), (16, [140])):
        inputs = Case([queries] * len(lengths), lengths).inputs(torch.float32)
        run_biased("triton", inputs, Biases(position=8, time=12), split="stream")
        found.append({key for key in keys if ".split." in key[1]})
        keys.clear()
    assert found[0] == found[1] == found[2] != set()


# --- a cache --------------------------------------------------------------------------------------

CACHED = ([3, 1, 0, 2, 1, 17, 2], [3, 1, 16, 15, 117, 33, 40])


@pytest.mark.parametrize(
    ("kind", "page_size", "causal", "heads"),
    combined([*KINDS, "everything"], [1, 16, 128], [True, False], [(2, 2), (4, 2), (9, 1)]),
)
def test_cached(kind, page_size, causal, heads):
    biases = KINDS.get(kind, EVERYTHING)
    inputs = Case(*CACHED, heads=heads[0], kv_heads=heads[1]).inputs(torch.float32)
    exact, peer = (
        plain(x, biases, biases.leaves(x), causal=causal) for x in (inputs.double(), inputs)
    )
    cache, q = filled(inputs, page_size), JaggedTensor(inputs.q, inputs.q_offsets)
    with torch.no_grad():
        bias = biases.values(inputs, biases.leaves(inputs))
        for backend in ("triton", "native", "reference"):
            o, lse = cached_attention(
                q, cache, causal=causal, bias=bias, backend=backend, return_lse=True
            )
            found = {"o": o.values, "lse": lse}
            assert_no_worse(found, peer.results, exact.results, name=backend, terms=exact.terms)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_an_hstu_layer_served_step_by_step(backend):
    """With the biases that it learned, by position and by the time between two events: of a user's
    events one after another what training's one causal attention has of them all."""
    lengths = [150, 40, 0, 9]
    whole = Case(lengths, heads=4, kv_heads=4).inputs(torch.float32)
    x = [JaggedTensor(part, whole.q_offsets) for part in (whole.q, whole.k, whole.v)]
    seconds = x[0].with_values(torch.randint(0, 10**6, (199,), device=DEVICE))
    generator = torch.Generator().manual_seed(1)
    by_distance, by_time = (
        torch.randn(n, 4, generator=generator).to(DEVICE) for n in (16, 20)
    )  # fmt: skip
    position = RelativePositionBias(by_distance, max_distance=64, bidirectional=False)
    options = {"causal": True, "scale": 1.0, "scores": SiLU(divide_by=200), "backend": backend}
    bias = (position, RelativeTimeBias(by_time, seconds))
    expected = jagged_attention(*x, bias=bias, **{**options, "backend": "reference"})
    users = [part.unbind() for part in (*x, seconds)]
    nothing = {name: getattr(whole, name)[:0] for name in ("k", "v")}
    cache = filled(
        replace(whole, **nothing, k_offsets=whole.k_offsets * 0), capacity=160
    )  # fmt: skip
    done = [0] * 4
    for end in ([140, 39, 0, 0], [141, 40, 0, 8], [150, 40, 0, 9]):
        q, k, v, query_times = (
            JaggedTensor.from_list(
                [user[a:b] for user, a, b in zip(part, done, end, strict=True)]
            )
            for part in users
        )  # fmt: skip
        cache.append(k, v, backend="triton")
        times = JaggedTensor.from_list([t[:b] for t, b in zip(users[3], end, strict=True)])
        bias = (position, RelativeTimeBias(by_time, times, query_times=query_times))
        out = cached_attention(q, cache, bias=bias, **options)
        for o, user, a, b in zip(out.unbind(), expected.unbind(), done, end, strict=True):
            torch.testing.assert_close(o, user[a:b], atol=2e-6, rtol=2e-5)
        done = end


def test_what_is_wrong_with_biases_of_a_cache():
    inputs = Case([2, 1], [30, 4]).inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    table, times = torch.ones(4, 2, device=DEVICE), torch.zeros(34, device=DEVICE)
    if DEVICE == "cpu":
        for wrong in (times[:33], JaggedTensor(times[:3], inputs.q_offsets)):
            bias = RelativeTimeBias(table, wrong, query_times=times[:3])
            with pytest.raises(ValueError, match="a number for each of 34 events that are cached"):
                cached_attention(q, cache, bias=bias)
        with pytest.raises(ValueError, match="bias must have a row for each of 64 scores"):
            cached_attention(q, cache, bias=torch.zeros(60, 2))
    with pytest.raises(ValueError, match="RelativeTimeBias needs query_times"):
        cached_attention(q, cache, bias=RelativeTimeBias(table, times))
    with pytest.raises(ValueError, match="ALiBi's slopes must have H = 2 columns"):
        cached_attention(q, cache, bias=ALiBi(torch.ones(3, device=DEVICE)))
    with pytest.raises(TypeError, match="a bias is a RelativePositionBias"):
        cached_attention(q, cache, bias=3)  # pyright: ignore
    slopes = torch.ones(2, device=DEVICE).requires_grad_()
    with pytest.raises(NotImplementedError, match="cached_attention has no gradient"):
        cached_attention(q, cache, bias=ALiBi(slopes))
    with torch.no_grad():
        no_bias = cached_attention(q, cache, bias=(), backend="triton")
        assert torch.equal(no_bias.values, cached_attention(q, cache, backend="triton").values)


# --- on the device --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"window": (100, 3)}], ids=str)
def test_default_shapes_on_the_device(dtype, dim, mask):
    case = Case([8] * 6, [3000, 64, 129, 70, 0, 1], heads=4, kv_heads=2, dim=dim)
    biases = Biases(position=32, time=16, alibi=True, scores=True, max_distance=128)
    options = {"dropout_p": 0.2, "split": "stream", **mask}
    assert_as_exact_as_pytorch(case.inputs(dtype), biases, ["triton"], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "heads"), [(1, (8, 2)), (16, (4, 4)), (64, (2, 2))])
def test_biases_on_the_device(kind, queries, heads):
    shape = {"heads": heads[0], "kv_heads": heads[1], "dim": 64}
    inputs = Case([queries] * 4, [5000, 17, 0, 300], **shape).inputs(torch.bfloat16)
    assert_as_exact_as_pytorch(inputs, KINDS[kind], ["triton"], split="stream")
    first, second = (run_biased("triton", inputs, KINDS[kind], split="stream") for _ in "ab")
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    case = Case([8] * 4, [3000, 64, 1, 3], heads=4, kv_heads=2, dim=64)
    inputs = case.inputs(torch.bfloat16)
    biases = Biases(position=32, time=16, alibi=True, max_distance=128)
    leaves = biases.leaves(inputs)
    k, v = (JaggedTensor(x.requires_grad_(), inputs.k_offsets) for x in (inputs.k, inputs.v))
    q = inputs.q.view(4, 8, 4, 64).requires_grad_()
    bias = biases.values(inputs, leaves)

    def step():
        out = jagged_attention(q, k, v, bias=bias, dropout_p=0.1)
        out.backward(inputs.d_o.view_as(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("scores", [None, SiLU(divide_by=100)], ids=str)
def test_a_cache_on_the_device(page_size, scores):
    case = Case([3, 1, 0, 40], [3000, 70, 5, 400], heads=8, kv_heads=2, dim=64)
    inputs = case.inputs(torch.bfloat16)
    biases = Biases(position=32, time=16, alibi=True, max_distance=128)
    cache = filled(inputs, page_size, capacity=4096)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    with torch.no_grad():
        options = {"scores": scores, "bias": biases.values(inputs, biases.leaves(inputs))}
        found = cached_attention(q, cache, backend="triton", **options).values
        expected = cached_attention(q, cache, backend="reference", **options).values
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
