"""Split attention against the specification in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DIFFERENT_DIMS, RESULTS, Case, Inputs, Standard
from torch import Tensor

from jagged_kernels.attention.split.backward import launch_split_backward
from jagged_kernels.attention.split.forward import launch_split_forward
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.spans import build_partition, split_backward_fits, split_partitions

BLOCK = 16
POLICIES = [("stream", 1), ("stream", 5), ("stream", 64), ("split", 3), ("rows", 1)]
EVERY_LENGTH = Case([3, 1, 0, 2, 1, 4, 2], [0, 1, BLOCK, BLOCK - 1, 7 * BLOCK + 5, BLOCK + 1, 40])


def run_split(
    inputs: Inputs,
    policy: Any = "stream",
    programs: int | None = 5,
    *,
    tile: int = 16,
    backward: bool = True,
    every_key_seen: bool = False,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> dict[str, Tensor]:
    """Results as `attention_cases.run` gives them; `programs` None takes `split_partitions`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    left, right = window[0], 0 if causal else window[1]
    rows = build_rows(
        inputs.q_offsets, inputs.k_offsets, tokens=q.shape[0], tile=tile, left=left, right=right
    )
    rows_t = build_rows(
        inputs.k_offsets, inputs.q_offsets, tokens=k.shape[0], tile=32, left=right, right=left
    )
    options: dict[str, Any] = {"tile_q": tile, "left": left, "right": right}
    options["scale"] = scale or q.shape[2] ** -0.5

    if programs is None:
        partition, partition_t = split_partitions(
            rows, heads=q.shape[1], kv_heads=k.shape[1], tile_q=tile,
            head_dim=max(q.shape[2], v.shape[2]), element_size=q.element_size(),
            k_tokens=k.shape[0],
        )  # fmt: skip
    else:
        partition = build_partition(rows, block=BLOCK, programs=programs, policy=policy)
        partition_t = partition

    o, lse2 = launch_split_forward(q, k, v, rows, partition, **options)
    assert lse2 is not None
    results = [o, lse2 * math.log(2)]
    if backward:
        results += launch_split_backward(
            inputs.d_o, inputs.d_lse * math.log(2), q, k, v, o, lse2, rows,
            partition_t, rows_t=None if every_key_seen else rows_t, tile_k=32,
            **options,
        )  # fmt: skip
    return dict(zip(RESULTS, results, strict=False))


def assert_exact(
    inputs: Inputs, *policies: tuple[Any, int | None], scale: float | None = None,
    causal: bool = False, window: tuple[int, int] = (-1, -1), **options: Any,
) -> None:  # fmt: skip
    mask = {"scale": scale, "causal": causal, "window": window}
    standard = Standard(inputs, **mask)
    for policy, programs in policies:
        ours = run_split(inputs, policy, programs, **mask, **options)
        standard.assert_met(ours, f"{policy} {programs}")


# --- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_length_under_every_policy(policy):
    assert_exact(EVERY_LENGTH.inputs(torch.float32), policy)


@pytest.mark.parametrize(
    "lengths",
    [[33] * 4, [300, 1, 2, 0, 5], [0, 0, 0, 0, 0, 100, 0, 0, 0]],
    ids=["constant", "one whale", "many empty"],
)
def test_skews(lengths):
    inputs = Case([2] * len(lengths), lengths).inputs(torch.float32)
    assert_exact(inputs, ("stream", 7))


@pytest.mark.parametrize(("queries", "tile"), [(1, 16), (3, 16), (16, 16), (17, 32)])
def test_dense_queries(queries, tile):
    """Every user has queries and there is no window: nothing needs zeroing."""
    inputs = Case([queries] * 3, [5, 70, 16], heads=2, kv_heads=1).inputs(torch.float32)
    assert_exact(inputs, ("stream", 4), tile=tile, every_key_seen=True)


def test_users_with_several_tiles_forward():
    inputs = Case([40, 3, 17], [60, 5, 33], heads=2, kv_heads=1).inputs(torch.float32)
    assert_exact(inputs, ("stream", 6), ("split", 2), backward=False, causal=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 2), (5, 1)])
def test_grouped_query_heads(heads, kv_heads):
    """Groups of 1, 2, 3 (in a tile for 4) and 5 heads."""
    inputs = Case([3, 1, 0], [70, 20, 9], heads=heads, kv_heads=kv_heads).inputs(torch.float32)
    assert_exact(inputs, ("stream", 3))


def test_a_group_too_large_for_one_tile():
    inputs = Case([2], [40], heads=9, kv_heads=1).inputs(torch.float32)
    assert_exact(inputs, ("stream", 3), backward=False)
    cpu = torch.device("cpu")
    assert not split_backward_fits(9, 1, 16, 64, 2, cpu)
    assert split_backward_fits(2, 1, 64, 128, 2, cpu)
    assert not split_backward_fits(2, 1, 64, 129, 2, cpu)
    assert not split_backward_fits(2, 1, 64, 128, 4, cpu)
    with pytest.raises(ValueError, match="9 heads of 16 queries and head_dim 16 do not fit"):
        run_split(inputs)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (24, 40), (72, 16)])
def test_any_head_dim(dim, dim_v):
    case = Case([2, 1], [50, 3], heads=1, kv_heads=1, dim=dim, dim_v=dim_v)
    assert_exact(case.inputs(torch.float32), ("stream", 3))


def test_more_pieces_than_the_merge_reads_at_a_time():
    """Many numbers a piece, so that it reads four pieces at a time, here of eight."""
    for dim, dim_v in ((16, 256), (256, 16)):
        case = Case([3], [8 * BLOCK], heads=1, kv_heads=1, dim=dim, dim_v=dim_v)
        inputs = case.inputs(torch.float32)
        assert_exact(inputs, ("split", 8), tile=32)
        # The largest score by far, in the last piece; of few bits, so that no product rounds.
        inputs.q[0] = (4 * inputs.q[0]).round() / 4
        inputs.k[-2] = 100 * inputs.q[0]
        assert_exact(inputs, ("split", 8), tile=32, backward=False)


@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True},
        {"window": (20, 3)},
        {"window": (2, -1)},
        {"window": (4, 0), "scale": -0.3},
        {"scale": -0.3},
    ],
    ids=str,
)
def test_masks_and_scales(mask):
    """More queries than keys, too: some queries see nothing, and most keys are not seen."""
    inputs = Case([5, 9, 2, 0], [70, 4, 40, 20]).inputs(torch.float32)
    assert_exact(inputs, ("stream", 4), **mask)


def test_float16():
    assert_exact(EVERY_LENGTH.inputs(torch.float16), ("stream", 5))


def test_every_element_is_written(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    inputs = EVERY_LENGTH.inputs(torch.float32)
    for window in ((-1, -1), (5, 0), (0, 5)):
        for name, result in run_split(inputs, window=window).items():
            assert not result.isnan().any(), name


def test_nan_stays_with_its_user():
    inputs = Case([2, 1, 2], [40, 30, 50]).inputs(torch.float32)
    clean = run_split(inputs, programs=7)
    for name in "qkv":
        users = inputs.q_offsets if name == "q" else inputs.k_offsets
        getattr(inputs, name)[slice(*users[1:3].tolist())] = math.nan
    for name, result in run_split(inputs, programs=7).items():
        users = inputs.k_offsets if name in ("dk", "dv") else inputs.q_offsets
        start, end = users[1:3].tolist()
        assert result[start:end].isnan().all(), name
        for healthy in (slice(0, start), slice(end, None)):
            assert torch.equal(result[healthy], clean[name][healthy]), name


def test_enormous_logits():
    """All equal, so that the answer is the mean; then one key far above the rest, in the middle of
    a row that is cut."""
    inputs = Case([2], [90], heads=1, kv_heads=1).inputs(torch.float32)
    inputs.q.fill_(1.0)
    inputs.k.fill_(-(2.0**100))
    result = run_split(inputs, programs=3)
    torch.testing.assert_close(result["o"], inputs.v.mean(0).expand(2, 1, -1))
    assert all(torch.isfinite(result[name]).all() for name in RESULTS)
    inputs.k[47] = 0.0
    result = run_split(inputs, programs=3)
    torch.testing.assert_close(result["o"], inputs.v[47].expand(2, 1, -1))
    assert all(torch.isfinite(result[name]).all() for name in RESULTS)


def test_reruns_are_bit_identical():
    inputs = EVERY_LENGTH.inputs(torch.float32)
    first, second = run_split(inputs), run_split(inputs)
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


def test_programs_change_nothing_but_rounding():
    inputs = Case([2, 1], [150, 20], heads=1, kv_heads=1).inputs(torch.float32)
    one = run_split(inputs, programs=1)
    for programs in (2, 3, 11):
        for name, result in run_split(inputs, programs=programs).items():
            torch.testing.assert_close(result, one[name], atol=2e-6, rtol=2e-6, msg=name)


def test_inputs_in_any_layout():
    inputs = Case([2, 3], [40, 10]).inputs(torch.float32)
    contiguous = run_split(inputs)
    packed = torch.stack([inputs.k, inputs.v], dim=1)
    inputs.k, inputs.v = packed.unbind(1)
    inputs.q = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    inputs.d_o = inputs.d_o.repeat_interleave(2, -1)[..., ::2]
    inputs.d_lse = inputs.d_lse.t().contiguous().t()
    assert not inputs.k.is_contiguous()
    assert not inputs.q.is_contiguous()
    for name, result in run_split(inputs).items():
        assert torch.equal(result, contiguous[name]), name


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"), [([], []), ([0, 0], [0, 0]), ([0, 0], [5, 0]), ([2, 1], [0, 0])]
)
def test_batches_without_events(policy, q_lengths, k_lengths):
    result = run_split(Case(q_lengths, k_lengths).inputs(torch.float32), *policy)
    assert result["o"].shape[0] == sum(q_lengths)
    for name in ("o", "dq", "dk", "dv"):
        assert (result[name] == 0).all(), name
    assert (result["lse"] == -math.inf).all()


# --- on the device --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"window": (100, 3)}], ids=str)
def test_default_shapes_on_the_device(dtype, dim, mask):
    case = Case([8, 1, 16, 0, 3, 5], [3000, 64, 129, 70, 0, 1], heads=4, kv_heads=2, dim=dim)
    assert_exact(case.inputs(dtype), ("stream", None), **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), DIFFERENT_DIMS)
def test_head_dims_that_differ_on_the_device(dtype, dim, dim_v):
    case = Case([3] * 5, [300, 17, 40, 64, 130], heads=4, kv_heads=2, dim=dim, dim_v=dim_v)
    assert_exact(case.inputs(dtype), ("stream", None), every_key_seen=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "tile", "dim", "dim_v"),
    [(20, 32, 16, 16), (20, 32, 64, 64), (20, 32, 128, 128), (20, 32, 256, 256), (64, 64, 16, 16),
     (64, 64, 64, 64), (64, 64, 128, 128), (64, 64, 64, 32), (64, 64, 64, 16), (64, 64, 32, 16),
     (64, 64, 128, 16), (64, 64, 16, 64)],
)  # fmt: skip
def test_many_queries_in_float32_on_the_device(queries, tile, dim, dim_v):
    case = Case([queries] * 3, [300, 17, 1000], heads=2, kv_heads=2, dim=dim, dim_v=dim_v)
    assert_exact(case.inputs(torch.float32), ("stream", None), tile=tile, every_key_seen=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "tile"), [(1, 16), (8, 16), (30, 32), (64, 64)])
def test_skewed_histories_on_the_device(queries, tile):
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(64, generator=generator) * 1.2 + 6).exp().clamp(1, 16384).int()
    lengths[7] = 16384
    case = Case([queries] * 64, lengths.tolist(), heads=4, kv_heads=4, dim=64)
    inputs = case.inputs(torch.bfloat16)
    assert_exact(
        inputs, ("stream", None), ("split", 4), ("rows", 1), tile=tile, every_key_seen=True
    )
    first, second = (run_split(inputs, programs=None, tile=tile) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    inputs = EVERY_LENGTH.inputs(torch.bfloat16)
    run_split(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_split(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements():
    """The last user, far beyond int32 addresses, is as exact as alone."""
    heads, dim, last = 8, 64, 3000
    tokens = 2**31 // (heads * dim) + 5000
    lengths = [tokens - last, last]
    k, v = (
        torch.empty(tokens, heads, dim, device="cuda", dtype=torch.bfloat16).normal_()
        for _ in range(2)
    )
    alone = Case([4], [last], heads=heads, kv_heads=heads, dim=dim).inputs(torch.bfloat16)
    alone.k, alone.v = k[-last:], v[-last:]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    both = Inputs(
        q=alone.q.repeat(2, 1, 1), k=k, v=v, d_o=alone.d_o.repeat(2, 1, 1),
        d_lse=alone.d_lse.repeat(2, 1),
        q_offsets=torch.tensor([0, 4, 8], device="cuda"), k_offsets=offsets,
    )  # fmt: skip
    expected = run_split(alone, "rows", 1)
    for name, result in run_split(both, "rows", 1).items():
        assert torch.equal(result[-expected[name].shape[0] :], expected[name]), name
