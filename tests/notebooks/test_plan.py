"""What a run is decided by: what the user typed, the preset, the notebook, in this order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jagged_ranking import paths
from jagged_ranking.cli import main
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.plan import make_plan, variables_from_here
from jagged_ranking.reproduce.run_record import RunRecord, earlier_seconds, read_record
from jagged_ranking.reproduce.settings import make_settings


@pytest.mark.usefixtures("checkout")
def test_what_is_typed_counts_before_the_preset_and_this_before_the_notebook():
    assert "count" not in make_plan("01_good").parameters  # its own, 3
    assert make_plan("01_good", preset="smoke").parameters["count"] == 5
    typed = make_plan("01_good", preset="smoke", assignments=["count=7"])
    assert typed.parameters["count"] == 7


def test_a_whole_name_is_that_notebook_whatever_begins_with_it(add_notebook, good_cells):
    add_notebook("01_good_mine", good_cells)
    assert make_plan("01_good").id == "01_good"
    assert make_plan("02").id == "02_bad"
    with pytest.raises(RunError, match="`01` names more than one notebook"):
        make_plan("01")


@pytest.mark.usefixtures("checkout")
def test_of_a_parameter_that_is_typed_twice_the_last_counts():
    plan = make_plan("01_good", assignments=["count=7", "rate=1", "count=8"])
    assert plan.parameters["count"] == 8


def test_data_that_is_a_parameter_is_that_of_the_run(checkout, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "dataset.json"
    other.write_text(json.dumps({"name": "other", "digest": "def"}))
    plan = make_plan("01_good", assignments=[f"data={tmp_path}/other"], data=checkout / "data")
    assert plan.data == tmp_path / "other"
    assert plan.parameters["data"] == str(tmp_path / "other")
    assert plan.key() != make_plan("01_good", data=checkout / "data").key()


@pytest.mark.usefixtures("checkout")
def test_results_are_labelled_with_their_preset():
    assert make_plan("01_good").parameters["preset"] == "interactive"
    plan = make_plan("01_good", preset="smoke")
    assert (plan.preset, plan.parameters["preset"]) == ("smoke", "smoke")
    assert plan.folder == paths.RUNS / "smoke" / "01_good"
    mine = make_plan("01_good", preset="smoke", assignments=["preset=mine"])
    assert (mine.preset, mine.parameters["preset"]) == ("mine", "mine")


def test_a_preset_of_another_form_is_named(checkout):
    path = checkout / "notebooks" / "params" / "smoke.yaml"
    for content in ("01_good: {count: [1}", "- 01_good", "01_good: 3"):
        path.write_text(content)
        with pytest.raises(RunError, match=str(path)) as refused:
            make_plan("01_good", preset="smoke")
        assert "\n" not in str(refused.value)
    path.write_text("01_good: {count: many}")
    with pytest.raises(RunError, match="preset smoke, 01_good: parameter `count` is int"):
        make_plan("01_good", preset="smoke")


def test_a_preset_that_is_no_text_is_named(checkout):
    path = checkout / "notebooks" / "params" / "smoke.yaml"
    path.write_bytes(b"01_good: {rate: \xff}")
    with pytest.raises(RunError, match=str(path)):
        make_plan("01_good", preset="smoke")


def test_a_preset_of_a_notebook_that_there_is_not_is_refused(checkout):
    path = checkout / "notebooks" / "params" / "smoke.yaml"
    path.write_text("01_good: {count: 5}\n01_god: {count: 6}\n")
    with pytest.raises(RunError, match="preset smoke sets parameters of `01_god`, which is no"):
        make_settings(data=checkout / "data")


def test_a_notebook_that_is_named_twice_runs_once(checkout):
    settings = make_settings(data=checkout / "data", only=["02", "01", "02_bad"])
    assert settings.only == ("02_bad", "01_good")


@pytest.mark.parametrize("content", ["", "[]", '{"name": "toy"}', '{"digest": "abc"}'])
@pytest.mark.parametrize("command", [["run", "01"], ["reproduce", "--only", "01"]])
def test_data_that_does_not_say_what_it_is_is_named(checkout, capfd, command, content):
    path = checkout / "data" / "dataset.json"
    path.write_text(content)
    assert main([*command, "--data", str(checkout / "data")]) == 1
    assert capfd.readouterr().err == f"jagged: {path}: not the description of a dataset\n"
    assert not (checkout / "figures").exists()


def test_a_notebook_finds_the_folders_that_the_user_meant(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(paths.DATA_VARIABLE, raising=False)
    monkeypatch.setenv(paths.BUILD_VARIABLE, "kept")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["mine", "/theirs"]))
    found = variables_from_here()
    assert found[paths.BUILD_VARIABLE] == str(tmp_path / "kept")
    assert found[paths.WORK_VARIABLE] == str(checkout)
    assert found[paths.DATA_VARIABLE] == str(checkout / "data")
    assert found["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "mine"), "/theirs"])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"id": "01", "status": "ok", "key": "a", "new": 1}']
)
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_record(tmp_path) is None
    assert earlier_seconds(tmp_path, "a") == 0


def test_time_is_of_all_parts_of_one_run(tmp_path: Path) -> None:
    assert earlier_seconds(tmp_path, "a") == 0
    RunRecord("01", "failed", "a", seconds=2.0, earlier_seconds=40.0).write(tmp_path)
    assert earlier_seconds(tmp_path, "a") == 42
    assert earlier_seconds(tmp_path, "b") == 0  # with other parameters nothing is kept
    RunRecord("01", "ok", "a", seconds=2.0, earlier_seconds=40.0).write(tmp_path)
    assert earlier_seconds(tmp_path, "a") == 0  # it came to its end
