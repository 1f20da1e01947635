"""Launches that go past Triton's own look-up."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE
from torch import Tensor
from triton import knobs

from jagged_kernels.core.launch import launch

SIZE = 64


class Pair(NamedTuple):
    y: Tensor | None
    factor: float


@triton.jit(do_not_specialize=["count"])
def _add_kernel(x_ptr, pair, out_ptr, count, SIZE: tl.constexpr, HAS_Y: tl.constexpr):
    """out = x + factor * y, or x."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x_ptr + index, mask=index < count, other=0.0)
    if HAS_Y:
        total += pair.factor * tl.load(pair.y + index, mask=index < count, other=0.0)
    tl.store(out_ptr + index, total, mask=index < count)


@triton.jit
def _compiled_in_kernel(x_ptr, count, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), count)


def add(x: Tensor, y: Tensor | None, factor: float = 1.0) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _add_kernel,
        -(-len(x) // SIZE),
        (x, Pair(y, factor), out, len(x)),
        {"SIZE": SIZE, "HAS_Y": y is not None},
        num_warps=4,
    )
    return out


@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "not aligned"])
def test_again_with_other_tensors_and_numbers(start):
    for length, factor in ((100, 2.0), (1, 0.5), (64, -1.0), (100, 1.0)):
        for dtype in (torch.float32, torch.float16):
            x, y = (torch.randn(length + 1, device=DEVICE, dtype=dtype)[start:] for _ in "xy")
            torch.testing.assert_close(add(x, y, factor), x + factor * y)
            assert torch.equal(add(x, None), x)


@pytest.mark.gpu
def test_tensors_in_another_place_are_refused():
    x, y = (torch.randn(SIZE, device="cuda") for _ in "xy")
    add(x, y)
    with pytest.raises(ValueError, match="cannot be accessed"):
        add(x, y.cpu())


@pytest.mark.gpu
def test_hooks_hear_of_every_launch():
    x = torch.randn(SIZE, device="cuda")
    add(x, x)
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    hooks = knobs.runtime.launch_enter_hook
    hooks.add(hook)
    try:
        add(x, x)
        add(x, x)
    finally:
        hooks.remove(hook)
    assert torch.equal(add(x, x), 2 * x)
    assert names == ["_add_kernel"] * 2


@pytest.mark.gpu
def test_integers_must_not_be_compiled_in():
    x = torch.zeros(SIZE, device="cuda")
    with pytest.raises(AssertionError, match="count"):
        launch(_compiled_in_kernel, 1, (x, 3), {"SIZE": SIZE})
