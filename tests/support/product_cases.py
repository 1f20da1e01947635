"""The products of a user's tokens as calls, and inputs for them."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels import (
    Jagged2Tensor,
    JaggedTensor,
    jagged2_matmul,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_linear,
    jagged_outer,
    lengths_to_offsets,
    target_interaction,
)
from jagged_kernels.ops.products.jagged_linear import Activation
from jagged_kernels.tensors.jagged2 import jagged2_offsets

LENGTHS = {
    "mixed": (3, 0, 64, 1, 65, 0),
    "whale": (2, 0, 300, 5, 1, 131),
    "one token": (1,),
    "no tokens": (0, 0),
    "no users": (),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    """In half precision first: every precision then gets the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().float()


def _jagged(x: Tensor, offsets: Tensor) -> JaggedTensor:
    """Without a look at the offsets, which would wait for a GPU."""
    return JaggedTensor(x, offsets, validate=False)


def offsets_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype))


def dense_case(
    lengths: tuple[int, ...], dim: int, columns: int, dtype: torch.dtype = torch.int64
) -> dict[str, Tensor]:
    users = len(lengths)
    return {
        "x": random(sum(lengths), dim),
        "dense": random(users, dim, columns, seed=1),
        "bias": random(users, columns, seed=2),
        "offsets": offsets_of(lengths, dtype),
    }


def dense_call(backend, *, x, dense, bias, offsets):
    return jagged_dense_bmm(_jagged(x, offsets), dense, bias=bias, backend=backend)


def pair_call(backend, *, x, y, offsets):
    x = _jagged(x, offsets)
    return jagged_jagged_bmm(x, x.with_values(y), backend=backend)


def linear_case(
    lengths: tuple[int, ...], count: int, groups: list[int], *, dim: int = 12, columns: int = 18
) -> dict[str, Tensor]:
    return {
        "x": random(sum(lengths), dim),
        "weight": random(count, dim, columns, seed=1),
        "bias": random(count, columns, seed=2),
        "groups": torch.tensor(groups, dtype=torch.int64),
        "offsets": offsets_of(lengths),
    }


def linear_call(activation: Activation):
    def call(backend, *, x, weight, bias, groups, offsets):
        return jagged_linear(
            _jagged(x, offsets), weight, bias=bias, groups=groups,
            activation=activation, backend=backend,
        )  # fmt: skip

    return call


def outer_call(backend, *, x, y, layout, offsets):
    x = _jagged(x, offsets)
    like = Jagged2Tensor(layout.to(x.dtype), offsets, jagged2_offsets(offsets))
    return jagged_outer(x, x.with_values(y), like=like, backend=backend).values


def outer_case(
    lengths: tuple[int, ...], dim: int, dtype: torch.dtype = torch.int64
) -> dict[str, Tensor]:
    return {
        "x": random(sum(lengths), dim),
        "y": random(sum(lengths), dim, seed=1),
        "layout": torch.zeros(sum(n * n for n in lengths), dtype=torch.int64),
        "offsets": offsets_of(lengths, dtype),
    }


def matmul_call(transpose: bool):
    def call(backend, *, m, x, offsets):
        m = Jagged2Tensor(m, offsets, jagged2_offsets(offsets))
        x = _jagged(x, offsets)
        return jagged2_matmul(m, x, transpose=transpose, backend=backend)

    return call


def matmul_case(
    lengths: tuple[int, ...], dim: int, dtype: torch.dtype = torch.int64
) -> dict[str, Tensor]:
    return {
        "m": random(sum(n * n for n in lengths)),
        "x": random(sum(lengths), dim, seed=1),
        "offsets": offsets_of(lengths, dtype),
    }


def target_call(activation: Activation):
    def call(backend, *, history, target, weight, bias, offsets):
        history = _jagged(history, offsets)
        return target_interaction(
            history, target, weight, bias=bias, activation=activation, backend=backend
        )

    return call


def target_case(lengths: tuple[int, ...], dim: int, columns: int) -> dict[str, Tensor]:
    return {
        "history": random(sum(lengths), dim),
        "target": random(len(lengths), dim, seed=1),
        "weight": random(columns, 4 * dim, seed=2) / dim**0.5,
        "bias": random(columns, seed=3),
        "offsets": offsets_of(lengths),
    }


OPERATIONS = {
    "dense": (dense_call, lambda lengths: dense_case(lengths, 5, 3)),
    "pair": (
        pair_call,
        lambda lengths: {
            "x": random(sum(lengths), 5),
            "y": random(sum(lengths), 3, seed=1),
            "offsets": offsets_of(lengths),
        },
    ),
    "linear": (
        linear_call("silu"),
        lambda lengths: linear_case(lengths, 4, [(2 * b + 1) % 4 for b in range(len(lengths))]),
    ),
    "outer": (outer_call, lambda lengths: outer_case(lengths, 4)),
    "matmul": (matmul_call(False), lambda lengths: matmul_case(lengths, 4)),
    "matmul of transposes": (matmul_call(True), lambda lengths: matmul_case(lengths, 4)),
    "target": (target_call("gelu"), lambda lengths: target_case(lengths, 3, 4)),
}
