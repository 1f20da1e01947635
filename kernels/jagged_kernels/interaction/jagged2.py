"""`Jagged2Tensor`: a square matrix for each user, stored one after another without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.jagged_tensor import JaggedTensor


class Jagged2Tensor:
    """A batch of B square matrices: user b with n_b tokens has [n_b, n_b], row by row.

    Args:
        values: [sum of n_b ** 2].
        offsets: [B + 1], int32 or int64, of the tokens.
        matrix_offsets: [B + 1] int64; where each user's matrix begins, and the end.

    Operations on one batch should share one layout (`jagged2_like`): how many scores there are
    depends on the offsets' contents, so making one waits for the device.
    """

    __slots__ = ("matrix_offsets", "offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> None:
        if values.dim() != 1:
            raise ValueError(f"values must be [sum of n ** 2], got {tuple(values.shape)}")
        if matrix_offsets.shape != offsets.shape or matrix_offsets.dtype != torch.int64:
            raise ValueError(
                f"matrix_offsets must be int64 of the shape of offsets {tuple(offsets.shape)}, "
                f"got {matrix_offsets.dtype} {tuple(matrix_offsets.shape)}"
            )
        if not values.device == offsets.device == matrix_offsets.device:
            raise ValueError(
                "values, offsets and matrix_offsets must be on one device, got "
                f"{values.device}, {offsets.device}, {matrix_offsets.device}"
            )
        self.values = values
        # Kernels read offsets one after another.
        self.offsets = offsets.contiguous()
        self.matrix_offsets = matrix_offsets.contiguous()

    def with_values(self, values: Tensor) -> Jagged2Tensor:
        """The same layout around other values [sum of n_b ** 2]."""
        if values.shape != self.values.shape:
            raise ValueError(
                f"values must be {tuple(self.values.shape)}, got {tuple(values.shape)}"
            )
        return Jagged2Tensor(values, self.offsets, self.matrix_offsets)

    @property
    def lengths(self) -> Tensor:
        """[B], tokens of each user."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def __repr__(self) -> str:
        return (
            f"Jagged2Tensor(users={len(self)}, values={list(self.values.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )


def jagged2_offsets(offsets: Tensor) -> Tensor:
    """[B + 1] int64: where the [n_b, n_b] matrix of each user begins. Does not wait."""
    squares = offsets.diff().long().square()
    return torch.nn.functional.pad(squares.cumsum(0), (1, 0))


def jagged2_like(x: JaggedTensor, total: int | None = None) -> Jagged2Tensor:
    """Zeros [n_b, n_b] for each user of `x`, in its dtype.

    Args:
        total: the sum of n_b ** 2, where the caller knows it; else this waits for the device.
    """
    matrix_offsets = jagged2_offsets(x.offsets)
    total = int(matrix_offsets[-1]) if total is None else total
    return Jagged2Tensor(x.values.new_zeros(total), x.offsets, matrix_offsets)
