"""Users of a few tokens, who have kernels of their own where most users have few."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import Case, Inputs, assert_as_exact_as_sdpa, run
from combinations import combined
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)
from jagged_kernels.attention.choice import SHORT, pick
from jagged_kernels.attention.plain import backward as triton_backward
from jagged_kernels.attention.plain import forward as triton_forward
from jagged_kernels.schedule.policy.plain import MOSTLY_SHORT
from jagged_kernels.schedule.row_layout import SHORT_USER
from jagged_kernels.schedule.rows import rows_to_walk

LENGTHS = [3, 0, SHORT_USER, SHORT_USER + 1, 16, 17, 1, 0]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (5, 2)},
    {"window": (0, 0), "scale": -0.3},
]


def inputs_of(lengths: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    """Queries and keys with the same offsets: self-attention."""
    return Case(lengths, **options).inputs(dtype).with_shared_offsets()


@pytest.fixture
def launches(monkeypatch):
    """The launches of kernels of short users."""
    seen: list[str] = []
    for module, name in (
        (triton_forward, "launch_short_forward"),
        (triton_backward, "launch_short_backward"),
    ):
        real = getattr(module, name)

        def watched(*args, _real=real, _name=name, **kwargs):
            seen.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    return seen


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_exact(dtype, mask, launches):
    inputs = inputs_of(LENGTHS, dtype, heads=2, kv_heads=1)
    assert_as_exact_as_sdpa(inputs, "triton", tile=None, **mask)
    assert launches == ["launch_short_forward", "launch_short_backward"]


@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "kv_heads"), [(24, 40, 3, 3), (64, 16, 4, 2), (128, 128, 1, 1)]
)
def test_other_shapes(dim, dim_v, heads, kv_heads, launches):
    inputs = inputs_of([5, 20, 40], dim=dim, dim_v=dim_v, heads=heads, kv_heads=kv_heads)
    assert_as_exact_as_sdpa(inputs, "triton", tile=None)
    assert launches


def test_nobody_is_long(launches):
    assert_as_exact_as_sdpa(inputs_of([4, 0, 9]), "triton", tile=None, causal=True)
    assert launches


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    combined(
        [torch.float32, torch.float16, torch.bfloat16],
        [16, 32, 64, 80, 128, 256],
        MASKS,
        whole=False,
    ),
)
def test_exact_on_the_device(dtype, dim, mask):
    lengths = [*range(SHORT_USER + 3), 70, 200, 0, 1, 65, 31]
    inputs = inputs_of(lengths, dtype, heads=4, kv_heads=2, dim=dim)
    assert_as_exact_as_sdpa(inputs, "triton", tile=None, **mask)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_a_user_does_not_depend_on_neighbours(mask):
    """Bit for bit, outputs and gradients."""
    inputs = inputs_of(LENGTHS)
    together = run("triton", inputs, tile=None, **mask)
    bounds = inputs.q_offsets.tolist()
    for user, length in enumerate(LENGTHS):
        part = slice(bounds[user], bounds[user + 1])
        alone = inputs_of([length])
        for name in ("q", "k", "v", "d_o", "d_lse"):
            setattr(alone, name, getattr(inputs, name)[part])
        for name, result in run("triton", alone, tile=None, **mask).items():
            assert torch.equal(result, together[name][part]), (user, name)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_bad_numbers_stay_with_their_user(value):
    inputs = inputs_of(LENGTHS)
    bounds = inputs.q_offsets.tolist()
    clean = run("triton", inputs, tile=None)
    for user in (0, 2, 5):
        sick = slice(bounds[user], bounds[user + 1])
        kept = [tensor[sick].clone() for tensor in (inputs.q, inputs.k, inputs.v)]
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor[sick] = value
        for name, result in run("triton", inputs, tile=None).items():
            assert not result[sick].isfinite().any(), (user, name)
            for healthy in (slice(0, sick.start), slice(sick.stop, None)):
                assert torch.equal(result[healthy], clean[name][healthy]), (user, name)
        for tensor, values in zip((inputs.q, inputs.k, inputs.v), kept, strict=True):
            tensor[sick] = values


def test_hidden_numbers_and_a_scale_below_zero():
    """Users with a NaN are walked token by token."""
    inputs = inputs_of([17, 5], heads=2, kv_heads=1)
    inputs.k[10] = math.nan
    mask: dict[str, Any] = {"window": (2, 1), "scale": -0.3}
    expected, found = (run(backend, inputs, tile=None, **mask) for backend in ("native", "triton"))
    for name, result in found.items():
        assert result[:7].isfinite().all(), name
    for name, result in found.items():
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("logit", [-1e4, 1e4, -(2.0**100)])
def test_enormous_equal_logits(logit):
    """A softmax does not change when all its logits move: no overflow, no NaN, also backward."""
    inputs = inputs_of(LENGTHS)
    inputs.q.fill_(1.0)
    inputs.k.fill_(logit / 4)
    shifted = run("triton", inputs, tile=None)
    inputs.k.zero_()
    torch.testing.assert_close(shifted["o"], run("triton", inputs, tile=None)["o"])
    for name in ("lse", "dq", "dk", "dv"):
        assert torch.isfinite(shifted[name]).all(), name


@pytest.mark.parametrize("layout", ["heads first", "packed", "int32 offsets"])
def test_layouts(layout):
    inputs = inputs_of(LENGTHS)
    expected = run("triton", inputs, tile=None)
    if layout == "heads first":
        for name in ("q", "k", "v", "d_o"):
            heads_first = getattr(inputs, name).transpose(0, 1).contiguous()
            setattr(inputs, name, heads_first.transpose(0, 1))
    elif layout == "packed":
        packed = torch.stack([inputs.q, inputs.k, inputs.v], 1)
        inputs.q, inputs.k, inputs.v = packed.unbind(1)
    else:
        inputs.q_offsets = inputs.q_offsets.int()
        inputs.k_offsets = inputs.q_offsets
    for name, result in run("triton", inputs, tile=None).items():
        assert torch.equal(result, expected[name]), name


def test_gradients_of_queries_alone(launches):
    inputs = inputs_of(LENGTHS)
    expected = run("triton", inputs, tile=None)["dq"]
    q = inputs.q.requires_grad_()
    x = JaggedTensor(q, inputs.q_offsets)
    out, lse = jagged_attention(
        x, x.with_values(inputs.k), x.with_values(inputs.v), backend="triton", return_lse=True
    )
    (found,) = torch.autograd.grad([out.values, lse], [q], [inputs.d_o, inputs.d_lse])
    assert torch.equal(found, expected)
    assert launches[-1] == "launch_short_backward"


def test_who_else_has_the_plain_kernels(launches):
    """Longer users, queries with offsets of their own, small tiles."""
    run("triton", inputs_of([MOSTLY_SHORT, MOSTLY_SHORT]), tile=None)
    run("triton", Case(LENGTHS).inputs(torch.float32), tile=None)
    run("triton", inputs_of(LENGTHS), tile=SHORT_USER)
    assert not launches


def test_the_rule():
    def takes(tokens: int, tile_q: int, tile_k: int) -> bool:
        x, offsets = torch.empty(tokens, 1, 16), torch.tensor([0, tokens])
        rows = torch.empty(tokens // tile_q + 1, 8)
        return pick("forward", x, x, x, rows, tile_q, tile_k, offsets) is SHORT

    assert takes(MOSTLY_SHORT - 1, 64, 64)
    assert not takes(MOSTLY_SHORT, 64, 64)
    assert not takes(1, 64, SHORT_USER)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3 * SHORT_USER), min_size=1, max_size=12),
    tile=st.sampled_from([64, 128]),
    window=st.sampled_from([(-1, -1), (-1, 0), (3, 2), (0, 0), (0, -1), (40, 0)]),
)
def test_rows_before_those_of_short_users_hold_every_longer_one(lengths, tile, window):
    offsets = lengths_to_offsets(torch.tensor(lengths))
    x = JaggedTensor(torch.empty(int(offsets[-1]), 1, 1), offsets)
    schedule = attention_schedule(x, window=window, tile_q=tile, tile_k=tile)
    for rows in (schedule.rows, schedule.rows_t):
        first = rows[: rows_to_walk(rows, int(offsets[-1]), tile, skips=True)]
        found = sorted(set(first[:, 5][first[:, 6] > SHORT_USER].tolist()))
        tiles = int((first[:, 6] > SHORT_USER).sum())
        longer = [user for user, length in enumerate(lengths) if length > SHORT_USER]
        assert found == longer
        assert tiles == sum(-(-lengths[user] // tile) for user in longer)
