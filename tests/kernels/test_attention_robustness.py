"""What must not change a result: neighbours, layout, offsets' dtype, reruns, awkward numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import (
    DEVICE,
    RESULTS,
    TILE,
    Case,
    assert_as_exact_as_sdpa,
    queries_of,
    run,
)

from jagged_kernels import ALiBi, JaggedTensor, RelativePositionBias, jagged_attention
from jagged_kernels.device.arithmetic import dot_precision

BACKENDS = ("native", "triton")
LENGTHS = [TILE + 2, 0, 5, 2 * TILE, 1]


@pytest.fixture
def inputs():
    return Case(LENGTHS, heads=2, kv_heads=1).inputs(torch.float32)


@pytest.fixture
def poisoned_allocations(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (3, 2)}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_is_written(backend, mask, inputs, poisoned_allocations):
    for name, result in run(backend, inputs, **mask).items():
        assert not result.isnan().any(), name


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_a_user_does_not_depend_on_neighbours(inputs, mask):
    """Bit for bit, outputs and gradients."""
    together = run("triton", inputs, **mask)
    bounds = inputs.q_offsets.tolist()
    for user in range(len(LENGTHS)):
        part = slice(bounds[user], bounds[user + 1])
        alone = Case([LENGTHS[user]], heads=2, kv_heads=1).inputs(torch.float32)
        for name in ("q", "k", "v", "d_o", "d_lse"):
            setattr(alone, name, getattr(inputs, name)[part])
        for name, result in run("triton", alone, **mask).items():
            assert torch.equal(result, together[name][part]), (user, name)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_nan_stays_with_its_user(backend, inputs):
    bounds = inputs.q_offsets.tolist()
    clean = run(backend, inputs)
    sick = slice(bounds[2], bounds[3])
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor[sick] = math.nan
    for name, result in run(backend, inputs).items():
        assert result[sick].isnan().all(), name
        for healthy in (slice(0, sick.start), slice(sick.stop, None)):
            assert torch.equal(result[healthy], clean[name][healthy]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_reruns_are_bit_identical(backend, inputs):
    first, second = run(backend, inputs, causal=True), run(backend, inputs, causal=True)
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_of_either_dtype(backend, inputs):
    wide = run(backend, inputs)
    inputs.q_offsets, inputs.k_offsets = inputs.q_offsets.int(), inputs.k_offsets.int()
    narrow = run(backend, inputs)
    assert all(torch.equal(wide[name], narrow[name]) for name in RESULTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "dropout", "flat bias"])
def test_offsets_with_gaps_in_memory(backend, kind, inputs):
    options: dict[str, Any] = {"dropout_p": 0.4} if kind == "dropout" else {}
    if kind == "flat bias":
        scores = int((inputs.q_offsets.diff() ** 2).sum())
        options = {"bias": torch.randn(scores, 2, device=DEVICE)}
    results = []
    for step in (1, 2):
        inputs.q_offsets = inputs.q_offsets.repeat_interleave(step)[::step]
        inputs.k_offsets = inputs.k_offsets.repeat_interleave(step)[::step]
        torch.manual_seed(5)
        results.append(run(backend, inputs, **options))
    assert not inputs.q_offsets.is_contiguous()
    for name in RESULTS:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("kind", ["self", "dense queries"])
@pytest.mark.parametrize(
    "window",
    [(-1, 2**31 - 1), (0, 2**31 - 1), (2**31 - 1, 2**31 - 1), (2**31 - 1, -1), (2**29 - 1, 2**70)],
    ids=str,
)
def test_a_side_wider_than_any_history_is_no_limit(backend, kind, window):
    results = []
    left, right = (-1 if side > 100 else side for side in window)
    for sides in (window, (left, right)):
        inputs = Case([3, 3], [TILE + 2, 2]).inputs(torch.float32)
        if kind == "self":
            inputs = Case([TILE + 2, 5]).inputs(torch.float32)
            results.append(run(backend, inputs, window=sides)["o"])
        else:
            k = JaggedTensor(inputs.k, inputs.k_offsets)
            dense, v = inputs.q.view(2, 3, 2, 16), k.with_values(inputs.v)
            results.append(jagged_attention(dense, k, v, window=sides, backend=backend))
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "bias", "dense queries"])
def test_a_gradient_of_nan_for_an_lse_that_is_constant(backend, kind):
    """The first queries see no key, beside others that do: nothing depends on their lse."""
    inputs = Case([6, 6], [4, 0]).inputs(torch.float32)

    def gradients(backend):
        leaves = [t.detach().clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        q, k = JaggedTensor(leaves[0], inputs.q_offsets), JaggedTensor(leaves[1], inputs.k_offsets)
        bias = None
        if kind == "bias":
            bias = ALiBi(torch.tensor([0.5, 0.25], device=DEVICE, requires_grad=True))
            leaves.append(bias.slopes)
        elif kind == "dense queries":
            q = leaves[0].view(2, 6, 2, 16)
        v = k.with_values(leaves[2])
        options: Any = {"causal": True, "bias": bias, "backend": backend, "return_lse": True}
        out, lse = jagged_attention(q, k, v, **options)
        o = out.values if isinstance(out, JaggedTensor) else out
        assert lse.isinf().any()
        z = torch.where(lse.isinf(), 0.0, lse.square())
        (o.sum() + z.sum()).backward()
        return [leaf.grad for leaf in leaves]

    for ours, exact in zip(gradients(backend), gradients("reference"), strict=True):
        assert exact is not None
        assert exact.isfinite().all()
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("layout", ["packed qkv", "heads first", "strided dims", "transposed grad"])
def test_inputs_of_any_layout(backend, layout):
    inputs = Case(LENGTHS).inputs(torch.float32)
    contiguous = run(backend, inputs)
    if layout == "packed qkv":
        packed = torch.stack([inputs.q, inputs.k, inputs.v], dim=1)
        inputs.q, inputs.k, inputs.v = packed.unbind(1)
    elif layout == "heads first":
        for name in "qkv":
            heads_first = getattr(inputs, name).transpose(0, 1).contiguous()
            setattr(inputs, name, heads_first.transpose(0, 1))
    elif layout == "strided dims":
        for name in "qkv":
            setattr(inputs, name, getattr(inputs, name).repeat_interleave(2, -1)[..., ::2])
    else:
        inputs.d_o = inputs.d_o.transpose(0, 1).contiguous().transpose(0, 1)
    assert layout == "transposed grad" or not inputs.q.is_contiguous()
    for name, result in run(backend, inputs).items():
        torch.testing.assert_close(result, contiguous[name])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_equal_logits_average_the_values(backend, inputs):
    inputs.q.zero_()
    out = run(backend, inputs)["o"]
    bounds = inputs.q_offsets.tolist()
    for user, length in enumerate(LENGTHS):
        part = slice(bounds[user], bounds[user + 1])
        expected = inputs.v[part].mean(0).expand(length, 2, -1)
        torch.testing.assert_close(out[part], expected, msg=f"user {user}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [None, "stream"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_scale_of_zero_averages_what_is_seen(backend, split, dtype):
    """What is hidden stays so."""
    inputs = Case([3, 3], [5, TILE + 3]).inputs(dtype)
    found = run(backend, inputs, split=split, causal=True, scale=0.0)
    expected = run("reference", inputs.double(), split=split, causal=True, scale=0.0)
    for name, result in found.items():
        torch.testing.assert_close(result.double(), expected[name], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("logit", [-1e4, 1e4, -(2.0**100)])
def test_enormous_equal_logits(backend, logit, inputs):
    """A softmax does not change when all its logits move: no overflow, no NaN, also backward.

    Sums of so many equal numbers of these are exact, so that logits are equal in whatever order a
    processor's library adds up the products of each.
    """
    inputs.q.fill_(1.0)
    inputs.k.fill_(logit / 4)
    shifted = run(backend, inputs)
    assert torch.isfinite(shifted["lse"]).all()
    inputs.k.zero_()
    torch.testing.assert_close(shifted["o"], run(backend, inputs)["o"])
    for name in ("dq", "dk", "dv"):
        assert torch.isfinite(shifted[name]).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [100.0, 6e4])
def test_enormous_equal_logits_in_half_precision(backend, number):
    """dQ and dK are left out: true ones pass the largest half."""
    inputs = Case([5, 0, TILE + 3]).inputs(torch.float16)
    inputs.q.fill_(number)
    inputs.k.fill_(number)
    result = run(backend, inputs)
    for name in ("o", "dv"):
        assert torch.isfinite(result[name]).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_dominant_key(backend, inputs):
    """One logit 1e4 above the rest: the answer is its value, all gradients are finite."""
    inputs.q.fill_(1.0)
    inputs.k.fill_(-2500.0)
    starts = inputs.k_offsets[:-1][inputs.k_offsets.diff() > 0]
    inputs.k[starts] = 0.0
    result = run(backend, inputs)
    first = torch.repeat_interleave(starts, inputs.q_offsets.diff()[inputs.q_offsets.diff() > 0])
    torch.testing.assert_close(result["o"], inputs.v[first].expand_as(result["o"]))
    assert all(torch.isfinite(result[name]).all() for name in RESULTS)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_batches_without_events(backend, lengths):
    for name, result in run(backend, Case(lengths).inputs(torch.float32)).items():
        assert result.shape[0] == 0, name


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("learned", ["q", "k", "v", "table"])
def test_of_no_users_everything_has_a_gradient(learned, backend):
    leaves = {name: torch.zeros(0, 2, 16, device=DEVICE) for name in "qkv"}
    leaves["table"] = torch.zeros(8, 2, device=DEVICE)
    leaf = leaves[learned].requires_grad_()
    x = JaggedTensor(leaves["q"], torch.tensor([0], device=DEVICE))
    k, v = (x.with_values(leaves[name]) for name in "kv")
    bias = RelativePositionBias(leaves["table"])
    jagged_attention(x, k, v, bias=bias, backend=backend).values.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_users_without_history_get_zeros(backend):
    result = run(backend, Case([3, 2], [0, 0]).inputs(torch.float32))
    assert (result["o"] == 0).all()
    assert (result["lse"] == -math.inf).all()
    assert (result["dq"] == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_dense_queries(backend):
    """[B, N, H, D] and [N, H, D] are the same as jagged queries of constant length."""
    inputs = Case([3, 3, 3], [4, 0, TILE + 3], heads=4).inputs(torch.float32)
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    v = k.with_values(inputs.v)
    jagged = run(backend, inputs, tile=None)["o"].view(3, 3, 4, 16)
    dense = inputs.q.view(3, 3, 4, 16)
    out, lse = jagged_attention(dense, k, v, backend=backend, return_lse=True)
    # Not to the bit: dense queries may go another way, that sums in another order.
    torch.testing.assert_close(out, jagged, rtol=1e-5, atol=1e-6)
    assert lse.shape == (3, 3, 4)

    shared = dense[0].clone().requires_grad_()
    jagged_attention(shared, k, v, backend=backend).sum().backward()
    repeated = dense[:1].expand(3, -1, -1, -1).clone().requires_grad_()
    jagged_attention(repeated, k, v, backend=backend).sum().backward()
    assert repeated.grad is not None
    torch.testing.assert_close(shared.grad, repeated.grad.sum(0))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_dense_queries(backend):
    inputs = Case([1, 1], [4, 0]).inputs(torch.float32)
    k = JaggedTensor(inputs.k.requires_grad_(), inputs.k_offsets)
    q = inputs.q.view(2, 1, 2, 16)[:, :0]
    out = jagged_attention(q, k, k.with_values(inputs.v), backend=backend)
    assert out.shape == (2, 0, 2, 16)
    out.sum().backward()
    assert inputs.k.grad is not None
    assert not inputs.k.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [None, "stream"])
def test_gradients_of_outputs_in_any_order(backend, split):
    """As of what was transposed: of o, and of the lse that `varlen_attn` has heads first."""
    inputs, results = Case([3, 3], [5, TILE + 3]).inputs(torch.float32), []
    for turned in (False, True):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        q, k, v = leaves
        keys = JaggedTensor(k, inputs.k_offsets)
        queries, schedule = queries_of(inputs, q, keys, split)
        out, lse = jagged_attention(
            queries, keys, keys.with_values(v), schedule=schedule, backend=backend, return_lse=True
        )
        o = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
        given = [inputs.d_o, inputs.d_lse]
        if turned:
            given = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in given]
        results.append(torch.autograd.grad([o, lse.view(o.shape[:2])], leaves, given))
    for usual, found in zip(*results, strict=True):
        torch.testing.assert_close(found, usual)


def test_dense_queries_over_wide_values():
    """Rows are cut where a tile holds the wider of k and v, else the backward cannot walk them."""
    case = Case([2, 2], [5, TILE + 3], heads=8, kv_heads=1, dim=16, dim_v=128)
    inputs, gradients = case.inputs(torch.float32), []
    for backend in ("triton", "reference"):
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        keys = JaggedTensor(k, inputs.k_offsets)
        out = jagged_attention(q.view(2, 2, 8, 16), keys, keys.with_values(v), backend=backend)
        gradients.append(torch.autograd.grad(out.flatten(0, 1), (q, k, v), inputs.d_o))
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_bias_agrees_between_backends():
    inputs = Case([3, 0, 7, 12], [5, 2, 7, 1]).inputs(torch.float32)
    bias = torch.randn(15 + 49 + 12, 2, device=DEVICE)
    gradients = {}
    for backend in ("reference", "native"):
        leaf = bias.clone().requires_grad_()
        result = run(backend, inputs, bias=leaf, causal=True)
        gradients[backend] = [result[name] for name in RESULTS] + [leaf.grad]
    for ours, exact in zip(gradients["native"], gradients["reference"], strict=True):
        torch.testing.assert_close(ours, exact)


def test_dropout_is_one_mask_in_both_backends():
    inputs = Case([3, 0, 40, 12]).inputs(torch.float64)
    results = []
    for backend in ("reference", "native"):
        torch.manual_seed(5)
        results.append(run(backend, inputs, dropout_p=0.3))
    for name in RESULTS:
        torch.testing.assert_close(results[0][name], results[1][name])
    torch.manual_seed(6)
    assert not torch.allclose(run("native", inputs, dropout_p=0.3)["o"], results[0]["o"])


def test_dropout_drops_the_stated_share_and_keeps_the_mean():
    from jagged_kernels.attention.scores.dropout import keep_mask

    axis = torch.arange(300)
    kept = keep_mask(torch.tensor(3), 1, 2, axis[:, None], axis, 0.3).double()
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.21 / 90_000)
    for dim in (0, 1):  # rows and columns are no more alike than chance
        assert kept.mean(dim).std() < 1.3 * math.sqrt(0.21 / 300)
    other = keep_mask(torch.tensor(4), 1, 2, axis[:, None], axis, 0.3).double()
    assert abs((kept * other).mean() - 0.49) < 5 * math.sqrt(0.25 / 90_000)


def test_the_tolerance_would_notice_a_wrong_scale(monkeypatch):
    """A check of the check: one part in a thousand is far outside of it."""

    def slightly_wrong(q, k, v, *, backend, **options):
        values = q.values if backend == "reference" else q.values * 1.001
        return jagged_attention(q.with_values(values), k, v, backend=backend, **options)

    monkeypatch.setattr("attention_cases.jagged_attention", slightly_wrong)
    with pytest.raises(AssertionError, match=r"native \w+: error"):
        assert_as_exact_as_sdpa(Case([20, 3]).inputs(torch.float32), "native")


@pytest.mark.parametrize("way", ["fp32_precision", "allow_tf32", "set_float32_matmul_precision"])
def test_tf32_is_allowed_by_any_of_pytorchs_ways(way, matmul):
    for allowed in (False, True):
        if way == "fp32_precision":
            matmul.fp32_precision = "tf32" if allowed else "ieee"
        elif way == "allow_tf32":
            matmul.allow_tf32 = allowed
        else:
            torch.set_float32_matmul_precision("high" if allowed else "highest")
        assert dot_precision(torch.float32) == ("tf32" if allowed else "ieee")
        assert dot_precision(torch.bfloat16) == "ieee"
