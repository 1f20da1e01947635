"""`Jagged2Tensor`: a square matrix for each user, stored one after another without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_kernels.core.contents import readable, total_of
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.container import Container, register_container
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import check_contents, check_form


@register_container
@dataclass(slots=True, init=False, repr=False, eq=False)
class Jagged2Tensor(Container):
    """A batch of B square matrices: user b with n_b tokens has [n_b, n_b], row by row.

    Args:
        values: [sum of n_b ** 2].
        offsets: [B + 1], int32 or int64, of the tokens.
        matrix_offsets: [B + 1] int64; where each user's matrix begins, and the end, as
            `jagged2_offsets` gives it.

    Raises:
        TypeError: an argument is not a tensor, or offsets have another dtype.
        ValueError: shapes, devices or (where they are on a CPU) contents do not fit.

    Operations on one batch should share one layout (`jagged2_like`): how many scores there are
    depends on the offsets' contents, so making one waits for the device. `lengths`,
    moving, saving and flattening are as of a `JaggedTensor`.

    >>> m = Jagged2Tensor(torch.arange(5), torch.tensor([0, 2, 3]), torch.tensor([0, 4, 5]))
    >>> m
    Jagged2Tensor(users=2, values=[5], dtype=torch.int64, device=cpu)
    >>> jagged2_to_padded(m, 2).tolist()
    [[[0, 1], [2, 3]], [[4, 0], [0, 0]]]
    """

    values: Tensor
    offsets: Tensor
    matrix_offsets: Tensor

    def __init__(self, values: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> None:
        check_form(values, offsets)
        if values.dim() != 1:
            raise ValueError(f"values must be [sum of n ** 2], got {tuple(values.shape)}")
        if not isinstance(matrix_offsets, Tensor) or matrix_offsets.dtype != torch.int64:
            got = getattr(matrix_offsets, "dtype", type(matrix_offsets).__name__)
            raise TypeError(f"matrix_offsets must be an int64 tensor, got {got}")
        if matrix_offsets.shape != offsets.shape or matrix_offsets.device != offsets.device:
            raise ValueError(
                f"matrix_offsets must be {tuple(offsets.shape)} on {offsets.device} like offsets, "
                f"got {tuple(matrix_offsets.shape)} on {matrix_offsets.device}"
            )
        if readable(offsets) and readable(matrix_offsets):
            _check_matrices(values.shape[0], offsets, matrix_offsets)
        self.values = values
        # Kernels read offsets one after another.
        self.offsets = offsets.contiguous()
        self.matrix_offsets = matrix_offsets.contiguous()

    @classmethod
    def _trusted(cls, values: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> Jagged2Tensor:
        """Without checks, for a layout that comes from a `Jagged2Tensor` or was just computed."""
        self = cls.__new__(cls)
        self.values = values
        self.offsets = offsets
        self.matrix_offsets = matrix_offsets
        return self

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.offsets, self.matrix_offsets

    def with_values(self, values: Tensor) -> Jagged2Tensor:
        """The same layout around other values [sum of n_b ** 2]."""
        if not isinstance(values, Tensor):
            raise not_a_tensor("values", values)
        if values.shape != self.values.shape or values.device != self.offsets.device:
            raise ValueError(
                f"values must be {tuple(self.values.shape)} on {self.offsets.device}, "
                f"got {tuple(values.shape)} on {values.device}"
            )
        return Jagged2Tensor._trusted(values, self.offsets, self.matrix_offsets)

    @property
    def shape(self) -> tuple[int, None, None]:
        """(B, None, None): the users, None for their lengths, which differ."""
        return len(self), None, None


def jagged2_offsets(offsets: Tensor) -> Tensor:
    """[B + 1] int64: where the [n_b, n_b] matrix of each user begins. Does not wait."""
    squares = offsets.diff().long().square()
    return torch.nn.functional.pad(squares.cumsum(0), (1, 0))


def _check_matrices(scores: int, offsets: Tensor, matrix_offsets: Tensor) -> None:
    """Reads both offsets."""
    check_contents(offsets)
    expected = jagged2_offsets(offsets)
    if not torch.equal(matrix_offsets, expected):
        user = int((matrix_offsets != expected).int().argmax())
        raise ValueError(
            "matrix_offsets must be jagged2_offsets(offsets), got "
            f"matrix_offsets[{user}] = {int(matrix_offsets[user])} for {int(expected[user])}"
        )
    if int(expected[-1]) != scores:
        raise ValueError(
            f"values must be [sum of n ** 2] = [{int(expected[-1])}] for these offsets, "
            f"got [{scores}]"
        )


@takes_nested
def jagged2_like(x: JaggedTensor, total: int | None = None) -> Jagged2Tensor:
    """Zeros [n_b, n_b] for each user of `x`, in its dtype.

    Args:
        total: the sum of n_b ** 2, where the caller knows it; else this waits for the device. A
            wrong one raises on a CPU and is not noticed on CUDA.

    Raises:
        TypeError, ValueError: `x` is not a `JaggedTensor`, or `total` is wrong.

    >>> jagged2_like(JaggedTensor(torch.ones(3), torch.tensor([0, 2, 3])))
    Jagged2Tensor(users=2, values=[5], dtype=torch.float32, device=cpu)
    """
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    matrix_offsets = jagged2_offsets(x.offsets)
    total = total_of(matrix_offsets, total, "scores", "the total of a layout")
    return Jagged2Tensor._trusted(x.values.new_zeros(total), x.offsets, matrix_offsets)
