"""The best tokens of each user, and its distinct ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_cases import (
    DTYPES,
    assert_as_exact_as_reference,
    assert_compiles,
    assert_gradients_exact,
)
from torch import Tensor

from jagged_kernels import JaggedTensor, jagged_top_k, jagged_unique, lengths_to_offsets
from jagged_kernels.ops.ids import triton_unique, triton_user_unique
from jagged_kernels.ops.ids.top_k import top_k, top_k_backward
from jagged_kernels.ops.ids.unique import unique_native, unique_triton

LENGTHS = [(0, 3, 300, 0, 1300, 1, 5, 0), (1,), (0, 0), ()]


def offsets_of(lengths: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).to(DEVICE)


def scores_of(lengths: Any, *, seed: int = 0) -> Tensor:
    """Few distinct scores: most are ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (sum(lengths),), generator=generator).to(DEVICE) / 4


def top(k: int) -> Any:
    def call(backend: Any, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return jagged_top_k(JaggedTensor(x, offsets), k, backend=backend)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_top_k_exact(lengths, k, dtype):
    tensors = {"x": scores_of(lengths), "offsets": offsets_of(lengths, torch.int32)}
    assert_as_exact_as_reference(top(k), tensors, dtype)


@pytest.mark.parametrize("order", ["increasing", "decreasing", "any"])
def test_the_best_of_a_long_user_are_anywhere(order):
    """Of few scores that are the same, the best are all in its first piece."""
    lengths = (3, 2500, 1024, 7)
    x = torch.arange(float(sum(lengths)))
    if order == "any":
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    x = (-x if order == "decreasing" else x).to(DEVICE)
    tensors = {"x": x, "offsets": offsets_of(lengths)}
    for k in (1, 6):
        assert_as_exact_as_reference(top(k), tensors, torch.float32)


def test_the_largest_k():
    tensors = {"x": scores_of((200, 3)), "offsets": offsets_of((200, 3))}
    assert_as_exact_as_reference(top(128), tensors, torch.float32)


def test_top_k_of_special_numbers():
    """NaN is highest, -0 equals 0, and -inf is a score, not a missing token."""
    nan, inf = math.nan, math.inf
    numbers = torch.tensor([-0.0, 1, nan, -inf, inf, 0.0, -1, -inf, nan, -inf])
    for backend in ("reference", "native", "triton"):
        if backend == "triton":  # PyTorch's sorts differ in what they do with a sign of NaN.
            numbers[8] = -numbers[8]
        x = JaggedTensor(numbers.to(DEVICE), offsets_of((8, 2)))
        values, positions = jagged_top_k(x, 9, backend=backend)
        assert positions.tolist() == [[2, 4, 1, 0, 5, 6, 3, 7, -1], [0, 1, *[-1] * 7]]
        assert values.isnan().sum() == 2
        assert values[0, 3].signbit()
        assert not values[0, 4].signbit()


def test_top_k_gradients_and_graph():
    def case(*lengths: int) -> dict[str, Tensor]:
        x = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0)).float()
        return {"x": x.to(DEVICE), "offsets": offsets_of(lengths)}

    # -inf, of users with fewer tokens, has no difference quotient.
    assert_gradients_exact(top(3), case(3, 5))
    batches = [case(0, 2, 5), case(7, 1), case(4, 4, 4)]
    assert_compiles(top(3), batches, sizes_compiled_in=["native"])


def test_top_k_gradient_of_strided_scores():
    pairs = torch.randn(9, 2, device=DEVICE, requires_grad=True)
    x = JaggedTensor(pairs[:, 1], offsets_of((4, 5)))
    values, positions = jagged_top_k(x, 2, backend="triton")
    values.sum().backward()
    assert pairs.grad is not None
    expected = torch.zeros(9, 2)
    expected[(positions.cpu() + torch.tensor([[0], [4]])).flatten(), 1] = 1
    assert torch.equal(pairs.grad.cpu(), expected)


def test_more_than_triton_takes():
    x = JaggedTensor(scores_of((300, 4)), offsets_of((300, 4)))
    with pytest.raises(NotImplementedError, match="k = 128, got 129"):
        jagged_top_k(x, 129, backend="triton")
    ours, reference = (jagged_top_k(x, 200, backend=b) for b in ("auto", "reference"))
    assert torch.equal(ours[1], reference[1])


def assert_unique_is_the_reference(ids: JaggedTensor) -> tuple[JaggedTensor, Tensor]:
    """(unique, inverse)"""
    expected, *others = jagged_unique(ids, backend="reference")
    for backend in ("native", "triton"):
        found, counts, inverse = jagged_unique(ids, backend=backend)
        for ours, theirs in [
            (found.values, expected.values),
            (found.offsets, expected.offsets),
            (counts, others[0]),
            (inverse, others[1]),
        ]:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    return expected, others[1]


@settings(max_examples=50, deadline=None)
@given(
    users=st.lists(st.lists(st.integers(-3, 3), max_size=7), max_size=5),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_unique_is_the_reference(users, dtype):
    values = torch.tensor([n for user in users for n in user], dtype=dtype, device=DEVICE)
    ids = JaggedTensor(values, offsets_of([len(user) for user in users]))
    found, inverse = assert_unique_is_the_reference(ids)
    assert torch.equal(found.values[inverse], values)
    assert [part.tolist() for part in found.unbind()] == [sorted(set(user)) for user in users]


def test_unique_takes_the_largest_ids():
    big = 2**63 - 1
    values = torch.tensor([big, -big - 1, big, 0, -big - 1], device=DEVICE)
    ids = JaggedTensor(values, offsets_of((4, 1), torch.int32))
    found, _ = assert_unique_is_the_reference(ids)
    assert [part.tolist() for part in found.unbind()] == [[-big - 1, 0, big], [-big - 1]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[-7, 30000, -7, 5, 5], [3, 3, 3, 3, 3]])
def test_unique_of_ids_in_any_range(values, dtype):
    ids = torch.tensor(values, dtype=dtype, device=DEVICE)
    assert_unique_is_the_reference(JaggedTensor(ids, offsets_of((2, 0, 3))))


KINDS = ["narrow", "same", "distinct", "large", "largest"]


def ids_of(kind: str, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return {
        "narrow": torch.randint(-3, 4, (tokens,), generator=generator),
        "same": torch.full((tokens,), -9),
        "distinct": torch.randperm(tokens, generator=generator) - 100,
        "large": torch.randint(-5, 5, (tokens,), generator=generator) * 2**40,
        "largest": torch.randint(-1, 2, (tokens,), generator=generator) * (2**63 - 1) - 1,
    }[kind]


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_unique_by_keys_is_the_reference(monkeypatch, dtype, offsets_dtype, kind):
    """Runs longer than a tile, and more tiles than are added up at a time."""
    monkeypatch.setattr(triton_user_unique, "LONG", (0,))  # no user fits
    for name, size in {"TILE": 16, "TILES": 4, "KEY_BLOCK": 32, "RANGE_BLOCK": 32}.items():
        monkeypatch.setattr(triton_unique, name, size)
    monkeypatch.setattr(triton_unique, "_RANGE_PROGRAMS", 2)
    lengths = (0, 3, 100, 0, 0, 1, 64, 15, 0)
    values = ids_of(kind, sum(lengths)).to(dtype).to(DEVICE)
    assert_unique_is_the_reference(JaggedTensor(values, offsets_of(lengths, offsets_dtype)))


def test_unique_by_keys_of_one_user_and_one_id(monkeypatch):
    """Whose key is 0, as what is read behind the last."""
    monkeypatch.setattr(triton_user_unique, "LONG", (0,))
    assert_unique_is_the_reference(
        JaggedTensor(torch.full((3,), 7, device=DEVICE), offsets_of((3,)))
    )


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_unique_by_users_is_the_reference(monkeypatch, dtype, offsets_dtype, kind):
    """Users at both sides of every size, more than are added up at a time."""
    small = {"SHORT": (16, 32), "LONG": (64, 128), "USERS": 4, "MOVED": 32}
    for name, size in small.items():
        monkeypatch.setattr(triton_user_unique, name, size)
    lengths = (0, 16, 17, 31, 0, 32, 33, 0, 65, 1, 64, 128, 5, 0)
    values = ids_of(kind, sum(lengths)).to(dtype).to(DEVICE)
    offsets = offsets_of(lengths, offsets_dtype)
    found = triton_user_unique.launch_user_unique(values, offsets)
    assert (found is None) == (kind == "largest" and dtype == torch.int64)
    assert_unique_is_the_reference(JaggedTensor(values, offsets))


@pytest.mark.parametrize("lengths", [(3, 700, 0, 20), (1, 1025)], ids=str)
def test_unique_of_a_long_user(lengths):
    ids = JaggedTensor(ids_of("narrow", sum(lengths)).to(DEVICE), offsets_of(lengths))
    assert triton_user_unique.launch_user_unique(ids.values, ids.offsets) is not None
    assert_unique_is_the_reference(ids)


@pytest.mark.parametrize("lengths", [(1, 4097, 2), (4097,)], ids=str)
def test_unique_of_a_user_that_is_too_long(lengths):
    ids = JaggedTensor(ids_of("distinct", sum(lengths)).to(DEVICE), offsets_of(lengths))
    assert triton_user_unique.launch_user_unique(ids.values, ids.offsets) is None
    assert_unique_is_the_reference(ids)


@pytest.mark.parametrize("end", [2**24, 2**25 - 1, 2**25, 2**25 + 1, 2**56 - 1, 2**56, 2**57])
def test_unique_of_ids_as_far_apart_as_keys_hold(end):
    """Of users of up to 64 tokens 25 bits for 32, 56 for 64."""
    values = [
        [-5, end - 5, 7, end - 5],
        [end, 0, end, 1],
        [end - 2**31, -(2**31)],
        [0] * 63 + [end],
    ]
    lengths = [len(user) for user in values]
    flat = torch.tensor([n for user in values for n in user], device=DEVICE)
    ids = JaggedTensor(flat, offsets_of(lengths))
    fits = triton_user_unique.launch_user_unique(ids.values, ids.offsets) is not None
    assert fits == (end < 2**56)
    assert_unique_is_the_reference(ids)


@pytest.mark.parametrize("bits", [59, 60, 61, 62, 63])
def test_unique_of_ids_that_leave_no_bits_for_users(bits):
    """Of three users: keys of user and id would pass 2^63."""
    end = 2**bits - 2
    values = torch.tensor([end, -1, end, 0, end, end, -1, 3], device=DEVICE)
    assert_unique_is_the_reference(JaggedTensor(values, offsets_of((3, 2, 3))))


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_unique_in_a_graph(backend):
    def call(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, counts, inverse = jagged_unique(
            JaggedTensor(values, offsets, validate=False), backend=backend
        )
        return found.values, counts, inverse

    values, offsets = torch.tensor([3, 3, 1, 3], device=DEVICE), offsets_of((3, 1))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = torch.compile(call, fullgraph=True, backend="aot_eager")
        for ours, eager in zip(graph(values, offsets), call(values, offsets), strict=True):
            assert torch.equal(ours, eager)


def test_operators_pass_opcheck():
    offsets = offsets_of((3, 0, 5))
    torch.library.opcheck(top_k, (scores_of((8,)).requires_grad_(), offsets, 2))
    positions = torch.tensor([[2, 0], [-1, -1], [4, 1]], device=DEVICE)
    d_values = torch.randn(3, 2, device=DEVICE)
    torch.library.opcheck(top_k_backward, (d_values, offsets, positions, 8))
    for unique in (unique_native, unique_triton):
        torch.library.opcheck(unique, (torch.arange(8, device=DEVICE) % 3, offsets))


@pytest.mark.parametrize(
    ("operation", "values", "options", "error", "message"),
    [
        (jagged_top_k, torch.zeros(2, 1), {"k": 1}, ValueError, r"scores \[T\], got \(2, 1\)"),
        (jagged_top_k, torch.zeros(2).long(), {"k": 1}, TypeError, "floating, got torch.int64"),
        (jagged_top_k, torch.zeros(2), {"k": 0}, ValueError, "at least 1, got 0"),
        (jagged_unique, torch.zeros(2), {}, TypeError, "got torch.float32"),
        (jagged_unique, torch.zeros(2, 1).long(), {}, ValueError, r"\[T\], got \(2, 1\)"),
    ],
)
def test_errors(operation, values, options, error, message):
    with pytest.raises(error, match=message):
        operation(JaggedTensor(values, torch.tensor([0, 2])).to(DEVICE), **options)
    with pytest.raises(TypeError, match="must be a JaggedTensor, got Tensor"):
        operation(values, **options)
