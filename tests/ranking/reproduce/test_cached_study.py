"""Ranking from compressed histories, on a toy log, and the batches of the study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from click_data import ClickDataset
from jagged_kernels import KeyStatistics, key_statistics, persistence_ratio
from jagged_ranking import paths, results
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.bootstrap import Difference, difference
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.figures.cached_points import by_compression
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.reproduce import compressed_quality as compressing
from jagged_ranking.reproduce.compressed_quality import (
    WHOLE,
    CompressedHistories,
    CompressionScore,
    Plan,
    Setting,
    budget_of,
    compressed_quality,
    events_of,
    kept_of,
)
from jagged_ranking.reproduce.lab import (
    cache_cases,
    describe_cases,
    measured_cached,
    quality_by_compression,
)
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import train

TINY: dict[str, Any] = {"dim": 8, "hidden": [8], "batch_size": 512, "epochs": 1, "max_history": 60}
CASES: dict[str, Any] = {
    "history_lengths": [12],
    "users": [2],
    "at_users": 3,
    "at_history": 16,
    "new_events": 2,
    "page_size": 4,
    "prefixes": [3],
    "prefix_users": 2,
    "prefix_history": 9,
    "scored_histories": [10],
    "scored_users": 2,
    "kept_share": 0.3,
    "recent": 5,
    "heads": 1,
    "head_dim": 8,
    "device": "cpu",
    "seed": 0,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout."""
    home = tmp_path / "home"
    (home / "notebooks").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def ranker(toy: ClickDataset) -> Ranker:
    """Away from its start, where attention is all alike."""
    from jagged_ranking.data.data_shape import DataShape

    torch.manual_seed(0)
    config = TrainConfig.from_dict({**TINY, "model": "target_attention", "dim": 16, "heads": 2})
    made = Ranker(config, DataShape.of(toy))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def batch_of(toy: ClickDataset, *, most: int = 60, count: int = 12) -> JaggedBatch:
    """Test requests, one without a history among them if there is one."""
    store = HistoryStore.from_dataset(toy)
    table = RequestTable.from_columns(toy.requests("test"))
    order = np.argsort(table.host_prefix, kind="stable")
    index = order[np.linspace(0, len(order) - 1, count).astype(int)]
    return make_batch(store, table, index, max_history=most)


def quality_of(folder: Path, **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "policies": ["pivotal", "newest"],
        "compressions": [4],
        "recent": 5,
        "replicates": 20,
        "device": "cpu",
        "workers": 1,
    }
    plan = Plan(folder, changes.pop("seeds", [0, 1]), changes.pop("options", TINY))
    return compressed_quality([plan], **{**given, **changes})


@pytest.mark.parametrize("policy", compressing.POLICIES)
@torch.no_grad()
def test_where_nothing_is_dropped_the_model_says_the_same(
    toy: ClickDataset, ranker: Ranker, policy: str
) -> None:
    batch = batch_of(toy)
    kept = CompressedHistories(ranker, batch, recent=5)
    logits = kept.logits(policy, max(1, batch.longest[1]))
    torch.testing.assert_close(logits, ranker(batch), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(kept.logits(policy, 2), logits, atol=1e-3)


@torch.no_grad()
def test_the_newest_events_are_a_shorter_history(toy: ClickDataset, ranker: Ranker) -> None:
    """But for what the head counts, which is of the whole one."""
    whole, short = batch_of(toy), batch_of(toy, most=7)
    history, candidates = ranker.embedding(short)
    answer = ranker.encoder(history, candidates, short)
    newest = CompressedHistories(ranker, whole, recent=5).logits("newest", 7)
    expected = ranker.head(answer, candidates.values, whole)
    torch.testing.assert_close(newest, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_event_is_asked_for_by_those_after_it(toy: ClickDataset, ranker: Ranker) -> None:
    batch = batch_of(toy)
    asked = CompressedHistories(ranker, batch, recent=5).asked
    offsets = batch.offsets.tolist()
    user = int(np.argmax(batch.events))
    first, end = offsets[user : user + 2]
    items = batch.item.values.long()
    known = items.masked_fill(items >= ranker.num_items, 0)
    vectors = ranker.embedding.items(known, batch.items)
    query = ranker.encoder.pool.query(vectors).unflatten(1, (2, -1))
    torch.testing.assert_close(asked.values[first : end - 1], query[first + 1 : end])
    torch.testing.assert_close(asked.values[end - 1], query[end - 1])


def test_budgets() -> None:
    assert [budget_of(100, c) for c in (1, 2, 3, 10)] == [100, 50, 34, 10]
    assert budget_of(0, 2) == budget_of(1, 10) == 1


def test_all_policies_keep_as_many(toy: ClickDataset, ranker: Ranker) -> None:
    seen: dict[str, list[list[int]]] = {}
    made = compressing.scissorhands

    def counted(cache: Any, *arguments: Any, **options: Any) -> Any:
        gone = made(cache, *arguments, **options)
        seen.setdefault(options["policy"], []).append(cache.lengths.tolist())
        return gone

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compressing, "scissorhands", counted)
        batch = batch_of(toy)
        kept = CompressedHistories(ranker, batch, recent=5)
        for policy in compressing.POLICIES:
            kept.logits(policy, 6)
    expected = [np.minimum(batch.events, 6).tolist()]
    assert seen == dict.fromkeys(compressing.POLICIES, expected)


@torch.no_grad()
def test_what_policies_go_by(
    toy: ClickDataset, ranker: Ranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scissorhands by the last queries and ten newest events, H2O by all and half of its budget."""
    seen: dict[str, tuple[KeyStatistics | None, int]] = {}
    made = compressing.scissorhands

    def noted(cache: Any, statistics: KeyStatistics | None, **options: Any) -> Any:
        seen[options["policy"]] = statistics, options["recent"]
        return made(cache, statistics, **options)

    monkeypatch.setattr(compressing, "scissorhands", noted)
    kept = CompressedHistories(ranker, batch_of(toy), recent=5)
    for policy in compressing.POLICIES:
        kept.logits(policy, 30)
    assert {policy: newest for policy, (_, newest) in seen.items()} == {
        "pivotal": 10, "h2o": 15, "newest": 0, "random": 0,
    }  # fmt: skip
    for policy, recent in (("pivotal", 5), ("h2o", None)):
        expected = key_statistics(kept.asked, kept.key, kept.lse, recent=recent)
        found = seen[policy][0]
        assert found is not None
        assert torch.equal(found.unimportant.values, expected.unimportant.values)
        assert torch.equal(found.mass.values, expected.mass.values)


def test_as_many_are_kept_as_is_said(
    toy: ClickDataset, ranker: Ranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    made = compressing.scissorhands

    def counted(cache: Any, *arguments: Any, **options: Any) -> Any:
        gone = made(cache, *arguments, **options)
        if options["policy"] == "newest":
            lengths.extend(cache.lengths.tolist())
        return gone

    monkeypatch.setattr(compressing, "scissorhands", counted)
    score = CompressionScore((WHOLE, Setting("newest", 3.0)), 5)
    score(ranker, toy, TrainConfig(), score.names())
    said = kept_of(events_of(toy, 60), 3.0)
    assert np.mean(lengths) == said["kept"] < said["whole"]


@torch.no_grad()
def test_persistence_is_of_the_longest_test_history_of_each_user(
    toy: ClickDataset, ranker: Ranker
) -> None:
    columns = toy.requests("test")
    longest = {int(u): row for row, u in enumerate(columns.user)}  # in order of time
    assert len(longest) < len(columns)
    table = RequestTable.from_columns(columns)
    rows = np.sort([*longest.values()])
    batch = make_batch(HistoryStore.from_dataset(toy), table, rows, max_history=60)
    kept = CompressedHistories(ranker, batch, recent=5)
    expected = persistence_ratio(kept.asked, kept.key, kept.lse)
    score = CompressionScore((WHOLE,), 5)
    found = score(ranker, toy, TrainConfig(), score.names())[-1].metrics
    assert found == {
        "persistence_ratio": pytest.approx(float(expected.ratio.nanmean())),
        "pivotal_kept": pytest.approx(float(expected.kept.nanmean())),
        "pivotal": pytest.approx(float(expected.pivotal.nanmean())),
    }
    assert len({*found.values()}) == 3


def test_rows_of_policies_and_compressions(home: Path, toy: ClickDataset) -> None:
    table = quality_of(toy.folder, run_id="09")
    assert set(table["id"]) == {"09"}
    assert set(table["op"]) == {"ranking_by_compression", "persistence"}
    scored = results.select(table, op="ranking_by_compression", metric="gauc")
    scored = results.with_config(scored, "compression", "kept", "whole", "seed")
    found = sorted(zip(scored["provider"], scored["compression"], scored["seed"], strict=True))
    assert found == [(p, c, s) for p in ("newest", "pivotal") for c in (1.0, 4.0) for s in (0, 1)]
    prefix = np.minimum(toy.requests("test").prefix, 60)
    whole = scored[scored["compression"] == 1]
    assert whole["kept"].tolist() == whole["whole"].tolist() == [pytest.approx(prefix.mean())] * 4
    # Requests that share a budget differ by up to a sixteenth.
    kept = scored[scored["compression"] == 4]["kept"].iloc[0]
    exact = np.ceil(prefix / 4).clip(min=(prefix > 0)).mean()
    assert exact <= kept <= 1.1 * exact
    # Where nothing is dropped, policies are one.
    by_policy = whole.groupby("provider")["value"].apply(list)
    assert by_policy["newest"] == by_policy["pivotal"]

    # Each row is of its policy, and each difference of its metric.
    config = TrainConfig.from_dict({**TINY, "model": "target_attention", "seed": 0})
    model = train(config, toy, device="cpu", progress=False).model
    score = CompressionScore((WHOLE, *(Setting(p, 4.0) for p in ("pivotal", "newest"))), 5)
    judged = score(model, toy, config, score.names())
    assert judged[1].metrics != judged[2].metrics
    for policy, one in zip(("pivotal", "newest"), judged[1:3], strict=True):
        for metric, value in one.metrics.items():
            rows = results.select(table, provider=policy, metric=metric)
            rows = results.with_config(rows, "compression", "seed")
            base, kept = (rows[rows["compression"] == level] for level in (1.0, 4.0))
            assert kept["value"][kept["seed"] == 0].tolist() == [pytest.approx(value)]
            (gap,) = results.select(table, provider=policy, metric=f"{metric}_difference")["value"]
            assert gap == pytest.approx(kept["value"].mean() - base["value"].mean())

    lost = by_compression(table)
    assert lost["compression"].tolist() == [1.0, 4.0] * 2
    for row in lost[lost["compression"] == 4].itertuples():
        one = lost[(lost["policy"] == row.policy) & (lost["compression"] == 1)]
        assert row.loss == pytest.approx(row.mean - one["mean"].iloc[0])
        assert row.low <= row.loss <= row.high
    differences = results.select(table, metric="gauc_difference")
    assert {json.loads(config)["seeds"] for config in differences["config"]} == {2}
    shares = results.select(table, op="persistence")
    assert set(shares["metric"]) == {"persistence_ratio", "pivotal_kept", "pivotal"}
    assert shares["value"].between(0, 1).all()


def test_both_sides_of_a_loss_are_of_the_same_trainings(
    home: Path, toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far seeds are from each other is no doubt about what compression does to each."""
    asked: list[bool] = []

    def noted(*given: Any, paired: bool, **options: Any) -> Difference:
        asked.append(paired)
        return difference(*given, paired=paired, **options)

    monkeypatch.setattr("jagged_ranking.evaluation.rows.difference", noted)
    quality_of(toy.folder, run_id="09")
    assert asked
    assert all(asked)


def test_whole_histories_score_as_the_model_does(toy: ClickDataset) -> None:
    """Of a trained model, batch by batch of requests with about as many events."""
    config = TrainConfig.from_dict({**TINY, "model": "target_attention"})
    model = train(config, toy, device="cpu", progress=False).model
    score = CompressionScore((WHOLE, Setting("random", 3.0)), 5)
    ours, random, matters = score(model, toy, config, score.names())
    theirs = evaluate_model(model, toy, batch_size=64)
    np.testing.assert_allclose(ours.probability, theirs.probability, atol=1e-5)
    assert ours.metrics["gauc"] == pytest.approx(theirs.metrics["gauc"], abs=1e-4)
    assert not np.allclose(random.probability, theirs.probability, atol=1e-5)
    assert [one.split for one in (ours, random, matters)] == list(score.names())
    assert set(matters.metrics) == {"persistence_ratio", "pivotal_kept", "pivotal"}


def test_what_scores_depend_on_names_them() -> None:
    settings = (WHOLE, Setting("h2o", 1.5))
    names = CompressionScore(settings, 5).names()
    assert len(set(names)) == 3
    assert not set(names) & set(CompressionScore(settings, 6).names())
    other = CompressionScore((WHOLE, Setting("h2o", 2.0)), 5).names()
    assert [one == another for one, another in zip(names, other, strict=True)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": ["oldest"]}, "no policy 'oldest'"),
        ({"compressions": [0.5]}, "compressions must be at least 1, got 0.5"),
        ({"seeds": []}, "at least one policy, one seed"),
        ({"replicates": 0}, "one replicate"),
        ({"options": {"width": 3}}, "unknown option 'width'"),
    ],
)
def test_wrong_options_are_refused_before_training(
    toy: ClickDataset, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressing, "train_all", None)
    with pytest.raises(ValueError, match=said):
        quality_of(toy.folder, **changes)


def test_each_training_is_kept_with_its_scores(
    home: Path, toy: ClickDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"policies": ["newest"], "compressions": [3], "seeds": [0, 1]}
    given |= {"options": TINY, "recent": 5, "replicates": 5, "device": "cpu", "workers": 1}
    first = quality_by_compression([toy.folder], own={toy.name: {"seeds": [3]}}, **given)
    assert "kept from" not in capsys.readouterr().out
    again = quality_by_compression([toy.folder], own={toy.name: {"seeds": [3]}}, **given)
    assert capsys.readouterr().out.count("kept from") == 1
    pd.testing.assert_frame_equal(first, again)
    seeds = {json.loads(c)["seed"] for c in results.select(first, metric="gauc")["config"]}
    assert seeds == {3}
    # One more seed trains that alone; of others asked there are other scores.
    quality_by_compression([toy.folder], own={toy.name: {"seeds": [3, 4]}}, **given)
    assert capsys.readouterr().out.count("kept from") == 1
    quality_by_compression([toy.folder], own={toy.name: {"seeds": [3]}}, **{**given, "recent": 6})
    assert "kept from" not in capsys.readouterr().out
    assert quality_by_compression([], **given).empty


def test_side_by_side_as_one_after_another(toy: ClickDataset, home: Path) -> None:
    alone = quality_of(toy.folder)
    paths.CACHE.rename(home / "elsewhere")
    pd.testing.assert_frame_equal(quality_of(toy.folder, workers=2), alone)


def test_cases_of_the_study() -> None:
    cases = cache_cases(**CASES)
    assert [case.op for case in cases] == [
        *["cached_attention"] * 2,
        *["cache_append"] * 2,
        "prefixed_attention",
        "key_statistics",
    ]
    assert {case.dtype for case in cases} == {torch.float32}
    assert {case.dtype for case in cache_cases(**{**CASES, "device": "cuda"})} == {torch.bfloat16}
    described = describe_cases(cases)
    assert described.loc["prefixed_attention", "prefix"].tolist() == [3]
    assert described["queries"].tolist()[-1] == 20
    none = {"history_lengths": [], "users": [], "prefixes": [], "scored_histories": []}
    with pytest.raises(ValueError, match="no batch"):
        cache_cases(**{**CASES, **none})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"new_events": 0}, "new_events must be at least 1, got 0"),
        ({"users": [2, 0]}, "users must be at least 1, got 0"),
        ({"kept_share": 2.0}, "kept_share must be above 0 and at most 1, got 2"),
    ],
)
def test_cases_that_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cache_cases(**{**CASES, **wrong})


@pytest.mark.usefixtures("objects_apart")
def test_cases_are_measured_and_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jagged_ranking.measure.timing import Effort

    cases = cache_cases(**{**CASES, "users": [], "history_lengths": [8], "scored_histories": []})
    given: dict[str, Any] = {"device": "cpu", "run_id": "09"}
    given["effort"] = Effort(rounds=1, inner=1, warmup=1, seconds=0.01)
    first = measured_cached(cases, **given)
    assert capsys.readouterr().out.count("took") == 4  # the ceilings, too
    again = measured_cached(cases, **given)
    assert capsys.readouterr().out.count("kept from") == 4
    pd.testing.assert_frame_equal(first, again)
    assert set(first["op"]) == {
        "ceiling", "cached_attention", "cache_schedule", "cache_append", "prefixed_attention",
    }  # fmt: skip
