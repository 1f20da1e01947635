"""Workloads: exactly the batches of the published table, and sweeps that meet their target."""

import pytest
import torch

from jagged_ranking.measure.hard_workloads import hard_workloads, small_hard_workloads
from jagged_ranking.measure.workload_sets import (
    head_dim_sweep,
    length_sweep,
    skew_sweep,
    small_workloads,
    target_workloads,
    waste_sweep,
    with_options,
    workloads,
)
from jagged_ranking.measure.workloads import Workload, setup

BY_NAME = {workload.name: workload for workload in workloads()}


def test_the_named_workloads_are_the_documented_ones() -> None:
    shapes = {w.name: (w.users, w.heads, w.head_dim, w.max_len) for w in workloads()}
    assert shapes == {
        "A": (256, 4, 64, 512),
        "B": (1024, 4, 64, 1024),
        "C": (512, 8, 64, 4096),
        "D": (512, 4, 128, 4096),
        "E": (2048, 4, 32, 512),
        "F": (64, 8, 64, 2048),
        "G": (32, 8, 128, 4096),
        "N": (1152, 4, 128, 2048),
    }
    assert all(w.dtype == torch.bfloat16 and w.seed == 0 for w in workloads())


@pytest.mark.parametrize(
    ("name", "waste", "limit_ms"),
    # The last two columns of the published table, at 3.0 TB/s and 740 TFLOP/s.
    [
        ("A", 0.51, 0.044),
        ("B", 0.87, 0.093),
        ("C", 0.87, 1.14),
        ("D", 0.87, 1.14),
        ("E", 0.87, 0.045),
        ("F", 0.0, 0.74),
        ("G", 0.0, 2.97),
    ],
)
def test_waste_and_limit_of_the_named_workloads(name: str, waste: float, limit_ms: float) -> None:
    facts = BY_NAME[name].facts()
    limit = max(facts["bytes_forward"] / 3.0e12, facts["flops_forward"] / 740e12) * 1e3
    assert facts["waste"] == pytest.approx(waste, abs=0.005)
    assert limit == pytest.approx(limit_ms, rel=0.02)
    assert facts["flops_forward+backward"] == 3.5 * facts["flops_forward"]


def test_lognormal_lengths_are_the_published_batch() -> None:
    lengths = BY_NAME["B"].draw_lengths()
    assert int(lengths.sum()) == 135_639
    assert int(lengths[0]) == int(lengths.max()) == 1024
    assert int(lengths.min()) >= 1


def test_the_hard_workloads_are_the_documented_ones() -> None:
    shapes = {w.name: (w.users, w.heads, w.head_dim, w.max_len) for w in hard_workloads()}
    assert shapes == {
        "K": (512, 4, 96, 1024),
        "L": (256, 2, 128, 8192),
        "W": (513, 4, 64, 16_384),
    }
    small = small_hard_workloads()
    for whole, part in zip(hard_workloads(), small, strict=True):
        assert part.name == f"{whole.name}-small"
        assert (part.distribution, part.group) == (whole.distribution, "workloads")
    assert all(w.max_len <= 512 and w.dtype == torch.float32 for w in small)
    lengths = hard_workloads()[-1].draw_lengths()
    assert int(lengths[0]) == 16_384
    assert (int(lengths[1:].min()), int(lengths[1:].max())) == (1, 128)


def test_uniform_includes_both_ends() -> None:
    workload = Workload(
        name="u", users=2000, heads=1, head_dim=8, max_len=4, distribution="uniform"
    )
    assert set(workload.draw_lengths().tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("waste", [0.0, 0.01, 0.37, 0.5, 0.95, 0.98])
def test_waste_sweep_meets_its_target(waste: float) -> None:
    (workload,) = waste_sweep([waste], users=128, max_len=300)
    lengths = workload.draw_lengths()
    assert workload.facts()["waste"] == pytest.approx(waste, abs=1e-4)
    assert int(lengths.max()) == 300
    assert int(lengths.min()) >= 1
    assert len(lengths) == 128


def test_waste_that_cannot_be_met_is_refused() -> None:
    (workload,) = waste_sweep([0.99], users=4, max_len=100)
    with pytest.raises(ValueError, match=r"waste 0\.99 cannot be met"):
        workload.draw_lengths()


def test_length_sweep_keeps_the_padded_size() -> None:
    sweep = length_sweep((128, 1024, 8192))
    assert [w.users * w.max_len for w in sweep] == [262_144] * 3
    assert [int(w.draw_lengths().max()) for w in sweep] == [128, 1024, 8192]


def test_real_lengths_are_taken_as_they_are() -> None:
    workload = Workload.from_lengths("mine", [3, 0, 7], heads=2, head_dim=8, dtype=torch.float32)
    batch = setup(workload, "cpu")
    assert batch.offsets.tolist() == [0, 3, 3, 10]
    assert workload.max_len == 7
    assert batch.q.shape == (10, 2, 8)


@pytest.mark.parametrize(
    ("name", "users", "queries", "tokens", "longest", "limit_ms"),
    # The published table of target attention; limits at 3.0 TB/s, K and V alone.
    [
        ("T1", 64, 8, 96_285, 16_384, 0.033),
        ("T2", 64, 64, 96_285, 16_384, 0.033),
        ("T3", 512, 8, 589_110, 16_384, 0.201),
        ("T4", 1, 16, 16_384, 16_384, 0.006),
        ("T5", 4096, 1, 502_625, 1024, 0.172),
        ("T6", 64, 1, 319_703, 32_768, 0.218),
    ],
)
def test_target_workloads_are_the_published_ones(
    name: str, users: int, queries: int, tokens: int, longest: int, limit_ms: float
) -> None:
    workload = {w.name: w for w in target_workloads()}[name]
    lengths = workload.draw_lengths()
    assert (workload.users, workload.queries) == (users, queries)
    assert (int(lengths.sum()), int(lengths.max())) == (tokens, longest)
    facts = workload.facts()
    width = workload.heads * workload.head_dim * 2
    assert facts["bytes_forward"] == 2 * (tokens + users * queries) * width
    assert facts["bytes_forward+backward"] == 2 * facts["bytes_forward"]
    assert facts["flops_forward"] == 4 * queries * tokens * workload.heads * workload.head_dim
    assert 2 * tokens * width / 3.0e12 * 1e3 == pytest.approx(limit_ms, rel=0.1)


def test_skews_hold_the_tokens_and_differ_in_the_longest() -> None:
    sweep = skew_sweep((16, 64), tokens=10_007)
    assert len(sweep) == 6
    for workload in sweep:
        lengths = workload.draw_lengths()
        assert int(lengths.sum()) == 10_007
        assert int(lengths.min()) >= 1
        assert int(lengths.max()) == workload.max_len
    longest = [(w.distribution, w.users, w.max_len) for w in sweep]
    assert longest[0] == ("constant", 16, 626)
    assert longest[2][2] == pytest.approx(0.75 * 10_007, rel=0.01)
    assert longest[3][2] < longest[4][2] < longest[5][2]


def test_skews_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        skew_sweep((16,), tokens=20)


def test_head_dims_share_their_histories() -> None:
    first, *others = head_dim_sweep((32, 96), users=9, max_len=64)
    assert [w.head_dim for w in (first, *others)] == [32, 96]
    assert all(torch.equal(first.draw_lengths(), w.draw_lengths()) for w in others)


def test_candidates_are_dense() -> None:
    workload = Workload.from_lengths("t", [3, 0, 7], heads=2, head_dim=8, queries=5)
    batch = setup(workload, "cpu")
    assert batch.q.shape == batch.dout.shape == (3, 5, 2, 8)
    assert batch.k.shape == batch.v.shape == (10, 2, 8)
    q, k, _, dout = batch.padded()
    assert q.shape == dout.shape == (3, 2, 5, 8)
    assert k.shape == (3, 2, 7, 8)
    assert torch.equal(q[2, :, 4], batch.q[2, 4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"distribution": "uniform", "median": 3.0},
        {"distribution": "uniform", "lengths": (1, 2)},
        {"distribution": "whale"},
        {"distribution": "full", "queries": 0},
        {"distribution": "full", "queries": 1, "causal": True},
        {"distribution": "gamma"},
        {"distribution": "waste"},
        {"distribution": "uniform", "waste": 0.5},
        {"distribution": "real"},
        {"distribution": "real", "lengths": (1, 2, 3)},
    ],
)
def test_a_workload_that_contradicts_itself_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"distribution|lengths|query"):
        Workload(name="x", users=2, heads=1, head_dim=8, max_len=4, **wrong)


def test_setup_is_the_same_every_time_and_padding_is_zero() -> None:
    workload = with_options(small_workloads()[:1], users=5)[0]
    first, second = setup(workload, "cpu"), setup(workload, "cpu")
    for name in ("q", "k", "v", "dout"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert not torch.equal(first.q, first.k)
    padded = first.padded()[0]  # [B, H, L, D]
    for user, length in enumerate(first.lengths.tolist()):
        start = int(first.offsets[user])
        mine = padded[user].transpose(0, 1)
        assert torch.equal(mine[:length], first.q[start : start + length])
        assert not mine[length:].any()
