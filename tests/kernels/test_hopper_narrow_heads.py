"""Heads that are narrower than the boxes that Hopper's kernels have for them: against the
specification in float64, and beside heads whose numbers must not come into the box."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case
from choice_cases import on_hopper
from launch_keys import watch_launches
from meeting_cases import assert_as_exact, pointwise, run, softmax
from padded_heads import MASKS, inputs_of, shown_by
from pays import TWO_PASSES, paying_from
from score_policies import POLICIES
from torch import Tensor

from jagged_kernels import StridedKeys
from jagged_kernels.schedule.policy.hopper import NEVER, ONE_PASS_PAYS_FROM

# Of q and k, and of v: in one piece and in two, in boxes of 64 and of 128.
DIMS = [
    (40, 40), (64, 48), (72, 72), (80, 80), (88, 88), (96, 96), (104, 104), (112, 112), (96, 128),
    (128, 80), (80, 112),
]  # fmt: skip
EACH_DIMS = pytest.mark.parametrize(("dim", "dim_v"), DIMS)
# One of each: the small box, two pieces of 64 and 16 and of 64 and 32, one piece, columns that v
# has not.
SOME_DIMS = pytest.mark.parametrize(
    ("dim", "dim_v"), [(40, 40), (72, 72), (96, 96), (112, 112), (128, 80)]
)
HOPPER = "jagged_kernels.attention.hopper"


@pytest.fixture(params=["two passes", "one pass"])
def passes(request) -> Iterator[str]:
    """Of the backward, which pays as the forward does."""
    with (
        paying_from(0, *TWO_PASSES),
        paying_from(0 if request.param == "one pass" else NEVER, ONE_PASS_PAYS_FROM),
    ):
        yield request.param


@on_hopper
@EACH_DIMS
@pytest.mark.parametrize("mask", MASKS)
def test_softmax(dim, dim_v, mask, passes, monkeypatch):
    if mask == "window" and passes == "one pass":
        pytest.skip("it takes no window")
    launches = watch_launches(monkeypatch)
    options = MASKS[mask]
    assert_as_exact(inputs_of(dim, dim_v), "triton", shown_by(**options), softmax, **options)
    taken = {module for _, module in launches}
    assert f"{HOPPER}.forward" in taken
    assert f"{HOPPER}.{'one_pass' if passes == 'one pass' else 'dkv'}" in taken


@on_hopper
@SOME_DIMS
@pytest.mark.usefixtures("passes")
def test_float16_and_a_negative_scale(dim, dim_v):
    inputs = inputs_of(dim, dim_v, torch.float16)
    inputs.q.neg_()
    expected = run("triton", inputs, causal=True)
    inputs.q.neg_()
    found = run("triton", inputs, causal=True, scale=-1 / math.sqrt(dim))
    assert torch.equal(found["o"], expected["o"])
    torch.testing.assert_close(found["dk"], expected["dk"], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found["dq"], -expected["dq"], atol=1e-3, rtol=1e-3)


@on_hopper
@SOME_DIMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("policy", ["silu", "own"])
def test_pointwise_scores(policy, dim, dim_v, mask):
    scores, function = POLICIES[policy]
    options: dict[str, Any] = {"scores": scores, **MASKS[mask]}
    weigh = pointwise(function, scores.divide_by)
    with paying_from(0, *TWO_PASSES):
        assert_as_exact(inputs_of(dim, dim_v), "triton", shown_by(**MASKS[mask]), weigh, **options)


@on_hopper
@SOME_DIMS
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("policy", ["", "silu"])
def test_lists(policy, dim, dim_v, block):
    keys = StridedKeys(5, 2, block=block)
    options: dict[str, Any] = {"keys": keys}
    weigh = softmax
    if policy:
        options["scores"], function = POLICIES[policy]
        weigh = pointwise(function, options["scores"].divide_by)

    def visible(user: int, queries: int, _keys: int) -> Tensor:
        return keys.visible(queries, 4, user=user)

    with paying_from(0, *TWO_PASSES):
        assert_as_exact(inputs_of(dim, dim_v), "triton", visible, weigh, **options)


@on_hopper
@SOME_DIMS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_head_does_not_depend_on_the_next(dim, dim_v, value, passes):
    """Which begins where its own columns end, and the last one where the next token begins."""
    clean = inputs_of(dim, dim_v)
    expected = run("triton", clean)
    for head in range(2):
        sick = inputs_of(dim, dim_v)
        for x in (sick.q, sick.d_o):
            x[:, 2 * head : 2 * head + 2] = value
        for x in (sick.k, sick.v):
            x[:, head] = value
        for name, result in run("triton", sick).items():
            own = 2 - 2 * head if name in ("o", "dq") else 1 - head
            healthy = slice(own, own + (2 if name in ("o", "dq") else 1))
            assert torch.equal(result[:, healthy], expected[name][:, healthy]), (name, passes)


@on_hopper
@SOME_DIMS
def test_columns_of_a_wider_tensor(dim, dim_v, passes, monkeypatch):
    """Whose other columns, NaN here, stand where a box goes on behind the head."""
    clean = inputs_of(dim, dim_v)
    expected = run("triton", clean, causal=True)
    for name in ("q", "k", "v", "d_o"):
        x = getattr(clean, name)
        wide = x.new_full((*x.shape[:2], 128 + 64), math.nan)
        wide[..., : x.shape[2]] = x
        setattr(clean, name, wide[..., : x.shape[2]])
    launches = watch_launches(monkeypatch)
    for name, result in run("triton", clean, causal=True).items():
        assert torch.equal(result, expected[name]), (name, passes)
    assert f"{HOPPER}.forward" in {module for _, module in launches}


@on_hopper
@SOME_DIMS
def test_reruns_are_bit_identical(dim, dim_v, passes):
    first = run("triton", inputs_of(dim, dim_v), causal=True)
    for _ in range(20):
        for name, result in run("triton", inputs_of(dim, dim_v), causal=True).items():
            assert torch.equal(result, first[name]), (name, passes)


@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128])
def test_what_is_behind_d_changes_nothing(dim):
    """On any device: rows of a wider tensor, through the kernels that take it there."""
    case = Case([5, 0, 33], dim=dim)
    inputs = case.inputs(torch.float32).with_shared_offsets()
    expected = run("native", inputs, causal=True)
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        wide = x.new_full((*x.shape[:2], dim + 8), math.nan)
        wide[..., :dim] = x
        setattr(inputs, name, wide[..., :dim])
    for name, result in run("triton", inputs, causal=True).items():
        torch.testing.assert_close(result, expected[name], atol=1e-4, rtol=1e-4)
