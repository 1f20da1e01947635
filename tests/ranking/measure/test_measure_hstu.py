"""HSTU's attention as it is measured: the reference is the formula, everybody agrees with it."""

import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hstu_adapter import plain_hstu_mha
from torch import Tensor
from torch.nn.functional import silu

from jagged_ranking import results
from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.lineup import AUTHORS, HSTU_OPS, default_providers
from jagged_ranking.measure.pointwise import FARTHEST, HSTU, POSITIONS, TIMES, position_buckets
from jagged_ranking.measure.providers import PROVIDERS, Unavailable, hstu_peers
from jagged_ranking.measure.reference import compare, reference
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workloads import Batch, Workload, setup

pytestmark = pytest.mark.usefixtures("objects_apart")

LENGTHS = [9, 1, 30, 0, 17, 3]
TARGETS = 4
KINDS = [
    HSTU(),
    HSTU(targets=TARGETS),
    HSTU(biased=True),
    HSTU(targets=TARGETS, biased=True),
]
QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.02)

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)


def workload(kind: HSTU, **options: Any) -> Workload:
    chosen = {"heads": 2, "head_dim": 16, "dtype": torch.float32, "causal": True, **options}
    return Workload.from_lengths("w", LENGTHS, hstu=kind, **chosen)


def measured(kind: HSTU, **options: Any) -> Any:
    given = {"effort": QUICK, "ceilings": Ceilings(1e10, 1e11, "float32"), "progress": False}
    return measure_attention([workload(kind)], **{**given, **options})


def formula(batch: Batch, kind: HSTU, *, softmax: bool) -> tuple[Tensor, ...]:
    """Result and gradients in float64, pair by pair of each user."""
    q, k, v = leaves = [x.double().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    if batch.biases is not None:
        tables = (batch.biases.position, batch.biases.time)
        leaves += [table.double().requires_grad_() for table in tables]
    outs = []
    for start, end in pairwise(batch.offsets.tolist()):
        n = end - start
        scores = torch.einsum("ihd,jhd->ijh", q[start:end], k[start:end]) / 4.0
        history = n - min(n, kind.targets)
        seen = torch.zeros(n, n, dtype=torch.bool)
        for i in range(n):
            for j in range(i + 1):
                seen[i, j] = j == i or j < history
                if seen[i, j] and batch.biases is not None:
                    elapsed = batch.biases.times[start + i] - batch.biases.times[start + j]
                    at = bucket_of_distance(i - j), min(int(math.log2(elapsed + 1)), TIMES - 1)
                    own = leaves[3][at[0]] + leaves[4][at[1]]
                    scores = scores + torch.zeros_like(scores).index_put(
                        (torch.tensor(i), torch.tensor(j)), own
                    )
        if softmax:
            weights = scores.masked_fill(~seen[..., None], -math.inf).softmax(1)
        else:
            weights = silu(scores) / batch.workload.max_len * seen[..., None]
        outs.append(torch.einsum("ijh,jhd->ihd", weights, v[start:end]))
    out = torch.cat(outs)
    return (out, *torch.autograd.grad(out, leaves, batch.dout.double()))


def bucket_of_distance(distance: int) -> int:
    """T5, in integers: the first half are distances; bucket b of the others begins where
    (distance / near) ** far reaches (FARTHEST / near) ** (b - near)."""
    near, far = POSITIONS // 2, POSITIONS - POSITIONS // 2
    if distance < near:
        return distance
    steps = [s for s in range(far) if distance**far >= near ** (far - s) * FARTHEST**s]
    return near + steps[-1]


def test_distances_have_t5s_buckets() -> None:
    found = position_buckets(torch.arange(3 * FARTHEST))[-1].flip(0)
    assert found.tolist() == [bucket_of_distance(d) for d in range(3 * FARTHEST)]


@pytest.mark.parametrize("softmax", [False, True])
@each_kind
def test_the_reference_is_the_formula(kind: HSTU, softmax: bool) -> None:
    batch = setup(workload(kind), "cpu")
    found = reference(batch, softmax=softmax).parts()
    expected = formula(batch, kind, softmax=softmax)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["jagged", "jagged_softmax", "dense_hstu"])
@each_kind
def test_every_provider_agrees_with_its_reference(name: str, kind: HSTU) -> None:
    batch = setup(workload(kind), "cpu")
    provider = PROVIDERS[name]
    wanted = reference(batch, softmax=provider.softmax_instead).parts()
    got = provider.prepare(batch).compare_as(batch, "forward+backward")
    for one, other in zip(got, wanted, strict=True):
        assert compare([(one, other)]).relative < 1e-5


@each_kind
def test_everybody_is_right_and_weighed(kind: HSTU) -> None:
    table = measured(kind)
    mine = results.select(table, op=kind.op)
    assert (mine["status"] == "ok").all(), mine[["provider", "message"]].to_string()
    assert set(mine["provider"]) == set(default_providers("cpu", hstu=True))
    assert {"latency", "rel_error", "peak_memory", "useful_flops"} <= set(mine["metric"])
    facts = results.with_config(mine, "targets", "biased", "flops_forward").iloc[0]
    assert (facts["targets"], facts["biased"]) == (kind.targets, kind.biased)
    pairs = sum(
        sum(j == i or j < n - min(n, kind.targets) for i in range(n) for j in range(i + 1))
        for n in LENGTHS
    )
    assert facts["flops_forward"] == 4 * 2 * 16 * pairs


def test_kinds_are_named_as_figures_know_them() -> None:
    assert tuple(kind.op for kind in KINDS) == HSTU_OPS
    assert workload(KINDS[0]).op == "hstu"
    assert replace(workload(KINDS[0]), hstu=None).op == "attention"


def test_a_wrong_gradient_of_a_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = PROVIDERS["dense_hstu"].prepare

    def spoiled(batch: Batch) -> Any:
        ready = prepare(batch)
        ready.learned[1].register_hook(lambda gradient: 1.1 * gradient)
        return ready

    monkeypatch.setitem(PROVIDERS, "dense_hstu", replace(PROVIDERS["dense_hstu"], prepare=spoiled))
    table = measured(HSTU(biased=True), providers=["dense_hstu"], metrics=["latency"])
    latency = results.select(table, provider="dense_hstu", metric="latency")
    by_mode = dict(zip(latency["mode"], latency["status"], strict=True))
    assert by_mode == {"forward": "ok", "forward+backward": "error"}


@pytest.mark.parametrize("options", [{"causal": False}, {"causal": False, "queries": 2}])
def test_hstus_attention_is_causal(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="and causal"):
        workload(HSTU(), **options)


def test_nobody_is_measured_on_another_attention() -> None:
    names = ["dense_eager", "jagged_stream"]
    table = measured(HSTU(), providers=names)
    assert set(results.select(table, provider=names)["status"]) == {"unsupported"}
    softmax = measure_attention(
        [replace(workload(HSTU()), hstu=None)],
        providers=["dense_hstu", "jagged_softmax"],
        effort=QUICK,
        ceilings=Ceilings(1e10, 1e11, "float32"),
        progress=False,
    )
    assert set(results.select(softmax, op="attention")["status"]) == {"unsupported"}


def authors_stand_in(
    N: int,
    alpha: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    num_targets: Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    sort_by_length: bool = False,
    enable_tma: bool = False,
) -> Tensor:
    """The signature of `triton_hstu_mha`."""
    assert seq_offsets.dtype == torch.int64
    assert not enable_tma
    assert not sort_by_length  # they are
    assert (seq_offsets.diff().diff() <= 0).all()
    limits = {"max_attn_len": max_attn_len, "contextual_seq_len": contextual_seq_len}
    return plain_hstu_mha(N, alpha, q, k, v, seq_offsets, num_targets, **limits)


@pytest.fixture
def authors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their package, as far as it is asked for."""
    parts = hstu_peers.AUTHORS_MODULE.split(".")
    for depth in range(1, len(parts) + 1):
        fake = ModuleType(".".join(parts[:depth]))
        fake.__path__ = []
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    module = sys.modules[hstu_peers.AUTHORS_MODULE]
    monkeypatch.setattr(module, hstu_peers.AUTHORS_FUNCTION, authors_stand_in, raising=False)
    monkeypatch.setattr(hstu_peers, "need_cuda", lambda device, what: None)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.op)
def test_the_authors_kernels_are_called_as_they_are_meant(authors: None, kind: HSTU) -> None:
    batch = setup(workload(kind), "cpu")
    got = PROVIDERS[AUTHORS].prepare(batch).compare_as(batch, "forward+backward")
    wanted = reference(batch).parts()
    assert compare(list(zip(got, wanted, strict=True))).relative < 1e-5


def test_the_authors_have_no_biases_nor_every_head_dim(authors: None) -> None:
    for refused in (workload(HSTU(biased=True)), workload(HSTU(), head_dim=24)):
        with pytest.raises(Unavailable) as caught:
            PROVIDERS[AUTHORS].prepare(setup(refused, "cpu"))
        assert caught.value.status == "unsupported"


def test_without_them_they_are_missing() -> None:
    if find_spec("generative_recommenders"):
        pytest.skip("they are here")
    table = measured(HSTU(), providers=[AUTHORS])
    rows = results.select(table, provider=AUTHORS)
    assert set(rows["status"]) == {"missing"}
    assert set(rows["message"]) == {"generative_recommenders is not installed"}


@pytest.mark.gpu
@each_kind
def test_on_a_gpu_whoever_runs_is_right(kind: HSTU) -> None:
    one = Workload.from_lengths("g", [300, 1, 64, 17, 129], heads=4, head_dim=64, causal=True)
    table = measure_attention(
        [replace(one, hstu=kind)], device="cuda", effort=QUICK, progress=False
    )
    latency = results.select(table, op=kind.op, metric="latency")
    wrong = latency[~latency["status"].isin(["ok", "missing", "unsupported"])]
    assert wrong.empty, wrong[["provider", "mode", "message"]].to_string()
    ran = set(latency[latency["status"] == "ok"]["provider"])
    assert {"jagged", "jagged_softmax", "dense_hstu"} <= ran
    assert not results.select(table, op="schedule", provider="jagged", status="ok").empty
