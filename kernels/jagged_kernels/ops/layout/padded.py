"""`to_padded`, `from_padded`: between jagged and dense [B, L, ...], cut at either end."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import readable, total_of
from jagged_kernels.core.operators import call
from jagged_kernels.core.sizes import as_int
from jagged_kernels.ops.layout.copies import place_rows
from jagged_kernels.ops.users import token_positions, zeros_of
from jagged_kernels.tensors.checks import as_fill
from jagged_kernels.tensors.jagged import JaggedTensor, called_by_methods
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import check_contents, lengths_to_offsets

Side = Literal["right", "left"]


@called_by_methods
@takes_nested
def to_padded(
    x: JaggedTensor,
    max_len: int,
    *,
    value: float = 0.0,
    truncate: Side = "right",
    pad: Side = "right",
    backend: Backend = "auto",
) -> Tensor:
    """As dense [B, max_len, ...], filled up with `value`. Does not wait.

    Args:
        x: [T, ...], any real dtype but float8 and unsigned integers of more than 8 bits.
        truncate: the end at which users with more than `max_len` tokens lose the rest: "right"
            keeps their first tokens, "left" their most recent.
        pad: the end at which shorter users are filled up.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Raises:
        TypeError, ValueError: arguments of wrong kind or value, or a complex dtype.
        NotImplementedError: float64 on the triton backend.

    >>> x = JaggedTensor(torch.arange(6), torch.tensor([0, 4, 4, 6]))
    >>> to_padded(x, 3, value=-1, truncate="left").tolist()
    [[1, 2, 3], [-1, -1, -1], [4, 5, -1]]
    """
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    _check_sides(truncate, pad)
    max_len = as_int("max_len", max_len)
    if max_len < 0:
        raise ValueError(f"max_len must be at least 0, got {max_len}")
    value = as_fill(value, x.dtype)
    chosen = choose_backend(backend, x.values)
    ends = (truncate == "left", pad == "left")
    if chosen == "reference":
        return _to_padded_reference(x, max_len, value, *ends)
    if chosen == "native":
        return _to_padded_native(x, max_len, value, *ends)
    rows = call(
        place_rows,
        x.values,
        x.offsets,
        None,
        None,
        1,
        len(x),
        len(x) * max_len,
        0,
        max_len,
        *ends,
        value,
    )
    return rows.unflatten(0, (len(x), max_len))


@called_by_methods
def from_padded(
    padded: Tensor,
    lengths: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    total: int | None = None,
    value: float = 0.0,
    truncate: Side = "right",
    pad: Side = "right",
    backend: Backend = "auto",
) -> JaggedTensor:
    """The users of a dense [B, L, ...] without its padding: the reverse of `to_padded`.

    Args:
        padded: [B, L, ...], of the dtypes of `to_padded`.
        lengths: [B] int32 or int64, tokens of each user. Or `offsets` [B + 1] in place of it, as
            in `JaggedTensor`. Contents that cannot be raise on a CPU only.
        total: tokens of the result, where the caller knows it. Without it this waits for the
            device, in a compiled graph too; a wrong one raises on a CPU and is not noticed on
            CUDA.
        value: of the tokens that `padded` does not have: a user of more than L tokens keeps its
            length, and those that `to_padded` has truncated at that end are `value`.
        truncate, pad: what `padded` was made with.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape, dtype, device or contents.
        NotImplementedError: float64 on the triton backend.

    >>> padded = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 5, 0]])
    >>> from_padded(padded, torch.tensor([4, 0, 2]), truncate="left").values.tolist()
    [0, 1, 2, 3, 4, 5]
    """
    if (lengths is None) == (offsets is None):
        raise TypeError("from_padded takes either lengths or offsets")
    _check_sides(truncate, pad)
    if offsets is None:
        assert lengths is not None
        check_padded(padded, lengths)
        offsets = lengths_to_offsets(lengths)
    else:
        check_padded(padded, offsets, "offsets", more=1)
        if readable(offsets):
            check_contents(offsets)
        offsets = offsets.contiguous()
    value = as_fill(value, padded.dtype)
    chosen = choose_backend(backend, padded)
    tokens = total_of(offsets, total)
    ends = (truncate == "left", pad == "left")
    users, max_len = padded.shape[:2]
    if chosen == "reference":
        values = _from_padded_reference(padded, offsets, value, *ends)
    elif chosen == "native":
        values = _from_padded_native(padded, offsets, tokens, value, *ends)
    else:
        # The end that lost tokens is now that of the output, and the other way round.
        values = call(place_rows,
            padded.flatten(0, 1), None, offsets, None, 1, users, tokens, max_len, 0,
            ends[1], ends[0], value,
        )  # fmt: skip
    return JaggedTensor._trusted(values, offsets)


def check_padded(padded: Tensor, lengths: Tensor, name: str = "lengths", *, more: int = 0) -> None:
    """A tensor [B, L, ...] and the argument `name` [B + more], but for its contents."""
    if not isinstance(padded, Tensor) or not isinstance(lengths, Tensor):
        kinds = f"{type(padded).__name__} and {type(lengths).__name__}"
        raise TypeError(f"padded and {name} must be tensors, got {kinds}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    if padded.dim() < 2 or lengths.shape != (padded.shape[0] + more,):
        form = f"[B + {more}]" if more else "[B]"
        raise ValueError(
            f"padded must be [B, L, ...] and {name} {form}, got {tuple(padded.shape)} "
            f"and {tuple(lengths.shape)}"
        )
    if padded.device != lengths.device:
        raise ValueError(
            f"padded and {name} must be on one device, got {padded.device} and {lengths.device}"
        )


def _check_sides(truncate: str, pad: str) -> None:
    if not {truncate, pad} <= {"left", "right"}:
        raise ValueError(
            f"truncate and pad must be 'left' or 'right', got {truncate!r} and {pad!r}"
        )


def _overlap(length: int, max_len: int, cut_left: bool, pad_left: bool) -> tuple[slice, slice]:
    """Which of a user's tokens are in which of its dense places."""
    kept = min(length, max_len)
    token = length - kept if cut_left else 0
    place = max_len - kept if pad_left else 0
    return slice(token, token + kept), slice(place, place + kept)


def _to_padded_reference(
    x: JaggedTensor, max_len: int, value: float, cut_left: bool, pad_left: bool
) -> Tensor:
    rows = [zeros_of((0, max_len, *x.values.shape[1:]), x.values[:0])]
    for part in x.unbind():
        tokens, places = _overlap(part.shape[0], max_len, cut_left, pad_left)
        row = part.new_full((max_len, *part.shape[1:]), value)
        row[places] = part[tokens]
        rows.append(row[None])
    return torch.cat(rows)


def _from_padded_reference(
    padded: Tensor, offsets: Tensor, value: float, cut_left: bool, pad_left: bool
) -> Tensor:
    parts = [padded[:0].flatten(0, 1)]
    for user, length in enumerate(offsets.diff().tolist()):
        tokens, places = _overlap(length, padded.shape[1], cut_left, pad_left)
        part = padded.new_full((length, *padded.shape[2:]), value)
        part[tokens] = padded[user, places]
        parts.append(part)
    return torch.cat(parts)


def _to_padded_native(
    x: JaggedTensor, max_len: int, value: float, cut_left: bool, pad_left: bool
) -> Tensor:
    lengths = x.lengths[:, None]
    token = torch.arange(max_len, device=x.device).expand(len(x), max_len)
    if cut_left:
        token = token + (lengths - max_len).clamp(min=0)
    if pad_left:
        token = token - (max_len - lengths).clamp(min=0)
    exists = (token >= 0) & (token < lengths)
    source = torch.where(exists, x.offsets[:-1, None] + token, x.values.shape[0])
    return _take(x.values, source, value)


def _from_padded_native(
    padded: Tensor, offsets: Tensor, tokens: int, value: float, cut_left: bool, pad_left: bool
) -> Tensor:
    max_len = padded.shape[1]
    user, place = token_positions(offsets, tokens)
    length = offsets.diff()[user]
    if cut_left:
        place = place - (length - max_len).clamp(min=0)
    if pad_left:
        place = place + (max_len - length).clamp(min=0)
    exists = (place >= 0) & (place < max_len)
    rows = padded.flatten(0, 1)
    return _take(rows, torch.where(exists, user * max_len + place, rows.shape[0]), value)


def _take(values: Tensor, source: Tensor, value: float) -> Tensor:
    """Rows `source` of values [T, ...]; row T is `value`."""
    values = torch.cat([values, values.new_full((1, *values.shape[1:]), value)])
    return values.index_select(0, source.flatten()).unflatten(0, source.shape)
