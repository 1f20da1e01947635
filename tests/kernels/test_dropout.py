"""Dropout: one mask in every backend, which depends on where a probability stands and no more."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DEVICE, RESULTS, TILE, Case, run
from bias_cases import Biases, assert_as_exact_as_pytorch, drawn_seed

from jagged_kernels import JaggedTensor, jagged_attention, lengths_to_offsets
from jagged_kernels.attention.scores.dropout import drop_below, keep_mask

BACKENDS = ("native", "triton")
LENGTHS = [0, 1, TILE - 1, TILE, 0, TILE + 1, 2 * TILE + 5]
CROSS = ([3, TILE + 1, 0, 2 * TILE, 1], [TILE, 5, 4, TILE + 3, 0])
NO_BIAS = Biases()
PYTHON_MASK32 = 0xFFFFFFFF


def murmur3_finaliser(x: int) -> int:
    """MurmurHash3's fmix32 (Appleby), of a number one golden ratio further on."""
    x = (x + 0x9E3779B9) & PYTHON_MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & PYTHON_MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & PYTHON_MASK32
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**40 + 5])
def test_the_mask_is_a_chain_of_hashes(seed):
    keep = keep_mask(
        torch.tensor(seed), 7, 3, torch.arange(40)[:, None], torch.arange(30), 0.3
    ).tolist()
    for query in range(40):
        for key in range(30):
            state = murmur3_finaliser(seed & PYTHON_MASK32)
            for coordinate in (7, 3, query, key):
                state = murmur3_finaliser(state ^ coordinate)
            assert keep[query][key] == (state / 2**32 >= round(0.3 * 2**24) / 2**24)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("torch_seed", [0, 1, 99])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_every_backend_drops_exactly_the_same(backend, torch_seed, p):
    """Equal logits and one-hot values show each kept probability: bit for bit `keep_mask`."""
    q_lengths, k_lengths, heads = [3, TILE + 1, 0, 5], [TILE + 3, 9, 4, 1], 2
    most = max(k_lengths)
    inputs = Case(q_lengths, k_lengths, dim_v=most).inputs(torch.float32)
    inputs.q.zero_()
    rows = torch.cat([torch.eye(most)[:m] for m in k_lengths]).to(DEVICE)
    inputs.v = rows[:, None].expand(-1, heads, -1).contiguous()
    torch.manual_seed(torch_seed)
    out = run(backend, inputs, dropout_p=p)["o"]
    seed = drawn_seed(torch_seed)
    bounds = inputs.q_offsets.tolist()
    head = torch.arange(heads, device=DEVICE)[:, None]
    for user, (n, m) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        row = torch.arange(n, device=DEVICE)[:, None, None]
        keep = keep_mask(seed, user, head, row, torch.arange(m, device=DEVICE), p)
        shown = out[bounds[user] : bounds[user] + n]
        assert torch.equal(shown[..., :m] > 0, keep)
        expected = keep / ((1 - p) * m)
        torch.testing.assert_close(shown[..., :m], expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (TILE + 3, 5)}], ids=str)
@pytest.mark.parametrize("lengths", [(LENGTHS,), CROSS], ids=["self", "cross"])
def test_outputs_and_gradients(lengths, options):
    inputs = Case(*lengths).inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, NO_BIAS, dropout_p=0.3, torch_seed=5, **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 1)])
def test_grouped_query_heads(heads, kv_heads):
    case = Case([TILE + 1, 2, 2 * TILE], [5, TILE + 2, 9], heads=heads, kv_heads=kv_heads)
    assert_as_exact_as_pytorch(case.inputs(torch.float32), NO_BIAS, dropout_p=0.4, torch_seed=6)


def test_with_biases():
    biases = Biases(position=8, time=12, alibi=True, scores=True)
    inputs = Case(LENGTHS).inputs(torch.float32)
    assert_as_exact_as_pytorch(inputs, biases, dropout_p=0.2, torch_seed=7, causal=True)


def test_float16():
    inputs = Case(LENGTHS).inputs(torch.float16)
    assert_as_exact_as_pytorch(inputs, NO_BIAS, dropout_p=0.2, torch_seed=8)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_default_tiles_in_bfloat16_on_the_device(dim):
    case = Case([0, 1, 63, 64, 65, 700, 128, 0, 17], heads=4, kv_heads=2, dim=dim)
    assert_as_exact_as_pytorch(
        case.inputs(torch.bfloat16), NO_BIAS, ["triton"], tile=None, dropout_p=0.2, causal=True
    )


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    inputs = Case([0, 700, 64, 3], heads=4, kv_heads=2, dim=64).inputs(torch.bfloat16)
    biases = Biases(position=32, time=16, alibi=True, max_distance=128)
    leaves = biases.leaves(inputs)
    q, k, v = (t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    jq, jk, jv = (JaggedTensor(t, inputs.q_offsets) for t in (q, k, v))

    def step():
        bias = biases.values(inputs, leaves)
        out = jagged_attention(jq, jk, jv, causal=True, bias=bias, dropout_p=0.1)
        out.values.backward(inputs.d_o)

    biases.times(inputs)
    step()
    times = biases.times(inputs)
    object.__setattr__(biases, "times", lambda _: times)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_user_keeps_its_mask_whatever_its_neighbours_are(backend):
    """The mask goes by the user's index, not by where its tokens lie or how they are packed."""

    def of_user_1(first, last, tile):
        inputs = Case([first, TILE + 3, last]).inputs(torch.float32)
        part = slice(first, first + TILE + 3)
        generator = torch.Generator().manual_seed(3)
        for name in ("q", "k", "v", "d_o"):
            own = torch.randn(inputs.q[part].shape, generator=generator)
            getattr(inputs, name)[part] = own.to(DEVICE)
        inputs.d_lse.zero_()
        torch.manual_seed(4)
        results = run(backend, inputs, tile=tile, dropout_p=0.4)
        return {name: results[name][part] for name in RESULTS}

    alone, between, tiled = of_user_1(0, 0, TILE), of_user_1(9, 2 * TILE, TILE), of_user_1(5, 1, 32)
    for name in RESULTS:
        torch.testing.assert_close(between[name], alone[name])
        torch.testing.assert_close(tiled[name], alone[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides(backend):
    inputs = Case([20, 0, 3]).inputs(torch.float32)

    def results(torch_seed):
        torch.manual_seed(torch_seed)
        return run(backend, inputs, dropout_p=0.3)

    first, again, other = results(5), results(5), results(6)
    assert all(torch.equal(first[name], again[name]) for name in RESULTS)
    assert not torch.allclose(first["o"], other["o"])
    assert torch.equal(first["lse"], other["lse"])


def test_the_mean_over_masks_is_the_output_without_dropout():
    """Of 20 seeds, and of 30 users each with the same tokens and a mask of its own."""
    inputs = Case([24], heads=1, kv_heads=1).inputs(torch.float32)
    exact = run("native", inputs)["o"]
    offsets = lengths_to_offsets(torch.tensor([24] * 30)).to(DEVICE)
    q, k, v = (JaggedTensor(getattr(inputs, x).repeat(30, 1, 1), offsets) for x in "qkv")
    outputs = []
    for seed in range(20):
        torch.manual_seed(seed)
        out = jagged_attention(q, k, v, dropout_p=0.4, backend="native").values
        outputs += out.unflatten(0, (30, 24))
    drawn = torch.stack(outputs)
    standard_error = drawn.std(0) / math.sqrt(len(drawn))
    # 384 numbers: the largest of so many normal deviates is about 3, and passes 5 once in 4,000.
    assert ((drawn.mean(0) - exact).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9])
def test_the_stated_share_is_dropped(p):
    axis = torch.arange(400)
    kept = keep_mask(torch.tensor(11), 2, 1, axis[:, None], axis, p).double()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    for dim in (0, 1):  # rows and columns are no more alike than chance
        assert kept.mean(dim).std() < 1.3 * math.sqrt(p * (1 - p) / 400)
    neighbour = keep_mask(torch.tensor(11), 3, 1, axis[:, None], axis, p).double()
    together = (kept * neighbour).mean() - kept.mean() * neighbour.mean()
    assert abs(together) < 5 * p * (1 - p) / math.sqrt(kept.numel())


def test_the_threshold_is_exact_in_float32():
    """The kernel compares it as one."""
    for p in (1e-9, 0.1, 1 / 3, 0.5, 0.999999, 1 - 2**-30):
        assert float(torch.tensor(drop_below(p), dtype=torch.float32)) == drop_below(p)
        assert abs(drop_below(p) / 2**24 - p) <= 2**-25
