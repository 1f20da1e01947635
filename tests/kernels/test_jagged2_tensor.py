"""`Jagged2Tensor`: every way to build a wrong one, and layouts that are of other offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import (
    Jagged2Tensor,
    JaggedTensor,
    jagged2_like,
    jagged2_matmul,
    jagged2_to_padded,
    jagged_outer,
    jagged_self_difference,
)
from jagged_kernels.tensors.jagged2 import jagged2_offsets

# Users of other lengths, and as many scores.
OFFSETS, OTHERS = torch.tensor([0, 1, 4]), torch.tensor([0, 3, 4])
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="contents are not read where that would wait")


def tokens(offsets: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(torch.ones(4, 2, device=DEVICE), offsets.to(DEVICE))


def built(scores: int, offsets: Any, matrix_offsets: Any, dtype: torch.dtype = torch.int64) -> Any:
    return Jagged2Tensor(
        torch.ones(scores), torch.tensor(offsets, dtype=dtype), torch.tensor(matrix_offsets)
    )


ANY: Any = [0, 1, 10]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: built(3, [0, 1, 4], [0, 7, 99]), ValueError, r"matrix_offsets\[1\] = 7 for 1"),
        (lambda: built(9, [0, 1, 4], [0, 1, 10]), ValueError, r"\[10\] for these .* got \[9\]"),
        (lambda: built(11, [0, 1, 4], [0, 1, 10]), ValueError, r"\[10\] for these .* got \[11\]"),
        (lambda: built(10, [1, 2, 5], [0, 1, 10]), ValueError, r"start at 0, got offsets\[0\] = 1"),
        (lambda: built(2, [0, 1, 0], [0, 1, 2]), ValueError, "offsets must not decrease"),
        (lambda: built(10, [0, 1, 4], [0, 1, 10], torch.float64), TypeError, "got torch.float64"),
        (lambda: built(10, [0, 1, 4], [0.0, 1.0, 10.0]), TypeError, "int64 .* got torch.float32"),
        (lambda: built(10, [0, 1, 4], [0, 10]), ValueError, r"must be \(3,\) .* got \(2,\)"),
        (lambda: Jagged2Tensor(torch.ones(10), OFFSETS, ANY), TypeError, "int64 tensor, got list"),
        (lambda: Jagged2Tensor(torch.ones(10), ANY, OFFSETS), TypeError, "Tensor and list"),
        (lambda: Jagged2Tensor(torch.ones(10, 1), OFFSETS, OFFSETS), ValueError, r"\(10, 1\)"),
        (
            lambda: Jagged2Tensor(torch.ones(10, device="meta"), OFFSETS, OFFSETS),
            ValueError,
            "on one device",
        ),
        (lambda: jagged2_like(ANY), TypeError, "x must be a JaggedTensor, got list"),
        (lambda: jagged2_like(tokens(OFFSETS), total=-1), ValueError, "at least 0, got -1"),
        (
            lambda: jagged2_like(tokens(OFFSETS)).with_values(torch.ones(10, device="meta")),
            ValueError,
            r"\(10,\) on .*, got \(10,\) on meta",
        ),
        (
            lambda: jagged2_like(tokens(OFFSETS)).with_values(torch.ones(9, device=DEVICE)),
            ValueError,
            r"must be \(10,\) on .*, got \(9,\)",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_shape():
    assert jagged2_like(tokens(OFFSETS)).shape == (2, None, None)


@ON_CPU
def test_a_wrong_total_raises():
    with pytest.raises(ValueError, match="total is 7, but the result has 10 scores"):
        jagged2_like(tokens(OFFSETS), total=7)


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_layouts_that_do_not_fit(backend):
    x = tokens(OFFSETS)
    scores = x.with_values(x.values[:, 0])
    calls = {
        "like": [
            lambda like: jagged_outer(x, x, like=like, backend=backend),
            lambda like: jagged_self_difference(scores, like=like, backend=backend),
        ],
        "m": [lambda m: jagged2_matmul(m, x, backend=backend)],
    }
    for name, functions in calls.items():
        for call in functions:
            assert len(call(jagged2_like(x))) == 2
            with pytest.raises(TypeError, match=f"{name} must be a Jagged2Tensor, got Jagged"):
                call(x)
            if DEVICE == "cpu":
                with pytest.raises(ValueError, match=f"{name} must have the offsets of x"):
                    call(jagged2_like(tokens(OTHERS)))
            with pytest.raises(ValueError, match=f"{name} must be on .* like x, got meta"):
                call(jagged2_like(x).to("meta"))
            with pytest.raises(ValueError, match=f"{name} must have the users of x, 2, got 1"):
                call(jagged2_like(tokens(torch.tensor([0, 4]))))


def test_fake_tensors_and_graphs_build_one():
    def padded(values, offsets):
        return jagged2_to_padded(Jagged2Tensor(values, offsets, jagged2_offsets(offsets)), 3)

    values, offsets = torch.ones(10, device=DEVICE), OFFSETS.to(DEVICE)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert padded(mode.from_tensor(values), mode.from_tensor(offsets)).shape == (2, 3, 3)
    graph = torch.compile(padded, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(values, offsets), padded(values, offsets))
