"""The forward for Hopper of numbers in FP8, against float64 attention of the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from choice_cases import on_hopper
from fp8_cases import LENGTHS, MASKS, assert_within, bound, sides
from hopper_backward_cases import deal_out_beforehand
from torch import Tensor

from jagged_kernels import FP8Keys, JaggedTensor, attention_schedule, fp8_attention, fp8_keys
from jagged_kernels.attention.fp8 import HEAD_DIMS

DIMS = pytest.mark.parametrize("dim", HEAD_DIMS)
MASK = pytest.mark.parametrize("mask", MASKS, ids=str)


def by_kernel(q: JaggedTensor, keys: FP8Keys, **options: Any) -> tuple[Tensor, Tensor]:
    o, lse = fp8_attention(q, keys, backend="triton", return_lse=True, **options)
    return o.values, lse


def assert_met(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, **mask: Any) -> None:
    keys = fp8_keys(k, v)
    assert_within(*by_kernel(q, keys, **mask), bound(q, keys, **mask))


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@on_hopper
@DIMS
@MASK
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_length(dim, mask, dtype):
    assert_met(*sides(LENGTHS, dim=dim, dtype=dtype), **mask)


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
def test_other_lengths_of_keys(dim, causal):
    lengths = ([5, 0, 200, 64, 130, 1, 300, 9], [300, 10, 0, 64, 1000, 129, 20, 1])
    assert_met(*sides(*lengths, dim=dim, dtype=torch.bfloat16), causal=causal)


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_and_more_tiles_than_programs(dim, causal, kv_heads):
    lengths = list(range(1, 420, 6))
    shape: Any = {"dim": dim, "heads": 4, "kv_heads": kv_heads, "dtype": torch.bfloat16}
    assert_met(*sides(lengths, **shape), causal=causal)


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
def test_long_users(dim, causal):
    """Sums of thousands of keys are as exact as those of few."""
    assert_met(*sides([4096, 3001], dim=dim, dtype=torch.bfloat16), causal=causal)


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
def test_sharp_and_flat_weights(dim, causal):
    for size in (0.0, 0.1, 10.0):
        q, k, v = sides(LENGTHS, dim=dim, dtype=torch.bfloat16)
        assert_met(q.with_values(size * q.values), k, v, causal=causal)


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38], ids=str)
def test_what_is_not_finite_stays_with_its_user(dim, causal, value):
    q, k, v = sides(LENGTHS, dim=dim, dtype=torch.bfloat16)
    clean = by_kernel(q, fp8_keys(k, v), causal=causal)
    bounds = k.offsets.tolist()
    for user in (1, 2, 4, 5, 7, 9):
        sick = slice(*bounds[user : user + 2])
        parts = [x.with_values(x.values.clone()) for x in (q, k, v)]
        for x in parts:
            x.values[sick] = value
        found = by_kernel(parts[0], fp8_keys(*parts[1:]), causal=causal)
        for one, other in zip(found, clean, strict=True):
            for healthy in (slice(0, sick.start), slice(sick.stop, None)):
                assert torch.equal(one[healthy], other[healthy]), user
            if not math.isfinite(value):
                assert one[sick].isnan().all(), user


@on_hopper
@DIMS
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("of", ["k", "v"])
def test_what_the_mask_hides_touches_nothing(dim, value, of):
    q, k, v = sides([1000], dim=dim, dtype=torch.bfloat16)
    clean = by_kernel(q, fp8_keys(k, v), causal=True)
    token = 700
    # Not the largest of its head, which makes the scale.
    (k if of == "k" else v).values[token, :, 3] = value
    found = by_kernel(q, fp8_keys(k, v), causal=True)
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[:token], other[:token])
        assert one[token:].isnan().all()


@on_hopper
@DIMS
@pytest.mark.parametrize("causal", [False, True])
def test_reruns_are_bit_identical_at_size(dim, causal):
    q, k, v = sides([2048] * 8 + LENGTHS, dim=dim, heads=4, kv_heads=4, dtype=torch.bfloat16)
    keys = fp8_keys(k, v)
    first = by_kernel(q, keys, causal=causal)
    for _ in range(10):
        assert_same(by_kernel(q, keys, causal=causal), first)


@on_hopper
@DIMS
def test_tiles_that_are_counted_out(dim, monkeypatch):
    """The same, to the bit, as those that are dealt out beforehand."""
    q, k, v = sides(list(range(1, 420, 6)), dim=dim, heads=4, kv_heads=4, dtype=torch.bfloat16)
    keys = fp8_keys(k, v)
    counted = by_kernel(q, keys, causal=True)
    deal_out_beforehand(monkeypatch)
    assert_same(by_kernel(q, keys, causal=True), counted)


@on_hopper
@DIMS
def test_tiles_of_other_schedules(dim):
    """They are made for the kernel, and its own are taken."""
    q, k, v = sides(LENGTHS, dim=dim, dtype=torch.bfloat16)
    keys = fp8_keys(k, v)
    first = by_kernel(q, keys)
    for tile in (16, 64, 128):
        assert_same(by_kernel(q, keys, schedule=attention_schedule(q, k, tile_q=tile)), first)


@on_hopper
@DIMS
def test_packed_queries_and_keys(dim):
    q, k, v = sides(LENGTHS, dim=dim, dtype=torch.bfloat16)
    separate = by_kernel(q, fp8_keys(k, v))
    packed = torch.stack([q.values, k.values, v.values], dim=1).unbind(1)
    q, k, v = (x.with_values(values) for x, values in zip((q, k, v), packed, strict=True))
    assert not k.values.is_contiguous()
    assert_same(by_kernel(q, fp8_keys(k, v)), separate)


@on_hopper
def test_it_never_waits_for_the_device():
    q, k, v = sides(LENGTHS, dim=128, dtype=torch.bfloat16)
    by_kernel(q, fp8_keys(k, v), causal=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_kernel(q, fp8_keys(k, v), causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
