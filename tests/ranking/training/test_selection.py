"""What an epoch is chosen by, and what is refused where the validation split does not have it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from click_data import ClickDataset, open_dataset
from jagged_ranking.cli import main
from jagged_ranking.data.batch import RequestTable
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.shares import share_out
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.all_items import ALL_ITEM_METRICS, ranks_among_all, ranks_and_rows
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import AUTO, SELECT_AMONG_ALL, TrainConfig
from jagged_ranking.training.experiment import Plan, compare_models
from jagged_ranking.training.run_files import CHECKPOINT, MODEL, load_model
from jagged_ranking.training.search import Search
from jagged_ranking.training.selection import settled
from jagged_ranking.training.trainer import train

NEXT = TrainConfig(model="sasrec", loss="next_item", head="dot", dim=8, epochs=3)
OPTIONS = ("--model", "sasrec", "--loss", "next_item", "--head", "dot", "--dim", "8")


@pytest.fixture(scope="module")
def alone(songs: ClickDataset, tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """The same songs, of which none is given beside the next one."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(songs.folder.parent / "interactions.parquet", folder)
    out = folder / "prepared"
    given = ["--from", str(folder), "--holdout", "1", "--out", str(out)]
    assert main(["prepare", "sequences", *given]) == 0
    return open_dataset(out)


def _train(data: ClickDataset, out: Path, *options: str) -> int:
    where = ["--data", str(data.folder), "--out", str(out), "--device", "cpu"]
    return main(["train", *where, *OPTIONS, *options])


def test_the_names_are_those_of_the_metrics() -> None:
    assert {*SELECT_AMONG_ALL} == {*ALL_ITEM_METRICS}


def test_next_items_without_lists_are_trained_by_the_defaults(
    alone: ClickDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(alone, tmp_path / "run", "--epochs", "3") == 0
    printed = capsys.readouterr().out.splitlines()
    columns = [line.split() for line in printed[:4]]
    values = [float(row[columns[0].index("valid_all_ndcg@10")]) for row in columns[1:]]
    assert f"best epoch: {int(np.argmax(values))}, " in printed[-1]
    model, config = load_model(tmp_path / "run", digest=alone.digest)
    assert config.select == "all_ndcg@10"
    found = evaluate_model(model, alone, batch_size=config.batch_size, split="valid").metrics
    assert found["all_ndcg@10"] == pytest.approx(max(values), abs=5e-5)
    assert _train(alone, tmp_path / "run", "--resume", "--epochs", "4") == 0


def test_metrics_that_are_undefined_are_null(
    alone: ClickDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has no NaN, which Python reads all the same."""

    def read(text: str) -> dict[str, Any]:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    assert _train(alone, tmp_path, "--epochs", "1") == 0
    capsys.readouterr()
    where = ["--data", str(alone.folder), "--run", str(tmp_path), "--device", "cpu"]
    assert main(["evaluate", *where, "--json"]) == 0
    found = read(capsys.readouterr().out)
    assert found == read((tmp_path / "metrics.json").read_text())
    assert found["metrics"]["auc"] is found["metrics"]["gauc"] is None
    assert 0 <= found["metrics"]["all_ndcg@10"] <= 1


@pytest.mark.parametrize("name", ["songs", "alone"])
@pytest.mark.parametrize("select", SELECT_AMONG_ALL)
def test_an_epoch_is_chosen_by_ranks_among_all_items(
    name: str, select: str, request: pytest.FixtureRequest
) -> None:
    """And they are those of `jagged evaluate`."""
    data = request.getfixturevalue(name)
    result = train(replace(NEXT, select=select), data, progress=False, device="cpu")
    values = [row[f"valid_{select}"] for row in result.history]
    assert result.best_epoch == int(np.argmax(values))
    found = evaluate_model(result.model, data, batch_size=7, split="valid").metrics
    assert found[select] == pytest.approx(max(values))


def test_they_are_computed_only_where_they_are_selected(songs: ClickDataset) -> None:
    result = train(replace(NEXT, epochs=1), songs, progress=False, device="cpu")
    assert result.config.select == "ndcg@10"
    assert not {f"valid_{name}" for name in ALL_ITEM_METRICS} & {*result.history[0]}


def test_the_default_depends_on_the_data(
    songs: ClickDataset, alone: ClickDataset, toy: ClickDataset
) -> None:
    assert NEXT.select == AUTO
    assert [settled(NEXT, data).select for data in (songs, alone, toy)] == [
        "ndcg@10",
        "all_ndcg@10",
        "ndcg@10",
    ]
    named = replace(NEXT, select="mrr")
    assert settled(named, alone) is named


@pytest.mark.parametrize(
    ("select", "needed"),
    [
        *((name, "candidates of both labels") for name in ("auc", "gauc")),
        *((name, "lists of candidates") for name in ("list_auc", "mrr", "ndcg@10")),
    ],
)
def test_what_validation_does_not_have_is_refused_before_training(
    alone: ClickDataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    select: str,
    needed: str,
) -> None:
    assert _train(alone, tmp_path, "--select", select) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"jagged: {alone.name}: select is {select}, which needs {needed}; there are: "
        "all_ndcg@10, all_hr@10"
    ]
    assert not (tmp_path / CHECKPOINT).exists()
    assert not (tmp_path / MODEL).exists()


@pytest.mark.parametrize("select", SELECT_AMONG_ALL)
def test_ranks_among_all_items_need_a_model_that_scores_them(
    toy: ClickDataset, select: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"^select {select} .* needs loss next_item with head dot, got loss poin"
    ):
        TrainConfig(select=select, head="dot")
    with pytest.raises(ValueError, match=r"^loss next_item needs head dot, got head mlp$"):
        TrainConfig(select=select, loss="next_item")
    with pytest.raises(
        ValueError,
        match=rf"select is {select}, which needs next items alone; there are: auc, gauc$",
    ):
        train(replace(NEXT, select=select), toy, progress=False, device="cpu")
    by_row = {"table_optimizer": "rowwise_adagrad", "negatives": 5}
    with pytest.raises(ValueError, match=f"^tables torchrec cannot select {select}: of all items "):
        replace(NEXT, select=select, tables="torchrec", **by_row)


def test_the_value_of_a_select_option_that_is_none_is_answered_by_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--data", "data", "--out", "run", "--select", "hr"])
    assert re.search(r"'?ndcg@10'?, '?all_ndcg@10'?, '?all_hr@10'?\)", capsys.readouterr().err)


def test_ranks_of_shares_are_those_of_the_whole(alone: ClickDataset) -> None:
    """Of three processes, of which one has nothing to do in the last batch."""
    made = Ranker(NEXT, DataShape.of(alone)).eval()
    table, store = (
        RequestTable.from_columns(alone.requests("valid")),
        HistoryStore.from_dataset(alone),
    )

    def loader(share: Callable[[np.ndarray], np.ndarray] | None = None) -> RequestLoader:
        return RequestLoader(store, table, batch_size=19, max_history=4, share=share)

    expected = ranks_among_all(made, loader())
    found = np.full(len(expected), np.nan)
    for rank in range(3):
        shared = loader(lambda tokens, me=rank: share_out(tokens, ranks=3) == me)
        ranks, rows = ranks_and_rows(made, shared)
        assert np.isnan(found[rows]).all()
        found[rows] = ranks
    np.testing.assert_allclose(found, expected)


def test_models_are_compared_on_next_items_without_lists(alone: ClickDataset) -> None:
    search = Search(trials=2, space={"learning_rate": [0.01, 0.003]})
    config = replace(NEXT, epochs=1)
    plan = Plan(alone.folder, models=("sasrec",), seeds=(0,), config=config, search=search)
    table = compare_models([plan], replicates=20, device="cpu", workers=1, progress=False)
    trials = table[table["mode"] == "trial"]
    assert trials["metric"].tolist() == ["all_ndcg@10"] * 2
    assert (trials["status"] == "ok").all()
