"""What a cache holds after appends, resets and compaction, against lists of users' events."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from cache_cases import shuffle
from torch import Tensor

from jagged_kernels import HistoryCache, JaggedTensor
from jagged_kernels.core import contents

BACKENDS = ["native", "triton"]
STEPS = [[5, 0, 3], [0, 0, 1], [9, 2, 0], [1, 14, 7]]


def new_events(
    lengths: list[int], heads: int = 2, dims: tuple[int, int] = (6, 3), seed: int = 0,
    dtype: torch.dtype = torch.float32, offsets: torch.dtype = torch.int64,
) -> tuple[JaggedTensor, JaggedTensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    k, v = (torch.randn(tokens, heads, dim, generator=generator) for dim in dims)
    x = JaggedTensor.from_lengths(k.to(DEVICE, dtype), torch.tensor(lengths, dtype=offsets))
    return x, x.with_values(v.to(DEVICE, dtype))


def a_cache(users: int = 3, capacity: int = 20, page_size: int = 4, **options) -> HistoryCache:
    shape = {"kv_heads": 2, "head_dim": 6, "head_dim_v": 3, "device": DEVICE} | options
    return HistoryCache(users, capacity, page_size=page_size, **shape)


def assert_holds(cache: HistoryCache, users: list[list[tuple[Tensor, Tensor]]]) -> None:
    """`users`: (k, v) of each event [Hk, *], in order."""
    assert cache.lengths.tolist() == [len(events) for events in users]
    for found, side in zip(cache.gather(), (0, 1), strict=True):
        for tokens, events in zip(found.unbind(), users, strict=True):
            assert tokens.shape[0] == len(events)
            for token, event in zip(tokens, events, strict=True):
                assert torch.equal(token, event[side])


def add(users: list[list[tuple[Tensor, Tensor]]], k: JaggedTensor, v: JaggedTensor) -> None:
    for events, k_user, v_user in zip(users, k.unbind(), v.unbind(), strict=True):
        events.extend(zip(k_user, v_user, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_events_stand_in_the_order_in_which_they_came(backend, page_size, offsets):
    cache, users = a_cache(page_size=page_size), [[], [], []]
    shuffle(cache)
    for seed, lengths in enumerate(STEPS):
        k, v = new_events(lengths, seed=seed, offsets=offsets)
        cache.append(k, v, backend=backend)
        add(users, k, v)
        assert_holds(cache, users)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tokens_than_a_program_takes(backend):
    dims = (96, 40)
    cache = a_cache(4, 200, 16, head_dim=96, head_dim_v=40)
    k, v = new_events([130, 0, 199, 3], dims=dims)
    cache.append(k, v, backend=backend)
    assert all(torch.equal(a.values, b.values) for a, b in zip(cache.gather(), (k, v), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_some_users_of_a_store(backend, page_size):
    """Their pages lie anywhere in it, and those of the others stay as they are."""
    cache, users = a_cache(5, page_size=page_size), [[], [], [], [], []]
    shuffle(cache)
    everybody = new_events([3, 1, 0, 4, 2])
    cache.append(*everybody, backend=backend)
    add(users, *everybody)
    some = copy.copy(cache)
    some.pages, some.lengths = cache.pages[[4, 1]], cache.lengths[[4, 1]]
    k, v = new_events([6, 5], seed=1)
    some.append(k, v, backend=backend)
    add([users[4], users[1]], k, v)
    cache.lengths[[4, 1]] = some.lengths
    assert_holds(cache, users)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_are_read_as_they_are(backend):
    k, v = new_events([3, 0, 2], dims=(6, 6))
    packed = torch.stack([k.values, v.values], 1)
    heads_first = k.values.transpose(0, 1).contiguous().transpose(0, 1)
    cache = a_cache(head_dim_v=6)
    cache.append(k.with_values(heads_first), v.with_values(packed[:, 1]), backend=backend)
    assert all(torch.equal(a.values, b.values) for a, b in zip(cache.gather(), (k, v), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads_first", [False, True])
def test_nested_tensors_are_appended(backend, heads_first):
    k, v = new_events([3, 1, 2])
    nested: Any = [
        torch.nested.nested_tensor_from_jagged(x.values, k.offsets, min_seqlen=1, max_seqlen=3)
        for x in (k, v)
    ]
    cache = a_cache()
    cache.append(*[x.transpose(1, 2) if heads_first else x for x in nested], backend=backend)
    assert all(torch.equal(a.values, b.values) for a, b in zip(cache.gather(), (k, v), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("users", [0, 2])
def test_no_events(backend, users):
    cache = a_cache(users)
    k, v = new_events([0] * users)
    cache.append(k, v, backend=backend)
    assert cache.lengths.tolist() == [0] * users
    assert cache.gather()[0].values.shape == (0, 2, 6)


def test_reset():
    for users, left in (
        (torch.tensor([2]), [5, 1, 0]),
        (torch.tensor([0, 2], dtype=torch.int32), [0, 1, 0]),
        (torch.tensor([], dtype=torch.int64), [5, 1, 3]),
        (torch.tensor([True, False, True]), [0, 1, 0]),
        (None, [0, 0, 0]),
    ):
        cache = a_cache()
        cache.append(*new_events([5, 1, 3]))
        cache.reset(None if users is None else users.to(DEVICE))
        assert cache.lengths.tolist() == left
    k, v = new_events([1, 20, 2], seed=1)
    cache.append(k, v)
    assert torch.equal(cache.gather()[0].values, k.values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_dropped_makes_room(backend):
    """Every slot is used again and again; what is kept is not touched."""
    cache = a_cache(1, 6, 1)
    generator = torch.Generator().manual_seed(0)
    heads = [[], []]
    for seed in range(12):
        k, v = new_events([3], seed=seed)
        cache.append(k, v, backend=backend)
        for head, events in enumerate(heads):
            events += [(k.values[i, head], v.values[i, head]) for i in range(3)]
        kept = torch.zeros(1, 2, 6, dtype=torch.bool)
        for head, events in enumerate(heads):
            places = torch.randperm(len(events), generator=generator)[:3].sort().values
            kept[0, head, places] = True
            heads[head] = [events[i] for i in places.tolist()]
        # Behind the length nothing counts.
        kept[..., cache.lengths.item() :] = True
        before = cache.k_store.clone()
        cache.keep(kept.to(DEVICE))
        assert torch.equal(cache.k_store, before)
        assert torch.equal(cache.pages.sort(-1).values[0, 0].cpu(), torch.arange(6).int())
        for found, side in zip(cache.gather(), (0, 1), strict=True):
            for head, events in enumerate(heads):
                assert torch.equal(found.values[:, head], torch.stack([e[side] for e in events]))


def test_memory():
    cache = a_cache(2, 100, 16, dtype=torch.float16)
    assert cache.k_store.shape == (2 * 7 * 16, 2, 6)
    assert cache.nbytes == 2 * 7 * 16 * 2 * (6 + 3) * 2 + 2 * 7 * 4 + 2 * 4


# --- what is wrong --------------------------------------------------------------------------------


def test_beyond_capacity_on_the_host():
    cache = a_cache(2, 5)
    cache.append(*new_events([3, 5]))
    if DEVICE == "cpu":
        with pytest.raises(
            ValueError, match="user 0 would have 6 events, and the cache's capacity"
        ):
            cache.append(*new_events([3, 0]))
        assert cache.lengths.tolist() == [3, 5]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_beyond_capacity_on_the_device(monkeypatch, backend, page_size):
    """Where looking would wait: what passes it is dropped, and nobody else's slots are touched."""
    cache = a_cache(3, 5, page_size)
    k, v = new_events([4, 9, 2])
    module = "jagged_kernels.cache.history.readable"
    monkeypatch.setattr(module, lambda tensor: False)
    cache.append(k, v, backend=backend)
    assert cache.lengths.tolist() == [4, 5, 2]
    found, expected = cache.gather()[0].unbind(), k.unbind()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1][:5])
    assert torch.equal(found[2], expected[2])


def test_beyond_capacity_while_checking(monkeypatch):
    monkeypatch.setattr(contents, "_CHECKING", True)
    with pytest.raises(ValueError, match="user 1 would have 21 events"):
        a_cache().append(*new_events([1, 21, 0]))


def test_a_list_that_leads_outside():
    cache = a_cache(page_size=1)
    k, v = new_events([3, 3, 3])
    cache.pages[0, 1, 2] = 60
    cache.pages[2, 0, 0] = -1
    cache.append(k, v, backend="triton")
    message = r"pages must lie in \[0, 60\), the store's; pages\[0, 1, 2\], of user 0, is 60"
    with pytest.raises(ValueError, match=message):
        cache.gather()
    cache.pages[0, 1, 2], cache.pages[2, 0, 0] = 2, 40
    found = cache.gather()[0].values
    assert (found[2, 1] == 0).all()
    assert (found[6, 0] == 0).all()
    wrong = torch.zeros(9, 2, dtype=torch.bool, device=DEVICE)
    wrong[2, 1] = wrong[6, 0] = True
    assert torch.equal(found[~wrong], k.values[~wrong])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_appended_through_such_a_list(monkeypatch, backend, page_size):
    """A page below 0 would be another user's; pages behind what is written are not looked at."""
    cache = a_cache(page_size=page_size)
    cache.append(*new_events([3, 4, 3]))
    place = 4 // page_size
    cache.pages[1, 0, place], cache.pages[2, 0, -1] = -1, 10**6
    stored, lengths = cache.k_store.clone(), cache.lengths.clone()
    k, v = new_events([0, 1, 0], seed=1)
    message = rf"pages\[1, 0, {place}\], of user 1, is -1"
    if backend == "native":
        with pytest.raises(ValueError, match=message):
            cache.append(k, v, backend=backend)
    else:
        cache.append(k, v, backend=backend)
        head = slice(1) if page_size == 1 else slice(2)
        assert torch.equal(cache.k_store[:, head], stored[:, head])
        assert (cache.lengths - lengths).tolist() == [0, 1, 0]
    cache.append(*new_events([5, 0, 0]), backend=backend)
    monkeypatch.setattr(contents, "_CHECKING", True)
    with pytest.raises(ValueError, match=message):
        cache.append(*new_events([1, 0, 0]), backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 3}, "page_size must be a power of two"),
        ({"page_size": 12}, "page_size must be a power of two"),
        ({"page_size": 256}, "page_size must be a power of two"),
        ({"capacity": 0}, "capacity, kv_heads and head_dim must be at least 1"),
        ({"kv_heads": 0}, "capacity, kv_heads and head_dim must be at least 1"),
        ({"users": 2**22, "capacity": 2**10}, "a cache has at most"),
    ],
)
def test_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        a_cache(**{"device": "meta"} | options)


def test_arguments():
    cache = a_cache()
    k, v = new_events([1, 2, 0])
    with pytest.raises(TypeError, match="k must be a JaggedTensor, got Tensor"):
        cache.append(k.values, v)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"v must be \[T, 2, 3\] of 3 users, got \(3, 2, 6\)"):
        cache.append(k, k)
    with pytest.raises(ValueError, match=r"k must be .* of 3 users, got .* of 2"):
        cache.append(*new_events([1, 2]))
    with pytest.raises(TypeError, match=r"k must be torch.float32 on .*, got torch.float16"):
        cache.append(*new_events([1, 2, 0], dtype=torch.float16))
    with pytest.raises(ValueError, match="k and v must have the same offsets"):
        cache.append(k, new_events([1, 1, 0])[1])
    if DEVICE == "cpu":  # where it can be seen without waiting
        with pytest.raises(ValueError, match="k and v must have the same offsets"):
            cache.append(k, new_events([2, 1, 0])[1])
    with pytest.raises(TypeError, match="dtype must be floating"):
        a_cache(dtype=torch.int32)
    with pytest.raises(TypeError, match="head_dim_v must be an int, got float"):
        a_cache(head_dim_v=3.0)
    with pytest.raises(TypeError, match="users must be a tensor or None, got list"):
        cache.reset([0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"users must be \[3\] bools, one for each, got \(1,\)"):
        cache.reset(torch.tensor([True], device=DEVICE))
    with pytest.raises(ValueError, match=r"users must be \[N\] indices, got \(1, 1\)"):
        cache.reset(torch.tensor([[0]], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int16], ids=str)
def test_users_to_forget_are_indices_or_bools(dtype):
    """A mask in another dtype would be taken for users 0 and 1."""
    cache = a_cache()
    cache.append(*new_events([5, 1, 3]))
    with pytest.raises(TypeError, match=f"users must be of int32, int64 or bool, got {dtype}"):
        cache.reset(torch.tensor([0, 0, 1], dtype=dtype, device=DEVICE))
    assert cache.lengths.tolist() == [5, 1, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_is_not_mapped_over(backend):
    """Every call would append to the same one."""
    cache = a_cache()
    k, v = new_events([1, 2, 0])

    def append(values: Tensor) -> Tensor:
        cache.append(k.with_values(values), v, backend=backend)
        return values

    with pytest.raises(NotImplementedError, match="append_events changes its arguments: not under"):
        torch.func.vmap(append)(k.values.expand(2, *k.values.shape))
    assert cache.lengths.tolist() == [0, 0, 0]


def test_no_gradient():
    cache = a_cache()
    k, v = new_events([1, 2, 0])
    k.values.requires_grad_()
    with pytest.raises(NotImplementedError, match="a cache has no gradient"):
        cache.append(k, v)
    with pytest.raises(NotImplementedError, match="a cache has no gradient"):
        cache.append(k.detach(), v.with_values(v.values.clone().requires_grad_()))
    with torch.no_grad():
        cache.append(k, v)
    with torch.inference_mode():
        inside = a_cache()
    inside.append(k.detach(), v)
    assert not cache.gather()[0].values.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_that_inference_mode_made_takes_events_there(backend):
    cache = a_cache()
    k, v = new_events([1, 2, 0])
    with torch.inference_mode():
        copied = copy.deepcopy(cache)
        copied.append(k, v, backend=backend)
        assert copied.lengths.tolist() == [1, 2, 0]
    assert cache.lengths.tolist() == [0, 0, 0]


def test_keeping():
    cache = a_cache()
    with pytest.raises(ValueError, match="page_size=1, not 4"):
        cache.keep(torch.ones(3, 1, 5, dtype=torch.bool))
    cache = a_cache(page_size=1)
    with pytest.raises(ValueError, match=r"kept must be \(3, 2, 20\) of bool"):
        cache.keep(torch.ones(3, 2, 19, dtype=torch.bool))
    cache.append(*new_events([2, 0, 0]))
    kept = torch.zeros(3, 2, 20, dtype=torch.bool, device=DEVICE)
    kept[0, 1, 0] = True
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="must keep the same number"):
            cache.keep(kept)


def test_lists_and_lengths_are_changed_where_they_are():
    """Schedules and captured graphs hold these tensors."""
    cache = a_cache(page_size=1)
    pages, lengths = cache.pages, cache.lengths
    cache.append(*new_events([2, 0, 1]))
    for change in (
        lambda: cache.append(*new_events([1, 0, 1])),
        lambda: cache.keep(torch.arange(20, device=DEVICE).expand(3, 2, 20) > 0),
        lambda: cache.reset(torch.tensor([0], device=DEVICE)),
        cache.reset,
    ):
        version = lengths._version
        change()
        assert cache.pages is pages
        assert cache.lengths is lengths
        assert lengths._version > version


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step(backend):
    def step(k, v):
        cache.append(k, v, backend=backend)
        return cache.lengths + 1

    cache = a_cache()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    k, v = new_events([2, 0, 3])
    with torch.no_grad():
        assert compiled(k, v).tolist() == [3, 1, 4]
        compiled(k, v)
    assert cache.lengths.tolist() == [4, 0, 6]
    assert torch.equal(cache.gather()[0].values[:2], k.values[:2])
