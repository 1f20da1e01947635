"""Numbers in FP8: their scales, their rounding, and V^T and its order."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DEVICE
from choice_cases import on_hopper
from torch import Tensor

from jagged_kernels import JaggedTensor, fp8_keys, lengths_to_offsets
from jagged_kernels.attention.fp8_numbers import (
    E4M3,
    LARGEST,
    ORDERED_KEYS,
    in_order,
    of_tokens,
    ordered,
    quantise,
    quantise_keys,
    quantise_queries,
    scales_of,
)
from jagged_kernels.attention.operators import fp8 as operators

# Users that begin anywhere, and empty ones.
LENGTHS = [0, 1, 31, 33, 64, 0, 129, 200, 0]


def random(lengths: list[int], heads: int = 2, dim: int = 64, seed: int = 0) -> JaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, dim, generator=generator)
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    return JaggedTensor(values.to(DEVICE), offsets.to(DEVICE))


def as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def test_a_scale_is_the_largest_number_of_a_user_and_head():
    x = random(LENGTHS)
    scales = scales_of(x)
    for user, tokens in enumerate(x):
        expected = tokens.abs().amax((0, 2)) / LARGEST if len(tokens) else torch.zeros(2)
        torch.testing.assert_close(scales[user], expected.to(DEVICE), rtol=1e-6, atol=1e-37)
    assert (scales > 0).all()


def test_what_is_not_finite_is_in_no_scale():
    x = random(LENGTHS)
    expected = scales_of(x)
    # Not the largest of their user and head.
    for token, number in ((40, math.nan), (100, math.inf), (300, -math.inf)):
        x.values[token, 1, 5] = number
    scales = scales_of(x)
    assert torch.equal(scales[:, 0], expected[:, 0])
    assert scales.isfinite().all()
    assert (scales <= expected).all()


def test_numbers_are_rounded_to_the_nearest():
    """Half a step of e4m3: a sixteenth of the number, or of its smallest step 2 ** -9."""
    x = random(LENGTHS)
    scales = of_tokens(scales_of(x), x.offsets, x.values.shape[0])
    numbers = quantise(x.values, scales)
    assert numbers.dtype == E4M3
    scaled = x.values / scales[:, :, None]
    error = (numbers.float() - scaled).abs()
    assert (error <= torch.maximum(scaled.abs() / 16, torch.tensor(2.0**-10))).all()
    assert numbers.float().abs().max() == LARGEST


def test_queries_have_a_scale_for_each_token():
    x = random(LENGTHS).values * torch.logspace(-6, 6, sum(LENGTHS), device=DEVICE)[:, None, None]
    x[5] = 0.0
    x[7, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    numbers, scales = quantise_queries(x)
    shown = x[7, 0, 3:].abs().max()
    torch.testing.assert_close(scales[7, 0] * LARGEST, shown)
    assert numbers[7, 0, :3].float().isnan().all()
    x[7, 0, :3] = 0.0
    torch.testing.assert_close(scales * LARGEST, x.abs().amax(2), atol=1e-30, rtol=1e-6)
    assert numbers[7, 0, 3:].float().abs().max() == LARGEST
    assert (numbers[5].float() == 0).all()


def test_numbers_beyond_a_given_scale_are_the_largest():
    x = torch.tensor([[[1e4, -1e4, 3.0, math.inf, -math.inf, math.nan]]], device=DEVICE)
    numbers = quantise(x, torch.ones(1, 1, device=DEVICE)).float().flatten().tolist()
    assert numbers[:3] == [LARGEST, -LARGEST, 3.0]
    assert all(map(math.isnan, numbers[3:]))


def test_the_order_of_16_keys():
    """A thread's scores, of four threads that share a query: 2c, 2c + 1, 8 + 2c, 9 + 2c."""
    numbers = torch.arange(32, device=DEVICE, dtype=torch.uint8)[:, None, None].view(E4M3)
    by_thread = [2 * c + b + 8 * i for c in range(4) for i in range(2) for b in range(2)]
    expected = [*by_thread, *(16 + key for key in by_thread)]
    assert as_bytes(ordered(numbers)).flatten().tolist() == expected


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 100])
def test_the_order_undone_is_the_original(tokens):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 127, (tokens, 2, 64), generator=generator, dtype=torch.uint8)
    numbers = numbers.to(DEVICE).view(E4M3)
    v_t = ordered(numbers)
    assert v_t.shape == (2, 64, -(-tokens // ORDERED_KEYS) * ORDERED_KEYS)
    assert torch.equal(as_bytes(in_order(v_t, tokens)), as_bytes(numbers))
    behind = as_bytes(in_order(v_t, v_t.shape[2]))[tokens:]
    assert (behind == 0).all()


def test_what_is_kept_of_keys():
    k, v = random(LENGTHS), random(LENGTHS, seed=1)
    kept = fp8_keys(k, v).dequantised()
    for given, found in zip((k, v), kept, strict=True):
        assert found.offsets is k.offsets
        scales = of_tokens(scales_of(given), k.offsets, k.values.shape[0])[:, :, None]
        error = (found.values - given.values).abs()
        assert (error <= torch.maximum(given.values.abs() / 16, scales * 2.0**-10) * 1.001).all()


def test_a_user_does_not_depend_on_others():
    k, v = random(LENGTHS), random(LENGTHS, seed=1)
    whole = fp8_keys(k, v).dequantised()
    for user, tokens in enumerate(LENGTHS):
        k_alone, v_alone = (JaggedTensor.from_list([x[user]]) for x in (k, v))
        for one, other in zip(fp8_keys(k_alone, v_alone).dequantised(), whole, strict=True):
            assert torch.equal(one.values, other[user]), tokens


def test_calibrated_scales():
    k, v = random(LENGTHS), random(LENGTHS, seed=1)
    users = len(LENGTHS)
    of_heads = torch.tensor([0.01, 0.02], device=DEVICE)
    keys = fp8_keys(k, v, k_scale=of_heads, v_scale=of_heads.expand(users, 2))
    assert torch.equal(keys.k_scale, of_heads.expand(users, 2))
    assert torch.equal(keys.v_scale, keys.k_scale)
    expected = quantise(k.values, of_heads.expand(k.values.shape[0], 2))
    assert torch.equal(as_bytes(keys.k), as_bytes(expected))


def test_a_value_that_is_not_finite_makes_its_key_nan():
    k, v = random(LENGTHS), random(LENGTHS, seed=1)
    v.values[50, 1, 7] = math.inf
    v.values[60, 0, 3] = math.nan
    k.values[70, 1, 0] = math.nan
    keys = fp8_keys(k, v)
    assert keys.v_t.float().isfinite().all()
    sick = keys.k.float().isnan()
    assert sick[50, 1].all()
    assert sick[60, 0].all()
    assert sick[70, 1].any()
    sick[50, 1] = sick[60, 0] = sick[70, 1] = False
    assert not sick.any()


def test_no_tokens():
    for lengths in ([], [0, 0]):
        keys = fp8_keys(random(lengths), random(lengths))
        assert keys.k.shape == (0, 2, 64)
        assert keys.v_t.shape == (2, 64, 0)
        assert keys.k_scale.shape == (len(lengths), 2)
        assert [x.values.shape for x in keys.dequantised()] == [(0, 2, 64)] * 2


def test_the_operator_keeps_its_contract():
    x = random(LENGTHS)
    scales = of_tokens(scales_of(x), x.offsets, x.values.shape[0])
    torch.library.opcheck(operators.fp8_keys, (x.values, x.values, scales, scales))


def _by_kernels(k: Tensor, v: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """k as queries, then k and V^T of both."""
    from jagged_kernels.attention.hopper.fp8_quantise import (
        launch_quantise_keys,
        launch_quantise_queries,
    )

    return *launch_quantise_queries(k), *launch_quantise_keys(k, v, scales, scales)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter")
@pytest.mark.parametrize("tokens", [0, 1, 100, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_lay_out_what_needs_no_rounding(tokens, packed):
    """The interpreter rounds to e4m3 in a way of its own, and has no NaN there."""
    generator = torch.Generator().manual_seed(0)
    pair = torch.randint(-7, 8, (tokens, 2, 3, 64), generator=generator).float()
    pair[..., 3] = 7.0  # so that queries are multiplied by 64
    k, v = pair.unbind(1) if packed else pair.transpose(0, 1).contiguous().unbind(0)
    if tokens > 20:
        v[20, 1, 5] = math.inf
    scales = torch.full((tokens, 3), 2.0)
    expected = (*quantise_queries(k), *quantise_keys(k, v, scales, scales))
    for one, other in zip(_by_kernels(k, v, scales), expected, strict=True):
        there = ~other.float().isnan()
        assert (~there).sum() in (0, 64)
        assert torch.equal(one.float()[there], other.float()[there])


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_are_the_specification_to_the_bit(dim, dtype):
    k, v = (random(LENGTHS, dim=dim, seed=seed).values.to(dtype) for seed in range(2))
    k[:50] *= 1e-3
    k[9, 0, 4] = -math.inf
    v[7, 1, 3] = math.nan
    x = random(LENGTHS)
    scales = of_tokens(scales_of(x), x.offsets, k.shape[0])
    expected = (*quantise_queries(k), *quantise_keys(k, v, scales, scales))
    for one, other in zip(_by_kernels(k, v, scales), expected, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))
