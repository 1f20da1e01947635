"""`JaggedTensor`: layouts in and out, and every way to build a wrong one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jagged_kernels import (
    JaggedTensor,
    from_padded,
    jagged_cat,
    jagged_index_select,
    lengths_to_offsets,
)


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
    assert JaggedTensor(torch.zeros(0, 3), torch.tensor([0])).to_padded().shape == (0, 0, 3)


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
    with pytest.raises(ValueError, match=r"lie in \[0, 3\], the padded length; got -1 to 1"):
        JaggedTensor.from_padded(torch.zeros(2, 3), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"lengths \[B\]"):
        JaggedTensor.from_padded(torch.zeros(2, 3), torch.tensor([1]))


def test_parts_without_tokens_have_no_say_in_the_dtype():
    large = torch.tensor([2**24 + 1])
    for parts in ([large, torch.zeros(0)], [torch.zeros(0), large], [large, large[:0].int()]):
        x = JaggedTensor.from_list(parts)
        assert x.values.tolist() == [2**24 + 1]
        assert x.dtype == torch.int64
    of_nobody = [torch.zeros(0, dtype=torch.int32), torch.zeros(0)]
    assert JaggedTensor.from_list(of_nobody).dtype == torch.int32


def test_lengths_of_every_integer_dtype():
    narrow = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64)
    for dtype in (*narrow, torch.int32, torch.int64):
        lengths = torch.tensor([100, 0, 100], dtype=dtype)
        for function in (lengths_to_offsets, torch.compile(lengths_to_offsets, backend="eager")):
            offsets = function(lengths)
            assert offsets.tolist() == [0, 100, 100, 200], dtype
            assert offsets.dtype == (torch.int32 if dtype == torch.int32 else torch.int64)
    assert lengths_to_offsets(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "lengths must be integers, got torch.float32"),
        ([True, False], TypeError, "lengths must be integers, got torch.bool"),
        ([2, -1], ValueError, "lengths must be at least 0, got -1"),
        ([[2, 1]], ValueError, r"lengths must be \[B\], got shape \(1, 2\)"),
    ],
)
def test_wrong_lengths(lengths, error, message):
    with pytest.raises(error, match=message):
        lengths_to_offsets(torch.tensor(lengths))
    with pytest.raises(error, match=message):
        JaggedTensor.from_lengths(torch.zeros(3), torch.tensor(lengths))


def test_more_tokens_than_int32_offsets_hold():
    message = "int32 offsets hold at most 2147483647 tokens, got 2147483648; use int64"
    half = 2**30
    with pytest.raises(ValueError, match=message):
        lengths_to_offsets(torch.tensor([half, half], dtype=torch.int32))
    assert lengths_to_offsets(torch.tensor([half, half])).tolist() == [0, half, 2 * half]
    values = torch.zeros(1).expand(2 * half)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    for validate in (True, False):
        with pytest.raises(ValueError, match=message):
            JaggedTensor(values, offsets, validate=validate)
    x = JaggedTensor(values[:half], torch.tensor([0, half], dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        jagged_cat([x, x])
    with pytest.raises(ValueError, match=message):
        jagged_index_select(x, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=message):
        from_padded(torch.zeros(1, 1), offsets=x.offsets, total=2 * half)


def test_offsets_that_decrease_by_more_than_int32_holds():
    offsets = torch.tensor([0, 2_000_000_000, -2_000_000_000, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must not decrease, got offsets\[1\] = 2000000000"):
        JaggedTensor(torch.zeros(6), offsets)


def test_from_lengths(jagged):
    again = JaggedTensor.from_lengths(jagged.values, jagged.lengths)
    assert again.values is jagged.values
    assert torch.equal(again.offsets, jagged.offsets)
    short = torch.tensor([2, 3])
    with pytest.raises(ValueError, match=r"offsets\[-1\] = 5 and values of 6 tokens"):
        JaggedTensor.from_lengths(jagged.values, short)
    assert len(JaggedTensor.from_lengths(jagged.values, short, validate=False)) == 2
    # Lengths on a CPU are checked there.
    with pytest.raises(ValueError, match=r"offsets\[-1\] = 5 and values of 6 tokens"):
        JaggedTensor.from_lengths(torch.zeros(6, device="meta"), short)
    with pytest.raises(TypeError, match="values must be a tensor, got list"):
        JaggedTensor.from_lengths([1.0], torch.tensor([1]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="lengths must be a tensor, got list"):
        JaggedTensor.from_lengths(jagged.values, [6])  # pyright: ignore[reportArgumentType]


def test_offsets_without_contents_are_not_read():
    x = JaggedTensor(
        torch.zeros(6, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    )
    assert x.shape == (2, None)


def test_nested_offsets_are_checked(jagged):
    nested = torch.nested.nested_tensor_from_jagged(jagged.values, torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=r"offsets\[-1\] = 4 and values of 6 tokens"):
        JaggedTensor.from_nested(nested)
    assert len(JaggedTensor.from_nested(nested, validate=False)) == 2


def test_shape(jagged):
    assert jagged.shape == (4, None, 2)
    assert jagged.with_values(torch.zeros(6)).shape == (4, None)


def test_a_user_is_a_view(jagged):
    tokens = jagged.unbind()
    for user in range(4):
        for index in (user, user - 4, torch.tensor(user), np.int64(user)):
            found = jagged[index]
            assert torch.equal(found, tokens[user])
            assert found.untyped_storage().data_ptr() == jagged.values.untyped_storage().data_ptr()
    assert [part.tolist() for part in jagged] == [part.tolist() for part in tokens]
    for user in (4, -5):
        with pytest.raises(IndexError, match=f"user {user} is not one of the 4"):
            jagged[user]


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(2),
        slice(1, 3),
        slice(-3, None),
        slice(3, 1),
        slice(9, 12),
        slice(None, None, 2),
        slice(None, None, -1),
        [2, 0, 2],
        [-1, 1],
        [],
        [True, False, True, False],
        range(1, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_users_by_index_are_those_of_a_list(jagged, index, dtype):
    jagged = JaggedTensor(jagged.values, jagged.offsets.to(dtype))
    tokens = jagged.unbind()
    wanted = np.arange(4)[index if isinstance(index, slice) else np.array(index, np.int64)]
    if isinstance(index, list) and index and isinstance(index[0], bool):
        wanted = np.arange(4)[index]
    indices = [index]
    if isinstance(index, list):
        indices += [torch.tensor(index) if index else torch.tensor([], dtype=torch.int64)]
        indices += [indices[-1].numpy()]
    for each in indices:
        found = jagged[each]
        assert [part.tolist() for part in found] == [tokens[user].tolist() for user in wanted]
        assert found.offsets.dtype == dtype
        JaggedTensor(found.values, found.offsets)  # which checks them


def test_a_slice_does_not_copy_tokens(jagged):
    assert jagged[1:3].values.data_ptr() == jagged.values[2:].data_ptr()
    assert jagged[:].offsets is jagged.offsets
    values = jagged.values.clone().requires_grad_()
    jagged.with_values(values)[2:].values.sum().backward()
    assert values.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (True, TypeError, "a tensor or list of users, got bool"),
        (torch.tensor(True), TypeError, "a tensor or list of users, got Tensor"),
        (1.0, TypeError, "a tensor or list of users, got float"),
        ((0, 1), TypeError, "a tensor or list of users, got tuple"),
        (None, TypeError, "a tensor or list of users, got NoneType"),
        ("item", TypeError, "a tensor or list of users, got str"),
        ([0.5], TypeError, "users must be int32 or int64, got torch.float32"),
        ([4], IndexError, r"users must lie in \[-4, 4\)"),
        ([-5], IndexError, r"users must lie in \[-4, 4\)"),
        ([True], IndexError, r"one for each user, \[4\], got \(1,\)"),
    ],
    ids=str,
)
def test_wrong_indices(jagged, index, error, message):
    with pytest.raises(error, match=message):
        jagged[index]


def test_detach(jagged):
    x = jagged.with_values(jagged.values.clone().requires_grad_())
    assert not x.detach().values.requires_grad
    assert x.detach().offsets is x.offsets


def test_equality_is_identity(jagged):
    assert jagged == jagged
    assert jagged != jagged.with_values(jagged.values)
    assert len({jagged, jagged.with_values(jagged.values)}) == 2
