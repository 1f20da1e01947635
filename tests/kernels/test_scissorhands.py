"""Statistics of keys and what is dropped by them, against the definitions in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, Case, Inputs, seen_keys, users
from cache_cases import filled
from torch import Tensor

from jagged_kernels import (
    HistoryCache,
    JaggedTensor,
    KeyStatistics,
    attention_schedule,
    jagged_attention,
    key_statistics,
    persistence_ratio,
    scissorhands,
)
from jagged_kernels.cache import statistics

BACKENDS = ["reference", "native", "triton"]
NOT_READ = pytest.mark.skipif(
    DEVICE == "cuda", reason="contents are not read where that would wait"
)
EVERY_LENGTH = Case([3, 0, 50, 40, 7, 2, 1, 5], [10, 2, 55, 30, 7, 2, 1, 0])
MASKS = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": (7, 0)},
    {"causal": False, "window": (5, 3)},
    {"causal": True, "scale": -0.4},
    {"causal": True, "scale": 2.0},
]


def ask(inputs: Inputs, backend: Any = "triton", recent: int | None = None, **mask: Any):
    q, k = JaggedTensor(inputs.q, inputs.q_offsets), JaggedTensor(inputs.k, inputs.k_offsets)
    v = k.with_values(inputs.v)
    _, lse = jagged_attention(q, k, v, return_lse=True, backend="native", **mask)
    return key_statistics(q, k, lse, recent=recent, backend=backend, **mask)


def exact(
    inputs: Inputs, recent: int | None = None, *, scale: float | None = None, **mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(how many probabilities are below 1/n, how many are so close that rounding decides, their
    sum), [Tk, Hk], by the definition."""
    double = inputs.double()
    kv_heads = inputs.k.shape[1]
    below, close, mass = (torch.zeros(inputs.k.shape[:2], dtype=torch.float64) for _ in range(3))
    for user in users(double, (double.q, double.k, double.v), **mask):
        scores = (scale or inputs.q.shape[2] ** -0.5) * user.q @ user.k.mT
        p = scores.masked_fill(~user.seen, -math.inf).softmax(-1)
        last = user.q_part.stop - (recent or 10**6)
        counted = user.seen & (user.queries >= last)[:, None]
        share = p * user.seen.sum(1, keepdim=True)
        for total, x in (
            (below, (share < 1) & counted),
            (close, ((share - 1).abs() < 2e-3) & counted),
            (mass, p * counted),
        ):
            total[user.keys] += x.double().unflatten(0, (kv_heads, -1)).sum((1, 2)).T.cpu()
    return below, close, mass


def assert_exact(found: KeyStatistics, expected: tuple[Tensor, Tensor, Tensor], eps: float) -> None:
    below, close, mass = expected
    assert found.unimportant.dtype == torch.int32
    difference = (found.unimportant.values.cpu() - below).abs()
    assert (difference <= close).all()
    assert close.sum() < 0.02 * below.sum() + 5, "rounding decides too much for a test"
    torch.testing.assert_close(found.mass.values.cpu().double(), mass, atol=eps, rtol=eps)


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("recent", [None, 5, 20])
def test_every_length_and_mask(backend, mask, recent):
    inputs = EVERY_LENGTH.inputs(torch.float32)
    inputs.q *= 2
    found = ask(inputs, backend, recent, **mask)
    assert_exact(found, exact(inputs, recent, **mask), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_heads_that_share_keys(backend, heads, kv_heads):
    case = Case([30, 9, 3], heads=heads, kv_heads=kv_heads, dim=24)
    inputs = case.inputs(torch.float32)
    found = ask(inputs, backend, 8, causal=True)
    assert_exact(found, exact(inputs, 8, causal=True), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    inputs = EVERY_LENGTH.inputs(torch.float32)
    q, k = JaggedTensor(inputs.q, inputs.q_offsets), JaggedTensor(inputs.k, inputs.k_offsets)
    _, lse = jagged_attention(q, k, k, causal=True, return_lse=True, backend="native")
    expected = key_statistics(q, k, lse, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = key_statistics(q, k, lse, backend=backend)
    assert torch.equal(found.mass.values, expected.mass.values)
    assert torch.equal(found.unimportant.values, expected.unimportant.values)


def test_a_seed_of_numpy():
    dropped = []
    inputs = Case([6, 3]).inputs(torch.float32)
    for seed in (2, np.int64(2)):
        cache = filled(inputs, 1)
        scissorhands(cache, budget=2, recent=0, policy="random", seed=seed)  # pyright: ignore
        dropped.append(cache.gather()[0].values)
    assert torch.equal(*dropped)


def test_float16():
    inputs = Case([40, 9]).inputs(torch.float16)
    assert_exact(ask(inputs, causal=True), exact(inputs, causal=True), 1e-4)


def test_a_schedule_of_the_caller():
    inputs = Case([40, 33, 1]).inputs(torch.float32)
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    expected = key_statistics(x, x, lse, backend="triton")
    schedule = attention_schedule(x, causal=True, tile_k=16)
    found = key_statistics(x, x, lse, schedule=schedule, backend="triton")
    assert torch.equal(found.unimportant.values, expected.unimportant.values)
    torch.testing.assert_close(found.mass.values, expected.mass.values)
    with pytest.raises(ValueError, match="built for another batch or mask"):
        key_statistics(x, x, lse, schedule=schedule, causal=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_keys_that_are_alike_none_is_below_its_share(backend):
    x = JaggedTensor(
        torch.full((60, 2, 16), 1.7, device=DEVICE), torch.tensor([0, 41, 60]).to(DEVICE)
    )
    _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    found = key_statistics(x, x, lse, backend=backend)
    assert (found.unimportant.values == 0).all()
    expected = torch.tensor([sum(1 / n for n in range(i + 1, 42)) for i in range(41)])
    torch.testing.assert_close(found.mass.values[:41, 0].cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"), [([], []), ([0, 0], [0, 0]), ([0, 0], [5, 0]), ([2, 1], [0, 0])]
)
def test_batches_without_events(backend, q_lengths, k_lengths):
    inputs = Case(q_lengths, k_lengths or None).inputs(torch.float32)
    found = ask(inputs, backend, causal=True)
    assert found.unimportant.values.shape == (sum(k_lengths), 2)
    assert (found.unimportant.values == 0).all()
    assert (found.mass.values == 0).all()


def test_reruns_are_bit_identical():
    inputs = EVERY_LENGTH.inputs(torch.float32)
    first, second = (ask(inputs, causal=True).mass.values for _ in range(2))
    assert torch.equal(first, second)


def test_inputs_in_any_layout():
    inputs = Case([40, 9]).inputs(torch.float32)
    expected = ask(inputs, causal=True)
    packed = torch.stack([inputs.q, inputs.k], 1)
    inputs.q, inputs.k = packed[:, 0], packed[:, 1].transpose(0, 1).contiguous().transpose(0, 1)
    found = ask(inputs, causal=True)
    assert torch.equal(found.mass.values, expected.mass.values)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_compiled_call(backend):
    inputs = Case([20, 9]).inputs(torch.float32)
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)

    def call(x: JaggedTensor, lse: Tensor) -> Tensor:
        return key_statistics(x, x, lse, backend=backend).mass.values

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, lse), call(x, lse))


def test_no_gradient():
    inputs = Case([20, 9]).inputs(torch.float32)
    x = JaggedTensor(inputs.q.requires_grad_(), inputs.q_offsets)
    _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    assert not key_statistics(x, x, lse, backend="triton").mass.values.requires_grad


def test_arguments_of_statistics():
    x = JaggedTensor(torch.zeros(5, 4, 8), torch.tensor([0, 3, 5]))
    lse = torch.zeros(5, 4)
    with pytest.raises(TypeError, match="q and k must be JaggedTensors"):
        key_statistics(x.values, x, lse)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="q's heads a multiple of k's"):
        key_statistics(x, x.with_values(torch.zeros(5, 3, 8)), lse)
    with pytest.raises(ValueError, match=r"lse must be \(5, 4\), of each query, got \(5,\)"):
        key_statistics(x, x, lse[:, 0])
    with pytest.raises(TypeError, match="lse must be float32"):
        key_statistics(x, x, lse.double())
    for dtype, wrong in ((torch.float16, torch.float16), (torch.float64, torch.float32)):
        half = x.to(dtype)
        with pytest.raises(TypeError, match=f"lse must be float32, .* got {wrong}"):
            key_statistics(half, half, lse.to(wrong))
    with pytest.raises(TypeError, match="one floating dtype"):
        key_statistics(x, x.to(torch.float16), lse)
    with pytest.raises(ValueError, match="recent must be at least 1, got 0"):
        key_statistics(x, x, lse, recent=0)
    with pytest.raises(ValueError, match="q has 2 users and k has 1"):
        key_statistics(x, x[:1], lse)
    with pytest.raises(TypeError, match="scale must be a number, got a tensor"):
        key_statistics(x, x, lse, scale=lse[0, 0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lse must be \(5, 4\), of each query, got \(4, 4\)"):
        persistence_ratio(x, x, lse[:4])


def test_scores_that_the_native_path_has_at_a_time_are_bounded(monkeypatch):
    inputs = Case([6] * 20).inputs(torch.float32)
    expected = ask(inputs, "native").mass.values
    monkeypatch.setattr(statistics, "_MAX_SCORES", 3 * 6 * 6 * 2)
    groups = list(statistics._groups(inputs.q_offsets, inputs.k_offsets, 10**6, 2))
    assert [len(users) for users, _, _ in groups] == [3] * 6 + [2]
    torch.testing.assert_close(ask(inputs, "native").mass.values, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_recent_queries_than_numbers_go(backend):
    inputs = Case([20, 3]).inputs(torch.float32)
    expected = ask(inputs, backend, None, causal=True).mass.values
    assert torch.equal(ask(inputs, backend, 2**70, causal=True).mass.values, expected)


# --- policies -------------------------------------------------------------------------------------


def numbered(lengths: list[int], capacity: int = 16, heads: int = 2) -> HistoryCache:
    """Events that are their numbers."""
    cache = HistoryCache(
        len(lengths), capacity, kv_heads=heads, head_dim=1, page_size=1, device=DEVICE
    )
    numbers = torch.cat([torch.arange(n) for n in lengths]).float()
    x = numbers[:, None, None].expand(-1, heads, 1).to(DEVICE)
    events = JaggedTensor.from_lengths(x, torch.tensor(lengths))
    cache.append(events, events)
    return cache


def kept(cache: HistoryCache) -> list[list[list[int]]]:
    """Of each user and head, the events it has."""
    return [user[..., 0].T.int().tolist() for user in cache.gather()[0].unbind()]


def given(
    cache: HistoryCache, low: list[list[int]], mass: list[list[float]] | None = None
) -> KeyStatistics:
    """Statistics [head][token]."""
    k = cache.gather()[0]
    counts = torch.tensor(low, device=DEVICE).T
    masses = torch.zeros(counts.shape) if mass is None else torch.tensor(mass).T
    return KeyStatistics(k.with_values(counts.int()), k.with_values(masses.to(DEVICE)))


def test_those_below_their_share_most_often_go_first():
    cache = numbered([8, 3])
    low = [[0, 5, 1, 7, 7, 2, 9, 9, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9]]
    dropped = scissorhands(cache, given(cache, low), budget=6, recent=2, drop=0.5)
    # Three of eight; the newest two go last; of equal ones the older first; three are few enough.
    assert dropped.tolist() == [3, 0]
    assert kept(cache) == [[[0, 2, 5, 6, 7], [3, 4, 5, 6, 7]], [[0, 1, 2]] * 2]


def test_policies_by_name():
    low = [[0] * 8, [0] * 8]
    mass = [[0.5, 0.1, 0.2, 0.9, 0.3, 0.4, 0.0, 0.0], [1, 2, 3, 4, 5, 6, 0, 0]]
    expected = {
        "pivotal": [[4, 5, 6, 7]] * 2,
        "newest": [[4, 5, 6, 7]] * 2,
        "h2o": [[0, 3, 6, 7], [4, 5, 6, 7]],
    }
    for policy, events in expected.items():
        cache = numbered([8])
        statistics = given(cache, low, mass)
        scissorhands(cache, statistics, budget=4, recent=2, drop=0.0, policy=policy)  # pyright: ignore
        assert kept(cache) == [events], policy


def test_random_events_by_seed():
    found = {}
    for seed in (0, 0, 1):
        cache = numbered([16, 16])
        scissorhands(cache, budget=8, recent=3, policy="random", seed=seed)
        events = kept(cache)
        assert all(head[-3:] == [13, 14, 15] for user in events for head in user)
        assert all(head == sorted(set(head)) for user in events for head in user)
        # Drawn for each user and key head: among 1287 ways, no two are the same.
        assert len({tuple(head) for user in events for head in user}) == 4
        assert found.setdefault(seed, events) == events
    assert found[0] != found[1]


@pytest.mark.parametrize("policy", ["pivotal", "h2o", "newest", "random"])
def test_all_policies_keep_as_many(policy):
    """Step by step, with the statistics of what is there; never more than the budget."""
    generator = torch.Generator().manual_seed(0)
    cache = HistoryCache(3, 40, kv_heads=2, head_dim=8, page_size=1, device=DEVICE)
    sizes = []
    for _ in range(12):
        new = torch.randint(0, 9, (3,), generator=generator)
        values = torch.randn(int(new.sum()), 2, 8, generator=generator).to(DEVICE)
        x = JaggedTensor.from_lengths(values, new)
        cache.append(x, x)
        k, v = cache.gather()
        _, lse = jagged_attention(x, k, v, causal=True, return_lse=True)
        before = cache.lengths.clone()
        dropped = scissorhands(
            cache, key_statistics(x, k, lse), budget=20, drop=0.25, policy=policy
        )
        assert torch.equal(dropped, torch.where(before > 20, (before - 20).clamp(min=5), 0))
        assert torch.equal(cache.lengths, before - dropped)
        slots = cache.pages.sort(-1).values.cpu()
        assert torch.equal(slots, torch.arange(120).int().view(3, 1, 40).expand(-1, 2, -1))
        sizes.append(cache.lengths.tolist())
    assert max(map(max, sizes)) <= 20
    assert any(a > b for one, other in pairwise(sizes) for a, b in zip(one, other, strict=True))


def test_a_history_that_is_far_over_its_budget():
    cache = numbered([16, 4, 0])
    assert scissorhands(cache, budget=3, policy="newest").tolist() == [13, 1, 0]
    assert kept(cache) == [[[13, 14, 15]] * 2, [[1, 2, 3]] * 2, [[], []]]


def test_nothing_at_all():
    assert scissorhands(numbered([0, 0]), budget=3, policy="newest").tolist() == [0, 0]
    cache = numbered([0, 0])
    x = cache.gather()[0].with_values(torch.zeros(0, 2, device=DEVICE))
    assert scissorhands(cache, KeyStatistics(x, x), budget=3).tolist() == [0, 0]


def test_arguments_of_policies():
    cache = numbered([3, 2])
    with pytest.raises(TypeError, match="cache must be a HistoryCache, got Tensor"):
        scissorhands(cache.pages, budget=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="policy must be one of pivotal, h2o, newest, random"):
        scissorhands(cache, budget=2, policy="oldest")  # pyright: ignore[reportArgumentType]
    for wrong in ({"budget": 0}, {"recent": -1}, {"drop": 1.5}, {"drop": -0.5}):
        with pytest.raises(ValueError, match="budget must be at least 1, recent at least 0 and"):
            scissorhands(cache, **{"budget": 2, "policy": "newest", **wrong})
    with pytest.raises(TypeError, match="policy 'pivotal' needs KeyStatistics, got NoneType"):
        scissorhands(cache, budget=2)
    with pytest.raises(ValueError, match=r"statistics must be \[T, 2\] of 2 users"):
        scissorhands(cache, given(numbered([5]), [[0] * 5] * 2), budget=2)
    pages = filled(Case([3, 2]).inputs(torch.float32), 4)
    with pytest.raises(ValueError, match="page_size=1, not 4"):
        scissorhands(pages, budget=2, policy="newest")


@NOT_READ
def test_statistics_of_other_lengths():
    cache, other = numbered([3, 2]), numbered([2, 3])
    with pytest.raises(ValueError, match="the lengths differ"):
        scissorhands(cache, given(other, [[0] * 5] * 2), budget=2)


# --- persistence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_persistence(backend, heads, kv_heads):
    lengths = [31, 2, 40, 1, 0]
    inputs = Case(lengths, heads=heads, kv_heads=kv_heads).inputs(torch.float32)
    # So sharp that a key which nobody looks at later is not rare.
    inputs.q *= 12
    x = [JaggedTensor(part, inputs.q_offsets) for part in (inputs.q, inputs.k, inputs.v)]
    _, lse = jagged_attention(*x, causal=True, return_lse=True)
    found = persistence_ratio(x[0], x[1], lse, backend=backend)
    assert (found.ratio[0] != found.kept[0]).any()
    assert (found.kept[:3:2] < 1).any()
    for user, n in enumerate(lengths):
        t = n // 2
        for head in range(kv_heads):
            was, stays = torch.zeros(t, dtype=torch.bool), torch.zeros(t, dtype=torch.bool)
            for mine in range(head * heads // kv_heads, (head + 1) * heads // kv_heads):
                q, k = x[0].unbind()[user][:, mine], x[1].unbind()[user][:, head]
                scores = (q @ k.T / 4).masked_fill(
                    ~seen_keys(n, n, causal=True).to(DEVICE), -math.inf
                )
                share = scores.double().softmax(-1).cpu() * torch.arange(1, n + 1)[:, None]
                pivotal = (share >= 1) & seen_keys(n, n, causal=True)
                was |= pivotal[:t, :t].any(0)
                stays |= pivotal[t:, :t].any(0)
            both = (was & stays).sum()
            for part, exact in (
                (found.ratio, both / stays.sum()),
                (found.kept, both / was.sum()),
                (found.pivotal, was.sum() / t),
            ):
                torch.testing.assert_close(part[user, head].cpu(), exact, equal_nan=True)


@NOT_READ
def test_persistence_of_other_lengths():
    inputs = Case([3, 5], [4, 4]).inputs(torch.float32)
    q, k = JaggedTensor(inputs.q, inputs.q_offsets), JaggedTensor(inputs.k, inputs.k_offsets)
    with pytest.raises(ValueError, match="q and k must have the same offsets"):
        persistence_ratio(q, k, inputs.d_lse)
