"""Elementwise, softmax, pooling and norm operations: what each promises, errors, registration."""

from __future__ import annotations

import math

import pytest
import torch
from operation_cases import DEVICE

import jagged_kernels as jk
from jagged_kernels import Jagged2Tensor, JaggedTensor
from jagged_kernels.core import backends
from jagged_kernels.ops import users as native_users
from jagged_kernels.ops.elementwise import elementwise, jagged2_mul, self_difference
from jagged_kernels.ops.layout import last_k
from jagged_kernels.ops.normalise import norm, softmax, triton_norm
from jagged_kernels.ops.pooling import pooling, weighted_sum
from jagged_kernels.tensors.jagged2 import jagged2_offsets

BACKENDS = ["reference", "native", "triton"]


def jagged(*shape, lengths=(3, 0, 4), dtype=torch.float32):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(int(offsets[-1]), *shape, generator=torch.Generator().manual_seed(0))
    return JaggedTensor(values.to(DEVICE, dtype), offsets.to(DEVICE))


def squares(lengths=(3, 0, 4)):
    x = jagged(lengths=lengths)
    total = sum(n * n for n in lengths)
    values = torch.randn(total, generator=torch.Generator().manual_seed(0))
    return Jagged2Tensor(values.to(DEVICE), x.offsets, jagged2_offsets(x.offsets))


@pytest.mark.parametrize("backend", ["triton", "native"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 5, 4)], ids=str)
def test_the_gradient_of_a_sum_is_not_copied(shape, backend):
    x = jagged(4)
    values = x.values.detach().requires_grad_()
    out = jk.jagged_add(x.with_values(values), values.new_zeros(shape), backend=backend).values
    gradient = torch.ones_like(out)
    (found,) = torch.autograd.grad(out, values, gradient)
    assert found.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_of_equals_infinities_and_nan(backend):
    inf, nan = math.inf, math.nan
    columns = torch.tensor([[1.0, -inf, 0.0], [2.0, -inf, nan], [2.0, -inf, inf], [0.0, -inf, nan]])
    # Many more, so that equals lie in other lanes and pieces too.
    tokens = columns.repeat(300, 1).to(DEVICE).requires_grad_()
    x = JaggedTensor(tokens, torch.tensor([0, 0, 1200], device=DEVICE))
    top, place = jk.jagged_max(x, return_indices=True, backend=backend)
    assert place.tolist() == [[-1, -1, -1], [1, 0, 1]]
    assert top[0].tolist() == [0, 0, 0]
    assert top[1, :2].tolist() == [2, -inf]
    assert top[1, 2].isnan()
    top.sum().backward()
    grad = torch.zeros_like(tokens)
    grad[[1, 0, 1], [0, 1, 2]] = 1.0
    assert tokens.grad is not None
    assert torch.equal(tokens.grad, grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_how_many_of_the_last_there_are_is_in_the_dtype_of_offsets(dtype, backend):
    x = jagged(2)
    counts = jk.jagged_last_k(JaggedTensor(x.values, x.offsets.to(dtype)), 2, backend=backend)[1]
    assert (counts.dtype, counts.tolist()) == (dtype, [2, 0, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_k(backend):
    x = JaggedTensor(torch.arange(1.0, 8.0, device=DEVICE)[:, None], jagged().offsets)
    rows, there = jk.jagged_last_k(x, 3, backend=backend)
    assert rows[:, :, 0].tolist() == [[1, 2, 3], [0, 0, 0], [5, 6, 7]]
    assert there.tolist() == [3, 0, 3]
    rows, there = jk.jagged_last_k(x, 5, backend=backend)
    assert rows[:, :, 0].tolist() == [[0, 0, 1, 2, 3], [0] * 5, [0, 4, 5, 6, 7]]
    assert there.tolist() == [3, 0, 4]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, -3e38, 3e38, 1e4])
def test_softmax_of_enormous_scores(backend, shift):
    x = jagged(2, lengths=(300, 0, 4))
    y = jk.jagged_softmax(x.with_values(x.values * 0 + shift), backend=backend).values
    torch.testing.assert_close(y[:300], torch.full_like(y[:300], 1 / 300))
    m = squares()
    y = jk.jagged2_softmax(m.with_values(m.values * 0 + shift), backend=backend).values
    torch.testing.assert_close(y[:9], torch.full_like(y[:9], 1 / 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_sums_to_one_far_apart(backend):
    """Where all but one score underflow, and with scores that are masked out."""
    x = jagged(1, lengths=(600, 3))
    values = x.values.clone()
    values[5], values[400:450] = 200.0, -math.inf
    y = jk.jagged_softmax(x.with_values(values), backend=backend).values
    assert y[5] == 1.0
    assert not y.isnan().any()
    assert (y[400:450] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_differences_of_times(backend, dtype):
    """Nanoseconds, which floats would round, and no gradient."""
    times = torch.tensor([0, 5, 7, 1, 2, 4, 9]) + (1_700_000_000 if dtype == torch.int64 else 0)
    times = times.to(DEVICE, dtype) * (10**9 if dtype == torch.int64 else 1)
    x = JaggedTensor(times, jagged().offsets)
    gaps = jk.jagged_self_difference(x, backend=backend)
    assert gaps.dtype == dtype
    assert torch.equal(gaps.values[:9].view(3, 3), times[:3, None] - times[None, :3])
    assert torch.equal(gaps.values[9:].view(4, 4), times[3:, None] - times[None, 3:])
    assert not gaps.values.requires_grad
    shared = jk.jagged_self_difference(x, like=gaps, backend=backend)
    assert torch.equal(shared.values, gaps.values)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_parameters_of_norms_may_be_float32(backend):
    x = jagged(40, dtype=torch.float16)
    weight, bias = (torch.randn(40, device=DEVICE, requires_grad=True) for _ in range(2))
    y = jk.jagged_layer_norm(x, weight, bias, backend=backend).values
    expected = torch.nn.functional.layer_norm(x.values.float(), (40,), weight, bias)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, expected.half())
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_gradients_of_float32_parameters_are_not_rounded_to_half(backend):
    tokens = 2049  # between two numbers of float16
    x = jagged(2, lengths=(tokens,), dtype=torch.float16)
    weight, bias = (torch.ones(2, device=DEVICE, requires_grad=True) for _ in range(2))
    jk.jagged_layer_norm(x, weight, bias, backend=backend).values.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [tokens, tokens]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_normalised_is_the_sum_that_is_returned(backend):
    """Of float16, where 2048 + 1 is 2048: two numbers that are the same have no variance."""
    row = torch.tensor([[2048.0, 2048.0]], dtype=torch.float16, device=DEVICE)
    x = JaggedTensor(row, torch.tensor([0, 1], device=DEVICE))
    added = x.with_values(torch.tensor([[1.0, 0.0]], dtype=torch.float16, device=DEVICE))
    y, total = jk.jagged_layer_norm(x, residual=added, backend=backend)
    assert total.values.tolist() == [[2048, 2048]]
    assert y.values.tolist() == [[0, 0]]


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_the_sum_of_a_norm_alone_is_differentiable(backend):
    x, residual = jagged(6), jagged(6)
    values = x.values.requires_grad_()
    _, total = jk.jagged_layer_norm(x.with_values(values), residual=residual, backend=backend)
    total.values.sum().backward()
    assert torch.equal(total.values, values + residual.values)
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones_like(values))


def test_a_result_that_nobody_used_has_no_gradient_and_not_one_of_zeros(monkeypatch):
    launch, given = triton_norm.launch_norm_backward, []

    def seen(d_y, d_total, *rest, **options):
        given.append(d_total)
        return launch(d_y, d_total, *rest, **options)

    monkeypatch.setattr(triton_norm, "launch_norm_backward", seen)
    x = jagged(6)
    x = x.with_values(x.values.requires_grad_())
    y, _ = jk.jagged_layer_norm(x, residual=jagged(6), backend="triton")
    y.values.sum().backward()
    assert given == [None]


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_only_one_operand_needs_a_gradient(backend):
    x = jagged(3)
    other = torch.randn(3, 3, device=DEVICE, requires_grad=True)
    jk.jagged_mul(x, other, backend=backend).values.sum().backward()
    torch.testing.assert_close(other.grad, jk.jagged_sum(x, backend="reference"))
    values = x.values.requires_grad_()
    jk.jagged_mul(x.with_values(values), other.detach(), backend=backend).values.sum().backward()
    torch.testing.assert_close(values.grad, other.detach().repeat_interleave(x.lengths, 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_half_types_are_in_float32(backend):
    """Whose terms, or sums on the way, are beyond the largest number of float16."""
    large = torch.full((3, 1), 60000.0, dtype=torch.float16, device=DEVICE)
    x = JaggedTensor(large, torch.tensor([0, 3], device=DEVICE))
    assert jk.jagged_mean(x, backend=backend).tolist() == [[60000.0]]
    weights = torch.tensor([300.0, -300.0, 1.0], dtype=torch.float16, device=DEVICE)
    total = jk.jagged_weighted_sum(x.with_values(large * 0 + 300), weights, backend=backend)
    assert total.dtype == torch.float16
    assert total.tolist() == [[300.0]]


def test_long_sums_keep_their_digits():
    """Of as many float32 one after another, the last four bits would be lost."""
    x = torch.rand(2**18, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    jagged = JaggedTensor(x, torch.tensor([0, 1, 2**18], device=DEVICE))
    total = jk.jagged_sum(jagged, backend="native")[1, 0].double()
    assert abs(total / x[1:].double().sum() - 1) < 2**-23


@pytest.mark.parametrize("backend", BACKENDS)
def test_behind_a_padded_operand_zero_times_infinity_is_nan(backend):
    values = torch.tensor([1.0, math.inf, math.nan, 2.0], device=DEVICE)
    x = JaggedTensor(values, torch.tensor([0, 4], device=DEVICE))
    out = jk.jagged_mul(x, torch.ones(1, 1, device=DEVICE), backend=backend).values
    torch.testing.assert_close(
        out, values * torch.tensor([1.0, 0, 0, 0], device=DEVICE), equal_nan=True
    )


WIDE_CALLS = {
    "weighted sum": lambda x, backend: jk.jagged_weighted_sum(
        x, x.values.new_ones(7), backend=backend
    ),
    "layer norm": lambda x, backend: jk.jagged_layer_norm(x, backend=backend).values,
    "rms norm": lambda x, backend: jk.jagged_rms_norm(x, backend=backend).values,
}


@pytest.mark.parametrize("call", WIDE_CALLS.values(), ids=WIDE_CALLS)
def test_more_columns_than_triton_takes(call, monkeypatch):
    x = jagged(8193)
    x.values.requires_grad_()
    with pytest.raises(NotImplementedError, match="8192 columns, got 8193"):
        call(x, "triton")
    # As on CUDA.
    monkeypatch.setattr(backends, "choose_backend", lambda backend, x: "triton")
    out = call(x, "auto")
    out.sum().backward()
    torch.testing.assert_close(out, call(x, "reference"))


X = jagged(3)
WRONG = {
    "not jagged": (lambda: jk.jagged_sum(X.values), TypeError, "a JaggedTensor"),  # pyright: ignore
    "integers": (
        lambda: jk.jagged_max(jagged(3, dtype=torch.int64)), TypeError, "torch.int64"
    ),
    "k": (lambda: jk.jagged_last_k(X, 0), ValueError, "got 0"),
    "weights": (
        lambda: jk.jagged_weighted_sum(X, torch.ones(6, device=DEVICE)),
        ValueError, r"\(7, 3\), got \(6,\)",
    ),
    "weights' dtype": (
        lambda: jk.jagged_weighted_sum(X, torch.ones(7, device=DEVICE).half()),
        TypeError, "torch.float16",
    ),
    "users of weights": (
        lambda: jk.jagged_weighted_sum(X, jagged(lengths=(3, 4))),
        ValueError, "users of x, 3, got 2",
    ),
    "operand": (
        lambda: jk.jagged_add(X, torch.ones(2, 3, device=DEVICE)),
        ValueError, r"B = 3, got \(2, 3\)",
    ),
    "operand's width": (
        lambda: jk.jagged_mul(X, torch.ones(3, 5, 2, device=DEVICE)), ValueError, r"\(3, 5, 2\)"
    ),
    "jagged operand": (lambda: jk.jagged_mul(X, jagged(4)), ValueError, r"\(7, 3\) like x"),
    "scalar operand": (
        lambda: jk.jagged_mul(X, torch.ones((), device=DEVICE)), ValueError, r"got \(\)"
    ),
    "number": (lambda: jk.jagged_mul(X, 2.0), TypeError, "got float"),  # pyright: ignore
    "squares": (lambda: jk.jagged2_softmax(X), TypeError, "Jagged2Tensor"),  # pyright: ignore
    "dim": (lambda: jk.jagged2_softmax(squares(), dim=1), ValueError, "got 1"),  # pyright: ignore
    "dense squares": (
        lambda: jk.jagged2_mul(squares(), torch.ones(3, 2, 4, device=DEVICE)),
        ValueError, r"got \(3, 2, 4\)",
    ),
    "times": (lambda: jk.jagged_self_difference(X), ValueError, r"\[T\], got \(7, 3\)"),
    "parameter": (
        lambda: jk.jagged_layer_norm(X, torch.ones(4, device=DEVICE)),
        ValueError, r"\[3\], got \(4,\)",
    ),
    "parameter's dtype": (
        lambda: jk.jagged_layer_norm(X, torch.ones(3, device=DEVICE).half()),
        TypeError, r"weight must have the dtype of x, torch.float32, got torch.float16",
    ),
    "squares of integers": (
        lambda: jk.jagged2_softmax(squares().with_values(torch.ones(25, device=DEVICE).long())),
        TypeError, r"m must be of a floating dtype, got torch.int64",
    ),
    "residual": (
        lambda: jk.jagged_rms_norm(X, residual=jagged(4)), ValueError, r"got \(7, 4\)"
    ),
    "residual of as many numbers": (
        lambda: jk.jagged_rms_norm(jagged(4, 2), residual=jagged(2, 4)),
        ValueError, r"\(7, 4, 2\) like x, got \(7, 2, 4\)",
    ),
    "numbers to normalise": (lambda: jk.jagged_rms_norm(jagged()), ValueError, r"got \(7,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(DEVICE == "cuda", reason="contents are compared only on the CPU")
def test_other_offsets_of_as_many_users():
    with pytest.raises(ValueError, match="must have the offsets of x"):
        jk.jagged_add(X, jagged(3, lengths=(0, 3, 4)))


def _operators():
    """(operator, arguments): each alone, for `opcheck`."""
    offsets, m = X.offsets, squares()
    x, row, number = X.values, torch.randn(3, 3, device=DEVICE), torch.randn(7, device=DEVICE)
    place = torch.zeros(3, 3, dtype=torch.int64, device=DEVICE)
    padded, square = torch.randn(3, 4, 3, device=DEVICE), torch.randn(3, 2, 2, device=DEVICE)
    layout = (m.offsets, m.matrix_offsets)
    weight = torch.randn(3, device=DEVICE)
    return {
        "native sum": (native_users._sum_users_op, (x, offsets)),
        "native spread": (native_users._spread_users_op, (row, offsets, 7)),
        "pool": (pooling.pool_op, (x, offsets, True)),
        "spread": (pooling.spread_op, (row, offsets, 7, True)),
        "max": (pooling.max_op, (x, offsets)),
        "max backward": (pooling.max_backward_op, (row, place, offsets, 7)),
        "last k": (last_k.last_k_op, (x, offsets, 4)),
        "last k backward": (last_k.last_k_backward_op, (padded, offsets, 7)),
        "weighted sum": (weighted_sum.weighted_sum_op, (x, number[:, None], offsets)),
        "weighted sum backward": (
            weighted_sum.weighted_sum_backward_op, (row[:, None], x, number[:, None], offsets)
        ),
        "softmax": (softmax.softmax_op, (x, offsets)),
        "softmax backward": (softmax.softmax_backward_op, (x, x.softmax(0), offsets)),
        "softmax2": (softmax.softmax2_op, (m.values, *layout, False)),
        "softmax2 backward": (softmax.softmax2_backward_op, (m.values, m.values, *layout, True)),
        "native softmax2": (softmax.softmax2_native_op, (m.values, *layout, False)),
        "native softmax2 backward": (
            softmax.softmax2_native_backward_op, (m.values, m.values, *layout, True)
        ),
        "join": (elementwise.join_op, (x, padded, offsets, True)),
        "gather": (elementwise.gather_op, (x, x, offsets, None)),
        "gather padded": (elementwise.gather_op, (x, None, offsets, 4)),
        "mul2": (jagged2_mul.mul2_op, (m.values, square, *layout)),
        "pad2": (jagged2_mul.pad2_op, (m.values, m.values, *layout, 2)),
        "difference": (self_difference.difference_op, (number, *layout, 25)),
        "difference backward": (self_difference.difference_backward_op, (m.values, *layout, 7)),
        "norm": (norm.norm_op, (x, x, weight, weight, 0.1, False)),
        "norm alone": (norm.norm_op, (x, None, None, None, 0.1, True)),
        "norm backward": (norm.norm_backward_op, (x, x, x, weight, weight, 0.1, False)),
    }  # fmt: skip


DIFFERENTIABLE = {
    "native sum", "native spread", "pool", "max", "last k", "weighted sum", "softmax", "softmax2",
    "native softmax2", "join", "mul2", "difference", "norm", "norm alone",
}  # fmt: skip


@pytest.mark.parametrize("name", _operators())
def test_opcheck(name):
    operator, arguments = _operators()[name]
    if name in DIFFERENTIABLE:
        arguments = tuple(
            a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a
            for a in arguments
        )
    torch.library.opcheck(operator, arguments)
