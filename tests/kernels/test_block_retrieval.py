"""Retrieval of key blocks by their means, against a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from combinations import combined
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import BLOCK, LENGTHS, offsets_of
from retrieval_cases import (
    BACKENDS,
    categories_of,
    expected_lists,
    jagged,
    listed,
    means_of,
    use,
)

from jagged_kernels import JaggedTensor
from jagged_kernels.attention.retrieval import native_choice, retrieval
from jagged_kernels.attention.retrieval.block_means import block_means
from jagged_kernels.attention.retrieval.retrieval import retrieved_blocks
from jagged_kernels.schedule.keys.check import check_lists

LONG = [100, 0, 3, 70, 16]

# --- means ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_means_of_blocks(lengths, dtype):
    x = jagged(lengths, dtype=dtype)
    means = block_means(x, BLOCK)
    assert means.dtype == dtype
    assert means.values.shape == (sum(lengths) // BLOCK + len(lengths), 2, 8)
    for user, (part, tokens) in enumerate(zip(means.unbind(), x.unbind(), strict=True)):
        assert int(means.offsets[user]) == int(x.offsets[user]) // BLOCK + user
        expected = means_of(tokens, BLOCK)
        assert len(part) - len(expected) in (0, 1)
        for mean, other in zip(part, expected, strict=False):
            torch.testing.assert_close(mean.double(), other, rtol=1e-6, atol=1e-6)
        assert not part[len(expected) :].any()


def test_means_have_gradients():
    x = jagged([20, 0, 3], dtype=torch.float64)
    values = x.values.requires_grad_()
    torch.autograd.gradcheck(lambda v: block_means(x.with_values(v), BLOCK).values, values)


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "causal", "heads", "blocks", "queries"),
    combined(
        ["native", "triton"],
        [False, True],
        [(2, 2, 1), (4, 2, 2), (4, 1, 4)],
        [(2, 1), (1, 0), (3, 2), (0, 2)],
        [LONG, [20, 3, 0, 33, 60]],
    ),
)
def test_lists_hold_the_best_blocks(backend, causal, heads, blocks, queries, monkeypatch):
    use(monkeypatch, backend)
    (q_heads, kv_heads, groups), (top_k, newest) = heads, blocks
    q, k = jagged(queries, q_heads, seed=1), jagged(LONG, kv_heads, seed=2)
    options = {
        "top_k": top_k, "newest": newest, "block": BLOCK, "groups": groups, "causal": causal,
    }  # fmt: skip
    lists = retrieved_blocks(q, k, **options)
    assert listed(lists, q) == expected_lists(q, k, **options)
    assert lists.window == (-1, 0 if causal else -1)
    tokens = {"q_tokens": q.values.shape[0], "k_tokens": k.values.shape[0]}
    check_lists(lists, q.offsets, k.offsets, **tokens)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS, top_k=st.integers(0, 4), newest=st.integers(0, 3))
def test_any_lengths(data, lengths, top_k, newest):
    causal = data.draw(st.booleans())
    queries = [data.draw(st.integers(0, 40)) for _ in lengths]
    newest = max(newest, 1 - top_k)
    q, k = jagged(queries, seed=3), jagged(lengths)
    options = {"top_k": top_k, "newest": newest, "block": BLOCK, "causal": causal}
    assert listed(retrieved_blocks(q, k, **options), q) == expected_lists(q, k, **options)


@BACKENDS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_blocks_of_other_categories_are_not_found(backend, causal, dtype, monkeypatch):
    """SIM's hard search: of candidates, and of tiles of a history."""
    use(monkeypatch, backend)
    monkeypatch.setattr(native_choice, "_MOST_PAIRS", 2 * BLOCK**2)
    lengths = [100, 0, 3, 70, 16]
    k = jagged(lengths)
    for q in (jagged(lengths, 4, seed=1), jagged([1, 1, 2, 0, 1], 4, seed=2)):
        for top_k, newest in ((2, 1), (9, 0)):
            options: dict[str, Any] = {
                "top_k": top_k, "newest": newest, "block": BLOCK, "groups": 2, "causal": causal,
                "categories": categories_of(q, k, kinds=150, dtype=dtype),
            }  # fmt: skip
            expected = expected_lists(q, k, **options)
            assert listed(retrieved_blocks(q, k, **options), q) == expected
            assert expected != expected_lists(q, k, **{**options, "categories": None})


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS, top_k=st.integers(1, 4), newest=st.integers(0, 3))
def test_any_lengths_with_categories(data, lengths, top_k, newest):
    queries = [data.draw(st.integers(0, 40)) for _ in lengths]
    q, k = jagged(queries, seed=3), jagged(lengths)
    categories = categories_of(q, k, kinds=data.draw(st.integers(1, 300)))
    options: dict[str, Any] = {"top_k": top_k, "newest": newest, "block": BLOCK}
    options |= {"causal": data.draw(st.booleans()), "categories": categories}
    assert listed(retrieved_blocks(q, k, **options), q) == expected_lists(q, k, **options)


@BACKENDS
def test_categories_of_users_without_keys(backend, monkeypatch):
    use(monkeypatch, backend)
    q, k = jagged([3, 0, 20]), jagged([0, 0, 0])
    options: dict[str, Any] = {"block": BLOCK, "longest": 90, "categories": categories_of(q, k)}
    assert not retrieved_blocks(q, k, 2, newest=1, **options).row_ptr.any()


@pytest.mark.parametrize("shape", [(3, 5), (5,)])
def test_categories_of_dense_queries(shape):
    k = jagged([100, 0, 40])
    dense = torch.randn(*shape, 2, 8, device=DEVICE)
    q = JaggedTensor(dense.expand(3, 5, 2, 8).reshape(15, 2, 8), offsets_of([5, 5, 5]))
    of_queries = torch.arange(dense[..., 0, 0].numel(), device=DEVICE).view(shape)
    of_keys = categories_of(k, kinds=50)[0]
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK}
    lists = retrieved_blocks(dense, k, categories=(of_queries, of_keys), **options)
    flat = (of_queries.expand(3, 5).flatten(), of_keys)
    assert listed(lists, q) == expected_lists(q, k, categories=flat, **options)


@pytest.mark.parametrize("shape", [(3, 5, 2, 8), (5, 2, 8)])
def test_dense_queries(shape):
    k = jagged([100, 0, 40])
    dense = torch.randn(shape, device=DEVICE)
    q = JaggedTensor(dense.expand(3, 5, 2, 8).reshape(15, 2, 8), offsets_of([5, 5, 5]))
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK}
    assert listed(retrieved_blocks(dense, k, **options), q) == expected_lists(q, k, **options)


@BACKENDS
def test_equal_scores_go_to_the_earlier(backend, monkeypatch):
    use(monkeypatch, backend)
    x = JaggedTensor(torch.ones(100, 2, 8, device=DEVICE), offsets_of([100]))
    lists = retrieved_blocks(x, x, top_k=2, newest=1, block=BLOCK)
    assert set(map(tuple, listed(lists, x).values())) == {(0, 1, 6)}


@BACKENDS
def test_room_beyond_the_longest_changes_nothing(backend, monkeypatch):
    use(monkeypatch, backend)
    x = jagged([100, 3, 0, 50])
    options = {"top_k": 2, "newest": 1, "block": BLOCK, "causal": True}
    lists = retrieved_blocks(x, x, **options)
    assert listed(retrieved_blocks(x, x, **options, longest=1000), x) == listed(lists, x)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_users_longer_than_said(backend, monkeypatch):
    """Nobody looks: of their older blocks the first ones can be found, and nothing breaks."""
    x = jagged([100, 3])
    on_cpu = x.to("cpu")
    with pytest.raises(ValueError, match="longest is 40, but a user has 100 tokens"):
        retrieved_blocks(on_cpu, on_cpu, top_k=2, block=BLOCK, longest=40)
    monkeypatch.setattr(retrieval, "longest_user", lambda q, k, longest: longest)
    use(monkeypatch, backend)
    lists = retrieved_blocks(x, x, top_k=2, newest=1, block=BLOCK, longest=40)
    for (user, *_), blocks in listed(lists, x).items():
        assert blocks == [0, 1, 6] if user == 0 else blocks == [0]


def test_no_gradient_and_no_users():
    empty = jagged([])
    lists = retrieved_blocks(empty, empty, top_k=2, newest=1, block=BLOCK)
    assert lists.row_ptr.tolist() == lists.transposed()[0].tolist() == [0]
    x = jagged([40])
    x.values.requires_grad_()
    lists = retrieved_blocks(x, x, top_k=1, block=BLOCK)
    assert not lists.col.requires_grad


# --- means that the caller keeps ------------------------------------------------------------------


def _without_room(means, x, block):
    """Each user's means right behind the other's."""
    parts = [m[: -(-n // block)] for m, n in zip(means.unbind(), x.lengths.tolist(), strict=True)]
    offsets = offsets_of([len(part) for part in parts], x.offsets.dtype)
    return JaggedTensor(torch.cat(parts), offsets)


@BACKENDS
@pytest.mark.parametrize("groups", [1, 2])
def test_kept_means_are_as_good_as_keys(backend, groups, monkeypatch):
    use(monkeypatch, backend)
    lengths = [100, 0, 3, 70, 16, 64]
    q, k = jagged([20, 3, 0, 33, 60, 16], 4, seed=1), jagged(lengths, 2)
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK, "groups": groups}
    expected = listed(retrieved_blocks(q, k, **options), q)
    means = block_means(k, BLOCK)
    unread = k.with_values(torch.full_like(k.values, math.nan))
    for kept in (means, _without_room(means, k, BLOCK)):
        lists = retrieved_blocks(q, unread, **options, key_means=kept)
        assert listed(lists, q) == expected


@BACKENDS
def test_means_of_whole_blocks_are_enough(backend, monkeypatch):
    """They are appended and never change; what is not whole is among the newest."""
    use(monkeypatch, backend)
    lengths, events = [32, 0, 3, 70], torch.randn(200, 2, 8, device=DEVICE)
    q = jagged([20, 3, 5, 33], seed=1)
    kept = [events[:0]] * 4
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK}
    for grown in (0, 3, 13, 40):
        k = JaggedTensor.from_list([events[: n + grown] for n in lengths])
        for user, keys in enumerate(k.unbind()):
            whole = keys[len(kept[user]) * BLOCK : len(keys) // BLOCK * BLOCK]
            new = whole.unflatten(0, (-1, BLOCK)).mean(1) if len(whole) else whole
            kept[user] = torch.cat([kept[user], new])
        lists = retrieved_blocks(q, k, **options, key_means=JaggedTensor.from_list(kept))
        assert listed(lists, q) == expected_lists(q, k, **options)


@BACKENDS
def test_blocks_without_a_mean_are_not_found(backend, monkeypatch):
    use(monkeypatch, backend)
    x = jagged([100, 40])
    means = JaggedTensor(block_means(x, BLOCK).values[:3], offsets_of([2, 1]))
    lists = retrieved_blocks(x, x, 9, newest=1, block=BLOCK, key_means=means)
    assert {user: blocks for (user, *_), blocks in listed(lists, x).items()} == {
        0: [0, 1, 6], 1: [0, 2],
    }  # fmt: skip


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k and newest must be at least 0 and one of them 1, got 0 and 0"),
        ({"top_k": 2, "newest": -1}, "got 2 and -1"),
        ({"top_k": 1, "block": 24}, "block must be a power of two"),
        ({"top_k": 1, "groups": 3}, "groups must divide q's 2 heads, got 3"),
    ],
)
def test_wrong_options(options, message):
    x = jagged([40])
    with pytest.raises(ValueError, match=message):
        retrieved_blocks(x, x, **options)


def test_wrong_queries():
    k = jagged([40, 3])
    with pytest.raises(ValueError, match="q has 1 users and k has 2"):
        retrieved_blocks(jagged([40]), k, top_k=1)
    with pytest.raises(ValueError, match=r"q and k must be .* of one D"):
        retrieved_blocks(jagged([40, 3], dim=4), k, top_k=1)
    with pytest.raises(ValueError, match="q must have a multiple of k's heads, got 3 and 2"):
        retrieved_blocks(jagged([40, 3], heads=3), k, top_k=1)
    with pytest.raises(ValueError, match="q and k must be on one device, got meta and "):
        retrieved_blocks(k.to("meta"), k, top_k=1)
    with pytest.raises(TypeError, match="q must be of a floating dtype"):
        retrieved_blocks(k.with_values(k.values.long()), k, top_k=1)
    ids = torch.zeros(43, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match=r"categories of k must be of .*, got torch.float"):
        retrieved_blocks(k, k, top_k=1, categories=(ids, ids.float()))
    with pytest.raises(ValueError, match=r"categories of q must be \[43\], one a token, got \(4,"):
        retrieved_blocks(k, k, top_k=1, categories=(ids[:4], ids))
    with pytest.raises(ValueError, match=r"categories of q must be on .*, got meta"):
        retrieved_blocks(k, k, top_k=1, categories=(ids.to("meta"), ids))
    means = block_means(k, 16)
    options: dict[str, Any] = {"top_k": 1, "block": 16}
    with pytest.raises(ValueError, match=r"key_means must be \[M, 2, 8\] as k, got \(4, 2, 4\)"):
        retrieved_blocks(k, k, **options, key_means=block_means(jagged([40, 3], dim=4), 16))
    with pytest.raises(ValueError, match="key_means must be of k's 2 users, got 1"):
        retrieved_blocks(k, k, **options, key_means=jagged([3]))
    with pytest.raises(TypeError, match="key_means must be of a floating dtype"):
        retrieved_blocks(k, k, **options, key_means=means.with_values(means.values.long()))
    with pytest.raises(ValueError, match=r"key_means must be on .*, got meta"):
        retrieved_blocks(k, k, **options, key_means=means.to("meta"))
    on_cpu = k.to("cpu")
    other = block_means(on_cpu, 16)
    with pytest.raises(ValueError, match="key_means has 3 of user 0, and it has 1 blocks of 64"):
        retrieved_blocks(on_cpu, on_cpu, 1, newest=1, key_means=other)
    with pytest.raises(TypeError, match="x must be of a floating dtype"):
        block_means(k.with_values(k.values.long()), 16)
