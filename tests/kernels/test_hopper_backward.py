"""The Gluon backward on its own: users that begin anywhere, masks, neighbours, reruns, graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_cases import TILE as PLAIN_TILE
from attention_cases import Case, Inputs, Standard
from choice_cases import hopper_fits
from torch import Tensor

from jagged_kernels.attention.hopper.backward import launch_backward
from jagged_kernels.attention.hopper.dkv import _dkv_kernel
from jagged_kernels.attention.hopper.dq import _dq_kernel
from jagged_kernels.attention.plain.forward import launch_forward
from jagged_kernels.schedule.policy.hopper import forward_config
from jagged_kernels.schedule.rows import build_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

GRADIENTS = ("dq", "dk", "dv")
# Empty users, one token, around a block (64) and a tile (128), and starts that are odd.
ODD = [0, 1, 63, 64, 65, 129, 1000, 0, 128, 256, 7, 300]
CROSS = ([5, 0, 200, 64, 130, 300], [300, 10, 0, 64, 1000, 20])
CASES = {
    "one tile": Case([128]),
    "whole blocks": Case([1024, 1024]),
    "one short": Case([100]),
    "one token": Case([1]),
    "odd": Case(ODD),
    "odd, int32 offsets": Case(ODD, offsets_dtype=torch.int32),
    "ends in the middle of a tile": Case([700, 513], mask={"causal": True}),
    "causal": Case(ODD, mask={"causal": True}),
    "window": Case(ODD, mask={"window": (64, 0)}),
    "two-sided window": Case(ODD, mask={"window": (300, 100)}),
    "left window": Case(ODD, mask={"window": (5, -1)}),
    "cross": Case(*CROSS),
    "cross causal": Case(*CROSS, mask={"causal": True}),
    "grouped": Case(ODD, heads=4, kv_heads=2),
    "grouped causal": Case(ODD, heads=4, kv_heads=2, mask={"causal": True}),
    "grouped cross causal": Case(*CROSS, heads=4, kv_heads=2, mask={"causal": True}),
    "one key head": Case(ODD, heads=4, kv_heads=1),
    "negative scale": Case(ODD, mask={"scale": -0.3}),
    "large scores": Case(ODD, mask={"scale": 4.0}),
    "more tiles than programs": Case(list(range(1, 300, 3)), heads=4, kv_heads=4),
}


@pytest.fixture(params=[64, 128])
def dim(request) -> int:
    return request.param


def _inputs(case: Case, dim: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return replace(case, dim=dim).inputs(dtype)


def _band(case: Case) -> dict[str, Any]:
    left, right = case.mask.get("window") or (-1, -1)
    return {"left": left, "right": 0 if case.mask.get("causal") else right}


def _scale(inputs: Inputs, case: Case) -> float:
    return case.mask.get("scale", 1 / math.sqrt(inputs.q.shape[2]))


def _forward(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    band = _band(case)
    rows = build_rows(
        inputs.q_offsets, inputs.k_offsets, tokens=inputs.q.shape[0], tile=PLAIN_TILE, **band
    )
    o, lse2 = launch_forward(
        inputs.q, inputs.k, inputs.v, rows,
        tile_q=PLAIN_TILE, left=band["left"], right=band["right"], scale=_scale(inputs, case),
    )  # fmt: skip
    assert lse2 is not None
    return o, lse2


def _tables(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    left, right = _band(case).values()
    q_offsets, k_offsets = inputs.q_offsets, inputs.k_offsets
    q_tokens, k_tokens = inputs.q.shape[0], inputs.k.shape[0]
    tile = forward_config(inputs.q.shape[2]).tile_q
    return (
        build_rows(q_offsets, k_offsets, tokens=q_tokens, tile=tile, left=left, right=right),
        build_rows(k_offsets, q_offsets, tokens=k_tokens, tile=tile, left=right, right=left),
    )


def _backward(
    inputs: Inputs, case: Case, forward: tuple[Tensor, Tensor], *, d_lse: bool = True
) -> dict[str, Tensor]:
    assert hopper_fits(inputs.q, inputs.k, inputs.v)
    # The kernels work in base 2: lse = ln(2) * lse2.
    d_lse2 = inputs.d_lse * math.log(2) if d_lse else None
    tables = _tables(inputs, case)
    _leave_nan_in_free_memory(inputs)
    grads = launch_backward(
        inputs.d_o, d_lse2, inputs.q, inputs.k, inputs.v, *forward, *tables,
        **_band(case), scale=_scale(inputs, case),
    )  # fmt: skip
    return dict(zip(GRADIENTS, grads, strict=True))


def _leave_nan_in_free_memory(inputs: Inputs) -> None:
    """So that a number that nobody wrote is seen, in outputs and between the kernels."""
    tokens, heads, _ = inputs.q.shape
    for like in (inputs.q, inputs.k, inputs.v):
        torch.full_like(like, math.nan, memory_format=torch.contiguous_format)
    torch.full((heads, 2, tokens), math.nan, device="cuda")


def _assert_exact(
    inputs: Inputs, case: Case, ours: dict[str, Tensor], *, d_lse: bool = True
) -> None:
    if not d_lse:
        inputs = replace(inputs, d_lse=torch.zeros_like(inputs.d_lse))
    Standard(inputs, **case.mask).assert_met(ours, "hopper")


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in GRADIENTS)


@pytest.mark.parametrize("name", CASES)
def test_exact(name, dim):
    case = CASES[name]
    inputs = _inputs(case, dim)
    _assert_exact(inputs, case, _backward(inputs, case, _forward(inputs, case)))


@pytest.mark.parametrize("name", ["odd", "cross causal", "grouped causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_without_a_gradient_of_lse(name, dtype, dim):
    case = CASES[name]
    inputs = _inputs(case, dim, dtype)
    ours = _backward(inputs, case, _forward(inputs, case), d_lse=False)
    _assert_exact(inputs, case, ours, d_lse=False)


def test_scale_0(dim):
    case = Case(ODD, mask={"scale": 0.0})
    inputs = _inputs(case, dim)
    ours = _backward(inputs, case, _forward(inputs, case))
    assert not ours["dq"].any()
    assert not ours["dk"].any()
    ends = inputs.q_offsets.tolist()
    for start, end in pairwise(ends):
        mean = inputs.d_o[start:end].double().mean(0, keepdim=True).expand(end - start, -1, -1)
        torch.testing.assert_close(ours["dv"][start:end].double(), mean, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("logit", [-1e4, 1e4, -1e30, 1e30])
def test_enormous_equal_logits(logit, dim):
    """No probability passes 1 by so much that a gradient is infinite."""
    case = CASES["odd"]
    inputs = _inputs(case, dim)
    inputs.q.fill_(1.0)
    inputs.k.fill_(logit / dim)
    ours = _backward(inputs, case, _forward(inputs, case))
    for name, gradient in ours.items():
        assert torch.isfinite(gradient).all(), name


def test_packed_qkv(dim):
    case = CASES["odd"]
    inputs = _inputs(case, dim)
    packed = torch.stack([inputs.q, inputs.k, inputs.v], dim=1)
    inputs.q, inputs.k, inputs.v = packed.unbind(1)
    _assert_exact(inputs, case, _backward(inputs, case, _forward(inputs, case)))


def test_one_gradient_for_all_tokens(dim):
    case = CASES["odd"]
    inputs = _inputs(case, dim)
    inputs.d_o = inputs.d_o[:1].expand_as(inputs.d_o)
    _assert_exact(inputs, case, _backward(inputs, case, _forward(inputs, case)))


@pytest.mark.parametrize("name", ["odd", "causal", "two-sided window", "grouped"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_with_their_user(name, bad, dim):
    case = CASES[name]
    clean = _inputs(case, dim)
    o, lse2 = _forward(clean, case)
    expected = _backward(clean, case, (o, lse2))
    ends = clean.q_offsets.tolist()
    for user in (3, 6, 9):
        tokens = slice(ends[user], ends[user + 1])
        parts = {part: getattr(clean, part).clone() for part in ("q", "k", "v", "d_o", "d_lse")}
        forward = o.clone(), lse2.clone()
        for x in (*parts.values(), *forward):
            x[tokens] = bad
        ours = _backward(replace(clean, **parts), case, forward)
        for gradient in GRADIENTS:
            ours[gradient][tokens] = expected[gradient][tokens]
        assert _same(ours, expected), user


@pytest.mark.parametrize("lengths", [[2048] * 8 + ODD, list(range(1, 300)), [50] * 132], ids=len)
def test_reruns_are_bit_identical(lengths, dim):
    """Also where a program's tiles follow each other so fast that their loads could overtake it."""
    case = Case(lengths, heads=4, kv_heads=4)
    inputs = _inputs(case, dim)
    forward = _forward(inputs, case)
    first = _backward(inputs, case, forward)
    assert all(_same(first, _backward(inputs, case, forward)) for _ in range(20))


def test_a_captured_graph_replays(dim):
    case = Case([1000, 77, 513])
    inputs = _inputs(case, dim)
    forward, tables = _forward(inputs, case), _tables(inputs, case)
    args = (inputs.d_o, None, inputs.q, inputs.k, inputs.v, *forward, *tables)
    options = {**_band(case), "scale": _scale(inputs, case)}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch_backward(*args, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch_backward(*args, **options)
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    expected = launch_backward(*args, **options)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_dq_alone(dim):
    case = Case([1000, 77, 513])
    inputs = _inputs(case, dim)
    args = (inputs.d_o, None, inputs.q, inputs.k, inputs.v)
    args = (*args, *_forward(inputs, case), *_tables(inputs, case))
    options = {**_band(case), "scale": _scale(inputs, case)}
    dq, dk, dv = launch_backward(*args, **options, wanted_kv=False)
    assert dk.numel() == dv.numel() == 0
    assert torch.equal(dq, launch_backward(*args, **options)[0])


def test_other_batches_do_not_recompile(dim):
    def compiled():
        kernels = (_dq_kernel, _dkv_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for lengths in ([1], [16], [64, 64], [5, 128, 1], ODD):
        case = Case(lengths)
        inputs = _inputs(case, dim)
        _backward(inputs, case, _forward(inputs, case))
        counts.append(compiled())
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts


def test_what_does_not_fit():
    inputs = _inputs(Case([10]), 128)
    q, k, v = inputs.q, inputs.k, inputs.v
    assert hopper_fits(q, k, v)
    assert not hopper_fits(q.float(), k.float(), v.float())
    assert not hopper_fits(*(x[..., :32].contiguous() for x in (q, k, v)))
    assert not hopper_fits(q, k, v[..., :64])
    assert not hopper_fits(q[:0], k, v)
    assert not hopper_fits(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
