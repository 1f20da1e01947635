"""Attention over a cache against the specification, of what it holds, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, Case, Inputs, Standard
from cache_cases import filled
from launch_keys import batches, record_launches
from torch.utils.flop_counter import FlopCounterMode

from jagged_kernels import (
    HistoryCache,
    JaggedTensor,
    RelativePositionBias,
    attention_schedule,
    cache_schedule,
    cached_attention,
    jagged_attention,
    lengths_to_offsets,
)
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.scores.bias_terms import BiasTerms
from jagged_kernels.cache import attention as ops
from jagged_kernels.cache import slots as ops_slots
from jagged_kernels.core import contents
from jagged_kernels.schedule import spans

EVERY_LENGTH = Case([3, 1, 0, 2, 1, 17, 2], [3, 1, 16, 15, 117, 33, 40])


def assert_exact(
    inputs: Inputs, page_size: int = 16, *backends: Any, causal: bool = True,
    scale: float | None = None, tile_q: int | None = None, capacity: int = 128,
) -> None:  # fmt: skip
    cache = filled(inputs, page_size, capacity=capacity)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    standard = Standard(inputs, causal=causal, scale=scale)
    for backend in backends or ("triton",):
        schedule = cache_schedule(q, cache, causal=causal, tile_q=tile_q)
        o, lse = cached_attention(
            q, cache, causal=causal, scale=scale, schedule=schedule, backend=backend,
            return_lse=True,
        )  # fmt: skip
        standard.assert_met({"o": o.values, "lse": lse}, backend)


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_every_length_in_pages_of_every_size(page_size, causal):
    assert_exact(EVERY_LENGTH.inputs(torch.float32), page_size, causal=causal)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_other_backends(backend):
    assert_exact(EVERY_LENGTH.inputs(torch.float32), 1, backend)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 2), (9, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_grouped_query_heads(heads, kv_heads, page_size):
    """Lists of each key head; groups of 1, 2, 3 (in a tile for 4), and 9, which no tile holds."""
    case = Case([3, 1, 0], [70, 20, 9], heads=heads, kv_heads=kv_heads)
    assert_exact(case.inputs(torch.float32), page_size)


@pytest.mark.parametrize("tile_q", [16, 32, None])
def test_any_number_of_queries(tile_q):
    """More than a tile, and more than there are keys: the first of those see nothing."""
    inputs = Case([40, 3, 64, 20], [60, 3, 100, 4], heads=2, kv_heads=1).inputs(torch.float32)
    assert_exact(inputs, tile_q=tile_q)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (24, 40), (72, 16)])
def test_any_head_dim(dim, dim_v):
    case = Case([2, 1], [50, 3], heads=1, kv_heads=1, dim=dim, dim_v=dim_v)
    assert_exact(case.inputs(torch.float32), 4)


def test_scales():
    inputs = Case([5, 9, 2], [70, 4, 40]).inputs(torch.float32)
    assert_exact(inputs, scale=-0.3)
    assert_exact(inputs, 1, "triton", "native", "reference", scale=2.0, causal=False)


def test_float16_and_a_capacity_of_no_whole_page():
    assert_exact(EVERY_LENGTH.inputs(torch.float16), 32, capacity=117)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_history_that_grows_is_a_history_that_was_there(page_size):
    """Steps of few events each against one causal attention over all of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = [23, 40, 0, 9]
    whole = Case(lengths, heads=4, kv_heads=2).inputs(torch.float32)
    x = [JaggedTensor(part, whole.q_offsets) for part in (whole.q, whole.k, whole.v)]
    expected = jagged_attention(*x, causal=True).unbind()
    users, cache = (
        [part.unbind() for part in x],
        filled(
            replace(whole, k=whole.k[:0], v=whole.v[:0], k_offsets=whole.k_offsets * 0), page_size
        ),
    )
    done = [0] * len(lengths)
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        end = [
            min(n, start + int(torch.randint(0, 14, (), generator=generator)))
            for start, n in zip(done, lengths, strict=True)
        ]
        q, k, v = (
            JaggedTensor.from_list([u[a:b] for u, a, b in zip(part, done, end, strict=True)])
            for part in users
        )
        cache.append(k, v, backend="triton")
        out = cached_attention(q, cache, backend="triton").unbind()
        for o, user, a, b in zip(out, expected, done, end, strict=True):
            torch.testing.assert_close(o, user[a:b], atol=2e-6, rtol=2e-6)
        done = end


def test_heads_that_keep_other_events():
    inputs = Case([2, 1], [60, 30], heads=4, kv_heads=2).inputs(torch.float32)
    cache = filled(inputs, 1, capacity=64)
    kept = torch.rand(2, 2, 64, generator=torch.Generator().manual_seed(0)).argsort(-1) < 12
    kept[1] = False
    kept[1, 0, [1, 29]] = kept[1, 1, [0, 7]] = True
    kept[0, :, 60:] = False
    counts = kept[0].sum(-1)
    for head in range(2):  # as many of each head
        extra = int(counts[head] - counts.min())
        kept[0, head, kept[0, head].nonzero()[:extra, 0]] = False
    cache.keep(kept.to(DEVICE))
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    for backend in ("native", "triton"):
        out = cached_attention(q, cache, causal=False, backend=backend)
        for user, (start, end) in enumerate(((0, 60), (60, 90))):
            for head in range(4):
                mine = start + kept[user, head // 2].nonzero()[:, 0]
                assert mine.max() < end
                rows = q.unbind()[user][:, head]
                weights = (rows @ inputs.k[mine, head // 2].T / 4).softmax(-1)
                expected = weights @ inputs.v[mine, head // 2]
                torch.testing.assert_close(out.unbind()[user][:, head], expected)


@pytest.mark.parametrize("page_size", [1, 128])
def test_a_page_that_the_store_does_not_have_is_hidden(page_size, monkeypatch):
    lost = 7 if page_size == 1 else 0
    inputs = Case([2, 1], [200, 30], heads=2, kv_heads=1).inputs(torch.float32)
    cache = filled(inputs, page_size, capacity=256)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    cache.pages[0, 0, lost] = 10**6 if page_size == 1 else -1
    out = cached_attention(q, cache, backend="triton", causal=False)
    seen = torch.ones(200, dtype=torch.bool)
    seen[lost * page_size : (lost + 1) * page_size] = False
    k, v = inputs.k[:200][seen], inputs.v[:200][seen]
    weights = torch.einsum("nhd,md->hnm", inputs.q[:2], k[:, 0]).div(4).softmax(-1)
    torch.testing.assert_close(
        out.values[:2], torch.einsum("hnm,md->nhd", weights, v[:, 0]), atol=2e-6, rtol=2e-6
    )
    for backend in ("native", "reference"):
        with pytest.raises(ValueError, match=rf"pages\[0, 0, {lost}\], of user 0, is"):
            cached_attention(q, cache, backend=backend)
    monkeypatch.setattr(contents, "_CHECKING", True)
    with pytest.raises(ValueError, match=rf"pages\[0, 0, {lost}\], of user 0, is"):
        cached_attention(q, cache, backend="triton")


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_schedule_for_longer_users_than_a_cache_has_reads_no_further(page_size, monkeypatch):
    """A layer's cache of another capacity, where lengths are not read: its pages are all there is,
    and not the next user's."""
    long, short = Case([2, 1], [250, 700]), Case([2, 1], [100, 100])
    inputs = short.inputs(torch.float32)
    q, cache = JaggedTensor(inputs.q, inputs.q_offsets), filled(inputs, page_size)
    for store in (cache.k_store, cache.v_store):
        store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(1)))
    other = filled(long.inputs(torch.float32), page_size, capacity=1024)
    schedule = cache_schedule(q, other, causal=False)
    monkeypatch.setattr("jagged_kernels.cache.schedule.readable", lambda tensor: False)
    found = cached_attention(q, cache, schedule=schedule, causal=False, backend="triton")
    cache.lengths.fill_(128)
    expected = cached_attention(q, cache, causal=False, backend="reference")
    torch.testing.assert_close(found.values, expected.values)


def test_what_is_hidden_touches_nothing():
    """NaN in an event that a query does not see, in slots that nobody uses, and with its user."""
    inputs = Case([3, 2], [50, 20]).inputs(torch.float32)
    cache, q = filled(inputs, 4), JaggedTensor(inputs.q, inputs.q_offsets)
    clean = cached_attention(q, cache, backend="triton").values
    used = torch.zeros(cache.k_store.shape[0], dtype=torch.bool, device=DEVICE)
    for user, length in enumerate((50, 20)):
        place = torch.arange(length, device=DEVICE)
        used[cache.pages[user, 0, place // 4].long() * 4 + place % 4] = True
    last = int(cache.pages[0, 0, 49 // 4]) * 4 + 49 % 4
    cache.k_store[~used] = math.nan
    cache.v_store[~used] = math.inf
    assert torch.equal(cached_attention(q, cache, backend="triton").values, clean)
    cache.v_store[last] = math.nan
    out = cached_attention(q, cache, backend="triton").values
    torch.testing.assert_close(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert out[2].isnan().all()


def test_reruns_are_bit_identical():
    inputs = EVERY_LENGTH.inputs(torch.float32)
    cache, q = filled(inputs, 1), JaggedTensor(inputs.q, inputs.q_offsets)
    first, second = (cached_attention(q, cache, backend="triton").values for _ in range(2))
    assert torch.equal(first, second)


def test_pages_change_nothing():
    inputs = EVERY_LENGTH.inputs(torch.float32)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    sizes = [cached_attention(q, filled(inputs, n), backend="triton").values for n in (1, 8, 128)]
    assert torch.equal(sizes[0], sizes[1])
    assert torch.equal(sizes[0], sizes[2])


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"), [([], []), ([0, 0], [0, 0]), ([0, 0], [5, 0]), ([2, 1], [0, 0])]
)
def test_batches_without_events(backend, q_lengths, k_lengths):
    inputs = Case(q_lengths, k_lengths or None).inputs(torch.float32)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    out, lse = cached_attention(q, filled(inputs), backend=backend, return_lse=True)
    assert out.values.shape == inputs.q.shape
    assert (out.values == 0).all()
    assert (lse == -math.inf).all()


# --- schedules ------------------------------------------------------------------------------------


def test_one_schedule_for_all_layers():
    layers = [EVERY_LENGTH.inputs(torch.float32, seed=seed) for seed in range(2)]
    caches = [filled(layer) for layer in layers]
    q = [JaggedTensor(layer.q, layers[0].q_offsets) for layer in layers]
    schedule = cache_schedule(q[0], caches[0])
    for queries, cache in zip(q, caches, strict=True):
        shared = cached_attention(queries, cache, schedule=schedule, backend="triton")
        own = cached_attention(queries, cache, backend="triton")
        assert torch.equal(shared.values, own.values)


def test_a_schedule_of_another_step():
    inputs = Case([2, 1], [30, 4]).inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = cache_schedule(q, cache)
    with pytest.raises(ValueError, match="built for another batch"):
        cached_attention(q, cache, schedule=schedule, causal=False)
    wide = JaggedTensor(inputs.q.repeat(1, 2, 1), inputs.q_offsets)
    with pytest.raises(ValueError, match="built for another batch"):
        cached_attention(wide, cache, schedule=schedule)
    there = HistoryCache(2, cache.capacity, kv_heads=2, head_dim=16, device="meta")
    with pytest.raises(ValueError, match=r"the schedule is on .* and q on meta"):
        cached_attention(q.to("meta"), there, schedule=schedule)
    if DEVICE == "cpu":
        other = JaggedTensor(inputs.q, lengths_to_offsets(torch.tensor([1, 2])))
        with pytest.raises(ValueError, match="other offsets of q"):
            cached_attention(other, cache, schedule=schedule)
        other = filled(Case([2, 1], [29, 5]).inputs(torch.float32))
        with pytest.raises(ValueError, match="a cache of other lengths"):
            cached_attention(q, other, schedule=schedule)
    for backend in ("native", "triton"):
        x = JaggedTensor(inputs.k[:3], inputs.q_offsets)
        cache.append(x, x, backend=backend)
        with pytest.raises(ValueError, match="lengths changed in place after the schedule"):
            cached_attention(q, cache, schedule=schedule)
        schedule = cache_schedule(q, cache)
        # Nothing changes where there is nothing new, and what changes does so under a mode too.
        nothing = JaggedTensor(inputs.k[:0], inputs.q_offsets * 0)
        cache.append(nothing, nothing, backend=backend)
        cached_attention(q, cache, schedule=schedule)
        with FlopCounterMode(display=False):
            cache.append(x, x, backend=backend)
        with pytest.raises(ValueError, match="lengths changed in place after the schedule"):
            cached_attention(q, cache, schedule=schedule)
        schedule = cache_schedule(q, cache)


def test_a_schedule_that_was_traced():
    inputs = Case([2, 1], [30, 4]).inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    build = torch.compile(lambda q: cache_schedule(q, cache), fullgraph=True, backend="aot_eager")
    found = cached_attention(q, cache, schedule=build(q), backend="triton")
    assert torch.equal(found.values, cached_attention(q, cache, backend="triton").values)


def test_tiles_follow_from_queries():
    inputs = Case([1] * 4, [5] * 4).inputs(torch.float32)
    cache = filled(inputs)
    # One that holds twice the average.
    for each, tile in ((0, 16), (1, 16), (8, 16), (9, 32), (16, 32), (17, 64), (200, 64)):
        q = JaggedTensor.from_lengths(torch.zeros(4 * each, 2, 16), torch.tensor([each] * 4))
        assert cache_schedule(q.to(DEVICE), cache).tile_q == tile
    q = JaggedTensor.from_lengths(torch.zeros(33, 2, 16), torch.tensor([9, 8, 8, 8]))
    assert cache_schedule(q.to(DEVICE), cache).tile_q == 32  # the average is above 8
    # Sixteen heads to one of keys: a tile holds them before it holds more queries.
    q = JaggedTensor.from_lengths(torch.zeros(800, 16, 16), torch.tensor([200] * 4))
    shape = Case([1] * 4, [5] * 4, heads=2, kv_heads=2).inputs(torch.float32)
    assert cache_schedule(q.to(DEVICE), filled(shape)).tile_q == 16


# --- what is wrong --------------------------------------------------------------------------------


def test_arguments():
    inputs = Case([2, 1], [30, 4]).inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    with pytest.raises(TypeError, match="q must be a JaggedTensor, got Tensor"):
        cached_attention(inputs.q, cache)  # pyright: ignore
    with pytest.raises(TypeError, match="cache must be a HistoryCache"):
        cached_attention(q, q)  # pyright: ignore
    with pytest.raises(ValueError, match=r"q must be \[T, H, 16\] with H a multiple of"):
        cached_attention(q.with_values(inputs.q[:, :1]), cache)
    with pytest.raises(ValueError, match=r"q must be \[T, H, 16\] with H a multiple of"):
        cached_attention(q.with_values(inputs.q[..., :8]), cache)
    with pytest.raises(ValueError, match="q has 1 users and the cache 2"):
        cached_attention(JaggedTensor(inputs.q, inputs.q_offsets[[0, 2]]), cache)
    with pytest.raises(TypeError, match=r"q must be torch.float32 on"):
        cached_attention(q.to(torch.float16), cache)
    with pytest.raises(TypeError, match="schedule must be a CacheSchedule, from cache_schedule"):
        cached_attention(q, cache, schedule=attention_schedule(q))  # pyright: ignore
    with pytest.raises(TypeError, match="scale must be a number, got a tensor"):
        cached_attention(q, cache, scale=torch.tensor(0.5))  # pyright: ignore
    with pytest.raises(ValueError, match="tile_q must be a power of two from 16 to 64, got 128"):
        cache_schedule(q, cache, tile_q=128)
    wide = filled(Case([2, 1], [3, 4], dim=264).inputs(torch.float32))
    q = JaggedTensor(torch.zeros(3, 2, 264, device=DEVICE), inputs.q_offsets)
    with pytest.raises(NotImplementedError, match="goes to head_dim 256, got 264"):
        cached_attention(q, wide, backend="triton")
    cached_attention(q, wide)


def test_heads_that_shared_memory_does_not_hold(monkeypatch):
    case = Case([2, 1], [30, 4], heads=8, kv_heads=1, dim=128)
    inputs = case.inputs(torch.float32)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = cache_schedule(q, cache)
    monkeypatch.setattr(spans, "has_small_memory", lambda _device: True)
    with pytest.raises(NotImplementedError, match="tiles of 16 queries of 8 heads over 1 with"):
        cached_attention(q, cache, backend="triton")
    few = Case([2, 1], [30, 4], heads=2, kv_heads=1, dim=128).inputs(torch.float32)
    of_few, q_of_few = filled(few), JaggedTensor(few.q, few.q_offsets)
    cached_attention(q_of_few, of_few, backend="triton")
    large = cache_schedule(q_of_few, of_few, tile_q=64)
    with pytest.raises(NotImplementedError, match="tiles of 64 queries of 2 heads over 1 with"):
        cached_attention(q_of_few, of_few, schedule=large, backend="triton")
    monkeypatch.setattr(ops, "choose_backend", lambda *_: "triton")
    out = cached_attention(q, cache, schedule=schedule)
    assert torch.equal(out.values, cached_attention(q, cache).values)


@pytest.mark.parametrize("backend", ["auto", "native", "reference", "triton"])
def test_no_gradient(backend):
    inputs = Case([2, 1], [30, 4]).inputs(torch.float32)
    cache = filled(inputs)
    q = JaggedTensor(inputs.q.requires_grad_(), inputs.q_offsets)
    with pytest.raises(NotImplementedError, match="cached_attention has no gradient"):
        cached_attention(q, cache, backend=backend)
    with torch.no_grad():
        assert not cached_attention(q, cache, backend=backend).values.requires_grad
    bias = RelativePositionBias(torch.ones(4, 2, device=DEVICE, requires_grad=True))
    with pytest.raises(NotImplementedError, match="cached_attention has no gradient"):
        cached_attention(q.detach(), cache, bias=bias, backend=backend)


def test_float64():
    inputs = Case([2, 1], [30, 4]).inputs(torch.float64)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    out, lse = cached_attention(q, cache, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_under_autocast():
    inputs = Case([2, 1], [30, 4]).inputs(torch.bfloat16)
    cache, q = filled(inputs), JaggedTensor(inputs.q, inputs.q_offsets)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = cached_attention(q.to(torch.float32), cache, backend="native")
    assert torch.equal(out.values, cached_attention(q, cache, backend="native").values)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_compiled_step(backend):
    inputs = Case([2, 1], [30, 4], heads=2, kv_heads=2).inputs(torch.float32)
    cache, q = filled(inputs, 1), JaggedTensor(inputs.q, inputs.q_offsets)
    k, v = q.with_values(q.values + 1), q.with_values(q.values - 1)

    def step(q, k, v):
        cache.append(k, v, backend=backend)
        schedule = cache_schedule(q, cache)
        return cached_attention(q, cache, schedule=schedule, backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found = compiled(q, k, v)
        expected = cached_attention(q, cache, backend="reference")
        torch.testing.assert_close(found.values, expected.values)
    assert cache.lengths.tolist() == [34, 6]


def test_opcheck():
    inputs = Case([2, 1], [30, 4], heads=4, kv_heads=2).inputs(torch.float32)
    cache, q = filled(inputs, 1), JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = cache_schedule(q, cache)
    stored = (cache.k_store, cache.v_store, cache.pages)
    walk = (schedule.rows, schedule.partition.spans, schedule.partition.block, schedule.tile_q)
    torch.library.opcheck(ops.attention_cached, (inputs.q, *stored, True, 1, *walk, 0, 0.25))
    rest = (cache.lengths, inputs.q_offsets, 1, 0, 0.25, *MeetTerms(), *BiasTerms())
    torch.library.opcheck(ops.attention_cached_native, (inputs.q, *stored, *rest))
    for triton in (False, True):
        changed = (cache.k_store.clone(), cache.v_store.clone(), cache.lengths.clone())
        new = (inputs.k[:3], inputs.v[:3], inputs.q_offsets)
        torch.library.opcheck(
            ops_slots.append_events, (*changed, cache.pages, *new, 1, 128, triton)
        )


def test_steps_compile_nothing_again(monkeypatch):
    """Whatever users bring; tiles of 16, 32 and 64 queries are a kernel each."""
    keys = record_launches(monkeypatch)
    found = set()
    for step, lengths in enumerate(batches(60)):
        cache = HistoryCache(len(lengths), 2000, kv_heads=2, head_dim=16, device=DEVICE)
        x = JaggedTensor.from_lengths(torch.zeros(sum(lengths), 2, 16), torch.tensor(lengths))
        x = x.to(DEVICE)
        cache.append(x, x, backend="triton")
        for tile_q in (16, 32, 64):
            schedule = cache_schedule(x, cache, tile_q=tile_q)
            cached_attention(x, cache, schedule=schedule, backend="triton", return_lse=True)
        if step == 5:
            found = set(keys)
            assert found
    assert set(keys) == found
