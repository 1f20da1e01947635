"""Checks that the products share: what can be said of arguments before a launch."""

from __future__ import annotations

from torch import Tensor

from jagged_kernels.core.contents import known_to_differ
from jagged_kernels.tensors.checks import check_floats, check_like
from jagged_kernels.tensors.jagged import JaggedTensor


def check_matrix(name: str, x: JaggedTensor) -> None:
    """A floating `JaggedTensor` [T, D] with D of 1 or more."""
    check_floats(name, x)
    if x.values.dim() != 2 or x.values.shape[1] == 0:
        raise ValueError(f"{name} must be [T, D] with D >= 1, got {tuple(x.values.shape)}")


def check_operand(
    name: str, operand: Tensor, shape: tuple[int, ...], meaning: str, x: Tensor, *, of: str = "x"
) -> None:
    """A dense tensor of this shape, of the dtype and on the device of `x`, the argument `of`."""
    check_like(name, operand, x, of=of)
    if tuple(operand.shape) != shape:
        raise ValueError(f"{name} must be {meaning} = {shape}, got {tuple(operand.shape)}")


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
