"""Heads of more than 128 columns, which Hopper's forward takes and the plain kernels' backward:
against the specification in float64, and beside heads whose numbers must not come into the box."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from choice_cases import on_hopper
from launch_keys import watch_launches
from meeting_cases import assert_as_exact, pointwise, run, softmax
from padded_heads import MASKS, inputs_of, shown_by
from pays import TWO_PASSES, paying_from
from score_policies import POLICIES

from jagged_kernels.attention.choice import HOPPER_FORWARD, Asked, refusals
from jagged_kernels.attention.hopper.heads import pieces
from jagged_kernels.schedule.policy.hopper import FORWARD_TILES

# Of q and k, and of v: in one piece and in two.
DIMS = [(136, 136), (160, 160), (192, 192), (200, 200), (256, 256), (192, 256), (256, 144)]
EACH_DIMS = pytest.mark.parametrize(("dim", "dim_v"), DIMS)


@on_hopper
@EACH_DIMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("policy", ["", "silu"])
def test_exact(policy, dim, dim_v, mask, monkeypatch):
    launches = watch_launches(monkeypatch)
    options: dict[str, Any] = dict(MASKS[mask])
    weigh = softmax
    if policy:
        options["scores"], function = POLICIES[policy]
        weigh = pointwise(function, options["scores"].divide_by)
    with paying_from(0, *TWO_PASSES):
        assert_as_exact(inputs_of(dim, dim_v), "triton", shown_by(**MASKS[mask]), weigh, **options)
    taken = {module.rpartition("attention.")[2] for _, module in launches}
    assert "hopper.forward" in taken
    assert not taken & {"hopper.dkv", "hopper.dq", "hopper.one_pass"}


@on_hopper
@EACH_DIMS
def test_float16_and_enormous_logits(dim, dim_v):
    """Tiles are walked again, exactly: one key takes it all. Those of other heads stay."""
    inputs = inputs_of(dim, dim_v, torch.float16)
    with paying_from(0, *TWO_PASSES):
        before = run("triton", inputs, causal=True)["o"]
        inputs.q[:, :2] *= 2.0**13
        inputs.k[:, 0] *= 2.0**13
        found = run("triton", inputs, causal=True)["o"]
    assert torch.equal(found[:, 2:], before[:, 2:])
    exact = run("reference", inputs.double(), causal=True)["o"]
    # Of PyTorch in half precision the scores overflow: v is rounded as it was.
    torch.testing.assert_close(found[:, :2], exact[:, :2].half())


@on_hopper
@EACH_DIMS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_head_does_not_depend_on_the_next(dim, dim_v, value):
    """Which begins where its own columns end, and the last one where the next token begins."""
    with paying_from(0, *TWO_PASSES):
        expected = run("triton", inputs_of(dim, dim_v))["o"]
        for head in range(2):
            sick = inputs_of(dim, dim_v)
            sick.q[:, 2 * head : 2 * head + 2] = value
            for x in (sick.k, sick.v):
                x[:, head] = value
            found = run("triton", sick)["o"]
            healthy = slice(2 - 2 * head, 4 - 2 * head)
            assert torch.equal(found[:, healthy], expected[:, healthy])


@on_hopper
@EACH_DIMS
def test_reruns_are_bit_identical(dim, dim_v):
    with paying_from(0, *TWO_PASSES):
        first = run("triton", inputs_of(dim, dim_v), causal=True)
        for _ in range(20):
            again = run("triton", inputs_of(dim, dim_v), causal=True)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_lists_are_refused():
    """Of any blocks, also of those that are a tile."""
    tile = FORWARD_TILES[256]
    call = Asked("forward", torch.device("cpu"), torch.float16, 256, 256, tile, tile, shared=True)
    said = refusals(HOPPER_FORWARD, call._replace(keys="lists"))
    assert set(said) - set(refusals(HOPPER_FORWARD, call)) == {"it takes no lists at head_dim 256"}


def test_boxes_with_a_quarter_to_spare_are_multiplied_in_two_pieces():
    counts = {dim: pieces(dim) for dim in (40, 64, 72, 96, 104, 128, 136, 192, 200, 256)}
    two = {dim for dim, count in counts.items() if count == 2}
    assert two == {72, 96, 136, 192}
