"""Attention to some of the keys: masks as the papers say, what is checked, what is a row."""

import functools
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor, KeyLists, StridedKeys
from jagged_ranking import results
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.lineup import SPARSE_GROUPS, sparse_providers
from jagged_ranking.measure.providers import MODES, PROVIDERS
from jagged_ranking.measure.reference import compare
from jagged_ranking.measure.sparse import patterns, sparse_measurement
from jagged_ranking.measure.sparse.patterns import (
    Pattern,
    RandomBlocks,
    Retrieved,
    SemiLocal,
    Strided,
    blocks_listed,
    dense_blocks,
)
from jagged_ranking.measure.sparse.sampled_reference import (
    errors_of,
    for_the_check,
    reference,
    regret_of,
    sample_of,
)
from jagged_ranking.measure.sparse.seen import keys_seen
from jagged_ranking.measure.sparse.sparse_measurement import measure_sparse
from jagged_ranking.measure.sparse.sparse_providers import SPARSE_PROVIDERS, histories_of
from jagged_ranking.measure.sparse.sparse_workloads import (
    SparseWorkload,
    jagged_lengths,
    random_by_density,
    retrieval,
    strided_by_density,
    strided_by_length,
)
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import small_workloads
from jagged_ranking.measure.workloads import Workload, setup

pytestmark = pytest.mark.usefixtures("objects_apart")

CPU = torch.device("cpu")
QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.05)
CEILINGS = Ceilings(1e10, 1e11, "float32")
HEADS, LENGTHS = 4, (70, 16, 33, 1)
STRIDED = Strided(stride=4, local=2, block=16)
SEMI_LOCAL = SemiLocal(window=20, first=3, block=16)
RANDOM = RandomBlocks(density=0.4, block=16)
RETRIEVED = Retrieved(top_k=2, newest=1, block=16)


def sparse(pattern: Pattern, **options: Any) -> SparseWorkload:
    """Few users of a few blocks."""
    group = "sparse_retrieval" if isinstance(pattern, Retrieved) else "sparse_jagged"
    queries = 20 if isinstance(pattern, Retrieved) else None
    given: dict[str, Any] = {"heads": HEADS, "head_dim": 16, "dtype": torch.float32}
    given |= {"group": group, "queries": queries, "causal": queries is None, **options}
    return SparseWorkload(batch=Workload.from_lengths("w", LENGTHS, **given), pattern=pattern)


def measure(workload: SparseWorkload, **options: Any) -> pd.DataFrame:
    given = {"effort": QUICK, "ceilings": CEILINGS, "progress": False, "weighed": (), **options}
    return measure_sparse([workload], **given)


def seen_by_hand(pattern: Pattern, head: int, i: int, j: int) -> bool:
    """Whether a query sees a key, as the papers say it."""
    q, k = i // pattern.block, j // pattern.block
    if isinstance(pattern, Strided):
        step = max(1, pattern.stride // HEADS)
        return j <= i and (q - k < pattern.local or (k + head * step) % pattern.stride == 0)
    assert isinstance(pattern, SemiLocal)
    return j <= i and (i - pattern.window < j or j < pattern.first)


@pytest.mark.parametrize("pattern", [STRIDED, SEMI_LOCAL])
def test_masks_are_those_of_the_papers(pattern: Any) -> None:
    length, rows = 70, torch.tensor([0, 15, 16, 40, 69])
    seen = pattern.visible(rows, length, heads=HEADS, user=0, causal=True).expand(HEADS, -1, -1)
    for head in range(HEADS):
        for row, i in enumerate(rows.tolist()):
            wanted = [seen_by_hand(pattern, head, i, j) for j in range(length)]
            assert seen[head, row].tolist() == wanted


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_have_their_density_and_no_query_sees_nothing(causal: bool) -> None:
    length, everyone = 160, torch.arange(160)
    options: dict[str, Any] = {"heads": HEADS, "user": 1, "causal": causal}
    seen = RANDOM.visible(everyone, length, **options)[0]
    assert bool(seen.any(1).all())
    assert not causal or not bool(seen.triu(1).any())
    assert not torch.equal(seen, RANDOM.visible(everyone, length, **{**options, "user": 0})[0])
    assert torch.equal(seen, RANDOM.visible(everyone, length, **options)[0])
    listed = seen.view(10, 16, 10, 16).any(3).any(1).sum()
    assert listed == round(0.4 * (55 if causal else 100))


@pytest.mark.parametrize("pattern", [STRIDED, SEMI_LOCAL, RANDOM])
@pytest.mark.parametrize("length", [1, 16, 70, 129])
def test_blocks_are_counted(pattern: Any, length: int) -> None:
    options: dict[str, Any] = {"heads": HEADS, "causal": True}
    everyone = torch.arange(length)
    seen = pattern.visible(everyone, length, user=0, **options).expand(HEADS, -1, -1)
    blocks = {(h, i // 16, j // 16) for h, i, j in seen.nonzero().tolist()}
    assert pattern.blocks(length, length, **options) == len(blocks) / HEADS
    count = -(-length // 16)
    assert dense_blocks(length, length, block=16, causal=True) == count * (count + 1) / 2


def test_density_is_that_of_the_issue() -> None:
    (at_16k,) = strided_by_length([16_384])
    assert at_16k.density() == pytest.approx(0.09, abs=0.003)
    facts = at_16k.facts()
    assert facts["flops_forward"] == pytest.approx(
        at_16k.batch.facts()["flops_forward"] * facts["density"]
    )
    assert (facts["rule"], facts["stride"], facts["local"]) == ("strided", 16, 4)
    sweep = strided_by_density((8, 1), (4, 8), length=1024, tokens=2048)
    assert [one.name for one in sweep] == [
        "stride 8, 4 local", "stride 1, 4 local", "stride 8, 8 local",
    ]  # fmt: skip
    assert sweep[1].density() == 1.0
    assert sweep[0].density() < sweep[2].density() < 1.0
    drawn = random_by_density((0.25, 1.0), length=1024, tokens=1024)
    assert [one.density() for one in drawn] == pytest.approx([0.25, 1.0, 0.25, 1.0], abs=0.01)
    few = retrieval((64,), (4,), length=4096, users=4)[0]
    assert 0 < few.density() < 0.4
    # Queries and results whole, of keys and values what is seen.
    moved = 2 * (4 * 64 + few.density() * few.facts()["tokens"]) * 8 * 64 * 2
    assert few.facts()["bytes_forward"] == pytest.approx(moved)


def test_the_batches_of_the_study_have_names_of_their_own() -> None:
    everything = [*strided_by_length(), *strided_by_density(), *random_by_density(), *retrieval()]
    everything += jagged_lengths(small_workloads()[2:4])
    names = [one.name for one in everything]
    assert len(set(names)) == len(names) == 8 + 13 + 12 + 9 + 4
    assert {one.batch.group for one in everything} == set(SPARSE_GROUPS)
    assert names[-4:] == ["C-small S2", "C-small semi-local", "D-small S2", "D-small semi-local"]


def test_a_sample_gives_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = setup(sparse(STRIDED).batch, CPU)
    sample = sample_of(batch, most_scores=8 * HEADS * 70)
    assert [len(rows) for rows in sample.rows] == [8, 16, 16, 1]
    assert sample.rows[0][0] == 0
    assert sample.rows[0][-1] == 69
    checked = for_the_check(batch, sample)
    kept = torch.zeros(len(batch.q), dtype=torch.bool)
    kept[sample.places] = True
    assert torch.equal(checked.dout[kept], batch.dout[kept])
    assert not checked.dout[~kept].any()
    everything = sample_of(batch)
    assert len(everything.places) == len(batch.q)
    assert for_the_check(batch, everything) is batch
    some = reference(checked, sample, STRIDED)
    whole = reference(checked, everything, STRIDED)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(some, name), getattr(whole, name))
    torch.testing.assert_close(some.out[kept], whole.out[kept])
    got = (whole.out, whole.dq, whole.dk, whole.dv)
    assert errors_of(got, some, sample, width=4).relative < 1e-5


def test_the_reference_of_all_keys_is_that_of_attention() -> None:
    batch = setup(sparse(STRIDED).batch, CPU)
    ready = PROVIDERS["jagged"].prepare(batch)
    expected = reference(batch, sample_of(batch), None)
    wanted = (expected.out, expected.dq, expected.dk, expected.dv)
    got = ready.compare_as(batch, "forward+backward")
    assert compare(list(zip(got, wanted, strict=True))).relative < 1e-5


@pytest.mark.parametrize("pattern", [STRIDED, SEMI_LOCAL, RANDOM, RETRIEVED], ids=str)
def test_rows_of_a_run(pattern: Any) -> None:
    workload = sparse(pattern)
    weighed = SPARSE_GROUPS if pattern is STRIDED else ()  # profiling takes seconds
    table = measure(workload, weighed=weighed, run_id="08", run_key="k")
    assert (table["status"] == "ok").all(), table[table["status"] != "ok"]["message"].tolist()
    attention = results.select(table, op="sparse_attention")
    names = {"jagged", "jagged_dense"}
    names |= {"jagged_padded"} if workload.batch.queries is None else set()
    assert set(attention["provider"]) == names
    metrics = {"latency", "max_abs_error", "rel_error"}
    metrics |= {"peak_memory", "peak_memory_minus_inputs"} if weighed else set()
    for name in names:
        for mode in MODES:
            mine = results.select(attention, provider=name, mode=mode)
            assert sorted(mine["metric"]) == sorted(metrics)
    config = results.with_config(attention, "density", "rule", "checked_queries", "limit_ms")
    assert set(config["rule"]) == {pattern.kind}
    assert set(config["density"]) == {workload.density()}
    assert set(config["checked_queries"]) == {1.0}
    assert config["limit_ms"].gt(0).all()
    built = results.select(table, op="lists", provider="jagged")
    regret = results.select(built, metric="regret")["value"].tolist()
    assert len(results.select(built, metric="latency")) == (pattern is not RANDOM)
    assert regret == ([pytest.approx(0, abs=1e-6)] if isinstance(pattern, Retrieved) else [])
    for op in ("block_means", "lists_with_transpose"):
        assert len(results.select(table, op=op)) == isinstance(pattern, Retrieved)


def test_random_blocks_need_not_be_causal() -> None:
    table = measure(sparse(RANDOM, causal=False), providers=["jagged", "jagged_dense"])
    assert (table["status"] == "ok").all(), table[table["status"] != "ok"]["message"].tolist()


def test_lists_of_another_rule_are_found_and_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(STRIDED, local=3)
    monkeypatch.setattr(Strided, "keys", lambda self, q, k, **options: rule_of(other))
    table = measure(sparse(STRIDED), providers=["jagged", "jagged_dense"])
    ours = results.select(table, provider="jagged", op="sparse_attention")
    failed = ours[~ours["metric"].isin(["max_abs_error", "rel_error"])]
    assert set(failed["status"]) == {"error"}
    assert failed["message"].str.startswith("wrong: relative error").all()
    assert (results.select(table, provider="jagged_dense")["status"] == "ok").all()


def rule_of(pattern: Strided) -> StridedKeys:
    return StridedKeys(stride=pattern.stride, local=pattern.local, block=pattern.block)


def test_retrieval_of_other_blocks_is_found_and_never_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def farthest(self: Retrieved, q: JaggedTensor, k: JaggedTensor, **options: Any) -> KeyLists:
        return retrieved(q, k.with_values(-k.values), top_k=2, newest=1, block=16)

    retrieved = patterns.retrieved_blocks
    monkeypatch.setattr(Retrieved, "keys", farthest)
    table = measure(sparse(RETRIEVED), providers=["jagged"])
    latency = results.select(table, op="sparse_attention", metric="latency")
    assert set(latency["status"]) == {"error"}
    assert latency["message"].str.startswith("wrong: regret").all()
    (regret,) = results.select(table, metric="regret")["value"]
    assert regret > 1.0  # worse than at random


def test_a_sample_finds_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one key, which no sampled query stands at."""
    few = functools.partial(sample_of, most_scores=2000)
    monkeypatch.setattr(sparse_measurement, "sample_of", few)
    ours = SPARSE_PROVIDERS["jagged"]

    def prepare(batch: Any, pattern: Any) -> Any:
        ready = ours.prepare(batch, pattern)
        inner = ready.forward

        def forward() -> Tensor:
            v = ready.inputs[2]
            return inner() + (v[5] - v[5].detach())

        ready.forward = forward
        return ready

    wrong = {**SPARSE_PROVIDERS, "jagged": replace(ours, prepare=prepare)}
    monkeypatch.setattr(sparse_measurement, "SPARSE_PROVIDERS", wrong)
    table = measure(sparse(STRIDED), providers=["jagged"])
    latency = results.select(table, op="sparse_attention", metric="latency")
    assert dict(zip(latency["mode"], latency["status"], strict=True)) == {
        "forward": "ok",
        "forward+backward": "error",
    }
    checked = results.with_config(latency, "checked_queries")["checked_queries"]
    assert checked.lt(0.5).all()


def test_retrieval_takes_the_nearest_blocks_and_the_newest() -> None:
    batch = setup(sparse(RETRIEVED).batch, CPU)
    queries, histories = histories_of(batch, batch.q.flatten(0, 1), batch.k)
    lists = RETRIEVED.keys(queries, histories, causal=False, longest=max(LENGTHS))
    assert regret_of(batch, RETRIEVED, lists) < 1e-6
    for user, length in enumerate(LENGTHS):
        blocks = -(-length // 16)
        first = int(queries.offsets[user]) // 16 + user
        listed = blocks_listed(lists, first, range(2), blocks)
        assert listed.sum(-1).eq(min(RETRIEVED.top_k + RETRIEVED.newest, blocks)).all()
        assert listed[..., -1].all()


def test_keys_seen_are_counted_in_the_lists() -> None:
    lengths = [64, 160]
    table = keys_seen([STRIDED, SEMI_LOCAL, RETRIEVED], lengths, heads=HEADS, head_dim=16)
    value = table.set_index(["provider", "workload", "metric"])["value"]
    for length in lengths:
        name = f"length {length}"
        by_head = [
            sum(seen_by_hand(STRIDED, head, length - 1, j) for j in range(length))
            for head in range(HEADS)
        ]
        row = results.select(table, provider="strided", workload=name, metric="one_head")
        assert sorted(row["samples"].iloc[0]) == sorted(by_head)
        # Four heads, a step of 1 and a stride of 4: every block is seen by one of them.
        assert value["strided", name, "all_heads"] == length
        assert value["semi_local", name, "one_head"] == 23
        assert value["all_keys", name, "one_head"] == length
        assert value["retrieved", name, "one_head"] == 48
    assert not any(map(math.isnan, table["value"]))


def test_who_is_measured_where() -> None:
    assert "dkernel" in sparse_providers("cuda", group="sparse_length", rule="strided")
    assert "dkernel" not in sparse_providers("cuda", group="sparse_jagged", rule="semi_local")
    for group in SPARSE_GROUPS:
        names = sparse_providers("cuda", group=group, rule="strided")
        assert set(names) <= set(SPARSE_PROVIDERS)
        assert {"jagged", "jagged_dense"} <= set(names)
        assert set(sparse_providers("cpu", group=group, rule="strided")) <= set(names)


def test_peers_that_need_a_gpu_or_an_installation_say_so() -> None:
    names = ["varlen_attn", "flash_attn_4", "dkernel"]
    table = results.select(measure(sparse(STRIDED), providers=names), metric="latency")
    assert set(table["provider"]) == set(names)
    assert set(table["status"]) <= {"missing", "unsupported"}


@pytest.mark.parametrize(
    "wrong", [{"providers": ["typo"]}, {"modes": ["typo"]}, {"weighed": ["typo"]}]
)
def test_unknown_names_are_refused_with_what_is_known(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"unknown .* 'typo'; known are"):
        measure(sparse(STRIDED), **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [STRIDED, SEMI_LOCAL, RANDOM, RETRIEVED], ids=str)
def test_on_a_gpu_whoever_runs_is_right(pattern: Any) -> None:
    workload = sparse(replace(pattern, block=64), head_dim=64, dtype=torch.bfloat16)
    table = measure_sparse([workload], device="cuda", effort=QUICK, progress=False)
    latency = results.select(table, op="sparse_attention", metric="latency")
    wrong = latency[~latency["status"].isin(["ok", "missing", "unsupported"])]
    assert wrong.empty, wrong[["provider", "mode", "message"]].to_string()
    ran = set(latency[latency["status"] == "ok"]["provider"])
    assert {"jagged", "jagged_dense", "varlen_attn"} <= ran
    lists = results.select(table, op="lists", provider="jagged")
    assert set(lists["status"]) == (set() if pattern is RANDOM else {"ok"})
    turned = results.select(table, op="lists_with_transpose", provider="jagged", metric="latency")
    assert set(turned["status"]) == ({"ok"} if pattern is RETRIEVED else set())
