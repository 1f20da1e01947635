"""`from_list_column` and `to_list_column`: Arrow, `datasets`, lists."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import JaggedTensor, from_list_column, to_list_column

datasets = pytest.importorskip("datasets")

ROWS = [[1, 2], [], [3], [4, 5, 6]]
KINDS = [pa.list_(pa.int32()), pa.large_list(pa.int32())]


def as_lists(x: JaggedTensor) -> list[Any]:
    return [user.tolist() for user in x.unbind()]


def address(column: Any) -> int:
    return column.values.buffers()[1].address


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_arrow_without_a_copy(kind):
    column = pa.array(ROWS, kind)
    x = from_list_column(column)
    assert as_lists(x) == ROWS
    assert x.dtype == torch.int32
    assert x.offsets.dtype == (torch.int32 if kind == KINDS[0] else torch.int64)
    assert x.values.data_ptr() == address(column)
    one_chunk = from_list_column(pa.chunked_array([column]))
    assert one_chunk.values.data_ptr() == address(column)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("part", [slice(1, None), slice(2, 4), slice(1, 2), slice(4, None)])
def test_slices_of_arrow(kind, part):
    column = pa.array(ROWS, kind)
    x = from_list_column(column[part.start : part.stop])
    assert as_lists(x) == ROWS[part]
    if x.values.numel():
        first = sum(map(len, ROWS[: part.start]))
        assert x.values.data_ptr() == address(column) + 4 * first


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunks(kind):
    column = pa.chunked_array([pa.array(ROWS, kind)[2:], pa.array([], kind), pa.array(ROWS, kind)])
    assert as_lists(from_list_column(column)) == [*ROWS[2:], *ROWS]
    nothing = from_list_column(pa.chunked_array([], kind))
    assert (len(nothing), nothing.dtype) == (0, torch.int32)
    assert len(from_list_column(pa.array([], kind))) == 0


@pytest.mark.parametrize(
    ("numbers", "kind", "dtype"),
    [
        ([1, 2, 3], pa.uint8(), torch.uint8),
        ([1, 2, 3], pa.int64(), torch.int64),
        ([1.5, 2, 3], pa.float16(), torch.float16),
        ([1.5, 2, 3], pa.float64(), torch.float64),
        ([True, False, True], pa.bool_(), torch.bool),
        ([1, 2, 3], pa.timestamp("us"), torch.int64),
        ([1, 2, 3], pa.duration("s"), torch.int64),
        ([1, 2, 3], pa.date32(), torch.int32),
    ],
    ids=str,
)
def test_what_lists_hold(numbers, kind, dtype):
    integers = {"timestamp": pa.int64(), "duration": pa.int64(), "date32": pa.int32()}
    stored = next((i for name, i in integers.items() if str(kind).startswith(name)), kind)
    array = pa.array(np.array(numbers, dtype=np.float16) if dtype == torch.float16 else numbers,
                     stored).cast(kind)  # fmt: skip
    x = from_list_column(pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), array)[1:])
    assert x.dtype == dtype
    assert as_lists(x) == [[numbers[2]]]


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3)])
def test_tokens_of_several_numbers(rows):
    tokens = [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]
    column = pa.array(tokens, pa.list_(pa.list_(pa.float32(), 2)))
    assert as_lists(from_list_column(column[rows.start or 0 : rows.stop])) == tokens[rows]
    deep = pa.array([[[[1], [2]]], []], pa.list_(pa.list_(pa.list_(pa.int64(), 1), 2)))
    assert from_list_column(deep).values.shape == (1, 2, 1)


def test_rows_of_one_size():
    column = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert as_lists(from_list_column(column, nulls="empty")) == [[1, 2], [], [3, 4]]
    assert as_lists(from_list_column(column[2:])) == [[3, 4]]
    with pytest.raises(ValueError, match="row 1 is null"):
        from_list_column(column)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_null_rows(kind):
    with_nulls: Any = [[1], None, [2, 3], None]
    # Below the null of row 1 there are tokens, that are not the user's.
    offsets = pa.array([0, 1, 4, 6, 6], (kind == KINDS[0] and pa.int32()) or pa.int64())
    numbers = pa.array([1, 8, 8, 8, 2, 3], pa.int32())
    mask = pa.array([row is None for row in with_nulls])
    list_array = pa.ListArray if kind == KINDS[0] else pa.LargeListArray
    column = list_array.from_arrays(offsets, numbers, mask=mask)
    assert column.to_pylist() == with_nulls
    assert as_lists(from_list_column(column, nulls="empty")) == [[1], [], [2, 3], []]
    assert as_lists(from_list_column(column[1:3], nulls="empty")) == [[], [2, 3]]
    with pytest.raises(ValueError, match="row 1 is null: nulls='empty' makes"):
        from_list_column(column)
    with pytest.raises(ValueError, match="row 2 is null"):
        from_list_column(pa.chunked_array([column[:1], column[2:]]))


def test_nulls_inside_rows():
    column = pa.array([[1], [], [2, None]])
    with pytest.raises(ValueError, match="row 2 has a null at 1"):
        from_list_column(column, nulls="empty")
    with pytest.raises(ValueError, match="row 3 has a null at 1"):
        from_list_column(pa.chunked_array([column[:1], column]))
    with pytest.raises(ValueError, match="row 3 has a null at 0"):
        from_list_column(pa.array([[1], [], [2], [None, 3]]))
    tokens = pa.array([[[1.0, 2.0]], [[3.0, 4.0], None]], pa.list_(pa.list_(pa.float32(), 2)))
    with pytest.raises(ValueError, match="row 1 has a null at 1"):
        from_list_column(tokens)
    # Of the tokens' numbers in a row.
    tokens = pa.array([[[1, 2]], [[3, 4], [5, None]], []], pa.list_(pa.list_(pa.int64(), 2)))
    with pytest.raises(ValueError, match="row 1 has a null at 3"):
        from_list_column(tokens)
    with pytest.raises(ValueError, match="row 2 has a null at 1"):
        from_list_column([[1], [], [2, None]])


@pytest.mark.parametrize("chosen", [None, [2, 0, 3]], ids=["all rows", "some rows"])
@pytest.mark.parametrize("form", [None, "arrow", "torch", "numpy", "pandas"])
def test_columns_and_batches_of_datasets(form, chosen):
    data = datasets.Dataset.from_dict({"history": ROWS, "label": [0, 1, 0, 1]})
    data = data if chosen is None else data.select(chosen)
    data = data.with_format(form)
    expected = ROWS if chosen is None else [ROWS[row] for row in chosen]
    assert as_lists(from_list_column(data["history"])) == expected
    x = from_list_column(data[:2]["history"])
    assert as_lists(x) == expected[:2]
    assert x.dtype == torch.int64


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_batches_of_one_length(form):
    """`datasets` makes one [B, L] of them."""
    data = datasets.Dataset.from_dict({"history": [[1, 2], [3, 4]]}).with_format(form)
    assert as_lists(from_list_column(data["history"])) == [[1, 2], [3, 4]]
    assert as_lists(from_list_column(data[:]["history"])) == [[1, 2], [3, 4]]


def test_what_a_dataset_was_told_to_do_is_done():
    data = datasets.Dataset.from_dict({"history": ROWS})
    data = data.with_transform(lambda rows: {"history": [[-n for n in r] for r in rows["history"]]})
    assert as_lists(from_list_column(data["history"])) == [[-n for n in row] for row in ROWS]


def test_plain_rows():
    assert as_lists(from_list_column(ROWS)) == ROWS
    assert as_lists(from_list_column([(1.5,), None], nulls="empty")) == [[1.5], []]
    assert from_list_column([[], []]).dtype == torch.float32
    assert from_list_column([[], []], dtype=torch.int64).dtype == torch.int64
    assert from_list_column(pa.array(ROWS), dtype=torch.float16).dtype == torch.float16
    tensors = [torch.ones(2, 3, device=DEVICE), None, torch.zeros(1, 3, device=DEVICE)]
    x = from_list_column(tensors, nulls="empty")
    assert (x.offsets.tolist(), x.device) == ([0, 2, 2, 3], tensors[0].device)


def test_rows_of_arrays_without_numbers():
    """NumPy makes floats of an empty list."""
    large = np.array([2**24 + 1, 2**53 + 1])
    for rows in ([np.array([]), large, []], [[], np.array([], np.float32), large]):
        x = from_list_column(rows)
        assert x.dtype == torch.int64
        assert x.values.tolist() == large.tolist()
    both = from_list_column([np.array([1]), np.array([0.5])], dtype=torch.float64)
    assert (both.dtype, as_lists(both)) == (torch.float64, [[1.0], [0.5]])


@pytest.mark.filterwarnings("error")
def test_arrays_that_are_not_to_be_written_to_are_copied():
    rows = [np.array([1, 2]), np.array([3])]
    both = np.array([[1, 2], [3, 4]])
    for array in (*rows, both):
        array.flags.writeable = False
    assert as_lists(from_list_column(rows)) == [[1, 2], [3]]
    x = from_list_column(both)
    x.values.zero_()
    assert both.tolist() == [[1, 2], [3, 4]]


def test_rows_of_one_length_have_offsets_on_their_device():
    x = from_list_column(torch.ones(2, 3, 4, device="meta"))
    assert (x.device.type, x.offsets.device.type) == ("meta", "meta")
    assert (len(x), x.values.shape) == (2, (6, 4))


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (pa.array([1, 2]), TypeError, "column must hold lists, got int64"),
        (pa.array([["a"], []]), TypeError, "hold numbers, the column is list<item: string>"),
        (pa.array([[[1], []]]), TypeError, "hold numbers, the column is list<item: list"),
        (3, TypeError, "column must be rows of numbers, got int"),
        (["abc"], TypeError, "row 0 must be a list or an array, got str"),
        (np.array([1, 2]), TypeError, "row 0 must be a list or an array, got int64"),
        ([[1], ["a"]], TypeError, "rows must hold numbers of one shape"),
        ([[[1]], [[1, 2]]], TypeError, "rows must hold numbers of one shape"),
        ([[1], None], ValueError, "row 1 is null: nulls='empty' makes"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], ValueError, r"tensor 1 has shape \(1, 3\)"),
    ],
    ids=str,
)
def test_what_is_no_column_of_numbers(column, error, message):
    with pytest.raises(error, match=message):
        from_list_column(column)


def test_wrong_nulls():
    with pytest.raises(ValueError, match="nulls must be 'error' or 'empty', got 'skip'"):
        from_list_column(ROWS, nulls="skip")  # pyright: ignore


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32, torch.bool])
def test_round_trip(dtype, shape, offsets):
    values = torch.arange(6 * int(np.prod(shape))).view(6, *shape).to(dtype)
    x = JaggedTensor(values, torch.tensor([0, 2, 2, 6], dtype=offsets))
    column = to_list_column(x)
    column.validate(full=True)
    assert column.to_pylist() == as_lists(x)
    assert to_list_column(x.to_nested()).equals(column)  # pyright: ignore
    again = from_list_column(column)
    assert torch.equal(again.values, x.values)
    assert torch.equal(again.offsets, x.offsets)
    assert (again.values.dtype, again.offsets.dtype) == (dtype, offsets)
    if dtype != torch.bool:
        assert again.values.data_ptr() == values.data_ptr()


def test_to_a_dataset():
    x = JaggedTensor(torch.arange(3.0, device=DEVICE).requires_grad_(),
                     torch.tensor([0, 2, 2, 3], device=DEVICE))  # fmt: skip
    data = datasets.Dataset(pa.table({"history": to_list_column(x)}))
    assert data[:]["history"] == [[0, 1], [], [2]]
    assert as_lists(from_list_column(data["history"])) == as_lists(x)


def test_what_cannot_be_a_column(monkeypatch):
    x = JaggedTensor(torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"NumPy has no torch.bfloat16: cast x before"):
        to_list_column(x)
    with pytest.raises(ValueError, match=r"numbers in a token, got \(3, 0\)"):
        to_list_column(x.with_values(torch.zeros(3, 0)))
    with pytest.raises(TypeError, match="x must be a JaggedTensor, got list"):
        to_list_column(ROWS)  # pyright: ignore
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="to_list_column needs pyarrow: pip install pyarrow"):
        to_list_column(x.to(torch.float32))
