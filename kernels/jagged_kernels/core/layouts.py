"""Which memory layouts kernels read in place.

Kernels are compiled for the strides of what they read: constants cost neither registers nor
multiplications. So a stride must follow from the model and not from the batch, or every batch
compiles kernels again. Where it may not, one pass over memory makes a contiguous copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A row may be a part of one so many times as wide: packed QKV, also with many heads of queries to
# one of keys. In a tensor of padded users, of which a token each is taken, rows lie as far apart as
# users are long; this bounds how many such lengths are compiled for.
WIDEST_PITCH = 16
# Numbers from a row to the next, at most: a block's addresses must fit 32 bits.
_FARTHEST = 2**22


def read_in_place(x: Tensor) -> bool:
    """Whether kernels read x [T, ..., D] as it is: a token's numbers lie together.

    So do those of packed QKV, of slices of heads or columns, and what is the same for all heads or
    all tokens. Heads first in memory ([H, T, D]) they do not: a head's stride is the batch's T.
    """
    tokens = x.shape[0]
    if tokens > 1 and x.is_contiguous():
        return True
    (_, *shape), (pitch, *strides) = x.shape, x.stride()
    width = math.prod(shape)
    if tokens <= 1:  # the stride of one token may be any
        return pitch == width and x.is_contiguous()
    length = 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
    fits = length <= max(pitch, width) and pitch <= min(WIDEST_PITCH * width, _FARTHEST)
    return strides[-1] == 1 and fits


def rows_of_dims(x: Tensor) -> Tensor:
    """x [T, ..., D], or a contiguous copy where kernels do not read it in place."""
    return x if read_in_place(x) else x.clone(memory_format=torch.contiguous_format)


def empty_as(x: Tensor) -> Tensor:
    """Uninitialised, contiguous, of the shape, dtype and device of x."""
    # In half the time of `empty`; of what is not contiguous it would keep the strides.
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
