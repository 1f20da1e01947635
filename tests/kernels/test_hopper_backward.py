"""The Gluon backward on its own: users that begin anywhere, masks, neighbours, reruns, graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import Case, Inputs
from captured import captured
from choice_cases import hopper_fits
from hopper_backward_cases import (
    CASES,
    GRADIENTS,
    ODD,
    assert_exact,
    band_of,
    deal_out_beforehand,
    forward_of,
    inputs_of,
    leave_nan_in_free_memory,
    same,
    scale_of,
    tables_of,
)
from torch import Tensor

from jagged_kernels.attention.hopper.backward import launch_backward
from jagged_kernels.attention.hopper.dkv import _dkv_kernel
from jagged_kernels.attention.hopper.dq import _dq_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]


@pytest.fixture(params=[64, 128])
def dim(request) -> int:
    return request.param


def _backward(
    inputs: Inputs, case: Case, forward: tuple[Tensor, Tensor], *, d_lse: bool = True
) -> dict[str, Tensor]:
    assert hopper_fits(inputs.q, inputs.k, inputs.v)
    # The kernels work in base 2: lse = ln(2) * lse2.
    d_lse2 = inputs.d_lse * math.log(2) if d_lse else None
    tables = tables_of(inputs, case)
    leave_nan_in_free_memory(inputs)
    grads = launch_backward(
        inputs.d_o, d_lse2, inputs.q, inputs.k, inputs.v, *forward, *tables,
        **band_of(case), scale=scale_of(inputs, case),
    )  # fmt: skip
    return dict(zip(GRADIENTS, grads, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_exact(name, dim):
    case = CASES[name]
    inputs = inputs_of(case, dim)
    assert_exact(inputs, case, _backward(inputs, case, forward_of(inputs, case)))


def test_tiles_that_are_counted_out(dim, monkeypatch):
    """The same, to the bit, as those that are dealt out beforehand."""
    case = replace(CASES["more tiles than programs"], mask={"causal": True})
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    counted = _backward(inputs, case, forward)
    deal_out_beforehand(monkeypatch)
    assert same(_backward(inputs, case, forward), counted)


@pytest.mark.parametrize("name", ["odd", "cross causal", "grouped causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_without_a_gradient_of_lse(name, dtype, dim):
    case = CASES[name]
    inputs = inputs_of(case, dim, dtype)
    ours = _backward(inputs, case, forward_of(inputs, case), d_lse=False)
    assert_exact(inputs, case, ours, d_lse=False)


def test_scale_0(dim):
    case = Case(ODD, mask={"scale": 0.0})
    inputs = inputs_of(case, dim)
    ours = _backward(inputs, case, forward_of(inputs, case))
    assert not ours["dq"].any()
    assert not ours["dk"].any()
    ends = inputs.q_offsets.tolist()
    for start, end in pairwise(ends):
        mean = inputs.d_o[start:end].double().mean(0, keepdim=True).expand(end - start, -1, -1)
        torch.testing.assert_close(ours["dv"][start:end].double(), mean, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("logit", [-1e4, 1e4, -1e30, 1e30])
def test_enormous_equal_logits(logit, dim):
    """No probability passes 1 by so much that a gradient is infinite."""
    case = CASES["odd"]
    inputs = inputs_of(case, dim)
    inputs.q.fill_(1.0)
    inputs.k.fill_(logit / dim)
    ours = _backward(inputs, case, forward_of(inputs, case))
    for name, gradient in ours.items():
        assert torch.isfinite(gradient).all(), name


def test_packed_qkv(dim):
    case = CASES["odd"]
    inputs = inputs_of(case, dim)
    packed = torch.stack([inputs.q, inputs.k, inputs.v], dim=1)
    inputs.q, inputs.k, inputs.v = packed.unbind(1)
    assert_exact(inputs, case, _backward(inputs, case, forward_of(inputs, case)))


def test_one_gradient_for_all_tokens(dim):
    case = CASES["odd"]
    inputs = inputs_of(case, dim)
    inputs.d_o = inputs.d_o[:1].expand_as(inputs.d_o)
    assert_exact(inputs, case, _backward(inputs, case, forward_of(inputs, case)))


@pytest.mark.parametrize("name", ["odd", "causal", "two-sided window", "grouped"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_with_their_user(name, bad, dim):
    case = CASES[name]
    clean = inputs_of(case, dim)
    o, lse2 = forward_of(clean, case)
    expected = _backward(clean, case, (o, lse2))
    ends = clean.q_offsets.tolist()
    for user in (3, 6, 9):
        tokens = slice(ends[user], ends[user + 1])
        parts = {part: getattr(clean, part).clone() for part in ("q", "k", "v", "d_o", "d_lse")}
        forward = o.clone(), lse2.clone()
        for x in (*parts.values(), *forward):
            x[tokens] = bad
        ours = _backward(replace(clean, **parts), case, forward)
        for gradient in GRADIENTS:
            ours[gradient][tokens] = expected[gradient][tokens]
        assert same(ours, expected), user


@pytest.mark.parametrize("lengths", [[2048] * 8 + ODD, list(range(1, 300)), [50] * 132], ids=len)
def test_reruns_are_bit_identical(lengths, dim):
    """Also where a program's tiles follow each other so fast that their loads could overtake it."""
    case = Case(lengths, heads=4, kv_heads=4)
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    first = _backward(inputs, case, forward)
    assert all(same(first, _backward(inputs, case, forward)) for _ in range(20))


def test_a_captured_graph_replays(dim):
    case = Case([1000, 77, 513])
    inputs = inputs_of(case, dim)
    forward, tables = forward_of(inputs, case), tables_of(inputs, case)
    args = (inputs.d_o, None, inputs.q, inputs.k, inputs.v, *forward, *tables)
    options = {**band_of(case), "scale": scale_of(inputs, case)}
    graph, replayed = captured(lambda: launch_backward(*args, **options))
    for x in replayed:
        x.fill_(math.nan)
    graph.replay()
    expected = launch_backward(*args, **options)
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def test_dq_alone(dim):
    case = Case([1000, 77, 513])
    inputs = inputs_of(case, dim)
    args = (inputs.d_o, None, inputs.q, inputs.k, inputs.v)
    args = (*args, *forward_of(inputs, case), *tables_of(inputs, case))
    options = {**band_of(case), "scale": scale_of(inputs, case)}
    dq, dk, dv = launch_backward(*args, **options, wanted_kv=False)
    assert dk.numel() == dv.numel() == 0
    assert torch.equal(dq, launch_backward(*args, **options)[0])


def test_other_batches_do_not_recompile(dim):
    def compiled():
        kernels = (_dq_kernel, _dkv_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for lengths in ([1], [16], [64, 64], [5, 128, 1], ODD):
        case = Case(lengths)
        inputs = inputs_of(case, dim)
        _backward(inputs, case, forward_of(inputs, case))
        counts.append(compiled())
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts


def test_what_does_not_fit():
    inputs = inputs_of(Case([10]), 128)
    q, k, v = inputs.q, inputs.k, inputs.v
    assert hopper_fits(q, k, v)
    assert not hopper_fits(q.float(), k.float(), v.float())
    assert not hopper_fits(*(x[..., :32].contiguous() for x in (q, k, v)))
    assert not hopper_fits(q, k, v[..., :64])
    assert not hopper_fits(q[:0], k, v)
    assert not hopper_fits(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
