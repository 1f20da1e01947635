"""Users of a few tokens with biases and dropout, who have kernels of their own as without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, RESULTS, Case, Inputs, run
from bias_cases import Biases, assert_as_exact_as_pytorch, drawn_seed, run_biased
from combinations import combined
from launch_keys import batches, record_launches, watch_launches
from torch import Tensor

from jagged_kernels import JaggedTensor, Sigmoid, SiLU, jagged_attention
from jagged_kernels.attention.scores.dropout import keep_mask
from jagged_kernels.schedule.policy.plain import short_warps
from jagged_kernels.schedule.row_layout import SHORT_USER

LENGTHS = [3, 0, SHORT_USER, SHORT_USER + 1, 16, 17, 1, 0]
MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (5, 2)}, {"window": (0, -1)}]
KINDS = {
    "position": Biases(position=8),
    "position before": Biases(position=10, bidirectional=False, max_distance=50),
    "one for each position": Biases(position=80, bidirectional=False, max_distance=41),
    "time": Biases(time=12),
    "alibi": Biases(alibi=True),
    "scores": Biases(scores=True),
    "none": Biases(),
}
LEARNED = Biases(position=8, time=12, alibi=True)
EVERYTHING = Biases(position=8, time=12, alibi=True, scores=True)
# `KINDS`, some two at a time: each stands beside each head_dim in fewer kernels, of which a test
# compiles five, long users' too, in half a minute.
AT_SIZE = {
    "position, alibi": Biases(position=8, alibi=True),
    "position before, time": Biases(position=10, bidirectional=False, max_distance=50, time=12),
    "scores": Biases(scores=True),
    "everything": EVERYTHING,
    "none": Biases(),
}
# Queries' heads and keys', and head_dims of k and v.
SHAPES = [(2, 2, 16, 16), (4, 2, 24, 40), (3, 1, 64, 16)]
DIMS = [16, 32, 64, 80, 128, 256]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHORT_KERNELS = {"_short_forward_kernel", "_short_backward_kernel"}


def inputs_of(lengths: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    """Queries and keys with the same offsets: self-attention."""
    return Case(lengths, **options).inputs(dtype).with_shared_offsets()


@pytest.fixture
def kernels(monkeypatch):
    """Whose launches are of users of a few tokens, at the end of a test."""
    keys = watch_launches(monkeypatch)
    yield
    assert {name for name, *_ in keys} >= SHORT_KERNELS


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kind", "mask", "shape", "dropout_p"), combined(KINDS, MASKS, SHAPES, [0.0, 0.3], whole=False)
)
def test_exact(kind, mask, shape, dropout_p):
    heads, kv_heads, dim, dim_v = shape
    inputs = inputs_of(LENGTHS, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
    options = {"dropout_p": dropout_p, "torch_seed": 5, **mask}
    assert_as_exact_as_pytorch(inputs, KINDS[kind], ["triton"], tile=None, **options)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mask", [{}, {"causal": True, "scale": -0.3}], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_everything_at_once(mask, dropout_p):
    inputs = inputs_of(LENGTHS, heads=4, kv_heads=2, dim=24, dim_v=40)
    options = {"dropout_p": dropout_p, "torch_seed": 6, **mask}
    assert_as_exact_as_pytorch(inputs, EVERYTHING, ["triton"], tile=None, **options)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("leaf_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_float16(leaf_dtype, dropout_p):
    inputs = inputs_of(LENGTHS, torch.float16, heads=2, kv_heads=1)
    assert_as_exact_as_pytorch(
        inputs, LEARNED, ["triton"], tile=None, leaf_dtype=leaf_dtype, dropout_p=dropout_p,
        torch_seed=8, causal=True,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kind", "dim", "dtype", "mask", "dropout_p"),
    combined(AT_SIZE, DIMS, DTYPES, MASKS, [0.0, 0.2], whole=False),
)
def test_at_size_on_the_device(kind, dim, dtype, mask, dropout_p):
    # Many heads: a slope has one gradient a head, and PyTorch is exact on a few of them by chance.
    lengths = [*range(SHORT_USER + 3), 70, 200, 0, 1, 65, 31] * 3
    inputs = inputs_of(lengths, dtype, heads=16, kv_heads=8, dim=dim)
    options = {"dropout_p": dropout_p, "torch_seed": 9, **mask}
    assert_as_exact_as_pytorch(
        inputs, AT_SIZE[kind], ["triton"], tile=None, leaf_dtype=torch.float32, **options
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("scores", "mask", "dropout_p"),
    combined([SiLU(), SiLU(divide_by=50), Sigmoid()], MASKS, [0.0, 0.4], whole=False),
)
def test_pointwise_scores(scores, mask, dropout_p):
    inputs = inputs_of(LENGTHS, heads=4, kv_heads=2, dim=24, dim_v=40)
    exact, found = (
        pointwise_results(which, given, scores=scores, dropout_p=dropout_p, **mask)
        for which, given in (("reference", inputs.double()), ("triton", inputs))
    )
    for name, result in exact.items():
        torch.testing.assert_close(found[name].double(), result, rtol=1e-4, atol=2e-5, msg=name)


def pointwise_results(backend: Any, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o, and the gradients of q, k, v and of what `EVERYTHING` learns."""
    torch.manual_seed(5)
    learned = EVERYTHING.leaves(inputs)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in "qkv"} | learned
    q, k, v = (JaggedTensor(leaves[name], inputs.q_offsets) for name in "qkv")
    k, v = q.with_values(k.values), q.with_values(v.values)
    bias = EVERYTHING.values(inputs, learned)
    out = jagged_attention(q, k, v, bias=bias, backend=backend, **options).values
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.d_o)
    return {"o": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_dropout_is_that_of_other_kernels(mask):
    """Equal logits and one-hot values show each kept probability: bit for bit `keep_mask`."""
    lengths, heads, p = [5, 0, SHORT_USER, 3, 17], 2, 0.4
    inputs = inputs_of(lengths, dim_v=SHORT_USER)
    inputs.q.zero_()
    rows = torch.cat([torch.eye(SHORT_USER)[:n] for n in lengths]).to(DEVICE)
    inputs.v = rows[:, None].expand(-1, heads, -1).contiguous()
    results = []
    for tile in (None, SHORT_USER):  # tiles so small are the plain kernels'
        torch.manual_seed(3)
        results.append(run("triton", inputs, tile=tile, dropout_p=p, **mask)["o"])
    out, plain = results
    torch.testing.assert_close(out, plain, rtol=1e-6, atol=0)
    seed, bounds = drawn_seed(3), inputs.q_offsets.tolist()
    head = torch.arange(heads, device=DEVICE)[:, None]
    for user, n in enumerate(lengths):
        token = torch.arange(n, device=DEVICE)
        keep = keep_mask(seed, user, head, token[:, None, None], token, p)
        if mask:
            keep &= token <= token[:, None, None]
        shown = out[bounds[user] : bounds[user] + n, :, :n]
        assert torch.equal(shown > 0, keep)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_a_bias_may_hide_keys(mask):
    """By -inf, of one query all of them; as the plain kernels have it."""
    inputs, results = inputs_of([5, SHORT_USER, 20]), []
    inputs.d_lse.zero_()
    for tile in (None, SHORT_USER):
        bias = EVERYTHING.leaves(inputs)["scores"].detach()
        bias[::3] = -math.inf
        bias[25 + 7 * SHORT_USER : 25 + 8 * SHORT_USER] = -math.inf
        bias.requires_grad_()
        found = run("triton", inputs, tile=tile, bias=bias, **mask)
        results.append({**found, "d_bias": bias.grad})
    short, plain = results
    query = 5 + 7
    assert (short["lse"][query] == -math.inf).all()
    assert not short["o"][query].any()
    assert not short["dq"][query].any()
    for name, result in plain.items():
        torch.testing.assert_close(short[name], result, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("place", "value"),
    [*((place, math.nan) for place in ("q", "k", "v", "d_o")), ("k", math.inf), ("d_o", math.inf)],
)
def test_what_is_hidden_is_in_no_gradient_of_a_bias(place, value):
    """A token meets the keys before it alone; a bucket of distances has what stands in it."""
    inputs = inputs_of([9, 20])
    biases = Biases(position=40, max_distance=100, scores=True)
    clean = run_biased("triton", inputs, biases, tile=None, window=(4, 0))
    getattr(inputs, place)[0, 1, 3] = value
    found = run_biased("triton", inputs, biases, tile=None, window=(4, 0))
    assert not found["d_position"][:, 1].isfinite().all()
    torch.testing.assert_close(found["d_position"][:, 0], clean["d_position"][:, 0])
    # Distances that nobody has, and those that only tokens further on have of themselves.
    far = clean["d_position"][:, 1] == 0
    assert far.sum() > 20
    assert (found["d_position"][far, 1] == 0).all()
    # The first token is seen by five, the other user's are not.
    same = torch.ones_like(clean["d_scores"], dtype=torch.bool)
    same[:45, 1] = False
    torch.testing.assert_close(found["d_scores"][same], clean["d_scores"][same])


def test_every_gradient_is_written(monkeypatch):
    """Memory that nothing wrote reads as NaN: the slots of users who are empty or long, too."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    inputs = inputs_of([0, SHORT_USER + 1, 3, 0, 17, 0])
    expected = run_biased("triton", inputs, EVERYTHING, tile=None, window=(3, 2))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    for name, result in run_biased("triton", inputs, EVERYTHING, tile=None, window=(3, 2)).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("lengths", [[0, 0], []], ids=str)
def test_no_tokens(lengths):
    results = run_biased("triton", inputs_of(lengths), EVERYTHING, tile=None, dropout_p=0.5)
    for name in ("d_position", "d_time", "d_alibi"):
        assert (results[name] == 0).all(), name


def test_a_user_does_not_depend_on_neighbours():
    """Bit for bit, outputs and gradients; of dropout's mask that of the first user."""
    inputs = inputs_of([9, *LENGTHS], kv_heads=1)
    leaves = LEARNED.leaves(inputs)
    times, _ = LEARNED.times(inputs)

    def results(given: Inputs, of_tokens: slice) -> dict[str, Tensor]:
        torch.manual_seed(4)
        own = times[of_tokens]
        biases = Biases(position=8, time=12, alibi=True)
        object.__setattr__(biases, "times", lambda _: (own, own))
        bias = biases.values(given, leaves)
        return run("triton", given, tile=None, bias=bias, dropout_p=0.3, causal=True)

    together, alone, part = results(inputs, slice(None)), inputs_of([9], kv_heads=1), slice(0, 9)
    for name in ("q", "k", "v", "d_o", "d_lse"):
        setattr(alone, name, getattr(inputs, name)[part])
    for name, result in results(alone, part).items():
        assert torch.equal(result, together[name][part]), name


@pytest.mark.parametrize("learns", ["position", "time", "alibi", "scores", ""])
def test_only_what_learns_gets_a_gradient(learns):
    inputs = inputs_of(LENGTHS)
    expected = run_biased("triton", inputs, EVERYTHING, tile=None)
    leaves = EVERYTHING.leaves(inputs)
    chosen = {n: t.detach().requires_grad_(n == learns) for n, t in leaves.items()}
    found = run("triton", inputs, tile=None, bias=EVERYTHING.values(inputs, chosen))
    for name in RESULTS:
        assert torch.equal(found[name], expected[name]), name
    for name, leaf in chosen.items():
        assert (leaf.grad is not None) == (name == learns)
        assert leaf.grad is None or torch.equal(leaf.grad, expected[f"d_{name}"]), name


def test_the_same_from_run_to_run():
    inputs, results = inputs_of(LENGTHS * 3), []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(run_biased("triton", inputs, EVERYTHING, tile=None, dropout_p=0.3))
    for name, result in results[0].items():
        assert torch.equal(result, results[1][name]), name


@pytest.mark.skipif(DEVICE == "cuda", reason="what is recorded is not run")
def test_no_batch_compiles_anything_again(monkeypatch):
    keys, seen = record_launches(monkeypatch), set[object]()
    # Numbers of buckets that align no slot but the first.
    biases = Biases(position=3, alibi=True, bidirectional=False)
    for number, lengths in enumerate([[5, 0, 1], [40, 1], *(x for x in batches(60) if sum(x))]):
        inputs = inputs_of([min(length, 2 * SHORT_USER) for length in lengths], heads=1, kv_heads=1)
        run_biased("triton", inputs, biases, tile=None, dropout_p=0.3)
        new = {key for key in keys if "short" in key[1]} - seen
        assert number == 0 or not new, f"{lengths} compiled {new}"
        seen |= new
        keys.clear()
    assert len(seen) == 2


def test_one_warp_has_no_room_for_biases_beside_wide_rows():
    assert [short_warps(size, biased=False) for size in (64, 128, 256, 512)] == [1, 1, 2, 4]
    assert [short_warps(size, biased=True) for size in (64, 128, 256, 512)] == [1, 2, 2, 4]
