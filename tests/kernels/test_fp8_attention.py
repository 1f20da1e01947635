"""`fp8_attention`: what it computes and what it refuses; its kernel is in `test_fp8_hopper.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import fp8_cases
import pytest
import torch
from attention_cases import DEVICE
from fp8_cases import MASKS, assert_within, bound, sides
from operation_cases import COMPILER
from torch import Tensor

from jagged_kernels import (
    FP8Keys,
    JaggedTensor,
    attention_schedule,
    fp8_attention,
    fp8_keys,
    jagged_attention,
)
from jagged_kernels.attention.fp8 import HEAD_DIMS

SHORT = [0, 1, 31, 5, 64, 0]
DIMS = pytest.mark.parametrize("dim", HEAD_DIMS)
MASK = pytest.mark.parametrize("mask", MASKS, ids=str)

# --- what it computes -----------------------------------------------------------------------------


@MASK
@DIMS
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_it_is_attention_of_what_fp8_keeps(mask, dim, kv_heads, backend):
    q, k, v = sides(SHORT, dim=dim, heads=4, kv_heads=kv_heads)
    keys = fp8_keys(k, v)
    o, lse = fp8_attention(q, keys, backend=backend, return_lse=True, **mask)
    q_kept = q.with_values(fp8_cases.kept(q))
    doubles = [x.with_values(x.values.double()) for x in keys.dequantised()]
    exact, exact_lse = jagged_attention(
        q_kept, *doubles, backend="reference", return_lse=True, **mask
    )
    torch.testing.assert_close(o.values.double(), exact.values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert o.offsets is q.offsets


def test_results_are_near_those_of_numbers_as_they_came():
    """e4m3 rounds each of q, k and v by up to a sixteenth, on average by a fortieth."""
    q, k, v = sides([300, 100], dim=64)
    exact = jagged_attention(q, k, v, causal=True).values
    error = fp8_attention(q, fp8_keys(k, v), causal=True, backend="native").values - exact
    assert error.norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_result_has_the_dtype_of_the_queries(dtype):
    q, k, v = sides(SHORT, dtype=dtype)
    o, lse = fp8_attention(q, fp8_keys(k, v), backend="native", return_lse=True)
    assert o.values.dtype == dtype
    assert lse.dtype == torch.float32


def test_queries_and_keys_of_other_lengths():
    q, k, v = sides([5, 0, 3, 1], [3, 2, 0, 40])
    keys = fp8_keys(k, v)
    o, lse = fp8_attention(q, keys, backend="native", return_lse=True)
    assert (o[2] == 0).all()
    assert (lse[5:8] == -math.inf).all()
    found = fp8_attention(q, keys, backend="native", schedule=attention_schedule(q, k))
    assert torch.equal(found.values, o.values)


@pytest.mark.parametrize("lengths", [[], [0, 0]], ids=["no users", "no tokens"])
def test_nothing_to_do(lengths):
    empty = JaggedTensor(
        torch.zeros(0, 2, 64, device=DEVICE),
        torch.zeros(len(lengths) + 1, dtype=torch.int64, device=DEVICE),
    )
    o, lse = fp8_attention(empty, fp8_keys(empty, empty), return_lse=True)
    assert o.values.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


def test_autocast_changes_nothing():
    q, k, v = sides(SHORT)
    keys = fp8_keys(k, v)
    plain = fp8_attention(q, keys, backend="native").values
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(fp8_attention(q, keys, backend="native").values, plain)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_it_compiles_to_one_graph(backend):
    q, k, v = sides(SHORT, dtype=torch.float16)

    def of_all(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> tuple[Tensor, Tensor]:
        return of_keys(q, fp8_keys(k, v))

    def of_keys(q: JaggedTensor, keys: FP8Keys) -> tuple[Tensor, Tensor]:
        o, lse = fp8_attention(q, keys, causal=True, backend=backend, return_lse=True)
        return o.values, lse

    keys = fp8_keys(k, v)
    # Inductor's division rounds otherwise, and a number that tips over is off by a sixteenth.
    compiler = "aot_eager" if backend == "native" else COMPILER
    cases: tuple[tuple[Any, tuple[Any, ...]], ...] = ((of_all, (q, k, v)), (of_keys, (q, keys)))
    for function, arguments in cases:
        compiled: Any = torch.compile(function, fullgraph=True, backend=compiler)
        for one, other in zip(compiled(*arguments), of_keys(q, keys), strict=True):
            torch.testing.assert_close(one, other)


def test_shapes_without_contents():
    q, k, v = (
        JaggedTensor(torch.empty(9, heads, 64, device="meta"), torch.empty(4, device="meta").long())
        for heads in (4, 2, 2)
    )
    o, lse = fp8_attention(q, fp8_keys(k, k.with_values(v.values)), return_lse=True)
    assert (o.values.shape, lse.shape) == ((9, 4, 64), (9, 4))


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_the_rounding_of_weights_alone_is_within_the_bound(mask):
    """So that the bound of the kernel is one."""
    q, k, v = sides([70, 0, 1, 33], dim=64, dtype=torch.bfloat16)
    keys = fp8_keys(k, v)
    within = bound(q, keys, **mask)
    o = within.rounded.to(q.dtype)
    assert_within(o, within.lse.float(), within)
    assert ((o.double() - within.o).abs() > 0.05 * within.o_error).any()
    with pytest.raises(AssertionError):
        assert_within(o.flip(0), within.lse.float(), within)


# --- what it refuses ------------------------------------------------------------------------------


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    offsets = torch.tensor([0, shape[0]], device=DEVICE)
    return JaggedTensor(torch.ones(shape, dtype=dtype, device=DEVICE), offsets)


X = _x(3, 2, 64)
KEYS = fp8_keys(X, X)
WANTS = X.with_values(X.values.clone().requires_grad_())
TWO_USERS = JaggedTensor(X.values, torch.tensor([0, 1, 3], device=DEVICE))
keys_of: Any = fp8_keys
attend: Any = fp8_attention
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "k is dense": (lambda: keys_of(X.values, X), TypeError, "k must be a JaggedTensor, got Tensor"),
    "float64": (
        lambda: fp8_keys(*[_x(3, 2, 64, dtype=torch.float64)] * 2), TypeError,
        "k must be float16, bfloat16 or float32, got torch.float64",
    ),
    "no heads": (
        lambda: fp8_keys(X.with_values(X.values[:, 0]), X), ValueError,
        "k must be [T, H, D], got (3, 64)",
    ),
    "head_dim": (
        lambda: fp8_keys(_x(3, 2, 32), _x(3, 2, 32)), NotImplementedError,
        "FP8 goes with a head_dim of 64 or 128, got 32 of k",
    ),
    "gradient of v": (
        lambda: fp8_keys(X, WANTS), NotImplementedError,
        "attention in FP8 has no gradient, and v wants one: detach it, or call under "
        "torch.no_grad()",
    ),
    "gradient of q": (
        lambda: fp8_attention(WANTS, KEYS), NotImplementedError,
        "attention in FP8 has no gradient, and q wants one: detach it, or call under "
        "torch.no_grad()",
    ),
    "v's heads": (
        lambda: fp8_keys(X, _x(3, 1, 64)), ValueError,
        "k and v must have the same shape, got (3, 2, 64) and (3, 1, 64)",
    ),
    "v's dtype": (
        lambda: fp8_keys(X, _x(3, 2, 64, dtype=torch.bfloat16)), TypeError,
        "k and v must be of one dtype, got torch.float32 and torch.bfloat16",
    ),
    "v's users": (lambda: fp8_keys(X, TWO_USERS), ValueError, "k has 1 users and v has 2"),
    "scale is a number": (
        lambda: keys_of(X, X, k_scale=1.0), TypeError,
        "k_scale must be a tensor of float32, got float",
    ),
    "scale's dtype": (
        lambda: fp8_keys(X, X, v_scale=torch.ones(2, dtype=torch.float64)), TypeError,
        "v_scale must be a tensor of float32, got torch.float64",
    ),
    "scale's shape": (
        lambda: fp8_keys(X, X, k_scale=torch.ones(3, device=DEVICE)), ValueError,
        "k_scale must be [2] or [1, 2], got [3]",
    ),
    "keys that are none": (
        lambda: attend(X, X), TypeError,
        "keys must be FP8Keys, as fp8_keys makes them, got JaggedTensor",
    ),
    "q is dense": (
        lambda: attend(X.values, KEYS), TypeError, "q must be a JaggedTensor, got Tensor"
    ),
    "q's head_dim": (
        lambda: fp8_attention(_x(3, 2, 128), KEYS), ValueError,
        "q and keys must have the same head_dim, got 128 and 64",
    ),
    "q's heads": (
        lambda: fp8_attention(_x(3, 3, 64), KEYS), ValueError,
        "q's heads must be a multiple of the keys', got 3 and 2",
    ),
    "q's users": (
        lambda: fp8_attention(TWO_USERS, KEYS), ValueError, "q has 2 users and k has 1"
    ),
    "window": (
        lambda: fp8_attention(X, KEYS, window=(-2, 0)), ValueError,
        "window must be (left, right) of -1 or more, got (-2, 0)",
    ),
    "schedule": (
        lambda: attend(X, KEYS, schedule=1), TypeError,
        "schedule must be an AttentionSchedule, got int",
    ),
    "another mask": (
        lambda: fp8_attention(X, KEYS, schedule=attention_schedule(X, causal=True)), ValueError,
        "the schedule was built for another batch or mask: (q tokens, k tokens, users, window) is "
        "(3, 3, 1, (-1, 0)) in the schedule and (3, 3, 1, (-1, -1)) in the call",
    ),
    "backend": (
        lambda: attend(X, KEYS, backend="cuda"), ValueError,
        "backend must be one of auto, triton, native, reference; got 'cuda'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    function, kind, message = ERRORS[case]
    with pytest.raises(kind) as raised:
        function()
    assert str(raised.value) == message


def test_keys_without_gradients_may_come_from_what_has_some():
    with torch.no_grad():
        keys = fp8_keys(WANTS, WANTS)
        fp8_attention(WANTS, keys)
    assert not keys.k.requires_grad


def test_keys_do_not_change():
    field = "k"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(KEYS, field, X.values)


@pytest.mark.skipif(DEVICE == "cuda", reason="about a CPU")
def test_the_kernel_needs_hopper():
    with pytest.raises(ValueError, match="needs a Hopper GPU for FP8, got tensors on cpu"):
        fp8_attention(X, KEYS, backend="triton")
