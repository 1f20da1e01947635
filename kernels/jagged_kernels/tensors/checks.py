"""What the operations on [T, ...] values ask of their arguments, and the form they compute in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from jagged_kernels.core.contents import known_to_differ
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.jagged2 import Jagged2Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floats(name: str, x: JaggedTensor) -> None:
    """A `JaggedTensor` of a floating dtype, or a TypeError."""
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"{name} must be a JaggedTensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be of a floating dtype, got {x.dtype}")


def as_scale(scale: float | None, head_dim: int) -> float:
    """Of attention's scores, 1 / sqrt(head_dim) for None; a TypeError for what is no number, as for
    tensors: reading one waits."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale must be a number, got a tensor, which would get no gradient: multiply q by it, "
            "with scale=1.0"
        )
    if not hasattr(scale, "__float__"):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    return float(scale)


def check_dropout(name: str, chance: float) -> None:
    """A chance to drop a probability, or a TypeError or ValueError."""
    # The first, since `torch.compile` cannot look for an attribute of a number that it traces.
    if not isinstance(chance, int | float) and not hasattr(chance, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(chance).__name__}")
    if not 0.0 <= chance < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {chance}")


def as_fill(value: float, dtype: torch.dtype) -> float:
    """`value` as it fills up a tensor of this dtype.

    Raises:
        TypeError: a complex dtype.
        ValueError: an integer that the dtype (or a float, on its way to the kernel) cannot hold.
    """
    if dtype.is_complex:
        raise TypeError(f"tensors must be real, got {dtype}; use torch.view_as_real")
    if dtype == torch.bool:
        return float(bool(value))
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        if not limits.min <= value <= limits.max or float(value) != value:
            raise ValueError(f"value must be a number that {dtype} and a float hold, got {value}")
    return float(value)


def check_like(
    name: str, tensor: Tensor, x: Tensor, *, of: str = "x", or_float32: bool = False
) -> None:
    """`tensor` goes with the values `x` of the argument `of`: dtype (or float32) and device."""
    if not isinstance(tensor, Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.dtype != x.dtype and not (or_float32 and tensor.dtype == torch.float32):
        raise TypeError(f"{name} must have the dtype of {of}, {x.dtype}, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like {of}, got {tensor.device}")


def check_same_offsets(name: str, offsets: Tensor, others: Tensor, *, of: str = "x") -> None:
    """`others` of the argument `name` are `offsets` of the argument `of`; contents are compared
    only where that does not wait for a device."""
    if offsets.shape != others.shape:
        users, got = offsets.shape[0] - 1, others.shape[0] - 1
        raise ValueError(f"{name} must have the users of {of}, {users}, got {got}")
    if known_to_differ(offsets, others):
        raise ValueError(f"{name} must have the offsets of {of}")


def as_columns(values: Tensor) -> Tensor:
    """[T, ...] -> [T, C]; a view where the strides allow one."""
    return values[:, None] if values.dim() == 1 else values.flatten(1)


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x.reshape(shape)`; no view, and no step of autograd, where that is its shape."""
    return x if x.shape == tuple(shape) else x.reshape(shape)


def user_bounds(offsets: Tensor) -> list[tuple[int, int]]:
    """(first token, end) of each user. Waits for the device: for references."""
    bounds = offsets.tolist()
    return list(pairwise(bounds))


def check_layout(name: str, layout: Jagged2Tensor, x: JaggedTensor) -> None:
    """A `Jagged2Tensor` over the offsets of `x`: contents as in `check_same_offsets`."""
    if not isinstance(layout, Jagged2Tensor):
        raise TypeError(f"{name} must be a Jagged2Tensor, got {type(layout).__name__}")
    if layout.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like x, got {layout.device}")
    check_same_offsets(name, x.offsets, layout.offsets)


def check_squares(name: str, m: Jagged2Tensor) -> None:
    """A `Jagged2Tensor` of a floating dtype, or a TypeError."""
    if not isinstance(m, Jagged2Tensor):
        raise TypeError(f"{name} must be a Jagged2Tensor, got {type(m).__name__}")
    if m.dtype not in FLOATS:
        raise TypeError(f"{name} must be of a floating dtype, got {m.dtype}")
