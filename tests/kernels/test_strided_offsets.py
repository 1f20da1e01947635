"""Offsets that are views with other strides, as a column of bounds or every second number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from every_operation import EVERY
from operation_cases import DEVICE, results
from torch import Tensor

import jagged_kernels as jk
from jagged_kernels import Jagged2Tensor, JaggedTensor, lengths_to_offsets
from jagged_kernels.tensors.jagged2 import jagged2_offsets

LENGTHS = (3, 0, 5, 1)
OFFSETS = ("offsets", "matrix_offsets")


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, each followed by one that is wrong."""
    view = torch.stack([tensor, tensor + 1], -1)[..., 0]
    assert not view.is_contiguous()
    return view


def _unique(backend: Any, ids: Tensor, offsets: Tensor) -> Any:
    return jk.jagged_unique(JaggedTensor(ids, offsets), backend=backend)


def _unique_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    offsets = lengths_to_offsets(torch.tensor(lengths))
    return {"ids": torch.arange(sum(lengths)) % 2, "offsets": offsets}


CASES = {**EVERY, "unique": (_unique, _unique_case)}


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_strided_offsets_give_what_contiguous_ones_give(name: str, backend: str) -> None:
    call, case = CASES[name]
    tensors = {key: t.to(DEVICE) for key, t in case(LENGTHS).items()}

    def of_views(backend: str, **operands: Tensor) -> Any:
        views = {key: strided(t) if key in OFFSETS else t for key, t in operands.items()}
        return call(backend, **views)

    expected, found = (results(function, backend, tensors) for function in (call, of_views))
    assert expected.keys() == found.keys()
    for key, result in found.items():
        assert torch.equal(result, expected[key]), key


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_strided_numbers_of_users_and_tokens(backend: Any) -> None:
    """Users, groups, starts, lengths and ids: what is read beside offsets."""
    offsets = lengths_to_offsets(torch.tensor(LENGTHS)).to(DEVICE)
    x = JaggedTensor(torch.arange(18.0, device=DEVICE).view(9, 2), offsets)
    weight = torch.arange(12.0, device=DEVICE).view(3, 2, 2)
    table = torch.arange(5.0, device=DEVICE)[:, None].requires_grad_()
    numbers = torch.tensor([1, 0, 1, 0], device=DEVICE)
    ids = torch.tensor([3, 0, 1, 3, 2, 3, 0, 0, 1], device=DEVICE)

    def all_of(numbers: Tensor, ids: Tensor) -> list[Tensor]:
        made = [
            jk.jagged_index_select(x, numbers, backend=backend),
            jk.jagged_slice(x, numbers, numbers + 1, backend=backend),
            jk.jagged_recent(x, numbers, backend=backend),
            jk.jagged_linear(x, weight, groups=numbers, backend=backend),
            jk.jagged_embedding([JaggedTensor(ids, offsets)], [table], backend=backend),
        ]
        (gradient,) = torch.autograd.grad(made[-1].values.square().sum(), table)
        return [part for y in made for part in (y.values, y.offsets)] + [gradient]

    found = all_of(strided(numbers), strided(ids))
    for ours, expected in zip(found, all_of(numbers, ids), strict=True):
        assert torch.equal(ours, expected)


def test_contiguous_offsets_are_not_copied() -> None:
    offsets = lengths_to_offsets(torch.tensor(LENGTHS))
    begins, scores = jagged2_offsets(offsets), torch.zeros(35)
    m = Jagged2Tensor(scores, offsets, begins)
    assert m.offsets is offsets
    assert m.matrix_offsets is begins
    assert JaggedTensor(torch.zeros(9), offsets).offsets is offsets
    padded = torch.zeros(4, 5)
    assert jk.from_padded(padded, offsets=offsets).offsets is offsets


@pytest.mark.parametrize("validate", [True, False])
def test_offsets_of_users_without_tokens_expanded(validate: bool) -> None:
    offsets = torch.zeros(1, dtype=torch.int64, device=DEVICE).expand(4)
    x = JaggedTensor(torch.zeros((0, 2), device=DEVICE), offsets, validate=validate)
    assert x.offsets.is_contiguous()
    for backend in ("reference", "native", "triton"):
        assert torch.equal(jk.jagged_sum(x, backend=backend), torch.zeros((3, 2), device=DEVICE))
