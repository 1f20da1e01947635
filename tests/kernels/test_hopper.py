"""The forward for Hopper against the specification in float64, and what it must not do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import score_policies
import torch
from attention_cases import DEVICE, Case, Inputs, Standard, run
from captured import captured
from choice_cases import hopper_fits, on_hopper
from hopper_backward_cases import deal_out_beforehand
from processes import run_python
from torch import Tensor

from jagged_kernels import JaggedTensor, attention_schedule
from jagged_kernels.schedule.policy.hopper import forward_config
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window

# Around parts of 64 queries, tiles of 128 and blocks of 128 keys.
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 0, 7, 300]
DIMS = pytest.mark.parametrize("dim", [64, 128])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def attend(
    inputs: Inputs, *, causal: bool = False, window: tuple[int, int] | None = None,
    scale: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """o and lse, as `attention_cases.run` gives them."""
    from jagged_kernels.attention.hopper.forward import launch_forward

    q, k, v = inputs.q, inputs.k, inputs.v
    assert hopper_fits(q, k, v)
    left, right = resolve_window(causal, window)
    dim = q.shape[2]
    rows = build_rows(
        inputs.q_offsets, inputs.k_offsets, tokens=q.shape[0], tile=forward_config(dim).tile_q,
        left=left, right=right,
    )  # fmt: skip
    scale = 1 / math.sqrt(dim) if scale is None else scale
    o, lse2 = launch_forward(q, k, v, rows, left=left, right=right, scale=scale)
    assert lse2 is not None
    return {"o": o, "lse": lse2 * math.log(2)}


def assert_exact(inputs: Inputs, **mask: Any) -> None:
    Standard(inputs, **mask).assert_met(attend(inputs, **mask), "hopper")


def half(case: Case, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return case.inputs(dtype)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


# --- results --------------------------------------------------------------------------------------


@on_hopper
@DIMS
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"causal": True}, torch.float16),
        ({"causal": True}, torch.bfloat16),
        ({"window": (64, 0)}, torch.bfloat16),
        ({"window": (300, 100)}, torch.bfloat16),
        ({"window": (5, -1)}, torch.bfloat16),
        ({"scale": -0.3}, torch.bfloat16),
    ],
    ids=str,
)
def test_every_length(dim, mask, dtype):
    assert_exact(half(Case(LENGTHS, dim=dim), dtype), **mask)


@on_hopper
@DIMS
@CAUSAL
def test_queries_and_keys_of_other_lengths(dim, causal):
    case = Case([5, 0, 200, 64, 130, 1, 300, 9], [300, 10, 0, 64, 1000, 129, 20, 1], dim=dim)
    assert_exact(half(case), causal=causal)


@on_hopper
@DIMS
@CAUSAL
def test_more_tiles_than_programs(dim, causal):
    """Rings of buffers and their barriers go on from tile to tile, also past empty parts."""
    assert_exact(half(Case(list(range(1, 420, 6)), heads=4, kv_heads=4, dim=dim)), causal=causal)


@on_hopper
@DIMS
def test_tiles_that_are_counted_out(dim, monkeypatch):
    """The same, to the bit, as those that are dealt out beforehand."""
    inputs = half(Case(list(range(1, 420, 6)), heads=4, kv_heads=4, dim=dim))
    counted = attend(inputs, causal=True)
    deal_out_beforehand(monkeypatch)
    assert_same(attend(inputs, causal=True), counted)


@on_hopper
@DIMS
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_heads(dim, kv_heads):
    assert_exact(half(Case(LENGTHS, heads=4, kv_heads=kv_heads, dim=dim)), causal=True)


@on_hopper
@DIMS
def test_scale_0_averages_the_values(dim):
    inputs = half(Case(LENGTHS, dim=dim))
    ours = attend(inputs, causal=True, scale=0.0)
    inputs.q.zero_()
    Standard(inputs, causal=True).assert_met(ours, "scale 0")


@on_hopper
@DIMS
def test_packed_qkv_is_read_in_place(dim):
    inputs = half(Case(LENGTHS, dim=dim))
    separate = attend(inputs)
    packed = torch.stack([inputs.q, inputs.k, inputs.v], dim=1)
    inputs.q, inputs.k, inputs.v = packed.unbind(1)
    assert not inputs.k.is_contiguous()
    assert_same(attend(inputs), separate)


# --- enormous scores ------------------------------------------------------------------------------


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize(
    ("dtype", "q", "k"),
    [
        (torch.bfloat16, 1.0, 1e6),
        (torch.bfloat16, 1.0, 1e10),
        (torch.bfloat16, 1.0, -1e10),
        (torch.bfloat16, 1e14, 1e14),
        (torch.float16, 6e4, 6e4),
        (torch.float16, 6e4, -6e4),
    ],
    ids=str,
)
def test_enormous_equal_logits(dim, causal, dtype, q, k):
    """A softmax does not change when all its logits move."""
    inputs = half(Case(LENGTHS, dim=dim), dtype)
    inputs.q.fill_(q)
    inputs.k.fill_(k)
    shifted = attend(inputs, causal=causal)
    seen = shifted["lse"] != -math.inf
    assert torch.isfinite(shifted["lse"][seen]).all()
    inputs.k.zero_()
    torch.testing.assert_close(shifted["o"], attend(inputs, causal=causal)["o"])


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2.0**16), (torch.float16, 2.0**13)])
def test_enormous_logits(dim, causal, dtype, size):
    """One key takes it all, and it is the right one; the other head's tiles stay as they were."""
    inputs = half(Case(LENGTHS, dim=dim), dtype)
    plain = attend(inputs, causal=causal)
    inputs.q[:, 0] *= size
    inputs.k[:, 0] *= size
    ours = attend(inputs, causal=causal)
    assert torch.equal(ours["o"][:, 1], plain["o"][:, 1])
    exact = run("reference", inputs.double(), tile=None, causal=causal)
    # Half-precision PyTorch overflows here: one rounding of v, and float32 products.
    torch.testing.assert_close(ours["o"][:, 0], exact["o"][:, 0].to(dtype))
    seen = exact["lse"] != -math.inf
    assert torch.equal(seen, ours["lse"] != -math.inf)
    error = (ours["lse"] - exact["lse"])[seen].abs().max()
    assert error < 1e-5 * exact["lse"][seen].abs().max()


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (9, 2)}], ids=str)
def test_marked_parts_are_computed_again(mask):
    """And nothing else is touched. More places (rows, parts, heads) than one program looks at."""
    from jagged_kernels.attention.hopper.exact import launch_exact
    from jagged_kernels.attention.plans import Call, scale_argument

    inputs = Case([70, 0, 33, 16, 1, *[20] * 12], heads=2, kv_heads=1).inputs(torch.float32)
    inputs.q *= 2.0**12
    inputs.k *= 2.0**12
    tokens, tile, part = inputs.q.shape[0], 32, 16
    left, right = resolve_window(mask.get("causal", False), mask.get("window"))
    rows = build_rows(
        inputs.q_offsets, inputs.k_offsets, tokens=tokens, tile=tile, left=left, right=right
    )
    o, lse2 = torch.full_like(inputs.q, 7.0), torch.full(inputs.q.shape[:2], 7.0, device=DEVICE)
    marked = torch.zeros(lse2.shape, dtype=torch.bool, device=DEVICE)
    marks = torch.zeros((rows.shape[0], tile // part, 2), dtype=torch.int8, device=DEVICE)
    starts = rows[:, :1] + torch.arange(0, tile, part, device=DEVICE)
    for (first, last), head in (((0, 16), 1), ((48, 64), 0), ((64, 70), 0), ((119, 120), 1)):
        marked[first:last, head] = True
        # Unused rows are empty and stand at 0, too.
        marks[..., head] |= (starts == first) & (rows[:, :1] < rows[:, 1:2])
    band: dict[str, Any] = {"left": left, "right": right}
    call = Call.of(inputs.q, inputs.k, inputs.v, scale=-0.5, **band)
    shape = call._replace(precision="ieee").shape(tile=tile, block=64)
    scale_log2, negate = scale_argument(-0.5)
    launch_exact(
        inputs.q, inputs.k, inputs.v, o, lse2, marks, rows,
        shape=shape, part_q=part, scale_log2=scale_log2, negate=negate, **band,
    )  # fmt: skip
    exact = run("reference", inputs.double(), tile=None, scale=-0.5, **mask)
    assert (o[~marked] == 7).all()
    assert (lse2[~marked] == 7).all()
    torch.testing.assert_close(o[marked].double(), exact["o"][marked], rtol=1e-4, atol=1e-4)
    lse = lse2[marked].double() * math.log(2)
    torch.testing.assert_close(lse, exact["lse"][marked], rtol=1e-5, atol=0)


# --- neighbours, reruns, graphs, compilation ------------------------------------------------------


@on_hopper
@DIMS
@CAUSAL
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38], ids=str)
def test_a_user_does_not_depend_on_neighbours(dim, causal, value):
    inputs = half(Case(LENGTHS, dim=dim))
    clean = attend(inputs, causal=causal)
    bounds = inputs.q_offsets.tolist()
    for user in (1, 3, 6, 8, 10):
        sick = slice(*bounds[user : user + 2])
        kept = [tensor[sick].clone() for tensor in (inputs.q, inputs.k, inputs.v)]
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor[sick] = value
        for name, result in attend(inputs, causal=causal).items():
            for healthy in (slice(0, sick.start), slice(sick.stop, None)):
                assert torch.equal(result[healthy], clean[name][healthy]), (user, name)
            if math.isnan(value):
                assert result[sick].isnan().all(), (user, name)
        for tensor, values in zip((inputs.q, inputs.k, inputs.v), kept, strict=True):
            tensor[sick] = values


@on_hopper
@DIMS
@CAUSAL
def test_reruns_are_bit_identical_at_size(dim, causal):
    inputs = half(Case([2048] * 8 + LENGTHS, heads=4, kv_heads=4, dim=dim))
    first = attend(inputs, causal=causal)
    for _ in range(10):
        assert_same(attend(inputs, causal=causal), first)


def _forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    from jagged_kernels.attention.hopper.forward import launch_forward

    tile = forward_config(q.shape[2]).tile_q
    schedule = attention_schedule(JaggedTensor(q, offsets, validate=False), tile_q=tile)
    o, lse2 = launch_forward(q, k, v, schedule.rows, left=-1, right=-1, scale=0.1)
    assert lse2 is not None
    return o, lse2


@on_hopper
@DIMS
def test_a_cuda_graph_follows_new_offsets(dim):
    budget = 1024
    q, k, v = (torch.randn(budget, 4, dim, device="cuda").bfloat16() for _ in range(3))
    offsets = torch.tensor([0, 100, 100, 600, 900, 1000, budget], device="cuda")
    graph, written = captured(lambda: _forward(q, k, v, offsets))
    for new in ([0, 1, 2, 3, 4, 5, budget], [0, 300, 600, 601, 800, budget, budget]):
        offsets.copy_(torch.tensor(new))
        graph.replay()
        for replayed, expected in zip(written, _forward(q, k, v, offsets), strict=True):
            assert torch.equal(replayed, expected)


@on_hopper
def test_it_never_waits_for_the_device():
    q, k, v = (torch.randn(800, 4, 128, device="cuda").bfloat16() for _ in range(3))
    offsets = torch.tensor([0, 0, 700, 797, 800], device="cuda")
    _forward(q, k, v, offsets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _forward(q, k, v, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_hopper
@DIMS
def test_other_batches_do_not_recompile(dim):
    from jagged_kernels.attention.hopper import exact as triton_exact
    from jagged_kernels.attention.hopper import forward as gluon_forward

    kernels = (gluon_forward._forward_kernel, triton_exact._exact_kernel)
    counts = []
    for users, length in ((3, 50), (1, 1), (1, 16), (2, 1), (70, 33), (16, 128), (1, 3000)):
        offsets = torch.arange(users + 1, device="cuda") * length
        q, k, v = torch.randn(3, users * length, 4, dim, device="cuda").half().unbind(0)
        _forward(q, k, v, offsets)
        caches = [cache[0] for kernel in kernels for cache in kernel.device_caches.values()]
        counts.append(sum(map(len, caches)))
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts


@on_hopper
def test_what_does_not_fit():
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    x = zeros(3, 2, 64)
    assert hopper_fits(x, x, x)
    for other in (
        zeros(3, 2, 32),
        zeros(3, 2, 64, dtype=torch.float32),
        zeros(0, 2, 64),
        zeros(3, 2, 65)[..., 1:],
        zeros(3, 2, 128)[..., ::2],
        zeros(1, 2, 64).expand(3, 2, 64),
    ):
        assert not hopper_fits(other, other, other), (other.shape, other.stride())
    assert not hopper_fits(x, x, zeros(3, 2, 128))


COMPILE = "import sys; sys.path.append(sys.argv[1]); import hopper_compile; hopper_compile.main()"


@pytest.mark.long
@pytest.mark.parametrize("policy", ["", "silu"], ids=["softmax", "pointwise"])
def test_it_compiles_without_a_gpu(policy, tmp_path):
    """All in one process, which starts for longer than it compiles."""
    support = str(Path(score_policies.__file__).parent)
    result = run_python(COMPILE, support, policy, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
