"""Products of a user's tokens: with matrices, with each other, and layers made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import DTYPES, assert_as_exact_as_reference, results
from product_cases import (
    LENGTHS,
    OPERATIONS,
    dense_call,
    dense_case,
    linear_call,
    linear_case,
    matmul_call,
    matmul_case,
    offsets_of,
    outer_call,
    outer_case,
    pair_call,
    random,
    target_call,
    target_case,
)

from jagged_kernels import JaggedTensor, jagged_linear
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.ops.products import triton_groups, triton_products, triton_target_interaction
from jagged_kernels.ops.products.jagged_linear import Activation

SMALL_TILES = LaunchConfig(16, 4, 2)


@pytest.fixture(params=["one launch", "shares", "spans"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to sum over tokens; small batches would take the first only."""
    if request.param != "one launch":
        monkeypatch.setattr(triton_products, "ONE_LAUNCH_TOKENS", 0)
        monkeypatch.setattr(triton_products, "SUM_PROGRAMS", 64)
        monkeypatch.setattr(triton_products, "LEAST_SHARE", 25)
        # Of half types, sums alone have a program a user in any case.
        short = 0 if request.param == "spans" else 10**6
        monkeypatch.setattr(triton_products, "SHORT_USER", short)


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


def test_users_cut_where_shares_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share's tokens exactly, one less and more, and users that end where a share does."""
    monkeypatch.setattr(triton_products, "ONE_LAUNCH_TOKENS", 0)
    monkeypatch.setattr(triton_products, "SUM_PROGRAMS", 64)
    monkeypatch.setattr(triton_products, "LEAST_SHARE", 16)
    monkeypatch.setattr(triton_products, "SHORT_USER", 10**6)
    # Tiles of 16 tokens, so that a user of few shares has a part for each.
    monkeypatch.setattr(triton_products, "SUM_CONFIGS", dict.fromkeys((2, 4), SMALL_TILES))
    lengths = (16, 15, 17, 0, 16, 31, 1, 16 * 23, 9, 48)
    tensors = {
        "x": random(sum(lengths), 20),
        "y": random(sum(lengths), 33, seed=1),
        "offsets": offsets_of(lengths, torch.int64),
    }
    assert_as_exact_as_reference(pair_call, tensors, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "columns"), [(64, 64), (130, 16), (16, 130)])
def test_widths(dim: int, columns: int, dtype: torch.dtype) -> None:
    tensors = dense_case((5, 0, 70), dim, columns, torch.int32)
    assert_as_exact_as_reference(dense_call, tensors, dtype)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
def test_linear_is_exact(activation: Activation, dtype: torch.dtype) -> None:
    """Groups out of order, without users (0, 3) and with users that have no tokens."""
    tensors = linear_case((70, 0, 3, 140, 9, 1, 0), 5, [2, 1, 4, 2, 1, 2, 4])
    assert_as_exact_as_reference(linear_call(activation), tensors, dtype)


@pytest.mark.parametrize("columns", [3, 70])
def test_a_bias_alone_gets_its_gradient(columns: int) -> None:
    """Read where it lies in a larger tensor."""
    tensors = dense_case((3, 0, 2), 4, columns)
    tensors = {key: t.to(DEVICE) for key, t in tensors.items()}
    both = torch.stack([tensors["bias"]] * 2, -1).requires_grad_()
    out = dense_call("triton", **tensors | {"bias": both[..., 0]}).values
    torch.testing.assert_close(out, dense_call("reference", **tensors).values)
    out.sum().backward()
    assert both.grad is not None
    assert both.grad[..., 0].tolist() == [[3.0] * columns, [0.0] * columns, [2.0] * columns]


def test_more_users_of_targets_than_programs_take_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_target_interaction, "multiprocessors", lambda device: 1)
    tensors = target_case((1, 0, 2) * 60, 3, 4)
    assert_as_exact_as_reference(target_call("none"), tensors, torch.float32, backends=["triton"])


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_relu_at_zero_and_at_nan(backend: Any) -> None:
    """As in PyTorch: no gradient at 0, and what is no number stays none."""
    values = torch.tensor([[1.0], [0.0], [torch.nan]], device=DEVICE, requires_grad=True)
    x = JaggedTensor(values, offsets_of((3,)).to(DEVICE))
    weight = torch.ones(1, 1, 1, device=DEVICE)
    out = jagged_linear(x, weight, activation="relu", backend=backend).values
    torch.testing.assert_close(
        out, torch.tensor([[1.0], [0.0], [torch.nan]], device=DEVICE), equal_nan=True
    )
    out[:2].sum().backward()
    assert values.grad is not None
    assert values.grad[:2, 0].tolist() == [1, 0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_native_gradients_of_float64_have_all_of_its_digits(name: str) -> None:
    call, case = OPERATIONS[name]
    tensors = {
        key: t.to(DEVICE, torch.float64 if t.is_floating_point() else t.dtype)
        for key, t in case((3, 0, 40)).items()
    }
    found, expected = (results(call, backend, tensors) for backend in ("native", "reference"))
    for key, result in found.items():
        torch.testing.assert_close(result, expected[key], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.usefixtures("launches")
def test_groups_without_users_get_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many, wherever a program's share of the tokens ends; memory holds anything before."""
    empty = torch.empty

    def poisoned(*args, **options):
        tensor = empty(*args, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    lengths = (64, 0, 64, 130, 64, 1, 64)
    tensors = linear_case(lengths, 40, [3, 36, 9, 9, 20, 21, 36])
    assert_as_exact_as_reference(linear_call("none"), tensors, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize(("users", "count"), [(1, 1), (5, 40), (50, 7), (16, 16)])
def test_users_in_the_order_of_groups(
    users: int, count: int, few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_groups, "_USERS", 16)
    monkeypatch.setattr(triton_groups, "FEW_USERS", few)
    generator = torch.Generator().manual_seed(users)
    lengths = torch.randint(0, 5, (users,), generator=generator).to(DEVICE)
    groups = torch.randint(0, count, (users,), generator=generator, dtype=dtype).to(DEVICE)
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=dtype), (1, 0))
    places, starts, group, bounds = triton_groups.segments_of(offsets, groups, count)
    assert group is not None
    assert bounds is not None
    order = groups.argsort(stable=True)
    assert torch.equal(starts, offsets[order])
    assert torch.equal(group, groups[order])
    assert torch.equal(places.diff(), lengths[order])
    assert places[0] == 0
    assert torch.equal(bounds.diff(), groups.bincount(minlength=count))
    assert bounds[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_wide_linear_is_exact(activation: Activation, dtype: torch.dtype) -> None:
    tensors = linear_case((70, 2), 2, [1, 0])
    tensors |= {"weight": random(2, 12, 140, seed=1), "bias": random(2, 140, seed=2)}
    assert_as_exact_as_reference(linear_call(activation), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_outer_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(outer_call, outer_case(LENGTHS[name], 9), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_users_at_the_edge_of_a_tile(dtype: torch.dtype) -> None:
    """And beside users without tokens."""
    lengths = (0, 3, 64, 0, 0, 65, 1, 130, 2, 0, 63, 20, 0)
    assert_as_exact_as_reference(outer_call, outer_case(lengths, 9), dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_matmul_is_exact(name: str, dtype: torch.dtype, transpose: bool) -> None:
    tensors = matmul_case(LENGTHS[name], 9, torch.int32)
    assert_as_exact_as_reference(matmul_call(transpose), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_with_rows_that_begin_alike(dtype: torch.dtype) -> None:
    """Every row, and every second, in users of more than a tile."""
    lengths = (130, 68)
    assert_as_exact_as_reference(outer_call, outer_case(lengths, 9), dtype)
    assert_as_exact_as_reference(matmul_call(False), matmul_case(lengths, 9), dtype)


@pytest.mark.parametrize("wanted", [("x",), ("y",), ("x", "y")], ids="".join)
def test_scores_give_gradients_to_whom_they_are_asked_for(wanted: tuple[str, ...]) -> None:
    """To one side by a product, to both by one launch; y lies in wider rows than x."""
    tensors = {key: t.to(DEVICE) for key, t in outer_case((3, 0, 70), 8).items()}
    found = {}
    for backend in ("reference", "triton"):
        leaves = {key: tensors[key].clone().requires_grad_(key in wanted) for key in "xy"}
        wide = torch.cat([leaves["y"], leaves["y"].detach()], 1)[:, :8]
        given = tensors | {"x": leaves["x"], "y": wide}
        scores = outer_call(backend, **given)
        found[backend] = torch.autograd.grad(
            (scores * scores.detach().cos()).sum(), [leaves[key] for key in wanted]
        )
    for ours, expected in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transpose", [False, True])
def test_what_is_not_finite_stays_where_it_is(transpose: bool) -> None:
    """The rest of an infinite float32, when it is split into parts, is NaN."""
    x, offsets = random(70, 16).abs() + 1, offsets_of((70,))
    x[3, 2], x[5, 0], x[66, 1] = torch.inf, -torch.inf, torch.nan
    tensors = {"x": x, "y": random(70, 16, seed=1).abs() + 1, "offsets": offsets}
    tensors["layout"] = torch.zeros(70 * 70, dtype=torch.int64)
    assert_not_finite_alike(outer_call, tensors)
    m = random(70, 70).abs() + 1
    m[3, 69], m[69, 5], m[64, 0] = torch.inf, -torch.inf, torch.nan
    tensors = {"m": m.flatten(), "x": tensors["y"], "offsets": offsets}
    assert_not_finite_alike(matmul_call(transpose), tensors)
    # Rows that begin and end in the middle of a word: tokens of its ends count once.
    tensors = matmul_case((3, 71), 16) | {"x": random(74, 16, seed=1).abs() + 1}
    tensors["m"] = tensors["m"].abs() + 1
    tensors["x"][3, 1] = tensors["x"][73, 2] = torch.inf
    assert_not_finite_alike(matmul_call(transpose), tensors)


def assert_not_finite_alike(call: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    ours, plain = (call(backend, **tensors) for backend in ("triton", "reference"))
    if isinstance(ours, JaggedTensor):
        ours, plain = ours.values, plain.values
    torch.testing.assert_close(ours, plain, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_scores(dtype: torch.dtype) -> None:
    """Tokens wider than a program holds."""
    assert_as_exact_as_reference(outer_call, outer_case((3, 70), 150, torch.int32), dtype)
    assert_as_exact_as_reference(matmul_call(False), matmul_case((3, 70), 150), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LENGTHS)
def test_target_interaction_is_exact(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_reference(target_call("none"), target_case(LENGTHS[name], 12, 18), dtype)


@pytest.mark.parametrize("name", LENGTHS)
def test_target_interaction_of_many_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_target_interaction, "ONE_LAUNCH_TOKENS", 0)
    tensors = target_case(LENGTHS[name], 12, 18)
    assert_as_exact_as_reference(target_call("gelu"), tensors, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize(("dim", "columns"), [(16, 36), (70, 16)])
def test_target_interaction_activations(
    dim: int, columns: int, activation: Activation, dtype: torch.dtype
) -> None:
    tensors = target_case((70, 0, 3, 140), dim, columns)
    if activation == "relu":
        # Of few bits: where a sum is rounded across 0, its gradient is another one altogether.
        tensors = {k: t.sign() if t.is_floating_point() else t for k, t in tensors.items()}
    assert_as_exact_as_reference(target_call(activation), tensors, dtype)
