"""What every product of a user's tokens keeps to: gradients, compilation, strides, NaN, errors."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import assert_compiles, assert_gradients_exact, flat, results
from product_cases import OPERATIONS, dense_call, dense_case, linear_case, offsets_of, random
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    jagged2_like,
    jagged2_matmul,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_linear,
    jagged_outer,
    target_interaction,
)
from jagged_kernels.ops.products import (
    triton_jagged2_matmul,
    triton_jagged_outer,
    triton_linear,
    triton_products,
    triton_target_interaction,
    triton_user_products,
)
from jagged_kernels.tensors.jagged2 import jagged2_offsets


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients(name: str) -> None:
    call, case = OPERATIONS[name]
    for lengths in ((2, 0, 3), (0,), ()):
        tensors = case(lengths)
        if name == "linear":  # a few of its thousand weights: each number costs two calls
            groups = tensors["groups"].tolist()
            tensors = linear_case(lengths, 4, groups, dim=3, columns=2)
        assert_gradients_exact(call, tensors)


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles(name: str) -> None:
    call, case = OPERATIONS[name]
    assert_compiles(call, [case((3, 0, 5, 1, 0, 2)), case((40, 2, 1, 7))])


@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_are_read(name: str) -> None:
    """Operands that are views: every second column of something wider."""
    call, case = OPERATIONS[name]
    tensors = {key: t.to(DEVICE) for key, t in case((3, 0, 35)).items()}

    def strided(backend, **operands):
        views = {
            key: torch.stack([t, t + 1], -1)[..., 0] if t.is_floating_point() else t
            for key, t in operands.items()
        }
        return call(backend, **views)

    for backend in ("native", "triton"):
        expected, found = (results(function, backend, tensors) for function in (call, strided))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [0, 2048])
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_stays_with_its_user(
    name: str, backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What belongs to the other users is as if the one with NaN were not there."""
    monkeypatch.setattr(triton_products, "ONE_LAUNCH_TOKENS", tokens)
    call, case = OPERATIONS[name]
    lengths = (5, 70, 0, 3)
    tensors = {key: t.to(DEVICE) for key, t in case(lengths).items()}
    first = "m" if "m" in tensors else "x" if "x" in tensors else "history"
    begin, end = (25, 4925) if first == "m" else (5, 75)
    poisoned = tensors | {first: tensors[first].clone()}
    poisoned[first][begin:end] = torch.nan
    clean, dirty = (results(call, backend, t) for t in (tensors, poisoned))
    # User 1, by the size of a result: its tokens, its scores, its place among users.
    own = {78: slice(5, 75), 4934: slice(25, 4925), 4: slice(1, 2)}
    shared = {"d_weight", "d_bias"} if name in ("linear", "target") else set()
    for key in clean.keys() - shared:
        kept = torch.ones(len(clean[key]), dtype=torch.bool)
        kept[own[len(clean[key])]] = False
        assert torch.equal(dirty[key][kept], clean[key][kept]), key
    assert dirty["out0"].isnan().any()


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nan_of_the_first_user_is_not_what_fills_up_others(name: str, backend: str) -> None:
    call, case = OPERATIONS[name]
    tensors = {key: t.to(DEVICE) for key, t in case((5, 40, 3)).items()}
    first = "m" if "m" in tensors else "x" if "x" in tensors else "history"
    poisoned = tensors | {first: tensors[first].clone()}
    poisoned[first][: 25 if first == "m" else 5] = torch.nan
    clean, dirty = (results(call, backend, t) for t in (tensors, poisoned))
    # User 0, by the size of a result: its tokens, its scores, its place among users.
    own = {48: 5, 1634: 25, 3: 1}
    shared = {"d_weight", "d_bias"} if name in ("linear", "target") else set()
    for key in clean.keys() - shared:
        behind = own[len(clean[key])]
        assert torch.equal(dirty[key][behind:], clean[key][behind:]), key
    assert dirty["out0"].isnan().any()


def _operator_samples() -> dict[str, tuple]:
    lengths = (3, 0, 35)
    dense = {key: t.to(DEVICE) for key, t in dense_case(lengths, 5, 3).items()}
    x, weight, bias, offsets = dense.values()
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    scores = random(9 + 35 * 35).to(DEVICE).requires_grad_()
    begins = jagged2_offsets(offsets)
    d_out, groups = random(38, 3, seed=7).to(DEVICE), torch.tensor([1, 0, 1], device=DEVICE)
    target = random(3, 5, seed=8).to(DEVICE).requires_grad_()
    layer = (random(3, 20, seed=9).to(DEVICE), random(3, seed=10).to(DEVICE))
    interaction = (x, target, *(p.requires_grad_() for p in layer), offsets, "relu")
    frozen = [t.detach() if isinstance(t, Tensor) else t for t in interaction]
    linear = (x, weight, bias, offsets, groups, "gelu")
    plain = [t.detach() if isinstance(t, Tensor) else t for t in linear]
    return {
        "jagged_linear_triton": linear,
        "jagged_linear_triton_backward": (d_out, *plain, True, True, False),
        "jagged_jagged_triton": (x, random(38, 3).to(DEVICE).requires_grad_(), offsets),
        "jagged_outer_triton": (x, x.detach().clone(), offsets, begins, 9 + 35 * 35),
        "jagged_outer_triton_backward": (
            scores.detach(),
            x.detach(),
            x.detach().clone(),
            offsets,
            begins,
        ),
        "jagged2_matmul_triton": (scores, x, offsets, begins, True),
        "target_interaction_triton": interaction,
        "target_interaction_triton_backward": (d_out, *frozen),
    }


@pytest.mark.parametrize("name", list(_operator_samples()))
def test_operators_are_registered_well(name: str) -> None:
    operator = getattr(torch.ops.jagged_kernels, name).default
    torch.library.opcheck(operator, _operator_samples()[name])


def test_one_user_does_not_depend_on_others() -> None:
    """A user alone and in a batch: the same output to the last bit."""
    both, alone = dense_case((70, 40), 16, 16), dense_case((70,), 16, 16)
    alone |= {"x": both["x"][:70], "dense": both["dense"][:1], "bias": both["bias"][:1]}
    for backend in ("native", "triton"):
        outs = [
            dense_call(backend, **{key: t.to(DEVICE) for key, t in case.items()}).values
            for case in (both, alone)
        ]
        assert torch.equal(outs[0][:70], outs[1])


X = JaggedTensor(torch.ones(3, 2), torch.tensor([0, 2, 3]))
LONGER = JaggedTensor(torch.ones(4, 2), torch.tensor([0, 2, 4]))
OTHER = JaggedTensor(torch.ones(3, 2), torch.tensor([0, 1, 3]))
INTEGERS = JaggedTensor(torch.ones(3, 2, dtype=torch.int64), torch.tensor([0, 2, 3]))
ONES = torch.ones


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jagged_dense_bmm(ONES(3, 2), ONES(2, 2, 2)), TypeError, "x must be a Jagged"),  # pyright: ignore
        (lambda: jagged_dense_bmm(X, ONES(3, 2, 2)), ValueError, r"B = 2.*\(3, 2, 2\)"),
        (lambda: jagged_dense_bmm(X, ONES(2, 3, 2)), ValueError, r"D = 2.*\(2, 3, 2\)"),
        (lambda: jagged_dense_bmm(X, ONES(2, 2, 2).half()), TypeError, "float32.*float16"),
        (lambda: jagged_dense_bmm(INTEGERS, ONES(2, 2, 2)), TypeError, "floating.*int64"),
        (
            lambda: jagged_dense_bmm(X, ONES(2, 2, 5), bias=ONES(2, 4)),
            ValueError,
            r"bias must be \[B, K\] = \(2, 5\), got \(2, 4\)",
        ),
        (lambda: jagged_linear(X, ONES(3, 2, 2)), ValueError, "B = 2.*G = 3"),
        (lambda: jagged_linear(X, ONES(2, 2, 0)), ValueError, "K >= 1"),
        (
            lambda: jagged_linear(X, ONES(2, 2, 2), activation="tanh"),  # pyright: ignore
            ValueError,
            "none, relu, silu, gelu; got 'tanh'",
        ),
        (
            lambda: jagged_linear(X, ONES(2, 2, 2), groups=torch.tensor([0, 2])),
            ValueError,
            r"\[0, G = 2\), got 0 to 2",
        ),
        (
            lambda: jagged_linear(X, ONES(2, 2, 2), groups=torch.tensor([-1, 1])),
            ValueError,
            r"\[0, G = 2\), got -1 to 1",
        ),
        (
            lambda: jagged_linear(X, ONES(2, 2, 2), groups=torch.tensor([0])),
            ValueError,
            r"\(2,\).*\(1,\)",
        ),
        (lambda: jagged_linear(X, ONES(2, 2, 2), groups=ONES(2)), TypeError, "int32 or int64"),
        (lambda: jagged_jagged_bmm(X, LONGER), ValueError, r"\(3, 2\) and \(4, 2\)"),
        (lambda: jagged_jagged_bmm(X, OTHER), ValueError, "same offsets"),
        (
            lambda: jagged_outer(X, X.with_values(ONES(3, 5))),
            ValueError,
            r"width D, got \(3, 2\) and \(3, 5\)",
        ),
        (
            lambda: jagged_outer(X, X, like=jagged2_like(JaggedTensor(ONES(2), X.offsets[:2]))),
            ValueError,
            "like must have the users of x, 2, got 1",
        ),
        (lambda: jagged2_matmul(ONES(5), X), TypeError, "Jagged2Tensor, got Tensor"),  # pyright: ignore
        (
            lambda: jagged2_matmul(jagged2_like(X.to(torch.float64)), X),
            TypeError,
            "float32, got torch.float64",
        ),
        (lambda: target_interaction(X, ONES(2, 3), ONES(4, 8)), ValueError, r"\(2, 2\).*\(2, 3\)"),
        (lambda: target_interaction(X, ONES(2, 2), ONES(4, 6)), ValueError, r"\(4, 8\).*\(4, 6\)"),
        (lambda: jagged_dense_bmm(X, ONES(2, 2, 2), backend="cuda"), ValueError, "cuda"),  # pyright: ignore
    ],
)
def test_bad_input_is_named(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_outer_makes_its_own_layout() -> None:
    x = JaggedTensor(random(7, 3), offsets_of((2, 0, 5)))
    for backend in ("reference", "native", "triton"):
        moved = x.to(DEVICE)
        scores = jagged_outer(moved, moved, backend=backend)
        again = jagged_outer(moved, moved, like=scores, backend=backend)
        assert torch.equal(scores.values, again.values)
        assert scores.values.shape == (29,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_waiting_and_no_second_compilation(name: str) -> None:
    """Another batch size, token count and longest user compile nothing and wait for nothing, once
    there was a batch each of few and many tokens, of short histories and long ones."""
    kernels = (
        triton_linear._linear_kernel,
        triton_products._products_kernel,
        triton_products.merge_kernel,
        triton_user_products._user_products_kernel,
        triton_user_products._merge_shares_kernel,
        triton_jagged_outer._outer_kernel,
        triton_jagged2_matmul._matmul_kernel,
        triton_jagged2_matmul._outer_backward_kernel,
        triton_target_interaction._target_kernel,
        triton_target_interaction._target_backward_kernel,
    )
    call, case = OPERATIONS[name]

    def step(batch: dict[str, Tensor]) -> int:
        (out,) = flat(call("triton", **batch))
        leaves = [t for t in batch.values() if t.requires_grad]
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def batch_of(lengths: tuple[int, ...]) -> dict[str, Tensor]:
        tensors = case(lengths)
        return {k: t.cuda().requires_grad_(t.is_floating_point()) for k, t in tensors.items()}

    first = ((3, 0, 5, 999), (40, 2, 1, 7, 16, 3000), (16, 48), (50,) * 43)
    later = ((2100, 1), (1, 2500, 16), (16, 1, 40), (1, 60, 9) * 100)
    warm = [step(batch_of(lengths)) for lengths in first][-1]
    assert warm > 0
    batches = [batch_of(lengths) for lengths in later]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [step(batch) for batch in batches] == [warm] * 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
