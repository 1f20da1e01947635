"""Rows that ranks share out by TorchRec: losses of one process, files that any number reads."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import STOP
from rank_scripts import assert_a_line_of_rank_0, run_script
from torch.distributed.checkpoint.api import CheckpointException
from torchrec_ranks import CONFIGS, SHARED

from click_data import ClickDataset, prepare
from jagged_ranking.training import checkpoint, table_files, trainer
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_files import CHECKPOINT, load_model
from jagged_ranking.training.table_files import TableFiles, load_tables
from jagged_ranking.training.torchrec_tables import check_torchrec
from jagged_ranking.training.trainer import train

SCRIPT = Path(__file__).parents[2] / "support" / "torchrec_ranks.py"
SMALL = TrainConfig(**SHARED, model="mean_pool", batch_size=256, checkpoint_steps=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchrec", reason="needs the extra torchrec")
    folder = tmp_path_factory.mktemp("torchrec") / "data"
    return prepare("synthetic", out=folder, users=9, items=12, categories=3, events=150)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(SCRIPT, "losses", data, tmp_path_factory.mktemp("trained"))


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Step by step, up to roundings of float32, which FBGEMM's tables are in."""
    assert len(found["losses"]) == len(expected["losses"]) > 4
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    assert found["best_epoch"] == expected["best_epoch"]
    for mine, row in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(row, rel=1e-5)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_have_the_losses_of_one_process(
    trained: dict[str, Any], name: str, count: int
) -> None:
    for rank in trained[str(count)]:
        close(rank[name], trained["1"][0][name])
        assert rank[name]["rows"] == [0, 0]  # no rank has a table of its own


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_ranks(trained: dict[str, Any], count: int) -> None:
    for rank in trained[str(count)]:
        assert rank["resumed"].pop("first step") < STOP
        close(rank["resumed"], trained["1"][0]["whole"])


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_reads_the_model_of_several(trained: dict[str, Any], name: str) -> None:
    (one,), (rank, _) = trained["1"], trained["2"]
    found = one["loaded"][name]
    tables = {key for key, value in rank[name]["weights"].items() if found[key] != value}
    assert tables == {"embedding.item.weight", "embedding.categories.0.weight"}
    for key in tables:
        assert found[key] == pytest.approx(one[name]["weights"][key], rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def broken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(SCRIPT, "broken", data, tmp_path_factory.mktemp("broken") / "run")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("missing", "rank 1: tables torchrec needs the extra torchrec"),
        ("damaged", "tables-1: cannot be read (rank 1: "),
        ("gone", "tables-1: no such tables, or not all of them"),
    ],
)
def test_what_cannot_be_read_is_a_line_of_rank_0(
    broken: dict[str, Any], name: str, line: str
) -> None:
    assert_a_line_of_rank_0(broken[name], line)


def test_ranks_that_share_rows_say_what_others_do(broken: dict[str, Any]) -> None:
    assert broken["fine"]["statuses"] == [0, 0]
    assert "best epoch: 0" in broken["fine"]["said"][0]
    assert "arning" not in broken["fine"]["said"][0]
    assert broken["fine"]["said"][1] == ""


def test_one_process_trains_them_as_it_trains_others(toy: ClickDataset, tmp_path: Path) -> None:
    """Without TorchRec; the rows lie in files of their own, of two steps at most."""
    options: dict[str, Any] = {"progress": False, "device": "cpu"}
    whole = train(replace(SMALL, tables="replicated"), toy, **options)
    apart = train(SMALL, toy, out=tmp_path, **options)
    assert apart.losses == whole.losses
    assert torch.equal(apart.model.embedding.item.weight, whole.model.embedding.item.weight)
    folders = sorted(path.name for path in tmp_path.glob("tables-*"))
    named = checkpoint.load(tmp_path / CHECKPOINT).content
    assert folders == sorted({named["rows"], named["best_rows"]})
    loaded, _ = load_model(tmp_path, digest=toy.digest)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_run_that_is_cut_off_behind_its_tables_goes_on(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are written first: a checkpoint names none that are not whole."""
    options: dict[str, Any] = {"progress": False, "device": "cpu"}
    expected = train(SMALL, toy, out=tmp_path / "whole", **options).losses

    class CutOff(Exception):
        pass

    def cut_off(self: Any, content: Any) -> None:
        if content["progress"]["step"] == 6:
            raise CutOff
        save(self, content)

    save = trainer.RunFiles.save
    monkeypatch.setattr(trainer.RunFiles, "save", cut_off)
    with pytest.raises(CutOff):
        train(SMALL, toy, out=tmp_path / "cut", **options)
    monkeypatch.undo()
    assert (tmp_path / "cut" / "tables-6").is_dir()
    assert train(SMALL, toy, out=tmp_path / "cut", resume=True, **options).losses == expected


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"table_optimizer": "adamw"}, "needs table_optimizer rowwise_adagrad, got adamw"),
        ({"accumulate": 2}, "needs accumulate 1, got 2"),
        ({"compile": "eager"}, "needs compile off, got eager"),
        ({"dim": 6}, "needs a dim that 4 divides, got 6"),
        ({"loss": "next_item", "head": "dot", "select": "auc"}, "needs negatives"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TrainConfig(**{**SHARED, **options})


def test_a_run_without_a_folder_is_refused(toy: ClickDataset) -> None:
    with pytest.raises(ValueError, match="tables torchrec needs a folder"):
        train(SMALL, toy, progress=False, device="cpu")


def test_without_the_extra_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(ValueError, match=r"needs the extra torchrec .*: ModuleNotFoundError"):
        check_torchrec()


class Planted:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


def test_nothing_in_the_files_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.arange(6.0).view(3, 2)}
    name = TableFiles(tmp_path, Ranks()).save(1, state)
    into = {"a": torch.zeros(3, 2)}
    load_tables(tmp_path / name, into)
    assert torch.equal(into["a"], state["a"])
    with pytest.raises(CheckpointError, match="tables-1: cannot be read"):
        load_tables(tmp_path / name, {"a": torch.zeros(4, 2)})
    (tmp_path / name / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
        load_tables(tmp_path / name, into)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("contents", "said"),
    [(b"", "Ran out of input"), (pickle.dumps(3), "the metadata is none")],
    ids=["empty", "a number"],
)
def test_a_metadata_that_is_none_says_so_where_pytorch_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: bytes, said: str
) -> None:
    name = TableFiles(tmp_path, Ranks()).save(1, {"a": torch.zeros(2)})
    (tmp_path / name / ".metadata").write_bytes(contents)

    def silent(_state: Any, *, storage_reader: Any, no_dist: bool) -> None:
        """As `load` of PyTorch 2.11."""
        with contextlib.suppress(Exception):
            storage_reader.read_metadata()
        failures: Any = {0: (AssertionError("metadata is None"), None)}
        raise CheckpointException("nothing was loaded", failures)

    messages = []
    for load in (table_files.load, silent):
        monkeypatch.setattr(table_files, "load", load)
        with pytest.raises(CheckpointError) as refused:
            load_tables(tmp_path / name, {"a": torch.zeros(2)})
        messages.append(str(refused.value))
    assert messages == [f"{tmp_path / name}: cannot be read (rank 0: {said})"] * 2
