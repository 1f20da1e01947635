"""What `JaggedTensor` and `Jagged2Tensor` have in common: values over offsets that move with them.

PyTorch looks into a container in two ways: DistributedDataParallel finds the tensors of a
dataclass; what flattens (`torch.export`, `tree_map`, and again DistributedDataParallel) asks the
registry of `torch.utils._pytree`. These containers are both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from jagged_kernels.tensors.moving import move_offsets, pin_offsets

C = TypeVar("C", bound="Container")


class Container:
    """Values, and one or more offsets [B + 1] on their device; dataclasses of these parts.

    Equality and hashes are those of objects: two containers are equal if they are one.
    """

    __slots__ = ()

    values: Tensor
    offsets: Tensor
    # A container of these parts without checks: `tree_map` may put there what is no tensor.
    _trusted: ClassVar[Callable[..., Any]]

    def _parts(self) -> tuple[Tensor, ...]:
        """The values, then all offsets: the fields, in their order."""
        raise NotImplementedError

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

    def __repr__(self) -> str:
        if not all(isinstance(part, Tensor) for part in self._parts()):
            return f"{type(self).__name__}{self._parts()}"
        return (
            f"{type(self).__name__}(users={len(self)}, values={list(self.values.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Like `Tensor.to`; the offsets follow to another device and keep their dtype.

        Those that share one offsets object go on sharing one there (`moving.move_offsets`).
        """
        given = next((a for a in args if isinstance(a, bool)), False)
        non_blocking = kwargs.get("non_blocking", given)
        return self._follow(self.values.to(*args, **kwargs), non_blocking)

    def cpu(self) -> Self:
        """Like `Tensor.cpu`; the offsets as in `to`."""
        return self._follow(self.values.cpu())

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Self:
        """Like `Tensor.cuda`; the offsets as in `to`."""
        return self._follow(self.values.cuda(device, non_blocking), non_blocking)

    def pin_memory(self) -> Self:
        """Like `Tensor.pin_memory`, of values and offsets; for `to(device, non_blocking=True)`."""
        values, *offsets = self._parts()
        return self._trusted(values.pin_memory(), *map(pin_offsets, offsets))

    def detach(self) -> Self:
        """The same users with `values.detach()`."""
        return self._trusted(self.values.detach(), *self._parts()[1:])

    def _follow(self, values: Tensor, non_blocking: bool = False) -> Self:
        """The offsets where the values are now."""
        device = values.device
        _, *offsets = self._parts()
        return self._trusted(
            values, *[move_offsets(o, device, non_blocking=non_blocking) for o in offsets]
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return rebuilt, (type(self).__name__, *self._parts())


_registered: dict[str, Callable[..., Any]] = {}


def register_container(cls: type[C]) -> type[C]:
    """Makes a dataclass of parts a pytree of them, and one that can be saved."""
    _registered[cls.__name__] = cls
    keys = [GetAttrKey(name) for name in cls.__dataclass_fields__]  # pyright: ignore[reportAttributeAccessIssue]

    def flatten(x: C) -> tuple[list[Any], None]:
        return list(x._parts()), None

    def flatten_with_keys(x: C) -> tuple[list[tuple[Any, Any]], None]:
        return list(zip(keys, x._parts(), strict=True)), None

    def unflatten(parts: Iterable[Any], context: None) -> C:
        return cls._trusted(*parts)

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"jagged_kernels.{cls.__name__}",
        to_dumpable_context=_same,
        from_dumpable_context=_same,
    )
    return cls


def _same(context: None) -> None:
    return context


def rebuilt(name: str, *parts: Tensor) -> Container:
    """What pickles call. By the constructor: kernels read where offsets say, and these may be from
    anybody's file."""
    return _registered[name](*parts)


# Pickles look for it in the package, wherever this file is, and `torch.load` trusts it.
rebuilt.__module__ = "jagged_kernels"
torch.serialization.add_safe_globals([rebuilt])
