"""The backward in one pass on Hopper: what the one in two passes has to pass, and its own turns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Inputs
from captured import captured
from hopper_backward_cases import (
    CASES,
    GRADIENTS,
    ODD,
    assert_exact,
    band_of,
    forward_of,
    inputs_of,
    leave_nan_in_free_memory,
    same,
    scale_of,
    tables_of,
)
from torch import Tensor

from jagged_kernels.attention.hopper.backward import launch_backward, launch_backward_in_one_pass
from jagged_kernels.attention.hopper.one_pass import _one_pass_kernel
from jagged_kernels.schedule.policy import hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

# Queries and keys of one length, around whose tiles (128) and blocks (64) there is something.
OWN = {name: case for name, case in CASES.items() if not name.count("cross")}
LONG = {
    "long": Case([3000, 2048, 1, 500]),
    "long causal": Case([3000, 2048, 1, 500], mask={"causal": True}),
    "long window": Case([3000, 2048, 1, 500], mask={"window": (700, 200)}),
    "long grouped": Case([3000, 2048, 1, 500], heads=4, kv_heads=2),
    # More tiles of one pair than there are programs: they do not walk around.
    "longest": Case([20000], heads=1, kv_heads=1),
    "longest causal": Case([20000], heads=1, kv_heads=1, mask={"causal": True}),
}


@pytest.fixture(params=[64, 128])
def dim(request) -> int:
    return request.param


def arguments(inputs: Inputs, case: Case, forward: tuple[Tensor, Tensor], *, d_lse: bool = True):
    d_lse2 = inputs.d_lse * math.log(2) if d_lse else None
    tensors = (inputs.d_o, d_lse2, inputs.q, inputs.k, inputs.v, *forward)
    options = {**band_of(case), "scale": scale_of(inputs, case)}
    return (*tensors, *tables_of(inputs, case)), options


def backward(
    inputs: Inputs, case: Case, forward: tuple[Tensor, Tensor], *, d_lse: bool = True,
    config: hopper.HopperConfig | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    given, options = arguments(inputs, case, forward, d_lse=d_lse)
    leave_nan_in_free_memory(inputs)
    grads = launch_backward_in_one_pass(*given, inputs.q_offsets, **options, config=config)
    return dict(zip(GRADIENTS, grads, strict=True))


@pytest.mark.parametrize("name", OWN)
def test_exact(name, dim):
    case = OWN[name]
    inputs = inputs_of(case, dim)
    assert_exact(inputs, case, backward(inputs, case, forward_of(inputs, case)))


@pytest.mark.parametrize("name", LONG)
def test_long_users(name, dim):
    """Against the two passes: float64 would need their squares."""
    case = LONG[name]
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    given, options = arguments(inputs, case, forward)
    expected = launch_backward(*given, **options)
    ours = backward(inputs, case, forward)
    for name, theirs in zip(GRADIENTS, expected, strict=True):
        error = (ours[name].float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 1e-2, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_without_a_gradient_of_lse(dtype, dim):
    case = OWN["grouped causal"]
    inputs = inputs_of(case, dim, dtype)
    ours = backward(inputs, case, forward_of(inputs, case), d_lse=False)
    assert_exact(inputs, case, ours, d_lse=False)


@pytest.mark.parametrize("name", ["odd", "causal", "grouped"])
@pytest.mark.parametrize("changed", [{"consumers": 1, "residents": 2}, {"turned": True}], ids=str)
def test_laid_out_otherwise(name, changed):
    case = OWN[name]
    inputs = inputs_of(case, 64)
    config = replace(hopper.one_pass_config(64), **changed)
    forward = forward_of(inputs, case)
    assert_exact(inputs, case, backward(inputs, case, forward, config=config))


@pytest.mark.parametrize("name", ["odd", "causal", "one key head"])
def test_the_smallest_ring(name, dim, monkeypatch):
    monkeypatch.setattr(hopper, "RING_BYTES", 0)
    case = replace(OWN[name], q_lengths=[1000, *[130] * 40, 300])
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    ours = backward(inputs, case, forward)
    monkeypatch.undo()
    assert same(ours, backward(inputs, case, forward))


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (300, 100)}], ids=str)
@pytest.mark.parametrize("lengths", [[2048] * 8 + ODD, list(range(1, 300)), [50] * 132], ids=len)
def test_reruns_are_bit_identical(lengths, mask, dim):
    case = Case(lengths, heads=4, kv_heads=4, mask=mask)
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    first = backward(inputs, case, forward)
    assert all(same(first, backward(inputs, case, forward)) for _ in range(20))


@pytest.mark.parametrize("name", ["odd", "causal", "two-sided window", "grouped"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_with_their_user(name, bad, dim):
    case = OWN[name]
    clean = inputs_of(case, dim)
    o, lse2 = forward_of(clean, case)
    expected = backward(clean, case, (o, lse2))
    ends = clean.q_offsets.tolist()
    for user in (3, 6, 9):
        tokens = slice(ends[user], ends[user + 1])
        parts = {part: getattr(clean, part).clone() for part in ("q", "k", "v", "d_o", "d_lse")}
        forward = o.clone(), lse2.clone()
        for x in (*parts.values(), *forward):
            x[tokens] = bad
        ours = backward(replace(clean, **parts), case, forward)
        for gradient in GRADIENTS:
            ours[gradient][tokens] = expected[gradient][tokens]
        assert same(ours, expected), user


@pytest.mark.parametrize("name", ["causal", "two-sided window"])
def test_what_is_hidden_touches_nothing(name, dim):
    """A key that is NaN, and a query's gradient that is inf: who does not see them keeps his."""
    case = OWN[name]
    inputs = inputs_of(case, dim)
    forward = forward_of(inputs, case)
    clean = backward(inputs, case, forward)
    place = inputs.q_offsets.tolist()[7] - 200  # of a user of 1000
    sick = replace(inputs, k=inputs.k.clone(), d_o=inputs.d_o.clone())
    sick.k[place] = math.nan
    sick.d_o[place] = math.inf
    given, options = arguments(sick, case, forward)
    expected = dict(zip(GRADIENTS, launch_backward(*given, **options), strict=True))
    ours = backward(sick, case, forward)
    for gradient in GRADIENTS:
        theirs = expected[gradient]
        assert torch.equal(ours[gradient].isfinite(), theirs.isfinite()), gradient
        assert theirs.isfinite().any()
        assert not theirs.isfinite().all()
        kept = theirs.isfinite()
        error = (ours[gradient] - clean[gradient])[kept].float().norm()
        both = (theirs - clean[gradient])[kept].float().norm()
        assert error <= 1.1 * both + 1e-2 * clean[gradient].float().norm(), gradient


def test_a_captured_graph_replays(dim):
    case = Case([1000, 77, 513])
    inputs = inputs_of(case, dim)
    given, options = arguments(inputs, case, forward_of(inputs, case))
    given = (*given, inputs.q_offsets)
    graph, replayed = captured(lambda: launch_backward_in_one_pass(*given, **options))
    for x in replayed:
        x.fill_(math.nan)
    graph.replay()
    expected = launch_backward_in_one_pass(*given, **options)
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def test_other_batches_do_not_recompile(dim):
    def compiled():
        return sum(len(cache[0]) for cache in _one_pass_kernel.device_caches.values())

    counts = []
    for lengths in ([1], [16], [64, 64], [5, 128, 1], ODD):
        case = Case(lengths)
        inputs = inputs_of(case, dim)
        backward(inputs, case, forward_of(inputs, case))
        counts.append(compiled())
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts
