"""Checks that the products share: what can be said of arguments before a launch."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.contents import known_to_differ
from jagged_kernels.jagged_tensor import JaggedTensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_matrix(name: str, x: JaggedTensor) -> None:
    """A floating `JaggedTensor` [T, D] with D of 1 or more."""
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"{name} must be a JaggedTensor, got {type(x).__name__}")
    if x.values.dim() != 2 or x.values.shape[1] == 0:
        raise ValueError(f"{name} must be [T, D] with D >= 1, got {tuple(x.values.shape)}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must be of a floating dtype, got {x.dtype}")


def check_operand(
    name: str, operand: Tensor | None, shape: tuple[int, ...], meaning: str, x: Tensor
) -> None:
    """A dense tensor of this shape, of the dtype and on the device of `x`; None is fine."""
    if operand is None:
        return
    if not isinstance(operand, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(operand).__name__}")
    if tuple(operand.shape) != shape:
        raise ValueError(f"{name} must be {meaning} = {shape}, got {tuple(operand.shape)}")
    check_like(name, operand, x)


def check_like(name: str, operand: Tensor, x: Tensor) -> None:
    """Of the dtype and on the device of `x`."""
    if operand.dtype != x.dtype:
        raise TypeError(f"{name} must have the jagged dtype {x.dtype}, got {operand.dtype}")
    if operand.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {operand.device}")


def check_pair(x: JaggedTensor, y: JaggedTensor) -> None:
    """Two [T, ...] of the same users."""
    check_matrix("x", x)
    check_matrix("y", y)
    if len(x) != len(y) or x.values.shape[0] != y.values.shape[0]:
        raise ValueError(
            f"x and y must have the same users and tokens, got {len(x)} and {len(y)} users, "
            f"{tuple(x.values.shape)} and {tuple(y.values.shape)}"
        )
    check_like("y", y.values, x.values)
    # Contents are not compared where that would wait for the device.
    if known_to_differ(x.offsets, y.offsets):
        raise ValueError("x and y must have the same offsets")
