"""`JaggedTensor`: rows of different lengths, stored one after another without padding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from jagged_kernels.core.contents import can_be_read, check_token_count, readable, refuse_meta
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.container import Container, register_container
from jagged_kernels.tensors.offsets import (
    check_contents,
    check_form,
    lengths_to_offsets,
)

F = TypeVar("F", bound=Callable[..., Any])
# What methods call: operations in files that need this one.
_OPERATIONS: dict[str, Callable[..., Any]] = {}


def called_by_methods(operation: F) -> F:
    """An operation, by its name, to methods of `JaggedTensor`."""
    _OPERATIONS[operation.__name__] = operation
    return operation


@register_container
@dataclass(slots=True, init=False, repr=False, eq=False)
class JaggedTensor(Container):
    """A batch of B variable-length sequences: `values[offsets[b]:offsets[b + 1]]` is sequence b.

    Args:
        values: [T, ...], the tokens of all users one after another.
        offsets: [B + 1], int32 or int64, on the device of `values`; `offsets[0] == 0`,
            non-decreasing, `offsets[B] == T`. An empty user repeats its offset. A view with other
            strides is copied: kernels read offsets one after another.
        validate: look at the contents of `offsets`. This waits for the device, so pass `False`
            for offsets that are known to be good in a loop that must not synchronise. Contents
            are never read while a CUDA graph is captured or `torch.compile` traces, and there are
            none on "meta".

    Raises:
        TypeError: `values` or `offsets` is not a tensor, or `offsets` has another dtype.
        ValueError: shapes, devices or contents do not fit; the message has the numbers.

    The layout is the one of `torch.nested` (`layout=torch.jagged`) and of FBGEMM's jagged tensors.
    `with_values` keeps the offsets, and whatever was derived from them, for the next layer.

    `len(x)`, `x[user]` and `for tokens in x` go by user; `lengths` [B] are tokens of each user.
    Equality and hashes are by identity. `device`, `dtype`, `to`, `cpu`, `cuda`, `pin_memory` and
    `detach` are as of the values; what shares one offsets object goes on sharing one where it is
    moved. It is a dataclass and a pytree of values and offsets, which `torch.export`, `tree_map`
    and DistributedDataParallel look into; `torch.load` takes it with `weights_only=True`, if this
    package is imported.

    >>> x = JaggedTensor(torch.arange(6), torch.tensor([0, 4, 4, 6]))
    >>> x[0], x[-1], x[1:].lengths
    (tensor([0, 1, 2, 3]), tensor([4, 5]), tensor([0, 2]))
    >>> [tokens.tolist() for tokens in x.with_values(2 * x.values)]
    [[0, 2, 4, 6], [], [8, 10]]
    """

    values: Tensor
    offsets: Tensor

    def __init__(self, values: Tensor, offsets: Tensor, *, validate: bool = True) -> None:
        check_form(values, offsets)
        if offsets.dtype == torch.int32:
            check_token_count(values.shape[0], offsets.dtype)
        if validate and can_be_read(offsets):
            check_contents(offsets, values.shape[0])
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

    def _parts(self) -> tuple[Tensor, Tensor]:
        return self.values, self.offsets

    @classmethod
    def from_lengths(
        cls, values: Tensor, lengths: Tensor, *, validate: bool = True
    ) -> JaggedTensor:
        """From [T, ...] and [B] lengths, integers of any dtype, that add up to T.

        Lengths may be on another device; those on a CPU are checked there, without waiting. The
        offsets are as in `lengths_to_offsets`.

        >>> JaggedTensor.from_lengths(torch.ones(3), torch.tensor([2, 0, 1])).offsets.tolist()
        [0, 2, 2, 3]
        """
        offsets = lengths_to_offsets(lengths)
        if not isinstance(values, Tensor):
            raise not_a_tensor("values", values)
        x = cls(values, offsets.to(values.device), validate=False)
        if validate and can_be_read(offsets):
            check_contents(offsets, values.shape[0])
        return x

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor]) -> JaggedTensor:
        """From B tensors [n_b, ...] that agree in all but their first dimension.

        Those without tokens take the dtype of the others.

        Raises:
            TypeError: something that is no tensor, or tokens of several dtypes.
            ValueError: no tensors, or tokens of several shapes.

        >>> JaggedTensor.from_list([torch.ones(2), torch.zeros(0), torch.ones(1)]).offsets.tolist()
        [0, 2, 2, 3]
        """
        if not isinstance(tensors, Sequence):
            kind = type(tensors).__name__
            raise TypeError(f"from_list takes a list of tensors, one for each user, got {kind}")
        if not tensors:
            raise ValueError("from_list needs at least one tensor, to know the shape of a token")
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise TypeError(f"from_list takes a list of tensors, got {kind} at {index}")
            if first.dim() == 0:
                raise ValueError("tensor 0 must be [n, ...], got one without dimensions")
            if tensor.dim() == 0 or tensor.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"tensor {index} has shape {tuple(tensor.shape)}; all must be [n, "
                    f"{', '.join(map(str, first.shape[1:]))}] like tensor 0 {tuple(first.shape)}"
                )
        lengths = torch.tensor([0] + [t.shape[0] for t in tensors], dtype=torch.int64)
        values = torch.cat(of_one_dtype(tensors, "user"))
        return cls._trusted(values, lengths.cumsum(0).to(first.device))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> JaggedTensor:
        """From [B, L, ...] and [B] lengths, keeping the first `lengths[b]` positions of user b.

        Waits for the device: the number of tokens decides a shape. Lengths may be on another one.
        """
        if isinstance(padded, Tensor) and isinstance(lengths, Tensor):
            lengths = lengths.to(padded.device)
            refuse_meta(lengths, "lengths are read for the number of tokens")
            # Stricter than the function, for which longer users are ones that lost tokens.
            smallest, largest = (int(x) for x in lengths.aminmax()) if lengths.numel() else (0, 0)
            if padded.dim() > 1 and (smallest < 0 or largest > padded.shape[1]):
                raise ValueError(
                    f"lengths must lie in [0, {padded.shape[1]}], the padded length; "
                    f"got {smallest} to {largest}"
                )
        return _OPERATIONS["from_padded"](padded, lengths)

    @classmethod
    def from_nested(cls, nested: Tensor, *, validate: bool = True) -> JaggedTensor:
        """From a `torch.nested` tensor of jagged layout, without a copy; `validate` as in the
        constructor."""
        if not isinstance(nested, Tensor):
            raise TypeError(f"nested must be a torch.nested tensor, got {type(nested).__name__}")
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
        if max_len is None:
            refuse_meta(self.offsets, "without max_len, offsets are read for the longest user")
            # Not `int`: a trace has no number here, and has to be told what it does not see.
            longest: Any = self.lengths.max().item() if len(self) else 0
            torch._check(longest >= 0)
            max_len = longest
        return _OPERATIONS["to_padded"](self, max_len, value=value)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """(B, None, ...): users, None for their lengths, which differ, and the shape of a token."""
        return (len(self), None, *self.values.shape[1:])

    def with_values(self, values: Tensor) -> JaggedTensor:
        """The same users with other values [T, ...]."""
        if not isinstance(values, Tensor):
            raise not_a_tensor("values", values)
        if values.shape[:1] != self.values.shape[:1] or values.device != self.offsets.device:
            raise ValueError(
                f"values must be [{self.values.shape[0]}, ...] on {self.offsets.device}, "
                f"got {tuple(values.shape)} on {values.device}"
            )
        return JaggedTensor._trusted(values, self.offsets)

    def unbind(self) -> list[Tensor]:
        """The B sequences as views. Waits for the device."""
        refuse_meta(self.offsets, "unbind reads offsets")
        bounds = self.offsets.tolist()
        return [self.values[start:end] for start, end in pairwise(bounds)]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    @overload
    def __getitem__(self, users: int) -> Tensor: ...

    @overload
    def __getitem__(self, users: slice | Tensor | Sequence[int]) -> JaggedTensor: ...

    def __getitem__(self, users: int | slice | Tensor | Sequence[int]) -> Tensor | JaggedTensor:
        """Users by index, as of a list. Waits for the device, save for the slice of all users.

        An int (or a tensor without dimensions) gives the tokens [n, ...] of that user, a view; a
        slice the users of it, without a copy of their tokens if its step is 1; a tensor or list
        [N] of indices, or [B] of bools, those users (`jagged_index_select`).

        Raises:
            TypeError, IndexError: another kind of index, or users that are not there; such ones in
                a tensor on CUDA are as in `jagged_index_select`.
        """
        if isinstance(users, slice):
            start, stop, step = users.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            users = range(start, stop, step)
        if isinstance(users, list | range) or getattr(users, "ndim", 0):
            return _OPERATIONS["jagged_index_select"](self, self._indices(users))
        is_bool = isinstance(users, bool) or getattr(users, "dtype", None) == torch.bool
        if is_bool or not hasattr(users, "__index__"):
            raise TypeError(
                "an index must be an int, a slice, or a tensor or list of users, "
                f"got {type(users).__name__}"
            )
        user = operator.index(users)  # pyright: ignore[reportArgumentType]
        if not -len(self) <= user < len(self):
            raise IndexError(f"user {user} is not one of the {len(self)} there are")
        user %= len(self)
        start, end = self.offsets[user : user + 2].tolist()
        return self.values[start:end]

    def _range(self, start: int, stop: int) -> JaggedTensor:
        """Users start ... stop - 1, their tokens not copied."""
        if (start, stop) == (0, len(self)):
            return self.with_values(self.values)
        bounds = self.offsets[start : stop + 1 : max(stop - start, 1)].tolist()
        values = self.values[bounds[0] : bounds[-1]]
        return JaggedTensor._trusted(values, self.offsets[start : stop + 1] - bounds[0])

    def _indices(self, users: Any) -> Tensor:
        """[N] indices from 0 on, for such that may be negative, or for bools [B]."""
        given = torch.as_tensor(users, device=self.device)
        if given.dtype == torch.bool:
            if given.shape != (len(self),):
                raise IndexError(
                    f"bools must be one for each user, [{len(self)}], got {tuple(given.shape)}"
                )
            return given.nonzero()[:, 0]
        if given.numel() == 0:
            given = given.long()  # an empty list has no dtype
        elif readable(given) and not given.is_floating_point():
            smallest, largest = (int(x) for x in given.aminmax())
            if smallest < -len(self) or largest >= len(self):
                raise IndexError(
                    f"users must lie in [{-len(self)}, {len(self)}), got {smallest} to {largest}"
                )
        return torch.where(given < 0, given + len(self), given)


def of_one_dtype(tensors: Sequence[Tensor], what: str) -> list[Tensor]:
    """Tensors [n, ...] to be joined: what has no tokens has no say in the dtype.

    Raises:
        TypeError: others are of several dtypes. `torch.cat` would promote them, and ids that
            become floats lose digits.
    """
    dtype = tensors[0].dtype
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    held = next((i for i, tensor in enumerate(tensors) if tensor.shape[0]), 0)
    dtype = tensors[held].dtype
    for index, tensor in enumerate(tensors):
        if tensor.shape[0] and tensor.dtype != dtype:
            raise TypeError(
                f"tokens must be of one dtype, got {dtype} for {what} {held} and {tensor.dtype} "
                f"for {what} {index}"
            )
    return [tensor.to(dtype) for tensor in tensors]
