"""What the mask hides touches nothing: a NaN or inf reaches what sees it, and nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, FACTOR, TILE, Case, Inputs
from hidden_cases import PLACES, Bad, Kind, spoil, touched
from pays import TWO_PASSES, paying_from
from torch import Tensor

from jagged_kernels import attention_schedule
from jagged_kernels.attention.hopper.exact_backward import launch_exact_backward
from jagged_kernels.attention.plain import short
from jagged_kernels.attention.plans import Call
from jagged_kernels.attention.seen import triton_sums
from jagged_kernels.attention.seen.products import seen_product
from jagged_kernels.attention.seen.triton_sums import add_seen
from jagged_kernels.attention.split import backward as split_backward
from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.policy.hopper import NEVER, ONE_PASS_PAYS_FROM, is_hopper
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window

BACKENDS = ("reference", "native", "triton")
# Of several tiles and blocks, one token, none, and an end within a tile.
SELF = Case([TILE + 4, 0, 1, 5])
CROSS = Case([4, TILE + 2, 2, 3], [TILE + 6, 5, 0, 3])
DENSE = Case([3, 3, 3], [2 * TILE + 4, 0, 2])
# Some queries see them, or keys are seen from them, and others not.
IN_SELF = {"q": 1, "k": TILE + 1, "v": 4, "d_o": TILE + 1, "d_lse": 2}
IN_CROSS = {"q": 1, "k": TILE + 5, "v": TILE + 4, "d_o": 8, "d_lse": 2}
IN_DENSE = {"q": 1, "k": 2 * TILE + 3, "v": 2 * TILE + 2, "d_o": 0, "d_lse": 1}
# Of the next user, in the tile in which the first one ends.
BEHIND = dict.fromkeys(PLACES, TILE + 4)


def _tiled(*sides: Any, **mask: Any) -> Any:
    return attention_schedule(*sides, tile_q=TILE, tile_k=TILE, **mask)


def _kind(case: Case, tokens: dict[Any, int], mask: Any, **options: Any) -> Kind:
    heads = {"heads": 4, "kv_heads": 2} if options.pop("grouped", False) else {}
    shared = options.pop("shared", False)

    def inputs(dtype: torch.dtype) -> Inputs:
        made = replace(case, **heads).inputs(dtype)
        return made.with_shared_offsets() if shared else made

    return Kind(inputs, tokens, mask, **options)


CAUSAL: dict[str, Any] = {"causal": True}
TILED: dict[str, Any] = {"schedule": _tiled}
KINDS = {
    "neighbours": _kind(SELF, BEHIND, {}, **TILED),
    "causal": _kind(SELF, IN_SELF, CAUSAL, **TILED),
    "window": _kind(SELF, IN_SELF, {"window": (4, 2)}, **TILED),
    "left window": _kind(SELF, IN_SELF, {"window": (4, -1)}, **TILED),
    "cross causal": _kind(CROSS, IN_CROSS, CAUSAL, **TILED),
    "cross window": _kind(CROSS, IN_CROSS, {"window": (1, 1)}, **TILED),
    "grouped": _kind(SELF, IN_SELF, CAUSAL, grouped=True, **TILED),
    "dense": _kind(DENSE, IN_DENSE, {}, dense=True),
    "dense causal": _kind(DENSE, IN_DENSE, CAUSAL, dense=True),
    "dense window": _kind(DENSE, IN_DENSE, {"window": (6, 0)}, dense=True, grouped=True),
    "short users": _kind(SELF, BEHIND, {}, shared=True),
    "short users, causal": _kind(SELF, IN_SELF, CAUSAL, shared=True),
    "short users, window": _kind(SELF, IN_SELF, {"window": (2, 1)}, shared=True, grouped=True),
    "short users, bias": _kind(SELF, IN_SELF, CAUSAL, shared=True, bias=True),
    "short users, bias, window": _kind(
        SELF, IN_SELF, {"window": (2, 1)}, shared=True, grouped=True, bias=True, dropout_p=0.4
    ),
    "bias": _kind(SELF, IN_SELF, CAUSAL, bias=True, **TILED),
    "bias, window": _kind(CROSS, IN_CROSS, {"window": (1, 1)}, bias=True, **TILED),
    "dropout": _kind(SELF, IN_SELF, CAUSAL, dropout_p=0.4, **TILED),
}


# Where Hopper's kernels run, made to pay for them: users of several tiles of 128.
def _long(length: int, dim: int, mask: Any, **options: Any) -> Kind:
    tokens = {"q": 3, "k": 200, "v": length - 40, "d_o": 260, "d_lse": 9}
    return _kind(Case([length, 5, length + 60], dim=dim), tokens, mask, shared=True, **options)


LONG = {
    "causal, 64": _long(1700, 64, CAUSAL),
    "window, 64": _long(1700, 64, {"window": (140, 30)}, grouped=True),
    "causal, 128": _long(500, 128, CAUSAL, grouped=True),
    "window, 128": _long(500, 128, {"window": (140, 30)}),
    "left window, 128": _long(500, 128, {"window": (140, -1)}),
    "one pass, causal, 64": _long(3300, 64, CAUSAL),
    "one pass, causal, 128": _long(1700, 128, CAUSAL),
}
KINDS |= LONG


@pytest.fixture
def by_hopper(name: str) -> Iterator[None]:
    one_pass = 0 if "one pass" in name else NEVER
    with paying_from(0, *TWO_PASSES), paying_from(one_pass, ONE_PASS_PAYS_FROM):
        yield


@functools.cache
def _clean(name: str, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return KINDS[name].run(backend, KINDS[name].inputs(dtype))


def _assert_only_touched(
    kind: Kind, inputs: Inputs, clean: dict[str, Tensor], backend: str, bad: Bad, value: float
) -> None:
    spoil(inputs, bad, value)
    may_change = touched(kind, inputs, bad)
    for name, result in kind.run(backend, inputs).items():
        reached = may_change[name].to(result.device)
        rest, before = result[~reached], clean[name][~reached]
        hidden = before == -math.inf
        assert torch.equal(rest == -math.inf, hidden), (bad, name)
        rest, before = rest[~hidden].double(), before[~hidden].double()
        assert rest.isfinite().all(), (bad, name)
        if rest.numel():
            # What is computed again is summed in another order: both may be off.
            allowed = 2 * FACTOR * torch.finfo(result.dtype).eps * float(before.abs().max())
            error = float((rest - before).abs().max())
            assert error <= allowed, f"{bad} {name}: {error:.3g} > {allowed:.3g}"
        if math.isnan(value):
            assert result[reached].isnan().all(), (bad, name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in LONG])
def test_nan_reaches_what_sees_it(name, backend, place):
    kind, clean = KINDS[name], _clean(name, backend, torch.float32)
    inputs = kind.inputs(torch.float32)
    bad = Bad(place, kind.tokens[place], getattr(inputs, place).shape[1] - 1)
    _assert_only_touched(kind, inputs, clean, backend, bad, math.nan)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("q", math.inf),
        ("k", -math.inf),
        ("v", math.inf),
        ("v", -math.inf),
        ("d_o", math.inf),
        ("d_lse", -math.inf),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["causal", "cross window", "dense causal", "short users, causal"])
def test_inf_reaches_what_sees_it(name, backend, place, value):
    kind, clean = KINDS[name], _clean(name, backend, torch.float32)
    bad = Bad(place, kind.tokens[place], 0)
    _assert_only_touched(kind, kind.inputs(torch.float32), clean, backend, bad, value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["causal", "dense causal", "short users, causal"])
def test_in_half_precision(name, place):
    kind, clean = KINDS[name], _clean(name, "triton", torch.float16)
    bad = Bad(place, kind.tokens[place], 1)
    _assert_only_touched(kind, kind.inputs(torch.float16), clean, "triton", bad, math.nan)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_hopper")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", LONG)
def test_of_long_histories(name, value, place):
    kind, clean = KINDS[name], _clean(name, "triton", torch.bfloat16)
    bad = Bad(place, kind.tokens[place], 1)
    _assert_only_touched(kind, kind.inputs(torch.bfloat16), clean, "triton", bad, value)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_hopper")
@pytest.mark.parametrize("name", LONG)
def test_long_histories_are_those_of_hopper(name, monkeypatch):
    inputs = KINDS[name].inputs(torch.bfloat16)
    if not is_hopper(inputs.q.device):
        pytest.skip("needs a Hopper GPU")
    from jagged_kernels.attention.hopper import backward as hopper_backward
    from jagged_kernels.attention.hopper import forward as hopper_forward

    launched = []
    passes = "launch_backward_in_one_pass" if "one pass" in name else "launch_backward"
    for module, launcher in ((hopper_forward, "launch_forward"), (hopper_backward, passes)):
        real = getattr(module, launcher)
        monkeypatch.setattr(
            module,
            launcher,
            lambda *args, _real=real, **rest: launched.append(_real) or _real(*args, **rest),
        )
    KINDS[name].run("triton", inputs)
    assert len(launched) == 2


# What walks again calls, by the module that calls it.
AGAIN = [(triton_sums, "add_seen"), (split_backward, "add_seen"), (short, "attend_by_token"),
         (short, "differentiate_by_token")]  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel calls what it was compiled with")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in LONG])
def test_finite_numbers_are_walked_once(name, monkeypatch):
    """Or they would be slow, and not those of a call without a mask."""

    def again(*args):
        raise AssertionError("a second walk")

    for module, function in AGAIN:
        monkeypatch.setattr(module, function, again)
    KINDS[name].run("triton", KINDS[name].inputs(torch.float32))


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_nobody_sees(backend, place):
    """Its own gradients are 0, and nothing is touched."""
    kind = KINDS["cross window"]
    inputs, clean = kind.inputs(torch.float32), _clean("cross window", backend, torch.float32)
    unseen = ~kind.seen(inputs).any(0)
    assert unseen.any()
    getattr(inputs, place)[unseen.to(DEVICE)] = math.nan
    for name, result in kind.run(backend, inputs).items():
        assert result.isnan().sum() == 0, name
        torch.testing.assert_close(result, clean[name])
    assert not clean["dk"][unseen.to(DEVICE)].any()


@pytest.mark.parametrize("seed", range(4))
def test_sums_over_what_is_seen_count_as_sums_of_numbers_do(seed):
    """Against every term by itself: signs of inf, 0 * inf, inf - inf, NaN."""
    torch.manual_seed(seed)
    weights = torch.randn(2, 7, 9)
    weights[torch.rand(weights.shape) < 0.2] = 0.0
    x = torch.randn(2, 9, 5)
    for value in (math.inf, -math.inf, math.nan):
        x[torch.rand(x.shape) < 0.06] = value
    seen = torch.rand(7, 9) < 0.6
    terms = torch.where(seen[:, :, None], weights[..., None] * x[:, None], 0.0)
    assert not terms.isfinite().all()
    torch.testing.assert_close(seen_product(weights, x, seen), terms.sum(2), equal_nan=True)


@triton.jit
def _add_seen_kernel(acc_ptr, weights_ptr, x_ptr, seen_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + column
    seen = tl.load(seen_ptr + place) != 0
    acc, weights = tl.load(acc_ptr + place), tl.load(weights_ptr + place)
    tl.store(acc_ptr + place, add_seen(acc, weights, tl.load(x_ptr + place), seen, "ieee"))


@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_kernels_sum_as_numbers_do(seed, bad):
    torch.manual_seed(seed)
    weights, x, start = torch.randn(3, 16, 16, device=DEVICE).unbind(0)
    weights[torch.rand(16, 16, device=DEVICE) < 0.2] = 0.0
    for value in (math.inf, -math.inf, math.nan) if bad else ():
        x[torch.rand(16, 16, device=DEVICE) < 0.04] = value
    seen = torch.rand(16, 16, device=DEVICE) < 0.6
    # Of what is hidden, neither counts.
    weights[~seen & (torch.rand(16, 16, device=DEVICE) < 0.1)] = math.nan
    terms = torch.where(seen[:, :, None], weights[..., None] * x[None], 0.0)
    acc = start.clone()
    launch(_add_seen_kernel, 1, (acc, weights, x.contiguous(), seen.byte()), {"SIZE": 16})
    torch.testing.assert_close(acc, start + terms.sum(1), equal_nan=True)
    assert acc.isfinite().all() != bad


@pytest.mark.parametrize("mask", [CAUSAL, {"window": (5, 3)}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_parts_of_gradients_that_are_not_finite_are_computed_again(place, mask):
    """As Hopper's backward leaves them: other parts stay, these become right."""
    kind = Kind(_kind(SELF, IN_SELF, {}, grouped=True).inputs, IN_SELF, mask)
    inputs, part, tile = kind.inputs(torch.float16), 16, 32
    spoil(inputs, Bad(place, kind.tokens[place], 0), math.nan)
    expected = kind.run("reference", inputs.double())
    left, right = resolve_window(mask.get("causal", False), mask.get("window"))
    rows, rows_t = (
        build_rows(
            inputs.q_offsets, inputs.k_offsets, tokens=inputs.q.shape[0], tile=tile, left=a, right=b
        )
        for a, b in ((left, right), (right, left))
    )
    delta = (expected["o"] * inputs.d_o).sum(-1) - inputs.d_lse
    lse2 = (expected["lse"] / math.log(2)).float()
    # The first part of each tile is taken for right.
    first_parts = torch.zeros(inputs.q.shape[0], dtype=torch.bool, device=DEVICE)
    for start, end in rows[:, :2].tolist():
        first_parts[start : min(end, start + part)] = True
    found = [torch.full_like(x, 7.0) for x in (inputs.q, inputs.k, inputs.v)]
    for gradient in found[:2]:
        gradient[~first_parts, :, 1] = math.inf
    q, k, v, d_o = inputs.q, inputs.k, inputs.v, inputs.d_o
    before = [gradient.clone() for gradient in found]
    for alarm in (0, 1):
        for gradient, was in zip(found, before, strict=True):
            assert torch.equal(gradient, was)
        launch_exact_backward(
            d_o, q, k, v, lse2, delta.float(), found[0], (found[1], found[2]), rows, rows_t,
            Call.of(q, k, v, d_o, left=left, right=right, scale=q.shape[2] ** -0.5),
            torch.tensor(alarm, dtype=torch.int32, device=DEVICE),
            tile=tile, part_q=part, part_k=part, left=left, right=right,
        )  # fmt: skip
    for gradient, name in zip(found, ("dq", "dk", "dv"), strict=True):
        assert (gradient[first_parts] == 7.0).all(), name
        exact, again = expected[name][~first_parts], gradient[~first_parts].double()
        assert torch.equal(again.isnan(), exact.isnan()), name
        error = (again - exact).nan_to_num(0.0).abs().max()
        scale = exact.nan_to_num(0.0).abs().max()
        assert error <= FACTOR * torch.finfo(torch.float16).eps * scale, (name, error, scale)
