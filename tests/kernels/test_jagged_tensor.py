"""`JaggedTensor`: layouts in and out, and every way to build a wrong one."""

from __future__ import annotations

import pytest
import torch

from jagged_kernels import JaggedTensor, lengths_to_offsets


@pytest.fixture
def jagged():
    values = torch.arange(12.0).view(6, 2)
    return JaggedTensor(values, torch.tensor([0, 2, 2, 5, 6]))


def test_parts(jagged):
    assert len(jagged) == 4
    assert jagged.lengths.tolist() == [2, 0, 3, 1]
    assert [part[:, 0].tolist() for part in jagged.unbind()] == [[0, 2], [], [4, 6, 8], [10]]


def test_from_list_is_the_inverse_of_unbind(jagged):
    again = JaggedTensor.from_list(jagged.unbind())
    assert torch.equal(again.values, jagged.values)
    assert torch.equal(again.offsets, jagged.offsets)


@pytest.mark.parametrize("max_len", [None, 3, 5])
def test_padded_round_trip(jagged, max_len):
    padded = jagged.to_padded(max_len, value=-1.0)
    assert padded.shape == (4, max_len or 3, 2)
    for user, part in enumerate(jagged.unbind()):
        assert torch.equal(padded[user, : len(part)], part)
        assert (padded[user, len(part) :] == -1).all()
    again = JaggedTensor.from_padded(padded, jagged.lengths)
    assert torch.equal(again.values, jagged.values)
    assert torch.equal(again.offsets, jagged.offsets)


def test_to_padded_truncates_to_the_first_tokens(jagged):
    padded = jagged.to_padded(2)
    assert torch.equal(padded[2], jagged.values[2:4])


def test_to_padded_passes_gradients(jagged):
    values = jagged.values.clone().requires_grad_()
    jagged.with_values(values).to_padded(2).sum().backward()
    assert values.grad[:, 0].tolist() == [1, 1, 1, 1, 0, 1]


def test_to_padded_without_tokens():
    empty = JaggedTensor(torch.zeros(0, 3), torch.zeros(3, dtype=torch.int64))
    assert empty.to_padded().shape == (2, 0, 3)
    assert torch.equal(empty.to_padded(2, value=7.0), torch.full((2, 2, 3), 7.0))


def test_nested_round_trip(jagged):
    nested = jagged.to_nested()
    assert [part.tolist() for part in nested.unbind()] == [p.tolist() for p in jagged.unbind()]
    again = JaggedTensor.from_nested(nested)
    assert again.values.data_ptr() == jagged.values.data_ptr()
    assert torch.equal(again.offsets, jagged.offsets)


def test_a_transposed_nested_tensor_is_refused(jagged):
    nested = jagged.with_values(torch.zeros(6, 2, 3)).to_nested()
    assert JaggedTensor.from_nested(nested.transpose(2, 3)).values.shape == (6, 3, 2)
    with pytest.raises(ValueError, match=r"ragged in dimension 1, but it is in dimension 2"):
        JaggedTensor.from_nested(nested.transpose(1, 2))


def test_to_another_dtype_keeps_the_offsets(jagged):
    half = jagged.to(torch.float16)
    assert half.dtype == torch.float16
    assert half.offsets.dtype == torch.int64


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([0, 2, 1, 6], ValueError, r"offsets\[1\] = 2 and offsets\[2\] = 1"),
        ([1, 2, 6], ValueError, r"offsets\[0\] = 1"),
        ([0, 2, 5], ValueError, r"offsets\[-1\] = 5 and values of 6 tokens"),
        ([[0, 6]], ValueError, r"\[B \+ 1\], got shape \(1, 2\)"),
        ([], ValueError, r"got shape \(0,\)"),
        ([0.0, 6.0], TypeError, "int32 or int64, got torch.float32"),
    ],
)
def test_wrong_offsets(offsets, error, message):
    tensor = torch.tensor(offsets)
    tensor = tensor.long() if tensor.numel() == 0 else tensor
    with pytest.raises(error, match=message):
        JaggedTensor(torch.zeros(6, 2), tensor)


def test_wrong_kinds(jagged):
    with pytest.raises(TypeError, match="list and Tensor"):
        JaggedTensor([1.0], torch.tensor([0, 1]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="scalar"):
        JaggedTensor(torch.tensor(1.0), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"\[6, ...\]"):
        jagged.with_values(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="one device"):
        JaggedTensor(torch.zeros(6, device="meta"), torch.tensor([0, 6]))


def test_wrong_lists_and_lengths():
    with pytest.raises(ValueError, match=r"tensor 1 has shape \(2, 3\)"):
        JaggedTensor.from_list([torch.zeros(2, 4), torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="at least one"):
        JaggedTensor.from_list([])
    with pytest.raises(ValueError, match=r"lie in \[0, 3\]"):
        JaggedTensor.from_padded(torch.zeros(2, 3), torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"lengths \[B\]"):
        JaggedTensor.from_padded(torch.zeros(2, 3), torch.tensor([1]))


def test_lengths_to_offsets_keeps_the_dtype():
    assert lengths_to_offsets(torch.tensor([3, 0], dtype=torch.int32)).dtype == torch.int32
    assert lengths_to_offsets(torch.zeros(0, dtype=torch.int64)).tolist() == [0]
