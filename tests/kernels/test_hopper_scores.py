"""Weights by a policy on Hopper's kernels: against the specification in float64, beside neighbours
and behind the mask; and what is computed again, which runs anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, FACTOR, Case, Inputs, assert_no_worse, seen_keys
from choice_cases import hopper_fits, on_hopper
from hopper_backward_cases import deal_out_beforehand
from meeting_cases import formula, pointwise, run, terms
from score_policies import POLICIES
from torch import Tensor

from jagged_kernels import SiLU
from jagged_kernels.attention.meeting import Meeting, MeetTerms, meeting_of
from jagged_kernels.attention.plans import Call, scale_argument
from jagged_kernels.schedule.policy.hopper import COUNTED_FROM, forward_config
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window

RESULTS = ("o", "dq", "dk", "dv")
# Around parts of 64 queries, tiles of 128 and blocks of 128 keys.
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 0, 7, 300]
CROSS = ([5, 0, 200, 64, 130, 1, 300, 9], [300, 10, 0, 64, 1000, 129, 20, 1])
DIMS = pytest.mark.parametrize("dim", [64, 128])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
MASKS = [{}, {"causal": True}, {"window": (64, 0)}, {"window": (300, 100)}, {"window": (5, -1)}]


def _tables(inputs: Inputs, tile: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    q_offsets, k_offsets = inputs.q_offsets, inputs.k_offsets
    q_tokens, k_tokens = inputs.q.shape[0], inputs.k.shape[0]
    return (
        build_rows(q_offsets, k_offsets, tokens=q_tokens, tile=tile, left=left, right=right),
        build_rows(k_offsets, q_offsets, tokens=k_tokens, tile=tile, left=right, right=left),
    )


def _meeting(inputs: Inputs, scores: Any) -> Meeting:
    return meeting_of(MeetTerms.of(None, scores), inputs.k_offsets)


def attend(
    inputs: Inputs, scores: Any, *, causal: bool = False, window: tuple[int, int] | None = None,
    scale: float | None = None, plain: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """o and the gradients, of Hopper's kernels or of the plain ones."""
    from jagged_kernels.attention.hopper import backward, forward
    from jagged_kernels.attention.plain import backward as plain_backward
    from jagged_kernels.attention.plain import forward as plain_forward

    q, k, v = inputs.q, inputs.k, inputs.v
    left, right = resolve_window(causal, window)
    dim, meeting = q.shape[2], _meeting(inputs, scores)
    tile = forward_config(dim).tile_q
    rows, rows_t = _tables(inputs, tile, left, right)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    band: dict[str, Any] = {"left": left, "right": right, "scale": scale, "meeting": meeting}
    if plain:
        o, _ = plain_forward.launch_forward(q, k, v, rows, tile_q=tile, **band, with_lse=False)
        gradients = plain_backward.launch_backward(
            inputs.d_o, None, q, k, v, o, None, rows, rows_t, tile_q=tile, tile_k=tile, **band
        )
    else:
        assert hopper_fits(q, k, v)
        o, lse2 = forward.launch_forward(q, k, v, rows, **band, with_lse=False)
        assert lse2 is None
        none = torch.empty(0, dtype=torch.float32, device=q.device)
        gradients = backward.launch_backward(
            inputs.d_o, None, q, k, v, o, none, rows, rows_t, **band
        )
    return dict(zip(RESULTS, (o, *gradients), strict=True))


def assert_exact(inputs: Inputs, policy: str, **mask: Any) -> None:
    """By the rule of `meeting_cases.assert_as_exact`."""
    scores, function = POLICIES[policy]
    weigh = pointwise(function, scores.divide_by)

    def visible(_user: int, queries: int, keys: int) -> Tensor:
        return seen_keys(queries, keys, **mask)[None]

    double = inputs.double()
    exact = run("reference", double, scores=scores, **mask)
    peer, products = formula(inputs, visible, weigh), terms(double, visible, weigh)
    ours = attend(inputs, scores, **mask)
    assert_no_worse(ours, peer, exact, terms=products, name=policy)


# --- results --------------------------------------------------------------------------------------


@on_hopper
@DIMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_length(policy, mask, dtype, dim):
    assert_exact(Case(LENGTHS, dim=dim).inputs(dtype), policy, **mask)


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize("policy", ["silu", "own"])
def test_queries_and_keys_of_other_lengths(policy, causal, dim):
    assert_exact(Case(*CROSS, dim=dim).inputs(torch.bfloat16), policy, causal=causal)


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(kv_heads, causal, dim):
    case = Case(LENGTHS, heads=4, kv_heads=kv_heads, dim=dim)
    assert_exact(case.inputs(torch.bfloat16), "silu", causal=causal)


@on_hopper
@DIMS
@CAUSAL
def test_more_tiles_than_programs(causal, dim):
    """Rings of buffers and their barriers go on from tile to tile, also past empty parts."""
    case = Case(list(range(1, 420, 6)), heads=4, kv_heads=4, dim=dim)
    assert_exact(case.inputs(torch.bfloat16), "silu", causal=causal)


@on_hopper
@DIMS
@pytest.mark.parametrize("policy", ["silu", "own"])
def test_tiles_that_are_counted_out(policy, dim, monkeypatch):
    """The same, to the bit, as those that are dealt out beforehand, however short users are."""
    inputs = Case(list(range(1, 420, 6)), heads=4, kv_heads=4, dim=dim).inputs(torch.bfloat16)
    scores, _ = POLICIES[policy]
    monkeypatch.setitem(COUNTED_FROM["pointwise"], dim, 0)
    counted = attend(inputs, scores, causal=True)
    deal_out_beforehand(monkeypatch)
    for name, result in attend(inputs, scores, causal=True).items():
        assert torch.equal(result, counted[name]), name


@on_hopper
@DIMS
def test_a_negative_scale_is_that_of_negative_queries(dim):
    inputs = Case(LENGTHS, dim=dim).inputs(torch.bfloat16)
    ours = attend(inputs, SiLU(), causal=True, scale=-0.3)
    inputs.q.neg_()
    expected = attend(inputs, SiLU(), causal=True, scale=0.3)
    expected["dq"].neg_()
    for name, result in expected.items():
        torch.testing.assert_close(ours[name], result, msg=name)


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize("policy", ["silu", "sigmoid"])
def test_enormous_scores(policy, causal, dim):
    """Weights and slopes of scores of thousands are what the plain kernels have."""
    inputs = Case(LENGTHS, dim=dim).inputs(torch.bfloat16)
    inputs.q *= 1e4
    scores = POLICIES[policy][0]
    ours, plain = (attend(inputs, scores, causal=causal, plain=one) for one in (False, True))
    for name, result in ours.items():
        assert result.isfinite().all(), name
        error = float((result.double() - plain[name].double()).abs().max())
        allowed = 2 * FACTOR * torch.finfo(result.dtype).eps * float(plain[name].abs().max())
        assert error <= allowed, (name, error, allowed)


# --- neighbours, what is hidden, reruns -----------------------------------------------------------


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_user_does_not_depend_on_neighbours(value, causal, dim):
    inputs = Case(LENGTHS, dim=dim).inputs(torch.bfloat16)
    clean = attend(inputs, SiLU(), causal=causal)
    bounds = inputs.q_offsets.tolist()
    for user in (1, 3, 6, 8, 10):
        sick = slice(*bounds[user : user + 2])
        given = (inputs.q, inputs.k, inputs.v, inputs.d_o)
        kept = [tensor[sick].clone() for tensor in given]
        for tensor in given:
            tensor[sick] = value
        for name, result in attend(inputs, SiLU(), causal=causal).items():
            for healthy in (slice(0, sick.start), slice(sick.stop, None)):
                assert torch.equal(result[healthy], clean[name][healthy]), (user, name)
        for tensor, values in zip(given, kept, strict=True):
            tensor[sick] = values


@on_hopper
@DIMS
@pytest.mark.parametrize("mask", [m for m in MASKS if m], ids=str)
@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
@pytest.mark.parametrize("policy", ["silu", "sigmoid"])
def test_nan_reaches_what_it_reaches_in_the_plain_kernels(policy, place, mask, dim):
    scores, results = POLICIES[policy][0], []
    for plain in (False, True):
        inputs = Case([700, 5, 560], heads=4, kv_heads=2, dim=dim).inputs(torch.bfloat16)
        getattr(inputs, place)[400, 1] = math.nan
        results.append(attend(inputs, scores, plain=plain, **mask))
    for name, expected in results[1].items():
        found = results[0][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        error = (found.double() - expected.double()).nan_to_num(0.0).abs().max()
        largest = expected.double().nan_to_num(0.0).abs().max()
        assert error <= 2 * FACTOR * torch.finfo(found.dtype).eps * largest, (name, error)


@on_hopper
@DIMS
@CAUSAL
def test_reruns_are_bit_identical_at_size(causal, dim):
    case = Case([2048] * 8 + LENGTHS + [50] * 132, heads=4, kv_heads=4, dim=dim)
    inputs = case.inputs(torch.bfloat16)
    first = attend(inputs, SiLU(), causal=causal)
    for _ in range(10):
        for name, result in attend(inputs, SiLU(), causal=causal).items():
            assert torch.equal(result, first[name]), name


# --- what is computed again, on any device --------------------------------------------------------


@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (9, 2)}], ids=str)
@pytest.mark.parametrize("policy", ["silu", "silu by a number"])
def test_marked_parts_are_computed_again(policy, mask):
    from jagged_kernels.attention.hopper.exact import launch_exact

    scores, tile, part = POLICIES[policy][0], 32, 16
    inputs = Case([70, 0, 33, 16, 1], heads=2, kv_heads=1).inputs(torch.float32)
    inputs.v[3, 0, 2] = math.nan
    left, right = resolve_window(mask.get("causal", False), mask.get("window"))
    rows, _ = _tables(inputs, tile, left, right)
    band: dict[str, Any] = {"left": left, "right": right}
    call = Call.of(inputs.q, inputs.k, inputs.v, scale=inputs.q.shape[2] ** -0.5, **band)
    scale_log2, negate = scale_argument(call.scale)
    o = torch.full_like(inputs.q, 7.0)
    marks = torch.zeros((rows.shape[0], tile // part, 2), dtype=torch.int8, device=DEVICE)
    marks[:, :, 1] = 1
    launch_exact(
        inputs.q, inputs.k, inputs.v, o, None, marks, rows,
        shape=call._replace(precision="ieee").shape(tile=tile, block=64), part_q=part,
        scale_log2=scale_log2, negate=negate, meeting=_meeting(inputs, scores), **band,
    )  # fmt: skip
    exact = run("reference", inputs.double(), scores=scores, **mask)["o"]
    assert (o[:, 0] == 7.0).all()
    assert exact.isnan().any()
    torch.testing.assert_close(o[:, 1].double(), exact[:, 1], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
@pytest.mark.parametrize("policy", ["silu", "silu by a number"])
def test_parts_of_gradients_that_are_not_finite_are_computed_again(policy, place):
    from jagged_kernels.attention.hopper.exact_backward import launch_exact_backward

    scores, tile, part = POLICIES[policy][0], 32, 16
    inputs = Case([37, 0, 20], heads=4, kv_heads=2).inputs(torch.float16)
    getattr(inputs, place)[17, 1] = math.nan
    exact = run("reference", inputs.double(), scores=scores, causal=True)
    left, right = resolve_window(True, None)
    rows, rows_t = _tables(inputs, tile, left, right)
    q, k, v, d_o = inputs.q, inputs.k, inputs.v, inputs.d_o
    found = [torch.full_like(x, math.inf) for x in (q, k, v)]
    nothing = torch.empty(0, device=DEVICE)
    launch_exact_backward(
        d_o, q, k, v, nothing, None, found[0], (found[1], found[2]), rows, rows_t,
        Call.of(q, k, v, d_o, left=left, right=right, scale=q.shape[2] ** -0.5),
        torch.tensor(1, dtype=torch.int32, device=DEVICE),
        tile=tile, part_q=part, part_k=part, left=left, right=right,
        meeting=_meeting(inputs, scores),
    )  # fmt: skip
    for name, again in zip(("dq", "dk", "dv"), found, strict=True):
        expected = exact[name]
        assert torch.equal(again.isnan(), expected.isnan()), name
        error = (again.double() - expected).nan_to_num(0.0).abs().max()
        largest = expected.nan_to_num(0.0).abs().max()
        assert error <= FACTOR * torch.finfo(torch.float16).eps * largest, (name, error)
