"""To and from columns of lists, of Arrow and of Hugging Face `datasets`: `from_list_column`,
`to_list_column`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import lengths_to_offsets

Nulls = Literal["error", "empty"]
_LISTS = ("list<", "large_list<", "fixed_size_list<")
# Stored as integers, which DLPack does not know.
_TIMES = ("timestamp", "duration", "date", "time")


def from_list_column(
    column: Any, *, nulls: Nulls = "error", dtype: torch.dtype | None = None
) -> JaggedTensor:
    """From a column whose rows are lists of numbers: row b is user b.

    Args:
        column: one of
            an Arrow `ListArray`, `LargeListArray` or `FixedSizeListArray`, or a `ChunkedArray` of
            those. What the lists hold are numbers, booleans, times (their integers are taken), or
            lists of one fixed size of them, for tokens [T, D];
            a column of a `datasets.Dataset`. It is read as Arrow where no other format is set;
            a sequence of lists, tensors or NumPy arrays, or one [B, L, ...], as a formatted batch
            of `datasets` has them.
        nulls: rows that are null raise ("error") or are users without tokens ("empty"). A null
            inside a row always raises.
        dtype: of the values; by default the column's. That of lists is what `torch.tensor` gives,
            which for rows without any number is the default floating dtype.

    Returns:
        On the CPU, or where the tensors are. Offsets have the column's width (int32 or int64) if
        it is one Arrow array, else int64. Of one Arrow array without nulls, values and offsets
        share its memory (booleans and slices' offsets are copies): do not write to them.

    Raises:
        TypeError: rows or numbers of another kind, or arrays of several dtypes and no `dtype`.
        ValueError: a null; the message has its row.

    >>> from_list_column([[1, 2], None, [3]], nulls="empty").offsets.tolist()
    [0, 2, 2, 3]
    """
    if nulls not in ("error", "empty"):
        raise ValueError(f"nulls must be 'error' or 'empty', got {nulls!r}")
    source: Any = getattr(column, "source", None)
    if hasattr(source, "with_format"):
        if source.format["type"] is None:
            column = source.with_format("arrow")[column.column_name]
        column = column[:]
    if hasattr(column, "null_count") and hasattr(column, "type"):
        jagged = _from_arrow(column, nulls)
    elif getattr(column, "ndim", 1) > 1:
        rectangle = _tensor(column)
        offsets = torch.arange(len(rectangle) + 1, device=rectangle.device) * rectangle.shape[1]
        jagged = JaggedTensor._trusted(rectangle.flatten(0, 1), offsets)
    else:
        jagged = _from_rows(column, nulls, dtype)
    return jagged if dtype is None else jagged.to(dtype)


@takes_nested
def to_list_column(x: JaggedTensor) -> Any:
    """As a pyarrow `ListArray` (a `LargeListArray` for int64 offsets): user b is row b.

    Args:
        x: [T, ...] of a dtype that NumPy has. Tokens [T, D] become lists of the fixed size D.

    Returns:
        An array that shares the memory of `x`, if that is on the CPU and contiguous (booleans are
        copied): `pyarrow.table({"history": column})`, `datasets.Dataset(table)`. It does not
        remember gradients. From another device this copies, and waits.

    Raises:
        ImportError: pyarrow is not installed.
        TypeError: `x` is no `JaggedTensor`, or of a dtype that NumPy does not have.
        ValueError: tokens of no numbers.

    `from_list_column` is the reverse.

    >>> x = JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))
    >>> to_list_column(x).to_pylist()
    [[1, 2], [], [3]]
    """
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    if 0 in x.values.shape[1:]:
        raise ValueError(f"x must have numbers in a token, got {tuple(x.values.shape)}")
    try:
        numbers = x.values.detach().cpu().flatten().numpy()
    except TypeError as error:
        raise TypeError(f"NumPy has no {x.dtype}: cast x before") from error
    arrow = _pyarrow()
    column = arrow.array(numbers)
    for size in reversed(x.values.shape[1:]):
        column = arrow.FixedSizeListArray.from_arrays(column, size)
    kind = arrow.LargeListArray if x.offsets.dtype == torch.int64 else arrow.ListArray
    return kind.from_arrays(arrow.array(x.offsets.cpu().numpy()), column)


def _from_arrow(column: Any, nulls: Nulls) -> JaggedTensor:
    if not str(column.type).startswith(_LISTS):
        raise TypeError(f"column must hold lists, got {column.type}")
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    if not chunks:
        chunks = [column.combine_chunks()]
    parts, row = [], 0
    for chunk in chunks:
        parts.append(_from_array(chunk, nulls, row))
        row += len(chunk)
    if len(parts) == 1:
        return parts[0]
    lengths = torch.cat([part.lengths.long() for part in parts])
    values = torch.cat([part.values for part in parts])
    return JaggedTensor._trusted(values, lengths_to_offsets(lengths))


def _from_array(array: Any, nulls: Nulls, first_row: int) -> JaggedTensor:
    """Of one Arrow array, whose first row is `first_row` of the column."""
    size = getattr(array.type, "list_size", None)
    if size is None:
        offsets = torch.from_dlpack(array.offsets)
        # A slice of an array begins where it begins.
        start, end = int(offsets[0]), int(offsets[-1])
        values = array.values.slice(start, end - start)
        offsets = offsets - start if start else offsets
    else:
        values, offsets = array.flatten(), torch.arange(len(array) + 1) * size
    if array.null_count:
        valid = _valid(array)
        if nulls == "error":
            row = first_row + int(valid.logical_not().nonzero()[0])
            raise ValueError(f"row {row} is null: nulls='empty' makes it a user without tokens")
        # What lies below a null counts for nothing, and `flatten` leaves it out.
        offsets, values = lengths_to_offsets(offsets.diff() * valid), array.flatten()
    return JaggedTensor(_numbers(values, array.type, offsets, first_row), offsets)


def _numbers(values: Any, column_type: Any, offsets: Tensor, first_row: int) -> Tensor:
    """[T, ...]: what the lists of a column hold. `offsets` and `first_row` are for messages."""
    if values.null_count:
        token = int(_valid(values).logical_not().nonzero()[0])
        row = int(torch.searchsorted(offsets, token, right=True)) - 1
        raise ValueError(f"row {first_row + row} has a null at {token - int(offsets[row])}")
    kind = str(values.type)
    if kind.startswith("fixed_size_list<"):
        size = values.type.list_size
        numbers = _numbers(values.flatten(), column_type, offsets * size, first_row)
        return numbers.unflatten(0, (len(values), size))
    if kind == "bool":
        return torch.from_dlpack(values.cast("uint8")).bool()
    if kind.startswith(_TIMES):
        values = values.view(f"int{values.type.bit_width}")
    try:
        return torch.from_dlpack(values)
    except TypeError as error:
        raise TypeError(f"lists must hold numbers, the column is {column_type}") from error


def _valid(array: Any) -> Tensor:
    """[rows] bool."""
    return torch.from_dlpack(array.is_valid().cast("uint8")).bool()


def _from_rows(column: Any, nulls: Nulls, dtype: torch.dtype | None) -> JaggedTensor:
    if not isinstance(column, Iterable) or isinstance(column, str | bytes):
        raise TypeError(f"column must be rows of numbers, got {type(column).__name__}")
    rows: list[Any] = []
    for index, row in enumerate(column):
        if row is None and nulls == "error":
            raise ValueError(f"row {index} is null: nulls='empty' makes it a user without tokens")
        if not (row is None or _is_array(row) or isinstance(row, Sequence)) or _is_text(row):
            raise TypeError(f"row {index} must be a list or an array, got {type(row).__name__}")
        rows.append([] if row is None else row)
    arrays = [row for row in rows if _is_array(row)]
    if arrays and not any(len(row) for row in rows if not _is_array(row)):
        nothing = _tensor(arrays[0])[:0]
        tensors = [_tensor(row) if _is_array(row) else nothing for row in rows]
        return JaggedTensor.from_list([x.to(dtype or x.dtype) for x in tensors])
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return JaggedTensor._trusted(_of_lists(rows, dtype), lengths_to_offsets(lengths))


def _is_array(row: Any) -> bool:
    """A tensor, a NumPy array or the like, of one dimension at least; no series of pandas, which
    has dimensions too, but is read by its labels."""
    if not (isinstance(row, Tensor) or hasattr(row, "__array_interface__")):
        return False
    return row.ndim > 0


def _tensor(array: Any) -> Tensor:
    """Of the same memory, where it may be written to: PyTorch knows no other."""
    flags = getattr(array, "flags", None)
    return torch.as_tensor(array if flags is None or flags.writeable else array.copy())


def _is_text(row: Any) -> bool:
    return isinstance(row, str | bytes)


def _of_lists(rows: list[Any], dtype: torch.dtype | None) -> Tensor:
    try:
        return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        for index, row in enumerate(rows):
            for place, number in enumerate(row):
                if number is None:
                    raise ValueError(f"row {index} has a null at {place}") from error
        raise TypeError(f"rows must hold numbers of one shape: {error}") from error


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ImportError(f"to_list_column needs pyarrow: pip install pyarrow ({error})") from error
