"""Arguments of a wrong kind, as plain numbers and lists, and by what name an error calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import (
    JaggedTensor,
    from_padded,
    jagged2_like,
    jagged2_mul,
    jagged2_to_padded,
    jagged_dense_bmm,
    jagged_embedding,
    jagged_last_k,
    jagged_linear,
    jagged_recent,
    jagged_slice,
    jagged_top_k,
    target_interaction,
    to_padded,
)

BACKENDS: list[Any] = ["reference", "native", "triton"]
X = JaggedTensor(torch.ones(3, 2, device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE))
SCORES = X.with_values(X.values[:, 0])
IDS = X.with_values(torch.zeros(3, dtype=torch.int64, device=DEVICE))
M = jagged2_like(X)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


TABLE = ones(4, 2)


def call(function: Any, *args: Any, **options: Any) -> Any:
    """Without a look at types by pyright."""
    return lambda: function(*args, **options)


@pytest.mark.parametrize("number", [1.5, [1, 1], None, "1"], ids=str)
@pytest.mark.parametrize("name", ["start", "length"])
def test_slices_take_ints_and_tensors(name, number):
    arguments: Any = {"start": 1, "length": 1, name: number}
    kind = type(number).__name__
    message = rf"{name} must be an int or integers \[B\], got {kind}"
    with pytest.raises(TypeError, match=message):
        jagged_slice(X, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_of_every_kind(backend):
    x = JaggedTensor(torch.arange(6, device=DEVICE), torch.tensor([0, 4, 6], device=DEVICE).int())
    expected = jagged_slice(x, 1, 2, backend=backend).values.tolist()
    assert expected == [1, 2, 5]
    one: Any = np.int64(1)
    assert jagged_slice(x, one, 2, backend=backend).values.tolist() == expected
    assert jagged_recent(x, one, backend=backend).values.tolist() == [3, 5]
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        start, length = (torch.tensor(n, dtype=dtype, device=DEVICE) for n in ([1, 1], [2, 2]))
        assert jagged_slice(x, start, length, backend=backend).values.tolist() == expected
    assert to_padded(X, one, backend=backend).shape == (2, 1, 2)
    assert jagged_last_k(X, one, backend=backend)[0].shape == (2, 1, 2)
    assert jagged_top_k(SCORES, one, backend=backend)[0].shape == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (call(jagged_slice, X, ones(2), 1), "start must be an int or .*, got torch.float32"),
        (call(jagged_recent, X, ones(2).to(torch.complex64)), "length must .* torch.complex64"),
        (call(jagged_recent, X, ones(2).bool()), r"length must be .*, got torch.bool"),
        (call(jagged_last_k, X, 2.0), "k must be an int, got float"),
        (call(jagged_last_k, X, torch.tensor(2)), "k must be an int, got Tensor"),
        (call(jagged_top_k, SCORES, 2.0), "k must be an int, got float"),
        (call(to_padded, X, 2.0), "max_len must be an int, got float"),
        (call(jagged2_to_padded, M, 2.0), "max_len must be an int, got float"),
        (call(jagged_linear, X, ones(2, 2, 1), groups=[0, 0]), r"groups must .* \[B\], got list"),
        (call(jagged_embedding, [IDS, None], [TABLE] * 2), "ids 1 .* tensors, got NoneType and T"),
        (call(jagged_embedding, [IDS, IDS], [TABLE, None]), "ids 1 .* got Tensor and NoneType"),
        (call(jagged_embedding, [IDS], [None]), "tables must be tensors, got NoneType as tables 0"),
    ],
)
def test_wrong_kinds(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong()


@pytest.mark.skipif(DEVICE == "cuda", reason="contents are not read where that would wait")
@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize(
    ("lengths", "offsets", "message"),
    [
        ([3, -1], None, "lengths must be at least 0, got -1"),
        (None, [0, 3, 2], r"not decrease, got offsets\[1\] = 3 and offsets\[2\] = 2"),
        (None, [2, 3, 5], r"start at 0, got offsets\[0\] = 2"),
    ],
)
def test_from_padded_reads_lengths_and_offsets_on_a_cpu(lengths, offsets, message, backend):
    kinds = {"lengths": lengths, "offsets": offsets}
    given: Any = {name: torch.tensor(x) for name, x in kinds.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        from_padded(ones(2, 3), backend=backend, **given)


HALF = ones(2, 2, 2).half()
ROWS, LAYER, TARGETS = ones(2, 2, 2), ones(4, 8), ones(2, 2)
META = torch.ones(2, 2, device="meta")
OTHER_M = jagged2_like(X.with_values(X.values.double()))
SHORT_M = jagged2_like(JaggedTensor(ones(3), torch.tensor([0, 3], device=DEVICE)))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (call(jagged2_mul, M, OTHER_M), TypeError, "other must have the dtype of m, torch.float32"),
        (call(jagged2_mul, M, SHORT_M), ValueError, "other must have the users of m, 2, got 1"),
        (call(jagged2_mul, M, HALF), TypeError, "other must have the dtype of m, torch.float32"),
        (call(jagged2_mul, M, META), ValueError, "other must be on .* like m, got meta"),
        (call(target_interaction, X, None, LAYER), TypeError, "target must be a tensor, got None"),
        (call(target_interaction, X, TARGETS.half(), LAYER), TypeError, "target .* of history, "),
        (call(target_interaction, X, META, LAYER), ValueError, "target .* like history, got meta"),
        (call(target_interaction, X, TARGETS, None), TypeError, "weight must be a tensor .* None"),
        (call(target_interaction, X, TARGETS, LAYER.half()), TypeError, "weight .* of history, "),
        (
            call(target_interaction, X, TARGETS, LAYER, bias=ones(4).half()),
            TypeError,
            "bias must have the dtype of history, ",
        ),
        (call(jagged_dense_bmm, X, ones(2, 3, 2)), ValueError, r"dense must be \[B, D, K\] .* = 2"),
        (call(jagged_dense_bmm, X, ones(2, 2, 0)), ValueError, r"dense must be .* K >= 1"),
        (call(jagged_dense_bmm, X, ones(3, 2, 2)), ValueError, r"dense must be .* with B = 2"),
        (call(jagged_dense_bmm, X, None), TypeError, "dense must be a tensor .* got NoneType"),
        (call(jagged_dense_bmm, X, HALF), TypeError, "dense must have the dtype of x"),
        (
            call(jagged_dense_bmm, X, ROWS, bias=ones(2, 3)),
            ValueError,
            r"bias must be \[B, K\] = \(2, 2\), got \(2, 3\)",
        ),
        (call(jagged_linear, X, None), TypeError, r"weight must be a tensor \[G, D, K\], got None"),
        (call(jagged_linear, X, ones(2, 3, 2)), ValueError, r"weight must be \[G, D, K\] .* D = 2"),
    ],
)
def test_errors_name_the_arguments_of_the_call(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_bias_may_be_left_out():
    assert jagged_linear(X, ROWS, bias=None).values.shape == (3, 2)
    assert jagged_dense_bmm(X, ROWS, bias=None).values.shape == (3, 2)
    assert target_interaction(X, TARGETS, LAYER, bias=None).values.shape == (3, 4)


FILLED = {
    "to_padded": lambda x, **options: to_padded(x, 3, **options),
    "from_padded": lambda x, **options: (
        from_padded(
            x.values[None], torch.tensor([len(x.values) + 1], device=DEVICE), **options
        ).values
    ),
    "jagged2_to_padded": lambda x, **options: jagged2_to_padded(
        jagged2_like(x).with_values(x.values.new_zeros(5)), 3, **options
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILLED)
def test_what_fills_up_is_a_number_of_the_dtype(name, backend):
    def fill(dtype, value):
        values = torch.zeros(3, dtype=dtype, device=DEVICE)
        x = JaggedTensor(values, torch.tensor([0, 1, 3], device=DEVICE))
        return FILLED[name](x, value=value, backend=backend)

    for value in (-1, 0.5):
        filled = fill(torch.bool, value)
        assert filled.any()
        assert (filled.view(torch.uint8) <= 1).all()
    assert (fill(torch.int64, -(2**53)) == -(2**53)).any()
    for dtype, value in ((torch.int32, 2**40), (torch.uint8, -1), (torch.int64, 2**53 + 1)):
        with pytest.raises(ValueError, match="value must be a number that"):
            fill(dtype, value)
    with pytest.raises(TypeError, match=r"must be real, got torch\.complex64"):
        fill(torch.complex64, 0.0)
