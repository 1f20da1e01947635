"""Workloads: exactly the batches of the published table, and sweeps that meet their target."""

import pytest
import torch

from jagged_ranking.measure.workloads import (
    Workload,
    length_sweep,
    setup,
    small_workloads,
    waste_sweep,
    with_options,
    workloads,
)

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
    "wrong",
    [
        {"distribution": "gamma"},
        {"distribution": "waste"},
        {"distribution": "uniform", "waste": 0.5},
        {"distribution": "real"},
        {"distribution": "real", "lengths": (1, 2, 3)},
    ],
)
def test_a_workload_that_contradicts_itself_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"distribution|lengths"):
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
