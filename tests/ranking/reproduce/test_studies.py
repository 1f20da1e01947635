"""What the notebooks measure: batches by name, real histories, and results kept piece by piece."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jagged_ranking import results
from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.ceilings import Ceilings, ceiling_table
from jagged_ranking.measure.lineup import HSTU_OPS
from jagged_ranking.measure.sparse.sparse_workloads import SparseWorkload
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workloads import Workload
from jagged_ranking.reproduce import attention_study as study
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import histories_digests
from jagged_ranking.reproduce.lab import (
    describe_batches,
    describe_sparse,
    hard_batches,
    hstu_batches,
    interaction_batches,
    measured,
    measured_interaction,
    measured_sparse,
    patterns_of,
    sparse_batches,
    study_batches,
    target_batches,
)

pytestmark = pytest.mark.usefixtures("objects_apart")

QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.02)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, and two data sets of lengths in CLICK_DATA_DIR."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    logs = tmp_path / "logs"
    logs.mkdir()
    pq.write_table(pa.table({"length": list(range(1, 41))}), logs / "many.parquet")
    pq.write_table(pa.table({"length": [5, 9]}), logs / "few.parquet")
    monkeypatch.setenv("JAGGED_HOME", str(tmp_path))
    monkeypatch.setenv("CLICK_DATA_DIR", str(logs))
    return tmp_path


def batches_of(**changes: Any) -> list[Workload]:
    given: dict[str, Any] = {
        "names": ["B", "F"],
        "size": "small",
        "wastes": [0.5],
        "waste_users": 4,
        "waste_max_len": 16,
        "max_lens": [16],
        "padded_tokens": 64,
        "head_dims": [8, 24],
        "heads": 2,
        "head_dim": 16,
        "data": None,
        "histories": [],
        "data_users": 10,
        "device": "cpu",
        "seed": 0,
    }
    return study_batches(**{**given, **changes})


def test_named_real_and_swept_batches(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = batches_of(histories=["many", "absent", "few"])
    names = ["B-small", "F-small", "many", "few", "waste 50%", "length 16"]
    assert [b.name for b in batches] == [*names, "head_dim 8", "head_dim 24"]
    assert "no absent in" in capsys.readouterr().out
    many, few = batches[2:4]
    assert many.users == len(set(many.lengths or ())) == 10  # drawn without repetition
    assert sorted(few.lengths or ()) == [5, 9]
    assert batches_of(histories=["many"])[2].lengths == many.lengths
    assert batches_of(histories=["many"], seed=1)[2].lengths != many.lengths
    table = describe_batches(batches)
    assert "candidates" not in table
    assert table.loc["head_dim 24", "head_dim"] == 24


def test_hard_batches_are_named_ones_of_their_own() -> None:
    given: dict[str, Any] = {"device": "cpu", "seed": 3}
    assert [(b.name, b.seed) for b in hard_batches(["W", "K"], "small", **given)] == [
        ("W-small", 3),
        ("K-small", 3),
    ]
    assert [b.name for b in hard_batches(["L"], "full", **given)] == ["L"]
    assert hard_batches([], "small", **given) == []
    with pytest.raises(ValueError, match="no workload A; there is K, L, W"):
        hard_batches(["A"], "small", **given)


def test_batches_of_others_do_without_any_of_these(home: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("names", "wastes", "max_lens", "head_dims"), ())
    more = hard_batches(["L"], "small", device="cpu", seed=0)
    assert [b.name for b in batches_of(**nothing, more=more)] == ["L-small"]
    assert [b.name for b in batches_of(**{**nothing, "names": ["A"]}, more=more)] == [
        "A-small",
        "L-small",
    ]


def test_batches_of_target_attention(home: Path) -> None:
    given: dict[str, Any] = {"size": "small", "heads": 2, "head_dim": 16, "device": "cpu"}
    batches = target_batches(
        names=["T4", "T1"],
        skew_users=[4],
        skew_tokens=64,
        candidates=3,
        data=None,
        data_users=2,
        seed=0,
        **given,
    )
    assert [b.name for b in batches][:2] == ["T4-small", "T1-small"]
    assert [(b.queries, b.group) for b in batches[2:]] == [(3, "skew")] * 3
    assert describe_batches(batches)["candidates"].tolist() == [8, 4, 3, 3, 3]


def hstu_batches_of(**changes: Any) -> list[Workload]:
    given: dict[str, Any] = {
        "names": ["C"],
        "size": "small",
        "wastes": [0.5],
        "waste_users": 4,
        "waste_max_len": 16,
        "heads": 2,
        "head_dim": 16,
        "attentions": list(HSTU_OPS),
        "targets": 3,
        "device": "cpu",
        "seed": 0,
    }
    return hstu_batches(**{**given, **changes})


def test_batches_of_hstus_attention() -> None:
    batches = hstu_batches_of()
    assert [b.name for b in batches] == ["C-small", "waste 50%"] * 4
    assert [b.op for b in batches[::2]] == list(HSTU_OPS)
    assert {b.causal for b in batches} == {True}
    table = describe_batches(batches)
    assert table["targets"].tolist() == [0, 0, 3, 3] * 2
    assert table["biases"].tolist() == [False] * 4 + [True] * 4
    assert hstu_batches_of(device="cuda", size="full")[0].dtype == torch.bfloat16
    for wrong, message in (
        ({"attentions": ["softmax"]}, "no attention softmax; there is hstu, hstu_targets"),
        ({"targets": 0}, "targets must be at least 1, got 0"),
        ({"names": [], "wastes": []}, "no batch to measure: .*workloads, wastes, attentions"),
    ):
        with pytest.raises(ValueError, match=message):
            hstu_batches_of(**wrong)


def interaction_batches_of(**changes: Any) -> list[Workload]:
    given: dict[str, Any] = {
        "users": [2, 4],
        "max_len": 16,
        "wastes": [0.5],
        "waste_users": 4,
        "float32_users": [4],
        "columns": 8,
        "data": None,
        "histories": ["few"],
        "data_users": 10,
        "device": "cpu",
        "seed": 0,
    }
    return interaction_batches(**{**given, **changes})


def test_batches_of_interaction_operations(home: Path) -> None:
    batches = interaction_batches_of()
    assert [b.name for b in batches] == ["users 2", "users 4", "waste 50%", "few"]
    assert [b.group for b in batches] == ["tokens", "tokens", "waste", "real"]
    assert {b.dtype for b in batches} == {torch.float32}
    on_gpu = interaction_batches_of(device="cuda")
    assert [b.dtype for b in on_gpu] == [torch.bfloat16] * 4 + [torch.float32]
    assert on_gpu[-1].name == "users 4"
    assert on_gpu[-1].draw_lengths().tolist() == batches[1].draw_lengths().tolist()


def test_interaction_operations_are_kept_one_by_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = interaction_batches_of(histories=[])
    given: dict[str, Any] = {"device": "cpu", "run_id": "05", "effort": QUICK}
    given["weighed"] = ["users 4"]
    first = measured_interaction(batches, operations=["jagged_cat"], **given)
    capsys.readouterr()
    both = measured_interaction(batches, operations=["jagged_cat", "jagged_max"], **given)
    said = capsys.readouterr().out
    assert "1 of 2, jagged_cat: measure_interaction: kept from" in said
    assert "2 of 2, jagged_max: measure_interaction: took" in said
    assert both.iloc[: len(first)].equals(first)
    assert set(both["op"]) == {"ceiling", "jagged_cat", "jagged_max"}
    weighed = both[both["metric"] == "peak_memory"]
    assert set(weighed["workload"]) == {"users 4"}


NO_SPARSE: dict[str, Any] = {"lengths": [], "strides": [], "densities": [], "candidates": []}
RULES = {"stride": 4, "local": 2, "window": 20, "first": 4, "newest": 1, "block": 16}


def sparse_batches_of(**changes: Any) -> list[SparseWorkload]:
    given: dict[str, Any] = {
        **RULES,
        "lengths": [32],
        "tokens": 64,
        "density_length": 64,
        "strides": [4, 1],
        "locals_": [1],
        "densities": [0.5],
        "block_length": 64,
        "candidates": [16],
        "top_k": [1],
        "retrieval_users": 2,
        "retrieval_length": 64,
        "names": ["B"],
        "size": "small",
        "heads": 2,
        "head_dim": 16,
        "data": None,
        "histories": ["few"],
        "data_users": 10,
        "device": "cpu",
        "seed": 0,
    }
    return sparse_batches(**{**given, **changes})


def test_batches_of_attention_to_some_keys(home: Path) -> None:
    batches = sparse_batches_of()
    assert [one.name for one in batches] == [
        *("length 32", "stride 4, 1 local", "stride 1, 1 local"),
        *("causal, density 0.5", "full, density 0.5", "16 candidates, 1 blocks"),
        *("B-small S2", "B-small semi-local", "few S2", "few semi-local"),
    ]
    assert {one.batch.dtype for one in batches} == {torch.float32}
    assert [one.batch.users for one in batches[:2]] == [2, 1]
    assert {one.pattern.block for one in batches} == {16}
    table = describe_sparse(batches)
    assert table["rule"].iloc[-1] == "semi_local"
    assert table.loc["stride 1, 1 local", "density"] == "100.0%"
    assert {one.batch.dtype for one in sparse_batches_of(device="cuda")} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"no batch to measure: .*lengths, strides, densities"):
        sparse_batches_of(**NO_SPARSE, names=[], histories=["absent"])


def test_attention_to_some_keys_is_kept_one_by_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = sparse_batches_of(**NO_SPARSE, names=[], histories=["few"])
    patterns = patterns_of(top_k=1, **RULES)
    given: dict[str, Any] = {"patterns": patterns, "seen_lengths": [32], "heads": 2}
    given |= {"head_dim": 16, "seed": 0, "device": "cpu", "run_id": "08", "effort": QUICK}
    first = measured_sparse(batches[:1], **given)
    capsys.readouterr()
    both = measured_sparse(batches, **given)
    said = capsys.readouterr().out
    assert "keys_seen: kept from" in said
    assert "1 of 2, few S2: measure_sparse: kept from" in said
    assert "2 of 2, few semi-local: measure_sparse: took" in said
    assert both.iloc[: len(first)].equals(first)
    assert set(both["op"]) == {"keys_seen", "ceiling", "sparse_attention", "lists"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"names": ["Z"]}, "no workload Z; there is A, B"),
        ({"size": "huge"}, "size must be one of full, small"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"heads": -1}, "heads must be at least 1, got -1"),
        ({"histories": ["./nowhere"]}, "nowhere does not exist"),
        ({"wastes": [0.501, 0.499]}, "2 batches are called 'waste 50%', of workloads, wastes"),
    ],
)
def test_what_there_is_not_is_refused(home: Path, wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches_of(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"heads": 0}, {"stride": 0}, {"block": 0}, {"retrieval_users": 0}, {"lengths": [64, 0]}],
)
def test_numbers_of_attention_to_some_keys_are_positive(home: Path, wrong: dict) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be at least 1, got 0"):
        sparse_batches_of(**wrong)


def test_no_batch_at_all_names_the_parameters(home: Path) -> None:
    none: dict[str, Any] = {"names": [], "wastes": [], "max_lens": [], "head_dims": []}
    for histories in ([], ["absent"]):
        with pytest.raises(ValueError, match=r"no batch to measure: .*workloads, wastes, max_lens"):
            batches_of(**none, histories=histories)
    with pytest.raises(ValueError, match=r"no batch to measure: .*users, wastes, histories, data"):
        interaction_batches_of(users=[], wastes=[], histories=["absent"])
    shape: dict[str, Any] = {"heads": 2, "head_dim": 16, "device": "cpu", "seed": 0}
    with pytest.raises(ValueError, match=r"no batch to measure: .*workloads, skew_users, data"):
        target_batches(names=[], size="small", skew_users=[], skew_tokens=64, candidates=3,
                       data=None, data_users=2, **shape)  # fmt: skip


def test_lengths_have_a_digest_wherever_they_come_from(home: Path) -> None:
    whole = histories_digests(["many", "few", "absent"])
    assert list(whole) == ["many", "few"]
    log = home / "logs" / "few"
    log.mkdir()
    users = [1] * 5 + [2] * 9
    pq.write_table(pa.table({"user_id": users}), log / "interactions.parquet")
    assert histories_digests(["few"])["few"] == whole["few"]
    with pytest.raises(RunError):
        histories_digests(["./nowhere"])


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = batches_of(names=[], head_dims=[])
    done: list[str] = []

    def cut_off(given: list[Workload], **options: Any) -> pd.DataFrame:
        if len(done) == 1 and "cut" not in done:
            done.append("cut")
            raise KeyboardInterrupt
        done.append(given[0].name)
        return measure_attention(given, **options)

    monkeypatch.setattr(study, "measure_attention", cut_off)
    options: dict[str, Any] = {"device": "cpu", "run_id": "x", "effort": QUICK}
    options["providers"] = ["jagged"]
    with pytest.raises(KeyboardInterrupt):
        measured(batches, **options)
    table = measured(batches, **options)
    assert done == ["waste 50%", "cut", "length 16"]
    assert "kept from" in capsys.readouterr().out
    assert list(table["op"]).count("ceiling") == 2
    assert list(dict.fromkeys(table["workload"])) == ["", "waste 50%", "length 16"]
    assert measured([], **options).empty


def test_our_own_errors_are_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def broken(given: list[Workload], **options: Any) -> pd.DataFrame:
        tried.append(1)
        where: dict[str, Any] = {
            "op": "attention",
            "provider": "jagged",
            "workload": "w",
            "mode": "forward",
        }
        row = results.row(metric="latency", unit="ms", status="error", message="x", **where)
        return results.frame([row])

    monkeypatch.setattr(study, "measure_attention", broken)
    for _ in range(2):
        table = measured(batches_of(names=["F"], wastes=[], max_lens=[], head_dims=[]),
                         device="cpu", run_id="x")  # fmt: skip
        assert "error" in set(table["status"])
    assert len(tried) == 2


def test_ceilings_survive_being_a_table() -> None:
    table = ceiling_table(device="cpu", dtype=torch.float32, run_id="x")
    found = Ceilings.from_table(table)
    assert found.dtype == "float32"
    assert found.bytes_per_second > 1e8
    assert set(table["id"]) == {"x"}
