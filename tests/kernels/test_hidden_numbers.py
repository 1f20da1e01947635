"""What the mask hides touches nothing: a NaN or inf reaches what sees it, and nothing else."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, FACTOR, TILE, Case, Inputs
from hidden_cases import PLACES, Bad, Kind, spoil, touched
from torch import Tensor

from jagged_kernels import attention_schedule
from jagged_kernels.attention.seen import seen_product

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
    "bias": _kind(SELF, IN_SELF, CAUSAL, bias=True, **TILED),
    "bias, window": _kind(CROSS, IN_CROSS, {"window": (1, 1)}, bias=True, **TILED),
    "dropout": _kind(SELF, IN_SELF, CAUSAL, dropout_p=0.4, **TILED),
}


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
@pytest.mark.parametrize("name", KINDS)
def test_nan_reaches_what_sees_it(name, backend, place):
    kind, clean = KINDS[name], _clean(name, backend, torch.float32)
    inputs = kind.inputs(torch.float32)
    bad = Bad(place, kind.tokens[place], getattr(inputs, place).shape[1] - 1)
    _assert_only_touched(kind, inputs, clean, backend, bad, math.nan)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["causal", "cross window", "dense causal", "short users, causal"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
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
