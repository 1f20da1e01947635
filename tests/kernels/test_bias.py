"""Biases in every backend: outputs and all gradients against the formulas in float64."""

from __future__ import annotations

import math

import meeting_cases
import pytest
import torch
from attention_cases import DEVICE, TILE, Case, run
from bias_cases import Biases, assert_as_exact_as_pytorch, run_biased, t5_bucket, time_bucket

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    SiLU,
    jagged_attention,
)
from jagged_kernels.attention.scores.bias_terms import position_buckets, time_bucket_starts

BACKENDS = ("native", "triton")
LENGTHS = [0, 1, TILE - 1, TILE, 0, TILE + 1, 2 * TILE + 5]
CROSS = ([3, TILE + 1, 0, 2 * TILE, 1], [TILE, 5, 4, TILE + 3, 0])
KINDS = {
    "position": Biases(position=8),
    "position before": Biases(position=10, bidirectional=False, max_distance=50),
    # Whose gradients are summed in memory: on both sides, and as HSTU has them.
    "many positions": Biases(position=300, max_distance=200),
    "one for each position": Biases(position=80, bidirectional=False, max_distance=41),
    "time": Biases(time=12),
    "many times": Biases(time=200, unit=0.001, base=1.1),
    "alibi": Biases(alibi=True),
    "scores": Biases(scores=True),
    "position and time": Biases(position=32, time=9, max_distance=128, unit=7.0, base=1.5),
}
EVERYTHING = Biases(position=8, time=12, alibi=True, scores=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize("biases", KINDS.values(), ids=KINDS)
def test_causal_self_attention_over_every_length(biases):
    inputs = Case(LENGTHS).inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, biases, causal=True)


@pytest.mark.parametrize("biases", KINDS.values(), ids=KINDS)
def test_cross_attention_with_other_lengths(biases):
    inputs = Case(*CROSS).inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, biases)


@pytest.mark.parametrize(
    "options",
    [{"window": (TILE + 3, 5)}, {"window": (7, -1)}, {"scale": -0.3, "causal": True}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(LENGTHS,), CROSS], ids=["self", "cross"])
def test_everything_at_once(options, lengths):
    inputs = Case(*lengths).inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, EVERYTHING, **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 1)])
def test_grouped_query_heads(heads, kv_heads):
    inputs = Case([TILE + 1, 2], [5, TILE + 2], heads=heads, kv_heads=kv_heads).inputs(
        torch.float32
    )
    assert_as_exact_as_pytorch(inputs, EVERYTHING)


def test_programs_that_share_a_tile():
    """float32 at head_dim 256: four to a tile, and each has sums of its own."""
    inputs = Case([5, 0, TILE + 21], heads=2, kv_heads=1, dim=256).inputs(torch.float32)
    biases = Biases(position=8, alibi=True)
    assert_as_exact_as_pytorch(inputs, biases, ["triton"], tile=None, causal=True)


@pytest.mark.parametrize("leaf_dtype", [torch.float16, torch.float32], ids=str)
def test_float16(leaf_dtype):
    inputs = Case(LENGTHS).inputs(torch.float16)
    biases = Biases(position=8, time=12, alibi=True)
    assert_as_exact_as_pytorch(inputs, biases, leaf_dtype=leaf_dtype, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [*KINDS.values(), EVERYTHING], ids=[*KINDS, "everything"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_default_tiles_in_bfloat16_on_the_device(biases, dim):
    # Many heads: a slope has one gradient a head, and PyTorch is exact on a few of them by chance.
    case = Case([0, 1, 63, 64, 65, 700, 128, 0, 17], heads=16, kv_heads=8, dim=dim)
    inputs = case.inputs(torch.bfloat16)
    assert_as_exact_as_pytorch(
        inputs, biases, ["triton"], tile=None, leaf_dtype=torch.float32, causal=True
    )


@pytest.mark.gpu
def test_long_histories_on_the_device():
    inputs = Case([700, 600], heads=16, kv_heads=8, dim=64).inputs(torch.bfloat16)
    assert_as_exact_as_pytorch(
        inputs, EVERYTHING, ["triton"], tile=None, leaf_dtype=torch.float32, causal=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_one_number_for_each_distance_on_the_device(causal):
    """As many as HSTU learns for histories of 1,024 events."""
    inputs = Case([700, 0, 5, 64, 600], heads=16, kv_heads=8, dim=64).inputs(torch.bfloat16)
    biases = Biases(position=2048, max_distance=1025, bidirectional=not causal, time=12)
    assert_as_exact_as_pytorch(
        inputs, biases, ["triton"], tile=None, leaf_dtype=torch.float32, causal=causal
    )


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_square_of_a_history():
    tokens, heads = 30_000, 2
    leaves = [
        torch.randn(tokens, heads, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    q, k, v = (JaggedTensor(t, torch.tensor([0, tokens], device="cuda")) for t in leaves)
    table, times_table = torch.zeros(2, 32, heads, device="cuda").requires_grad_().unbind()
    times = torch.arange(tokens, device="cuda")
    bias = (RelativePositionBias(table), RelativeTimeBias(times_table, times))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = jagged_attention(q, k, v, causal=True, bias=bias, dropout_p=0.1).values
    out.backward(out.detach())
    assert torch.cuda.max_memory_allocated() - before < tokens * tokens // 10


@pytest.mark.gpu
def test_other_batches_do_not_recompile():
    from jagged_kernels.attention.plain import dkv, dq, forward

    kernels = (forward._forward_kernel, dq._dq_kernel, dkv._dkv_kernel)
    biases = Biases(position=8, time=12, alibi=True)
    counts = []
    for batch in range(12):
        lengths = [37 * (batch + one) % 300 for one in range(batch % 5)]
        inputs = Case([1, *lengths], dim=32).inputs(torch.bfloat16, seed=batch)
        run_biased("triton", inputs, biases, tile=None, dropout_p=0.05 * (batch + 1))
        counts.append(sum(len(c[0]) for k in kernels for c in k.device_caches.values()))
    assert len(set(counts[1:])) == 1, counts


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("buckets", "limit"), [(32, 128), (4, 3), (10, 100), (64, 40), (32, 20), (24, 384)]
)
def test_position_buckets_are_those_of_t5(buckets, limit, bidirectional):
    distance = torch.arange(-2 * limit, 2 * limit + 1)
    expected = t5_bucket(distance, buckets, limit, bidirectional)
    ours = position_buckets(buckets, limit, bidirectional, CPU)
    assert ours.dtype == torch.int32
    assert torch.equal(ours[distance.clamp(-limit, limit) + limit].long(), expected)


def test_position_buckets_by_hand():
    """T5's own setting: 32 buckets, 128 positions, both directions."""
    ours = position_buckets(32, 128, True, CPU)[128:].tolist()
    starts = {ours.index(bucket): bucket - 16 for bucket in range(17, 32)}
    exact = {distance: distance for distance in range(1, 8)}
    assert starts == exact | {8: 8, 12: 9, 16: 10, 23: 11, 32: 12, 46: 13, 64: 14, 91: 15}


def test_as_many_position_buckets_as_distances():
    """Where each has one until their logarithms lie too close: some have none, and none is late.
    Numbers of these powers have a hundred thousand digits, of which few may be computed."""
    buckets, limit = 2**15, 2**14
    ours = position_buckets(buckets, limit, True, CPU)[limit:] - buckets // 2
    exact = buckets // 4
    distance = torch.arange(exact, limit + 1, dtype=torch.float64)
    steps = exact * torch.log(distance / exact) / math.log(limit / exact)
    assert torch.equal(ours[1:exact], torch.arange(1, exact, dtype=torch.int32))
    expected = (exact + (steps + 1e-9).floor()).clamp(max=buckets // 2 - 1)
    assert torch.equal(ours[exact:], expected.int())


def test_time_buckets_are_exact_at_their_edges():
    starts = time_bucket_starts(64, 1.0, 2.0, CPU)
    assert starts[:53].tolist() == [2**bucket - 1 for bucket in range(53)]
    for base, unit in ((1.5, 1.0), (math.exp(0.301), 60.0), (1.1, 3.0), (10.0, 0.5)):
        starts = time_bucket_starts(40, unit, base, CPU)
        elapsed = torch.arange(100_000)
        ours = torch.bucketize(elapsed, starts, right=True) - 1
        assert torch.equal(ours, time_bucket(elapsed, 40, unit, base))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(("unit", "base"), [(1.0, 2.0), (1.0, 1.1), (3600.0, 1.3), (0.01, 9.0)])
def test_every_backend_takes_the_same_time_bucket(backend, unit, base):
    """With one key, lse is the bias itself: here the number of its bucket. At all edges."""
    count = 60
    starts = time_bucket_starts(count, unit, base, CPU)
    edges = torch.cat([starts - 1, starts, starts + 1, torch.tensor([2**61])])
    edges = edges.clamp(0, 2**62 - 1)
    expected = torch.bucketize(edges, starts, right=True) - 1
    # Not from zero, and on both sides: |t_q - t_k| and nothing else.
    query_times = 1_700_000_000 + edges * (1 - 2 * (torch.arange(len(edges)) % 2))
    queries = torch.zeros(1, len(edges), 1, 16, device=DEVICE)
    key = JaggedTensor(torch.zeros(1, 1, 16, device=DEVICE), torch.tensor([0, 1], device=DEVICE))
    table = torch.arange(count, device=DEVICE, dtype=torch.float32)[:, None]
    bias = RelativeTimeBias(
        table,
        torch.tensor([1_700_000_000], device=DEVICE),
        query_times=query_times[None].to(DEVICE),
        unit=unit,
        base=base,
    )
    _, lse = jagged_attention(queries, key, key, bias=bias, backend=backend, return_lse=True)
    assert torch.equal(lse.round().long().flatten().cpu(), expected)


def test_floating_times_are_times_too():
    inputs = Case([20, 3]).inputs(torch.float32)
    table = torch.randn(9, 2, device=DEVICE)
    times = torch.randint(0, 500, (23,), device=DEVICE)
    whole = run("triton", inputs, bias=RelativeTimeBias(table, times))
    for floating in (times.float(), times.double()):
        result = run("triton", inputs, bias=RelativeTimeBias(table, floating))
        assert torch.equal(result["o"], whole["o"])
    # Halves of a unit, which integers could not tell apart.
    halves = run("triton", inputs, bias=RelativeTimeBias(table, times / 2, unit=0.5))
    assert torch.equal(halves["o"], whole["o"])
    # Seconds since 1970, of which float32 would keep one in 128.
    since = run("triton", inputs, bias=RelativeTimeBias(table, times.double() + 1.7e9))
    assert torch.equal(since["o"], whole["o"])


# --- what must hold whatever the numbers ----------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3}], ids=str)
def test_gradcheck_in_float64(backend, options):
    case = Case([3, 0, 5], [4, 2, 3], dim=2, dim_v=3, heads=2, kv_heads=1)
    inputs = case.inputs(torch.float64)
    biases = Biases(position=4, time=5, alibi=True, scores=True, max_distance=3)
    leaves = biases.leaves(inputs)

    def outputs(q, k, v, *learned):
        torch.manual_seed(1)
        jk = JaggedTensor(k, inputs.k_offsets)
        values = biases.values(inputs, dict(zip(leaves, learned, strict=True)))
        out, lse = jagged_attention(
            JaggedTensor(q, inputs.q_offsets),
            jk,
            jk.with_values(v),
            bias=values,
            backend=backend,
            return_lse=True,
            **options,
        )
        return out.values, lse.masked_fill(lse.isinf(), 0.0)

    qkv = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    assert torch.autograd.gradcheck(outputs, (*qkv, *leaves.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_reruns_are_bit_identical(backend):
    inputs = Case(LENGTHS).inputs(torch.float32)
    first, second = (run_biased(backend, inputs, EVERYTHING, causal=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_user_does_not_depend_on_neighbours():
    """Bit for bit, outputs and gradients."""
    lengths = [TILE + 2, 0, 5, 2 * TILE]
    inputs = Case(lengths, kv_heads=1).inputs(torch.float32)
    table, times_table, slopes = (torch.randn(8, 2, device=DEVICE) for _ in range(3))
    times = torch.randint(0, 9999, (inputs.q.shape[0],), device=DEVICE)

    def bias(part):
        time = RelativeTimeBias(times_table, times[part])
        return RelativePositionBias(table, max_distance=9), time, ALiBi(slopes[0])

    together = run("triton", inputs, bias=bias(slice(None)), causal=True)
    bounds = inputs.q_offsets.tolist()
    for user, length in enumerate(lengths):
        part = slice(bounds[user], bounds[user + 1])
        alone = Case([length], kv_heads=1).inputs(torch.float32)
        for name in ("q", "k", "v", "d_o", "d_lse"):
            setattr(alone, name, getattr(inputs, name)[part])
        for name, result in run("triton", alone, bias=bias(part), causal=True).items():
            assert torch.equal(result, together[name][part]), (user, name)


@pytest.mark.parametrize(
    "biases", [EVERYTHING, KINDS["one for each position"]], ids=["few", "many"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_gradient_is_written(backend, biases, monkeypatch):
    """Memory that nothing wrote reads as NaN: the slots of unused rows too."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    inputs = Case([TILE, TILE, 0, 1, 0]).inputs(torch.float32)
    for name, result in run_biased(backend, inputs, biases, window=(3, 2)).items():
        assert not result.isnan().any(), name


@pytest.mark.parametrize("options", [{}, {"scores": SiLU()}], ids=["softmax", "pointwise"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("split", [None, "stream"], ids=["rows", "split"])
@pytest.mark.parametrize("kind", ["position before", "one for each position", "position and time"])
def test_nan_reaches_the_gradients_of_what_was_added_to_it(kind, split, causal, options):
    """And no others: keys are walked again, and then sums begin anew."""
    case = Case([3, 3], [2 * TILE + 4, 7]) if split else Case([2 * TILE + 4, 3])
    inputs, biases = case.inputs(torch.float32), KINDS[kind]
    inputs.k[2 * TILE + 3] = math.nan

    def gradients(backend: str) -> dict[str, torch.Tensor]:
        leaves = biases.leaves(inputs)
        bias = biases.values(inputs, leaves)
        meeting_cases.run(backend, inputs, split=split, bias=bias, causal=causal, **options)
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert found.keys() == leaves.keys()
        return found

    expected = gradients("reference")
    for backend in BACKENDS:
        for name, gradient in gradients(backend).items():
            torch.testing.assert_close(gradient, expected[name], equal_nan=True, msg=name)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("shift", [-1e4, 300.0, 1e4])
def test_a_bias_that_is_the_same_everywhere_changes_nothing_but_lse(backend, shift):
    """Nor does it overflow, where a tile or bucket has places without a query."""
    inputs = Case([TILE + 2, 3, 1]).inputs(torch.float32)
    table = torch.full((8, 2), shift, device=DEVICE, requires_grad=True)
    biased = run(backend, inputs, bias=RelativePositionBias(table, max_distance=9))
    without = run(backend, inputs)
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(biased[name], without[name], rtol=0, atol=4e-3)
    torch.testing.assert_close(biased["lse"], without["lse"] + shift, rtol=1e-6, atol=1e-4)
    assert table.grad is not None
    assert torch.isfinite(table.grad).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_dense_queries(backend):
    """Query times [B, N] are those of jagged queries of constant length."""
    inputs = Case([3, 3], [4, TILE + 3]).inputs(torch.float32)
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    v = k.with_values(inputs.v)
    table = torch.randn(10, 2, device=DEVICE)
    times = torch.arange(inputs.k.shape[0], device=DEVICE)
    query_times = torch.arange(6, device=DEVICE) * 10
    jagged_times = JaggedTensor(query_times, inputs.q_offsets)
    bias = RelativeTimeBias(table, k.with_values(times), query_times=jagged_times)
    jagged = run(backend, inputs, tile=None, bias=bias)["o"]
    bias = RelativeTimeBias(table, times, query_times=query_times.view(2, 3))
    dense = jagged_attention(inputs.q.view(2, 3, 2, 16), k, v, bias=bias, backend=backend)
    torch.testing.assert_close(dense.flatten(0, 1), jagged)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("lengths", [([],), ([0, 0],), ([2, 1], [0, 0])], ids=str)
def test_nothing_to_see(backend, lengths):
    results = run_biased(backend, Case(*lengths).inputs(torch.float32), EVERYTHING)
    for name in ("o", "dq", "d_position", "d_time", "d_alibi"):
        assert (results[name] == 0).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_learns_gets_a_gradient(backend):
    inputs = Case([TILE + 1]).inputs(torch.float32)
    leaves = EVERYTHING.leaves(inputs)
    expected = run_biased(backend, inputs, EVERYTHING)
    for learns in leaves:
        chosen = {n: t.detach().requires_grad_(n == learns) for n, t in leaves.items()}
        run(backend, inputs, bias=EVERYTHING.values(inputs, chosen))
        for name, leaf in chosen.items():
            assert (leaf.grad is not None) == (name == learns)
        torch.testing.assert_close(chosen[learns].grad, expected[f"d_{learns}"], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads_first", [False, True])
def test_biases_in_any_layout(backend, heads_first):
    """Tables and scores of heads first in memory, times that are a column of a table."""
    inputs, results = Case([TILE + 1, 0, 2]).inputs(torch.float32), []
    tokens, rows = TILE + 3, (TILE + 1) ** 2 + 4
    generator = torch.Generator().manual_seed(2)
    numbers = [torch.randn(n, 2, generator=generator).to(DEVICE) for n in (8, 6, rows, 1)]
    seconds = torch.randint(90, (tokens, 2), generator=generator).to(DEVICE)
    for one in (backend, "reference"):
        given = [x.t().contiguous().t() if heads_first else x for x in numbers]
        leaves = position, time, scores, slopes = [x.detach().requires_grad_() for x in given]
        times = [seconds[:, 1], seconds[:, 0]]
        if not heads_first:
            times = [x.contiguous() for x in times]
        bias = (
            RelativePositionBias(position, max_distance=20),
            RelativeTimeBias(time, times[0], query_times=times[1]),
            scores,
            ALiBi(torch.stack([slopes[0], -slopes[0]], 1).flatten()[::2]),
        )
        found = run(one, inputs, causal=True, bias=bias)
        results.append([*found.values(), *[x.grad for x in leaves]])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_learns_alone(backend):
    """Of what nobody else wants a gradient of, nor the lse."""
    inputs = Case([TILE + 1]).inputs(torch.float32)
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    found = []
    for one in (backend, "reference"):
        slopes = torch.tensor([0.1, 0.2], device=DEVICE, requires_grad=True)
        out = jagged_attention(x, x, x, bias=ALiBi(slopes), backend=one)
        found += torch.autograd.grad(out.values, slopes, inputs.d_o)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
