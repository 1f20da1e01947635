"""Products of a user's tokens: with matrices, with each other, and layers made of them."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import (
    DTYPES,
    assert_as_exact_as_reference,
    assert_compiles,
    assert_gradients_exact,
)
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
from jagged_kernels.interaction import triton_products
from jagged_kernels.interaction.jagged2 import jagged2_offsets

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
    return jagged_dense_bmm(JaggedTensor(x, offsets), dense, bias=bias, backend=backend)


def pair_call(backend, *, x, y, offsets):
    x = JaggedTensor(x, offsets)
    return jagged_jagged_bmm(x, x.with_values(y), backend=backend)


@pytest.fixture(params=["one launch", "spans"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to sum over tokens; small batches would take the first only."""
    if request.param == "spans":
        monkeypatch.setattr(triton_products, "ONE_LAUNCH_TOKENS", 0)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_dense_bmm_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(dense_call, dense_case(LENGTHS[name], 20, 7), dtype)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_jagged_bmm_is_exact(name: str, dtype: torch.dtype) -> None:
    lengths = LENGTHS[name]
    tensors = {
        "x": random(sum(lengths), 20),
        "y": random(sum(lengths), 33, seed=1),
        "offsets": offsets_of(lengths, torch.int32),
    }
    assert_as_exact_as_reference(pair_call, tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "columns"), [(64, 64), (130, 16), (16, 130)])
def test_widths(dim: int, columns: int, dtype: torch.dtype) -> None:
    tensors = dense_case((5, 0, 70), dim, columns, torch.int32)
    assert_as_exact_as_reference(dense_call, tensors, dtype)


def linear_case(lengths: tuple[int, ...], count: int, groups: list[int]) -> dict[str, Tensor]:
    return {
        "x": random(sum(lengths), 12),
        "weight": random(count, 12, 18, seed=1),
        "bias": random(count, 18, seed=2),
        "groups": torch.tensor(groups),
        "offsets": offsets_of(lengths),
    }


def linear_call(activation: str):
    def call(backend, *, x, weight, bias, groups, offsets):
        return jagged_linear(
            JaggedTensor(x, offsets), weight, bias=bias, groups=groups,
            activation=activation, backend=backend,
        )  # fmt: skip

    return call


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
def test_linear_is_exact(activation: str, dtype: torch.dtype) -> None:
    """Groups out of order, without users (0, 3) and with users that have no tokens."""
    tensors = linear_case((70, 0, 3, 140, 9, 1, 0), 5, [2, 1, 4, 2, 1, 2, 4])
    assert_as_exact_as_reference(linear_call(activation), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_wide_linear_is_exact(activation: str, dtype: torch.dtype) -> None:
    tensors = linear_case((70, 2), 2, [1, 0])
    tensors |= {"weight": random(2, 12, 140, seed=1), "bias": random(2, 140, seed=2)}
    assert_as_exact_as_reference(linear_call(activation), tensors, dtype)


def outer_call(backend, *, x, y, layout, offsets):
    x = JaggedTensor(x, offsets)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_outer_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(outer_call, outer_case(LENGTHS[name], 9), dtype)


def matmul_call(transpose: bool):
    def call(backend, *, m, x, offsets):
        m = Jagged2Tensor(m, offsets, jagged2_offsets(offsets))
        x = JaggedTensor(x, offsets)
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


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_matmul_is_exact(name: str, dtype: torch.dtype, transpose: bool) -> None:
    tensors = matmul_case(LENGTHS[name], 9, torch.int32)
    assert_as_exact_as_reference(matmul_call(transpose), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_scores(dtype: torch.dtype) -> None:
    """Tokens wider than a program holds."""
    assert_as_exact_as_reference(outer_call, outer_case((3, 70), 150, torch.int32), dtype)
    assert_as_exact_as_reference(matmul_call(False), matmul_case((3, 70), 150), dtype)


def target_call(activation: str):
    def call(backend, *, history, target, weight, bias, offsets):
        history = JaggedTensor(history, offsets)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_target_interaction_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(target_call("none"), target_case(LENGTHS[name], 12, 18), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize(("dim", "columns"), [(16, 36), (70, 16)])
def test_target_interaction_activations(
    dim: int, columns: int, activation: str, dtype: torch.dtype
) -> None:
    tensors = target_case((70, 0, 3, 140), dim, columns)
    assert_as_exact_as_reference(target_call(activation), tensors, dtype)
