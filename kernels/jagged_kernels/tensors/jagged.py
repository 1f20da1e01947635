"""`JaggedTensor`: rows of different lengths, stored one after another without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.contents import can_be_read, check_token_count
from jagged_kernels.tensors.offsets import _check_contents, _check_form


class JaggedTensor:
    """A batch of B variable-length sequences: `values[offsets[b]:offsets[b + 1]]` is sequence b.

    Args:
        values: [T, ...], the tokens of all users one after another.
        offsets: [B + 1], int32 or int64, on the device of `values`; `offsets[0] == 0`,
            non-decreasing, `offsets[B] == T`. An empty user repeats its offset. A view with other
            strides is copied: kernels read offsets one after another.
        validate: look at the contents of `offsets`. This waits for the device, so pass `False`
            for offsets that are known to be good in a loop that must not synchronise. Contents
            are never read while a CUDA graph is captured or `torch.compile` traces.

    Raises:
        TypeError: `values` or `offsets` is not a tensor, or `offsets` has another dtype.
        ValueError: shapes, devices or contents do not fit; the message has the numbers.

    The layout is the one of `torch.nested` (`layout=torch.jagged`) and of FBGEMM's jagged tensors.
    `with_values` keeps the offsets, and whatever was derived from them, for the next layer.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor, *, validate: bool = True) -> None:
        _check_form(values, offsets)
        if offsets.dtype == torch.int32:
            check_token_count(values.shape[0], offsets.dtype)
        if validate and can_be_read(offsets):
            _check_contents(offsets, values.shape[0])
        self.values = values
        self.offsets = offsets.contiguous()

    @classmethod
    def _trusted(cls, values: Tensor, offsets: Tensor) -> JaggedTensor:
        """Without checks, for offsets that come from a `JaggedTensor` or were just computed, and
        so are contiguous."""
        self = cls.__new__(cls)
        self.values = values
        self.offsets = offsets
        return self

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor]) -> JaggedTensor:
        """From B tensors [n_b, ...] that agree in all but their first dimension.

        >>> JaggedTensor.from_list([torch.ones(2), torch.zeros(0), torch.ones(1)]).offsets.tolist()
        [0, 2, 2, 3]
        """
        if not tensors:
            raise ValueError("from_list needs at least one tensor, to know the shape of a token")
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            if tensor.dim() == 0 or tensor.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"tensor {index} has shape {tuple(tensor.shape)}; all must be [n, "
                    f"{', '.join(map(str, first.shape[1:]))}] like tensor 0 {tuple(first.shape)}"
                )
        lengths = torch.tensor([0] + [t.shape[0] for t in tensors], dtype=torch.int64)
        return cls._trusted(torch.cat(list(tensors)), lengths.cumsum(0).to(first.device))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> JaggedTensor:
        """From [B, L, ...] and [B] lengths, keeping the first `lengths[b]` positions of user b.

        Waits for the device: the number of tokens decides a shape. Lengths may be on another one.
        """
        from jagged_kernels.ops.layout.padded import check_padded, from_padded

        if isinstance(padded, Tensor) and isinstance(lengths, Tensor):
            lengths = lengths.to(padded.device)
        check_padded(padded, lengths)
        # Stricter than the function, for which longer users are ones that lost tokens.
        if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > padded.shape[1]):
            raise ValueError(
                f"lengths must lie in [0, {padded.shape[1]}], the padded length; "
                f"got {int(lengths.min())} to {int(lengths.max())}"
            )
        return from_padded(padded, lengths)

    @classmethod
    def from_nested(cls, nested: Tensor, *, validate: bool = True) -> JaggedTensor:
        """From a `torch.nested` tensor of jagged layout, without a copy; `validate` as in the
        constructor."""
        if nested.layout != torch.jagged:
            raise ValueError(f"nested must have the jagged layout, got {nested.layout}")
        parts: Any = nested
        if parts._ragged_idx != 1:
            raise ValueError(
                "nested must be [B, n_b, ...], ragged in dimension 1, but it is in dimension "
                f"{parts._ragged_idx} (a transposed view); transpose it back first"
            )
        if parts.lengths() is not None:
            raise ValueError("nested has holes (it is a narrowed view); call .contiguous() first")
        return cls(parts.values(), parts.offsets(), validate=validate)

    def to_nested(self) -> Tensor:
        """As a `torch.nested` tensor of jagged layout, without a copy."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def to_padded(self, max_len: int | None = None, value: float = 0.0) -> Tensor:
        """As [B, max_len, ...], `value` behind each user's tokens.

        Users longer than `max_len` are truncated to their first `max_len` tokens. Without
        `max_len` the longest user decides, which waits for the device.
        """
        from jagged_kernels.ops.layout.padded import to_padded

        if max_len is None:
            max_len = int(self.lengths.max()) if len(self) else 0
        return to_padded(self, max_len, value=value)

    @property
    def lengths(self) -> Tensor:
        """[B], tokens of each user, in the dtype of the offsets."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def with_values(self, values: Tensor) -> JaggedTensor:
        """The same users with other values [T, ...]."""
        if values.shape[:1] != self.values.shape[:1] or values.device != self.offsets.device:
            raise ValueError(
                f"values must be [{self.values.shape[0]}, ...] on {self.offsets.device}, "
                f"got {tuple(values.shape)} on {values.device}"
            )
        return JaggedTensor._trusted(values, self.offsets)

    def to(self, *args: Any, **kwargs: Any) -> JaggedTensor:
        """Like `Tensor.to`; the offsets follow to another device and keep their dtype."""
        values = self.values.to(*args, **kwargs)
        non_blocking = bool(kwargs.get("non_blocking", False))
        offsets = self.offsets.to(values.device, non_blocking=non_blocking)
        return JaggedTensor._trusted(values, offsets)

    def unbind(self) -> list[Tensor]:
        """The B sequences as views. Waits for the device."""
        bounds = self.offsets.tolist()
        return [self.values[start:end] for start, end in pairwise(bounds)]

    def __repr__(self) -> str:
        return (
            f"JaggedTensor(users={len(self)}, values={list(self.values.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )
