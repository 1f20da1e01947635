"""Caches, as only a GPU can show them: at size, in half precision, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import Case, Standard
from cache_cases import filled, shuffle

from jagged_kernels import (
    HistoryCache,
    JaggedTensor,
    cache_schedule,
    cached_attention,
    jagged_attention,
    key_statistics,
    scissorhands,
)

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SKEWED = Case([8, 1, 64, 0, 3, 5, 20], [3000, 64, 129, 70, 0, 5, 20], heads=4, kv_heads=2, dim=64)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def new_events(
    lengths: torch.Tensor, heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[JaggedTensor, JaggedTensor, JaggedTensor]:
    """(q of twice the heads, k, v), random."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens = int(offsets[-1])
    x = JaggedTensor(torch.zeros(tokens, device="cuda"), offsets.cuda())
    shapes = [(tokens, count, dim) for count in (2 * heads, heads, heads)]
    q, k, v = (x.with_values(torch.randn(s, device="cuda").to(dtype)) for s in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_at_size(dtype, page_size, causal):
    inputs = SKEWED.inputs(dtype)
    cache, q = filled(inputs, page_size, capacity=3001), JaggedTensor(inputs.q, inputs.q_offsets)
    o, lse = cached_attention(q, cache, causal=causal, return_lse=True)
    Standard(inputs, causal=causal).assert_met({"o": o.values, "lse": lse}, f"pages of {page_size}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "tile_q"),
    [(4, 4, 16, 16, 16), (8, 2, 128, 128, 16), (2, 2, 128, 128, 64), (8, 1, 128, 128, 16),
     (4, 2, 256, 256, 16), (2, 2, 80, 48, 32), (4, 2, 64, 128, 32), (16, 1, 64, 64, 16)],
)  # fmt: skip
def test_shapes_of_heads(dtype, page_size, heads, kv_heads, dim, dim_v, tile_q):
    case = Case([7, 30, 1], [900, 33, 400], heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
    inputs = case.inputs(dtype)
    cache, q = filled(inputs, page_size, capacity=1000), JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = cache_schedule(q, cache, tile_q=tile_q)
    o, lse = cached_attention(q, cache, schedule=schedule, return_lse=True)
    Standard(inputs, causal=True).assert_met({"o": o.values, "lse": lse}, "triton")


@pytest.mark.parametrize("page_size", [1, 64])
def test_what_is_hidden_touches_nothing(page_size):
    inputs = SKEWED.inputs(torch.bfloat16)
    cache, q = filled(inputs, page_size, capacity=3000), JaggedTensor(inputs.q, inputs.q_offsets)
    clean = cached_attention(q, cache).values
    lists = range(2) if page_size == 1 else [0]
    for head in lists:
        last = int(cache.pages[0, head, 2999 // page_size]) * page_size + 2999 % page_size
        cache.v_store[last, head if page_size == 1 else slice(None)] = torch.nan
    out = cached_attention(q, cache).values
    assert out[7].isnan().all()
    seen = torch.arange(out.shape[0]) != 7
    torch.testing.assert_close(out[seen], clean[seen], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_thousand_steps_wait_for_nothing_and_compile_nothing(page_size):
    from jagged_kernels.attention.split import forward, merge
    from jagged_kernels.cache import triton_append, triton_statistics
    from jagged_kernels.schedule import triton_rows, triton_spans

    kernels: tuple[Any, ...] = (
        triton_append._append_kernel,
        triton_append._grow_kernel,
        forward._split_forward_kernel,
        merge._merge_states_kernel,
        triton_rows._count_kernel,
        triton_rows._place_kernel,
        triton_rows._fill_kernel,
        triton_spans._cost_kernel,
        triton_spans._cut_kernel,
        triton_statistics._statistics_kernel,
    )

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    users, capacity = 37, 1500
    generator = torch.Generator().manual_seed(0)
    layers = [
        HistoryCache(
            users, capacity, kv_heads=2, head_dim=64, page_size=page_size, dtype=torch.bfloat16,
            device="cuda",
        )
        for _ in range(2)
    ]  # fmt: skip

    def step(most: int) -> None:
        lengths = torch.randint(0, most + 1, (users,), generator=generator)
        q, k, v = new_events(lengths)
        with no_waiting():
            for cache in layers:
                # Those that are nearly full start anew.
                cache.reset(cache.lengths > capacity - most)
                cache.append(k, v)
            schedule = cache_schedule(q, layers[0])
            for cache in layers:
                _, lse = cached_attention(q, cache, schedule=schedule, return_lse=True)
                key_statistics(q, k, lse)
            if page_size == 1:
                for cache in layers:
                    scissorhands(cache, budget=1200, policy="random")

    # Tiles of 16, 32 and 64 queries.
    for most in (2, 24, 100):
        step(most)
    before = compiled()
    for _ in range(1000):
        step(int(torch.randint(1, 101, (), generator=generator)))
    assert compiled() == before


def test_steps_give_what_attention_over_the_whole_history_gives():
    users, generator = 50, torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 900, (users,), generator=generator)
    q, k, v = new_events(lengths, dtype=torch.float32)
    expected = jagged_attention(q, k, v, causal=True)
    parts = [x.unbind() for x in (q, k, v)]
    for page_size in (1, 32):
        cache = HistoryCache(
            users, 900, kv_heads=2, head_dim=64, page_size=page_size, device="cuda"
        )
        shuffle(cache)
        found: list[list[torch.Tensor]] = [[] for _ in range(users)]
        for start in range(0, 900, 60):
            some = [[user[start : start + 60] for user in part] for part in parts]
            now = [JaggedTensor.from_list(part) for part in some]
            cache.append(now[1], now[2])
            for user, o in zip(found, cached_attention(now[0], cache).unbind(), strict=True):
                user.append(o)
        out = torch.cat([torch.cat(user) for user in found])
        torch.testing.assert_close(out, expected.values, atol=1e-5, rtol=1e-5)


def test_a_step_in_a_cuda_graph_follows_new_offsets():
    """Captured once at so many tokens, replayed with other users' events."""
    cache = HistoryCache(3, 256, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    q, k, v = new_events(torch.tensor([5, 0, 3]))

    def step() -> JaggedTensor:
        cache.append(k, v)
        return cached_attention(q, cache)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new in ([0, 1, 2, 8], [0, 8, 8, 8], [0, 0, 4, 8]):
        q.offsets.copy_(torch.tensor(new))
        graph.replay()
        replayed = out.values.clone()
        assert torch.equal(replayed, cached_attention(q, cache).values)
    assert cache.lengths.tolist() == [5 + 1 + 8 + 0, 1 + 0 + 4, 3 + 6 + 0 + 4]


def test_beyond_capacity_is_dropped():
    cache = HistoryCache(3, 100, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    _, k, v = new_events(torch.tensor([90, 130, 7]))
    cache.append(k, v)
    cache.append(k, v)
    assert cache.lengths.tolist() == [100, 100, 14]
    users = cache.gather()[0].unbind()
    first = k.unbind()
    assert torch.equal(users[0], torch.cat([first[0], first[0][:10]]))
    assert torch.equal(users[1], first[1][:100])
    assert torch.equal(users[2], torch.cat([first[2]] * 2))


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("page_size", [1, 128])
def test_more_than_2_to_the_31_elements(page_size):
    heads, dim, users = 8, 64, 4
    capacity = 2**31 // (heads * dim * users) + 40_000
    cache = HistoryCache(
        users, capacity, kv_heads=heads, head_dim=dim, page_size=page_size, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    assert cache.k_store.numel() > 2**31
    _, k, v = new_events(torch.tensor([0, 0, 0, 3000]), heads, dim)
    cache.append(k, v)
    cache.pages.copy_(cache.pages.flip(-1))
    cache.lengths.zero_()
    cache.append(k, v)
    q = JaggedTensor(k.values[-8:], torch.tensor([0, 0, 0, 0, 8], device="cuda"))
    expected = jagged_attention(q, k, v, causal=True).values.float()
    out = cached_attention(q, cache).values.float()
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": (100, 0)}], ids=str)
def test_statistics_at_size(dtype, dim, mask):
    inputs = Case([900, 64, 129, 1, 0, 300], heads=4, kv_heads=2, dim=dim).inputs(dtype)
    q, k, v = (JaggedTensor(x, inputs.q_offsets) for x in (inputs.q, inputs.k, inputs.v))
    options: dict[str, Any] = {"causal": True} | mask
    _, lse = jagged_attention(q, k, v, return_lse=True, **options)
    found = key_statistics(q, k, lse, recent=200, **options)
    expected = key_statistics(
        q.to(torch.float64), k.to(torch.float64), lse.double(), recent=200, backend="reference",
        **options,
    )  # fmt: skip
    difference = (found.unimportant.values - expected.unimportant.values).abs()
    # A probability within rounding of the bound may be counted on its other side.
    assert difference.max() <= 2
    assert difference.float().mean() < 0.01
    torch.testing.assert_close(
        found.mass.values.double(), expected.mass.values, atol=1e-3, rtol=1e-3
    )
    again = key_statistics(q, k, lse, recent=200, **options)
    assert torch.equal(again.mass.values, found.mass.values)


@pytest.mark.parametrize("policy", ["pivotal", "h2o", "newest", "random"])
def test_a_compression_waits_for_nothing(policy):
    lengths = torch.tensor([900, 0, 400, 1200])
    q, k, v = new_events(lengths)
    _, lse = jagged_attention(q, k, v, causal=True, return_lse=True)
    cache = HistoryCache(
        4, 1200, kv_heads=2, head_dim=64, page_size=1, dtype=torch.bfloat16, device="cuda"
    )
    cache.append(k, v)
    with no_waiting():
        dropped = scissorhands(cache, key_statistics(q, k, lse), budget=800, policy=policy)
    assert dropped.tolist() == [400, 0, 0, 400]
    assert cache.lengths.tolist() == [500, 0, 400, 800]
    out = cached_attention(q, cache, causal=False).values
    kept = cached_attention(q, cache, causal=False, backend="native").values
    torch.testing.assert_close(out, kept, atol=2e-2, rtol=2e-2)
