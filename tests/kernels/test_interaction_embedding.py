"""Vectors of several features of a token, and the gradients of their tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import (
    DTYPES,
    assert_as_exact_as_reference,
    assert_compiles,
    assert_gradients_exact,
)
from torch import Tensor

from jagged_kernels import JaggedTensor, jagged_embedding
from jagged_kernels.ops.ids import embedding as embedding_module
from jagged_kernels.ops.ids.embedding import embed
from jagged_kernels.ops.ids.keyed_sums import sort_ids, sum_sorted_rows


def embedding(backend: Any, offsets: Tensor, **tensors: Tensor) -> JaggedTensor:
    """Ids and tables of features a, b, c: `ids_a`, `table_a`, ..."""
    names = [name.removeprefix("ids_") for name in tensors if name.startswith("ids_")]
    ids = [JaggedTensor(tensors[f"ids_{n}"], offsets, validate=False) for n in names]
    return jagged_embedding(ids, [tensors[f"table_{n}"] for n in names], backend=backend)


def features(tokens: int, width: int, *, seed: int = 0) -> dict[str, Tensor]:
    """An id of every token, one that all tokens have, two ids in turn, and many rare ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = {
        "often": torch.randint(0, 40, (tokens,), generator=generator),
        "same": torch.full((tokens,), 1, dtype=torch.int32),
        "turns": torch.arange(tokens, dtype=torch.int32) % 2,
        "rare": (torch.rand(tokens, generator=generator) ** 8 * 1000).long(),
    }
    sizes = {"often": 40, "same": 3, "turns": 2, "rare": 40_000}
    tensors = {"offsets": torch.tensor([0, 0, tokens // 3, tokens])}
    for name, numbers in ids.items():
        tensors[f"ids_{name}"] = numbers
        tensors[f"table_{name}"] = torch.randn((sizes[name], width), generator=generator)
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 4), (1, 4), (33, 1), (700, 5), (2500, 20)])
def test_exact(tokens, width, dtype):
    assert_as_exact_as_reference(embedding, features(tokens, width), dtype)


def test_large_tables_are_sorted_by_themselves(monkeypatch):
    monkeypatch.setattr(embedding_module, "_SHARED_IDS", 0)
    assert_as_exact_as_reference(embedding, features(700, 5), torch.float32)
    check_sparse_gradients("triton")


def test_parts_of_the_tokens_are_summed_apart(monkeypatch):
    monkeypatch.setattr(embedding_module, "_PART_BYTES", 1024)
    tensors = features(700, 5)
    few = {n: t for n, t in tensors.items() if not n.endswith("rare")}
    assert_as_exact_as_reference(embedding, few, torch.float32)
    assert_as_exact_as_reference(embedding, few, torch.float16)
    # So many rows leave 16 bits to one part alone.
    few["table_often"] = torch.randn((20_000, 5), device=DEVICE)
    assert_as_exact_as_reference(embedding, few, torch.float32)


def test_wide_vectors():
    tensors = features(50, 600)
    few = {n: t for n, t in tensors.items() if n == "offsets" or n.endswith("often")}
    assert_as_exact_as_reference(embedding, few, torch.float32)


def test_gradients():
    tensors = {
        "offsets": torch.tensor([0, 2, 6]),
        "ids_a": torch.tensor([0, 2, 0, 1, 2, 2]),
        "table_a": torch.randn(4, 2),
        "ids_b": torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.int32),
        "table_b": torch.randn(2, 2),
    }
    assert_gradients_exact(embedding, {name: t.to(DEVICE) for name, t in tensors.items()})


def test_compiles():
    assert_compiles(embedding, [features(7, 4), features(20, 4, seed=1), features(3, 4)])


def test_operators_pass_opcheck():
    tensors = features(9, 4)
    tables = [tensors[f"table_{n}"].requires_grad_() for n in ("often", "same")]
    ids = [tensors[f"ids_{n}"] for n in ("often", "same")]
    torch.library.opcheck(embed, (tables, ids, False))
    torch.library.opcheck(sort_ids, (ids, [40, 3], 2))
    keys, order = ids[0].sort()
    rows = torch.randn(9, 4, device=DEVICE)
    torch.library.opcheck(sum_sorted_rows, (rows, order, keys, 40, torch.float32))


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_sparse_gradients_are_the_dense_ones(backend):
    check_sparse_gradients(backend)


def check_sparse_gradients(backend):
    tensors = features(300, 5)
    offsets = tensors.pop("offsets")
    names = ("often", "same", "turns", "rare")
    ids = [JaggedTensor(tensors[f"ids_{n}"], offsets) for n in names]
    d_out = torch.randn((300, 5), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = []
    for sparse in (False, True):
        tables = [tensors[f"table_{n}"].clone().requires_grad_() for n in names]
        out = jagged_embedding(ids, tables, sparse=sparse, backend=backend)
        out.values.backward(d_out)
        found.append([table.grad for table in tables])
    for n, dense, sparse in zip(ids, *found, strict=True):
        assert sparse.is_sparse
        torch.testing.assert_close(sparse.to_dense(), dense, rtol=1e-5, atol=1e-5)
        assert torch.equal(sparse.coalesce().indices()[0], n.values.long().unique())
        if backend == "triton":
            assert sparse._nnz() == n.values.unique().numel()
            assert torch.equal(sparse.to_dense(), dense)


def test_only_wanted_tables_get_gradients():
    tensors = features(10, 4)
    tensors["table_often"].requires_grad_()
    embedding("triton", **tensors).values.sum().backward()
    assert tensors["table_often"].grad is not None
    assert tensors["table_same"].grad is None


def test_equal_keys_add_up_over_any_number_of_spans():
    """Integers, so that every order gives the exact sum; two keys and rows that are left out."""
    count = 20_000
    keys = torch.arange(count, device=DEVICE) // 9_000 - 1  # -1, 0, and the beginning of 1
    rows = torch.arange(count, device=DEVICE).float()[:, None] % 8
    order = torch.arange(count, device=DEVICE).flip(0)
    found = sum_sorted_rows(rows, order, keys, 2, torch.float32)
    picked = rows[order]
    expected = torch.stack([picked[keys == key].sum(0) for key in range(2)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [3, 150, 280])
def test_nan_of_a_row_reaches_its_key_only(place):
    """Among several keys, and among rows of one key."""
    keys = torch.cat([torch.arange(100) // 9, torch.full((190,), 12), torch.arange(10) + 13])
    rows, order = torch.randn(300, 7), torch.randperm(300)
    rows[order[place], 2] = math.nan
    expected = torch.zeros(23, 7).index_add_(0, keys, rows[order])
    inputs = (x.to(DEVICE) for x in (rows, order, keys))
    found = sum_sorted_rows(*inputs, 23, torch.float32).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sparse", [False, True])
def test_ids_outside_the_table_are_left_out_where_they_are_not_looked_at(sparse):
    table = torch.ones(3, 2, device=DEVICE, requires_grad=True)
    ids = torch.tensor([1, -1, 3, 70_000, 2, -(2**40), 1], device=DEVICE)
    out = embed([table], [ids], sparse)
    assert out[:, 0].tolist() == [1, 0, 0, 0, 1, 0, 1]
    out.sum().backward()
    assert table.grad is not None
    assert table.grad.to_dense()[:, 0].tolist() == [0, 2, 1]


def test_ids_outside_the_tables_are_left_out_of_parts_of_the_tokens(monkeypatch):
    monkeypatch.setattr(embedding_module, "_PART_BYTES", 16)
    tables = [torch.ones(n, 1, device=DEVICE, requires_grad=True) for n in (2, 3)]
    ids = torch.tensor([0, 1, 1, -1, 1, 5, -7, 0, 1, 9, 0, -1], device=DEVICE)
    gradients = torch.autograd.grad(embed(tables, [ids, ids], False).sum(), tables)
    assert [gradient[:, 0].tolist() for gradient in gradients] == [[3, 4], [3, 4, 0]]


def test_sums_of_half_types_are_in_float32(monkeypatch):
    """Of tables, and of the tokens of an id over parts of them: on the way beyond float16."""
    monkeypatch.setattr(embedding_module, "_PART_BYTES", 4)
    numbers = torch.tensor([60000.0, 60000.0, -40000.0, -40000.0], dtype=torch.float16)
    tables = [n.to(DEVICE).view(1, 1).requires_grad_() for n in numbers]
    ids = JaggedTensor.from_list([torch.zeros(4, dtype=torch.int64, device=DEVICE)])
    out = jagged_embedding([ids] * 4, tables, backend="triton").values
    assert out[:, 0].tolist() == [40000.0] * 4
    gradients = torch.autograd.grad(out, tables, numbers.to(DEVICE)[:, None])
    assert [gradient.item() for gradient in gradients] == [40000.0] * 4


@pytest.mark.parametrize("rows", [2**15, 2**15 + 1, 2**15 + 2])
def test_the_last_rows_of_tables_at_the_border_of_16_bits(rows):
    table = torch.ones(rows, 1, device=DEVICE, requires_grad=True)
    ids = JaggedTensor.from_list([torch.tensor([rows - 1, 0, rows - 1], device=DEVICE)])
    jagged_embedding([ids], [table], backend="triton").values.sum().backward()
    assert table.grad is not None
    assert table.grad[[0, 1, -2, -1], 0].tolist() == [1, 0, 0, 2]


def test_nan_of_one_row_reaches_its_tokens_only():
    tensors = features(60, 3)
    tensors["table_often"][7] = math.nan
    for backend in ("native", "triton"):
        bad = embedding(backend, **tensors).values.isnan().any(1)
        assert torch.equal(bad, tensors["ids_often"] == 7)


@pytest.mark.skipif(DEVICE == "cuda", reason="contents are not read where that would wait")
def test_contents_are_checked_on_a_cpu():
    table, offsets = torch.zeros(3, 2), torch.tensor([0, 2])
    ids = JaggedTensor(torch.tensor([0, 3]), offsets)
    with pytest.raises(IndexError, match=r"ids 0 must lie in \[0, 3\), got 0 to 3"):
        jagged_embedding([ids], [table])
    zeros = torch.zeros(2).long()
    others = JaggedTensor(torch.zeros(2).long(), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="ids 1 must have the offsets of x"):
        jagged_embedding([others, JaggedTensor(zeros, torch.tensor([0, 0, 2]))], [table, table])


def test_offsets_of_other_users_are_named_where_contents_are_not_read(monkeypatch):
    monkeypatch.setattr(embedding_module, "readable", lambda x: False)
    zeros, table = torch.zeros(2, device=DEVICE).long(), torch.zeros(3, 2, device=DEVICE)
    ids = [JaggedTensor(zeros, torch.tensor(ends, device=DEVICE)) for ends in ([0, 2], [0, 1, 2])]
    with pytest.raises(ValueError, match="ids 1 must have the users of x, 1, got 2"):
        jagged_embedding(ids, [table, table])


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends the process")
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_negative_ids_do_not_count_from_the_end(backend, monkeypatch):
    monkeypatch.setattr(embedding_module, "readable", lambda x: False)
    ids = JaggedTensor(torch.tensor([-1]), torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        jagged_embedding([ids], [torch.zeros(9, 2)], backend=backend)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_tables_without_rows(backend, sparse):
    nobody = JaggedTensor(torch.zeros(0, device=DEVICE).long(), torch.zeros(3, device=DEVICE).int())
    tables = [torch.zeros(0, 4, device=DEVICE, requires_grad=True) for _ in range(2)]
    out = jagged_embedding([nobody, nobody], tables, sparse=sparse, backend=backend)
    out.values.sum().backward()
    for table in tables:
        assert table.grad is not None
        assert table.grad.shape == (0, 4)


@pytest.mark.parametrize(
    ("ids", "tables", "error", "message"),
    [
        ([torch.zeros(2).long()], [(3, 2)], TypeError, r"at least one .* got \[Tensor\]"),
        ([None], [(3, 2), (3, 2)], ValueError, "1 ids, 2 tables"),
        ([None, torch.zeros(2)], [(3, 2), (3, 2)], TypeError, "ids 1 must be int32 or int64"),
        ([None, torch.zeros(3).long()], [(3, 2), (3, 2)], ValueError, r"\(3,\) and \(2,\)"),
        ([None, torch.zeros(2).long()], [(3, 2), (3, 4)], ValueError, r"\(3, 4\) and \(3, 2\)"),
        ([None], [(3,)], ValueError, r"\[V, D\]"),
    ],
)
def test_errors(ids, tables, error, message):
    jagged = JaggedTensor(torch.zeros(2).long(), torch.tensor([0, 2])).to(DEVICE)
    ids = [jagged if x is None else x.to(DEVICE) for x in ids]
    with pytest.raises(error, match=message):
        jagged_embedding(ids, [torch.zeros(shape, device=DEVICE) for shape in tables])
