"""Retrieval of key blocks by their means, against a plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import BLOCK, LENGTHS, offsets_of
from launch_keys import batches, record_launches

from jagged_kernels import JaggedTensor
from jagged_kernels.attention.retrieval import block_scores as scores_module
from jagged_kernels.attention.retrieval import retrieval
from jagged_kernels.attention.retrieval.block_scores import block_scores
from jagged_kernels.attention.retrieval.retrieval import block_means, retrieved_blocks
from jagged_kernels.schedule.keys.check import check_lists

BACKENDS = pytest.mark.parametrize("backend", ["triton", "native"])


def _jagged(lengths, heads=2, dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, dim, generator=generator)
    return JaggedTensor(values.to(DEVICE, dtype), offsets_of(lengths))


def _means(x, block):
    return [x[i : i + block].double().mean(0) for i in range(0, len(x), block)]


def _expected(q, k, *, top_k, newest, block, groups=1, causal=False, categories=None):
    """[(user, tile, group)] -> blocks, one after another."""
    found = {}
    if categories is None:
        categories = [torch.zeros(len(x.values), dtype=torch.int64) for x in (q, k)]
    of_queries, of_keys = (
        [x.split(block) for x in JaggedTensor(of.cpu(), x.offsets.cpu()).unbind()]
        for of, x in zip(categories, (q, k), strict=True)
    )
    heads, kv_heads = q.values.shape[1], k.values.shape[1]
    for user, (queries, keys) in enumerate(zip(q.unbind(), k.unbind(), strict=True)):
        keys = keys.repeat_interleave(heads // kv_heads, 1)
        shift = len(keys) - len(queries)
        for tile, query in enumerate(_means(queries, block)):
            end = min((tile + 1) * block, len(queries)) + shift if causal else len(keys)
            seen = math.ceil(max(end, 0) / block)
            older = _means(keys, block)[: max(seen - newest, 0)]
            for group in range(groups):
                part = slice(group * heads // groups, (group + 1) * heads // groups)
                scores = [float((query[part] * key[part]).sum()) for key in older]
                wanted = set(of_queries[user][tile].tolist())
                hold = [c for c in range(len(older)) if wanted & set(of_keys[user][c].tolist())]
                best = sorted(hold, key=lambda c, s=scores: (-s[c], c))
                blocks = {*best[:top_k], *range(max(seen - newest, 0), seen)}
                found[user, tile, group] = sorted(blocks)
    return found


def _listed(lists, q):
    found, groups = {}, lists.groups
    for user, n in enumerate(q.lengths.tolist()):
        first = int(q.offsets[user]) // lists.block + user
        for tile in range(-(-n // lists.block)):
            for group in range(groups):
                entry = (first + tile) * groups + group
                begin, end = lists.row_ptr[entry : entry + 2].tolist()
                found[user, tile, group] = (lists.col[begin:end] // 2).tolist()
    return found


def _use(monkeypatch, backend):
    monkeypatch.setattr(scores_module, "triton_runs", lambda x: backend == "triton")


# --- means ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_means_of_blocks(lengths, dtype):
    x = _jagged(lengths, dtype=dtype)
    means = block_means(x, BLOCK)
    assert means.dtype == dtype
    assert means.values.shape == (sum(lengths) // BLOCK + len(lengths), 2, 8)
    for user, (part, tokens) in enumerate(zip(means.unbind(), x.unbind(), strict=True)):
        assert int(means.offsets[user]) == int(x.offsets[user]) // BLOCK + user
        expected = _means(tokens, BLOCK)
        assert len(part) - len(expected) in (0, 1)
        for mean, other in zip(part, expected, strict=False):
            torch.testing.assert_close(mean.double(), other, rtol=1e-6, atol=1e-6)
        assert not part[len(expected) :].any()


def test_means_have_gradients():
    x = _jagged([20, 0, 3], dtype=torch.float64)
    values = x.values.requires_grad_()
    torch.autograd.gradcheck(lambda v: block_means(x.with_values(v), BLOCK).values, values)


# --- the choice -----------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "groups"), [(2, 2, 1), (4, 2, 2), (4, 1, 4)])
def test_lists_hold_the_best_blocks(backend, causal, heads, kv_heads, groups, monkeypatch):
    _use(monkeypatch, backend)
    lengths = [100, 0, 3, 70, 16]
    for top_k, newest in ((2, 1), (1, 0), (3, 2), (0, 2)):
        k = _jagged(lengths, kv_heads, seed=top_k)
        for q in (_jagged(lengths, heads, seed=1), _jagged([20, 3, 0, 33, 60], heads, seed=2)):
            options = {
                "top_k": top_k, "newest": newest, "block": BLOCK, "groups": groups,
                "causal": causal,
            }  # fmt: skip
            lists = retrieved_blocks(q, k, **options)
            assert _listed(lists, q) == _expected(q, k, **options)
            assert lists.window == (-1, 0 if causal else -1)
            tokens = {"q_tokens": q.values.shape[0], "k_tokens": k.values.shape[0]}
            check_lists(lists, q.offsets, k.offsets, **tokens)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS, top_k=st.integers(0, 4), newest=st.integers(0, 3))
def test_any_lengths(data, lengths, top_k, newest):
    causal = data.draw(st.booleans())
    queries = [data.draw(st.integers(0, 40)) for _ in lengths]
    newest = max(newest, 1 - top_k)
    q, k = _jagged(queries, seed=3), _jagged(lengths)
    options = {"top_k": top_k, "newest": newest, "block": BLOCK, "causal": causal}
    assert _listed(retrieved_blocks(q, k, **options), q) == _expected(q, k, **options)


def _categories(*sides, kinds=12, dtype=torch.int64):
    """Of the tokens of q and k; few of each kind in a block."""
    generator = torch.Generator().manual_seed(4)
    return tuple(
        torch.randint(-3, kinds - 3, (len(x.values),), generator=generator).to(DEVICE, dtype)
        for x in sides
    )


@BACKENDS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_blocks_of_other_categories_are_not_found(backend, causal, dtype, monkeypatch):
    """SIM's hard search: of candidates, and of tiles of a history."""
    _use(monkeypatch, backend)
    monkeypatch.setattr(scores_module, "_MOST_PAIRS", 2 * BLOCK**2)
    lengths = [100, 0, 3, 70, 16]
    k = _jagged(lengths)
    for q in (_jagged(lengths, 4, seed=1), _jagged([1, 1, 2, 0, 1], 4, seed=2)):
        for top_k, newest in ((2, 1), (9, 0)):
            options: dict[str, Any] = {
                "top_k": top_k, "newest": newest, "block": BLOCK, "groups": 2, "causal": causal,
                "categories": _categories(q, k, kinds=150, dtype=dtype),
            }  # fmt: skip
            expected = _expected(q, k, **options)
            assert _listed(retrieved_blocks(q, k, **options), q) == expected
            assert expected != _expected(q, k, **{**options, "categories": None})


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS, top_k=st.integers(1, 4), newest=st.integers(0, 3))
def test_any_lengths_with_categories(data, lengths, top_k, newest):
    queries = [data.draw(st.integers(0, 40)) for _ in lengths]
    q, k = _jagged(queries, seed=3), _jagged(lengths)
    categories = _categories(q, k, kinds=data.draw(st.integers(1, 300)))
    options: dict[str, Any] = {"top_k": top_k, "newest": newest, "block": BLOCK}
    options |= {"causal": data.draw(st.booleans()), "categories": categories}
    assert _listed(retrieved_blocks(q, k, **options), q) == _expected(q, k, **options)


@pytest.mark.parametrize("shape", [(3, 5), (5,)])
def test_categories_of_dense_queries(shape):
    k = _jagged([100, 0, 40])
    dense = torch.randn(*shape, 2, 8, device=DEVICE)
    q = JaggedTensor(dense.expand(3, 5, 2, 8).reshape(15, 2, 8), offsets_of([5, 5, 5]))
    of_queries = torch.arange(dense[..., 0, 0].numel(), device=DEVICE).view(shape)
    of_keys = _categories(k, kinds=50)[0]
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK}
    lists = retrieved_blocks(dense, k, categories=(of_queries, of_keys), **options)
    flat = (of_queries.expand(3, 5).flatten(), of_keys)
    assert _listed(lists, q) == _expected(q, k, categories=flat, **options)


@pytest.mark.parametrize("shape", [(3, 5, 2, 8), (5, 2, 8)])
def test_dense_queries(shape):
    k = _jagged([100, 0, 40])
    dense = torch.randn(shape, device=DEVICE)
    q = JaggedTensor(dense.expand(3, 5, 2, 8).reshape(15, 2, 8), offsets_of([5, 5, 5]))
    options: dict[str, Any] = {"top_k": 2, "newest": 1, "block": BLOCK}
    assert _listed(retrieved_blocks(dense, k, **options), q) == _expected(q, k, **options)


@BACKENDS
def test_equal_scores_go_to_the_earlier(backend, monkeypatch):
    _use(monkeypatch, backend)
    x = JaggedTensor(torch.ones(100, 2, 8, device=DEVICE), offsets_of([100]))
    lists = retrieved_blocks(x, x, top_k=2, newest=1, block=BLOCK)
    assert set(map(tuple, _listed(lists, x).values())) == {(0, 1, 6)}


@BACKENDS
def test_room_beyond_the_longest_changes_nothing(backend, monkeypatch):
    _use(monkeypatch, backend)
    x = _jagged([100, 3, 0, 50])
    options = {"top_k": 2, "newest": 1, "block": BLOCK, "causal": True}
    lists = retrieved_blocks(x, x, **options)
    assert _listed(retrieved_blocks(x, x, **options, longest=1000), x) == _listed(lists, x)


def test_users_longer_than_said(monkeypatch):
    """Nobody looks: of their older blocks the first ones can be found, and nothing breaks."""
    x = _jagged([100, 3])
    on_cpu = x.to("cpu")
    with pytest.raises(ValueError, match="longest is 40, but a user has 100 tokens"):
        retrieved_blocks(on_cpu, on_cpu, top_k=2, block=BLOCK, longest=40)
    monkeypatch.setattr(retrieval, "longest_user", lambda q, k, longest: longest)
    lists = retrieved_blocks(x, x, top_k=2, newest=1, block=BLOCK, longest=40)
    for (user, *_), blocks in _listed(lists, x).items():
        assert blocks == [0, 1, 6] if user == 0 else blocks == [0]


def test_no_gradient_and_no_users():
    empty = _jagged([])
    lists = retrieved_blocks(empty, empty, top_k=2, newest=1, block=BLOCK)
    assert lists.row_ptr.tolist() == lists.row_ptr_t.tolist() == [0]
    x = _jagged([40])
    x.values.requires_grad_()
    lists = retrieved_blocks(x, x, top_k=1, block=BLOCK)
    assert not lists.col.requires_grad


# --- the operator ---------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [8, 100])
def test_scores_of_blocks(backend, dtype, size, monkeypatch):
    _use(monkeypatch, backend)
    lengths, groups = [100, 0, 3, 1100], 2
    offsets = offsets_of(lengths)
    tiles = sum(lengths) // BLOCK + len(lengths)
    torch.manual_seed(0)
    queries, keys = torch.randn(2, tiles, groups, size, device=DEVICE).to(dtype).unbind()
    # The first tile of each user sees all, no other any.
    counts = torch.zeros(tiles, groups, dtype=torch.int64, device=DEVICE)
    first = (offsets[:-1] // BLOCK + torch.arange(len(lengths), device=DEVICE)).tolist()
    blocks = [-(-n // BLOCK) for n in lengths]
    counts[first] = torch.tensor(blocks, device=DEVICE)[:, None]
    ends = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
    inputs = (queries, keys, offsets, offsets, ends, BLOCK, int(ends[-1]) + 3)
    scores = block_scores(*inputs)
    assert scores.shape == (int(ends[-1]) + 3,)
    for x, count in zip(first, blocks, strict=True):
        for group in range(groups):
            expected = keys[x : x + count, group].double() @ queries[x, group].double()
            begin = int(ends[x * groups + group])
            torch.testing.assert_close(
                scores[begin : begin + count].double(), expected, rtol=1e-5, atol=1e-4
            )
    if dtype == torch.float32:
        exact = (*inputs[:-1], int(ends[-1]))  # what is behind means nothing
        torch.library.opcheck(block_scores, exact)
        categories = torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE)
        torch.library.opcheck(block_scores, (*exact, categories, categories))


def test_batches_compile_nothing_again(monkeypatch):
    _use(monkeypatch, "triton")
    monkeypatch.setattr(retrieval, "longest_user", lambda q, k, longest: longest)
    monkeypatch.setattr(scores_module, "triton_runs", lambda x: True)
    keys = record_launches(monkeypatch)
    for count, lengths in enumerate(batches(10)):
        x = _jagged(lengths)
        retrieved_blocks(x, x, top_k=2, newest=1, block=BLOCK, longest=max(lengths) + count + 40)
    assert len({key for key in keys if key[0] == "_block_scores_kernel"}) == 1


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
    x = _jagged([40])
    with pytest.raises(ValueError, match=message):
        retrieved_blocks(x, x, **options)


def test_wrong_queries():
    k = _jagged([40, 3])
    with pytest.raises(ValueError, match="q has 1 users and k has 2"):
        retrieved_blocks(_jagged([40]), k, top_k=1)
    with pytest.raises(ValueError, match=r"q and k must be .* of one D"):
        retrieved_blocks(_jagged([40, 3], dim=4), k, top_k=1)
    with pytest.raises(ValueError, match="q must have a multiple of k's heads, got 3 and 2"):
        retrieved_blocks(_jagged([40, 3], heads=3), k, top_k=1)
    with pytest.raises(TypeError, match="q must be of a floating dtype"):
        retrieved_blocks(k.with_values(k.values.long()), k, top_k=1)
    ids = torch.zeros(43, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match=r"categories of k must be of .*, got torch.float"):
        retrieved_blocks(k, k, top_k=1, categories=(ids, ids.float()))
    with pytest.raises(ValueError, match=r"categories of q must be \[43\], one a token, got \(4,"):
        retrieved_blocks(k, k, top_k=1, categories=(ids[:4], ids))
    with pytest.raises(ValueError, match=r"categories of q must be on .*, got meta"):
        retrieved_blocks(k, k, top_k=1, categories=(ids.to("meta"), ids))
    with pytest.raises(TypeError, match="x must be of a floating dtype"):
        block_means(k.with_values(k.values.long()), 16)
