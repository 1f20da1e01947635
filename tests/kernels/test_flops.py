"""What `torch.utils.flop_counter` counts of operators."""

from __future__ import annotations

import contextlib

import pytest
import torch
from combinations import combined
from operation_cases import DEVICE, flat
from processes import run_python
from product_cases import OPERATIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from jagged_kernels import (
    ALiBi,
    HistoryCache,
    JaggedTensor,
    SiLU,
    attention_schedule,
    cache_schedule,
    cached_attention,
    jagged_attention,
    key_statistics,
    lengths_to_offsets,
)

HEADS, DIM, DIM_V = 4, 16, 32
BANDS = [(-1, -1), (-1, 0), (5, 0), (2, 19), (0, -1)]
# More queries than keys, fewer, none of either; longer than a tile of 16.
LENGTHS = {
    "self": ([3, 0, 20, 1], [3, 0, 20, 1]),
    "cross": ([5, 0, 18, 4, 1], [3, 7, 20, 0, 18]),
}


def visible(q_lengths, k_lengths, left, right, recent=None):
    """Pairs one by one, of the last `recent` queries of each user."""
    return sum(
        (left < 0 or j - i - (m - n) >= -left) and (right < 0 or j - i - (m - n) <= right)
        for n, m in zip(q_lengths, k_lengths, strict=True)
        for i in range(0 if recent is None else max(n - recent, 0), n)
        for j in range(m)
    )


def jagged(lengths, heads, dim):
    values = torch.randn(sum(lengths), heads, dim, device=DEVICE)
    return JaggedTensor(values, lengths_to_offsets(torch.tensor(lengths)).to(DEVICE))


def counted(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "lengths", "band"),
    combined(["native", "triton", "split", "rows", "stream", "biased"], LENGTHS, BANDS),
    ids=str,
)
def test_attention_counts_the_pairs_that_are_visible(kind, lengths, band):
    q_lengths, k_lengths = LENGTHS[lengths]
    k = jagged(k_lengths, 2, DIM)
    v = k.with_values(jagged(k_lengths, 2, DIM_V).values)
    q = jagged(q_lengths, HEADS, DIM)
    q = k.with_values(q.values) if q_lengths == k_lengths else q
    bias = schedule = None
    if kind == "biased":
        bias = ALiBi(torch.rand(HEADS, device=DEVICE))
    if kind in ("split", "rows", "stream"):
        q, q_lengths = torch.randn(len(k), 3, HEADS, DIM, device=DEVICE), [3] * len(k)
        schedule = attention_schedule(q, k, window=band, head_dim=DIM_V, split=kind)
    leaves = [x if isinstance(x, torch.Tensor) else x.values for x in (q, k, v)]
    for leaf in leaves:
        leaf.requires_grad_()
    options = {"window": band, "bias": bias, "schedule": schedule}
    options["backend"] = "native" if kind == "native" else "triton"
    out, forward = counted(lambda: flat(jagged_attention(q, k, v, **options))[0])
    _, backward = counted(lambda: out.sum().backward())
    pairs = visible(q_lengths, k_lengths, *band)
    assert pairs
    assert forward == 2 * HEADS * pairs * (DIM + DIM_V)
    assert backward == 2 * HEADS * pairs * (3 * DIM + 2 * DIM_V)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_one_user_counts_as_scaled_dot_product_attention(backend):
    x = jagged([9], HEADS, DIM)
    _, found = counted(lambda: jagged_attention(x, x, x, backend=backend))
    shape = (1, HEADS, 9, DIM)
    assert found == sdpa_flop_count(shape, shape, shape)


def test_frozen_histories_count_less():
    q, k = jagged([9, 4], HEADS, DIM), jagged([9, 4], HEADS, DIM)
    q.values.requires_grad_()
    out = jagged_attention(q, k, k, backend="triton").values
    _, backward = counted(lambda: out.sum().backward())
    assert backward == 2 * HEADS * (81 + 16) * (2 * DIM + DIM)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize(("band", "pairs"), [((-1, -1), 16), ((-1, 0), 10), ((1, 0), 7)])
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_without_contents_users_are_of_one_length(device, band, pairs, backend):
    fakes = FakeTensorMode() if device == "fake" else contextlib.nullcontext()
    with fakes, torch.device(DEVICE if device == "fake" else "meta"):
        offsets = torch.empty(4, dtype=torch.int64)
        x = JaggedTensor(torch.empty(12, HEADS, DIM), offsets)
        _, found = counted(lambda: jagged_attention(x, x, x, window=band, backend=backend))
        assert found == 2 * HEADS * 3 * pairs * 2 * DIM
        q = torch.empty(3, 2, HEADS, DIM)
        _, found = counted(lambda: jagged_attention(q, x, x, backend=backend))
        assert found == 2 * HEADS * 12 * 2 * 2 * DIM


def a_cache(lengths, page_size, capacity=24):
    cache = HistoryCache(
        len(lengths), capacity, kv_heads=2, head_dim=DIM, head_dim_v=DIM_V, page_size=page_size,
        device=DEVICE,
    )  # fmt: skip
    k = jagged(lengths, 2, DIM)
    cache.append(k, k.with_values(jagged(lengths, 2, DIM_V).values))
    return cache


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_attention_over_a_cache_counts_what_it_holds(backend, page_size, causal):
    """Whatever its capacity; more queries than keys, and more than a tile of 16, too."""
    q_lengths, k_lengths = LENGTHS["cross"]
    cache, q = a_cache(k_lengths, page_size), jagged(q_lengths, HEADS, DIM)
    pairs = visible(q_lengths, k_lengths, -1, 0 if causal else -1)
    # Causal: five queries see 0, 0, 1, 2 and 3 keys, eighteen 3 ... 20, one 18.
    assert pairs == (6 + 207 + 18 if causal else 15 + 360 + 18)
    for schedule in (None, cache_schedule(q, cache, causal=causal, tile_q=16)):
        options = {"causal": causal, "schedule": schedule, "backend": backend}
        for more in ({}, {"scores": SiLU(divide_by=8)}):
            given = options | more
            _, found = counted(lambda given=given: cached_attention(q, cache, **given))
            assert found == 2 * HEADS * pairs * (DIM + DIM_V)


@pytest.mark.parametrize("recent", [1, 5, None])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_statistics_count_the_scores_of_the_queries_that_count(backend, lengths, band, recent):
    q, k = (jagged(*x) for x in zip(lengths, (HEADS, 2), (DIM, DIM), strict=True))
    lse = torch.zeros(q.values.shape[:2], device=DEVICE)
    options = {"causal": False, "window": band, "recent": recent, "backend": backend}
    _, found = counted(lambda: key_statistics(q, k, lse, **options))
    assert found == 2 * HEADS * visible(*lengths, *band, recent=recent) * DIM


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_without_contents_caches_are_full(device, backend):
    """Three users of 16 slots; of statistics, of four events each."""
    fakes = FakeTensorMode() if device == "fake" else contextlib.nullcontext()
    with fakes, torch.device(DEVICE if device == "fake" else "meta"):
        cache = HistoryCache(3, 16, kv_heads=HEADS, head_dim=DIM)
        offsets = torch.empty(4, dtype=torch.int64)
        q = JaggedTensor(torch.empty(6, HEADS, DIM), offsets)
        for causal, pairs in ((True, 31), (False, 32)):
            options = {"causal": causal, "backend": backend}
            _, found = counted(lambda options=options: cached_attention(q, cache, **options))
            assert found == 2 * HEADS * 3 * pairs * 2 * DIM
        x = JaggedTensor(torch.empty(12, HEADS, DIM), offsets)
        lse = torch.empty(12, HEADS)
        for recent, pairs in ((None, 10), (1, 4), (9, 10)):
            options = {"recent": recent, "backend": backend}
            _, found = counted(lambda options=options: key_statistics(x, x, lse, **options))
            assert found == 2 * HEADS * 3 * pairs * DIM


TOKENS = (3, 0, 20, 1)
COUNT, SCORES = sum(TOKENS), sum(n * n for n in TOKENS)
# Of each product in `product_cases`: forward, backward for all inputs.
PRODUCTS = {
    "dense": (2 * COUNT * 5 * 3, 2),
    "pair": (2 * COUNT * 5 * 3, 2),
    # With what is before the activation once more.
    "linear": (2 * COUNT * 12 * 18, 3),
    "outer": (2 * SCORES * 4, 2),
    "matmul": (2 * SCORES * 4, 2),
    "matmul of transposes": (2 * SCORES * 4, 2),
    "target": (2 * COUNT * 3 * 4, 3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_what_tokens_take_part_in(name):
    call, case = OPERATIONS[name]
    leaves = {
        key: t.to(DEVICE).requires_grad_(t.is_floating_point()) for key, t in case(TOKENS).items()
    }
    out, forward = counted(lambda: flat(call("triton", **leaves))[0])
    _, backward = counted(lambda: out.sum().backward())
    once, times = PRODUCTS[name]
    assert (forward, backward) == (once, times * once)


@pytest.mark.parametrize("name", ["linear", "outer", "matmul"])
def test_gradients_of_some_inputs_count_for_themselves(name):
    call, case = OPERATIONS[name]
    once, _ = PRODUCTS[name]
    for wanted in ("weight", "x", "y", "m"):
        leaves = {key: t.to(DEVICE) for key, t in case(TOKENS).items()}
        if wanted in leaves:
            leaves[wanted].requires_grad_()
            out = flat(call("triton", **leaves))[0]
            _, backward = counted(lambda out=out: out.sum().backward())
            assert backward == (2 if name == "linear" else 1) * once


@pytest.mark.parametrize("first", ["jagged_kernels", "torch.utils.flop_counter"])
def test_formulas_are_there_whatever_is_imported_first(first):
    """And importing the package alone imports no counter, which would import Triton."""
    code = f"""
import {first}, sys
import jagged_kernels
assert {first == "torch.utils.flop_counter"} == ("torch.utils.flop_counter" in sys.modules)
import torch.utils.flop_counter as counter
from torch.utils.flop_counter import flop_registry
assert counter.__spec__.name == "torch.utils.flop_counter"
print(sorted(str(op) for op in flop_registry if str(op).startswith("jagged_kernels")))
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    attention = ["split", "triton", "triton_general", "native"]
    for name in ("attention_cached", "attention_cached_native", "key_statistics_triton"):
        assert f"jagged_kernels.{name}'" in result.stdout
    for name in [f"attention_{kind}" for kind in attention]:
        assert f"jagged_kernels.{name}'" in result.stdout
        assert f"jagged_kernels.{name}_backward'" in result.stdout
