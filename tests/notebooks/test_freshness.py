"""What makes a run stale, and what does not: each part of its key, and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jagged_ranking import devices, paths, provenance
from jagged_ranking.reproduce import freshness
from jagged_ranking.reproduce.click_logs import find_histories
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import drawing_key, is_fresh, run_key
from jagged_ranking.reproduce.run_record import RunRecord

RANKS = ["# A toy", 'device: str = "auto"\nranks: list[int] = [1, 2]', "x = 1"]


@pytest.fixture
def key(checkout: Path) -> Callable[..., str]:
    """The key of a notebook with these parameters."""
    return lambda **parameters: run_key(checkout / "notebooks" / "01_good.ipynb", parameters, None)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where data sets are looked for by name."""
    monkeypatch.setenv(paths.DATA_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_a_cell_is_counts(checkout, key):
    path = checkout / "notebooks" / "01_good.ipynb"
    content = json.loads(path.read_text())
    keys = {key()}
    content["cells"][0]["cell_type"] = "raw"
    path.write_text(json.dumps(content))
    keys.add(key())
    content["cells"][3]["metadata"]["tags"] = ["parameters of another"]
    path.write_text(json.dumps(content))
    assert len(keys | {key()}) == 3


def test_what_results_are_labelled_with_counts(key):
    assert key(preset="smoke") != key(preset="small")


def test_further_data_sets_count_by_their_digests(key, data_folder):
    (data_folder / "more").mkdir()
    keys = {key(datasets=["more"])}  # not there
    for digest in ("abc", "def"):
        described = json.dumps({"name": "more", "digest": digest})
        (data_folder / "more" / "dataset.json").write_text(described)
        keys.add(key(datasets=["more"]))
    assert len(keys) == 3


def test_histories_count_by_their_lengths(key, data_folder):
    keys = {key(histories=["log"])}
    for lengths in ([1, 2], [1, 3]):
        table = pa.table({"length": np.array(lengths)})
        pq.write_table(table, data_folder / "log.parquet")
        keys.add(key(histories=["log"]))
    assert len(keys) == 3


def test_two_data_sets_that_are_called_the_same_are_refused(checkout, key, data_folder):
    """Their rows would be those of one."""
    for name, digest in (("one", "abc"), ("again", "abc"), ("other", "def")):
        (data_folder / name).mkdir()
        described = json.dumps({"name": "toy", "digest": digest})
        (data_folder / name / "dataset.json").write_text(described)
    assert key(datasets=["one", "again"])  # the same
    refused = f"{data_folder}/other: another data set of this run is called toy, too"
    with pytest.raises(RunError, match=refused):
        key(datasets=["one", "other"])
    notebook = checkout / "notebooks" / "01_good.ipynb"
    with pytest.raises(RunError, match="is called toy, too"):
        run_key(notebook, {"datasets": ["one"]}, data_folder / "other")


def test_two_histories_that_are_called_the_same_are_refused(key, data_folder):
    for name, lengths in (("one", [1, 2]), ("other", [1, 3])):
        (data_folder / name).mkdir()
        pq.write_table(pa.table({"length": lengths}), data_folder / name / "log.parquet")
    given = [f"{data_folder}/{name}/log.parquet" for name in ("one", "other")]
    assert key(histories=given[:1] * 2)
    with pytest.raises(RunError, match=f"{given[1]}: other histories of this run are called log"):
        key(histories=given)


def test_histories_lie_in_a_folder_or_a_file_of_their_name(data_folder):
    assert find_histories("log") is None
    (data_folder / "log.parquet").touch()
    assert find_histories("log") == data_folder / "log.parquet"
    (data_folder / "log").mkdir()
    assert find_histories("log") == data_folder / "log"
    with pytest.raises(RunError, match=f"{data_folder}/none does not exist"):
        find_histories(f"{data_folder}/none")


def test_other_software_and_another_device_make_a_run_stale(key, monkeypatch):
    keys = {key()}
    with monkeypatch.context() as changed:
        changed.setattr(freshness.provenance, "versions", lambda: {"torch": "9.9.9"})
        keys.add(key())
    monkeypatch.setattr(freshness, "device_name", lambda device: "another")
    assert len(keys | {key()}) == 3


def test_ranks_that_were_missing_count_once_there_is_a_gpu_for_them(add_notebook, monkeypatch):
    notebook = add_notebook("03_ranks", RANKS)
    monkeypatch.setattr(freshness, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(freshness, "default_device", lambda: "cuda")
    monkeypatch.setattr(freshness, "usable_cores", lambda: 64)

    def on(gpus: int, **parameters: Any) -> str:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return run_key(notebook, parameters, None)

    assert on(1) != on(2)
    assert on(2) == on(8)  # none of its ranks are more
    assert on(2, ranks=[1, 4]) != on(8, ranks=[1, 4])
    assert on(1, device="cpu") == on(8, device="cpu")


def test_ranks_on_a_cpu_count_by_its_cores(add_notebook, monkeypatch):
    notebook = add_notebook("03_ranks", RANKS)
    monkeypatch.setattr(freshness, "default_device", lambda: "cpu")

    def on(cores: int) -> str:
        monkeypatch.setattr(freshness, "usable_cores", lambda: cores)
        return run_key(notebook, {}, None)

    assert on(1) != on(2)
    assert on(2) == on(64)


def test_a_notebook_without_ranks_is_fresh_on_a_larger_machine(key, monkeypatch):
    before = key()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(devices, "usable_cores", lambda: 64)
    monkeypatch.setattr(freshness, "usable_cores", lambda: 64)
    assert key() == before


@pytest.fixture
def folder(tmp_path: Path, write_quality: Callable[..., None]) -> Path:
    """Whole results of a run with the key "abc"."""
    write_quality(tmp_path, run_key="abc")
    RunRecord("04_quality", "ok", "abc").write(tmp_path)
    return tmp_path


def test_results_are_fresh_by_their_record(folder):
    assert is_fresh(folder, "abc")
    assert not is_fresh(folder, "def")
    RunRecord("04_quality", "failed", "abc", error="cell 3: no").write(folder)
    assert not is_fresh(folder, "abc")


@pytest.mark.parametrize("key", ["", "def"], ids=["by hand", "another run"])
def test_results_that_another_run_wrote_into_the_folder_are_not_fresh(folder, write_quality, key):
    write_quality(folder, run_key=key)
    assert not is_fresh(folder, "abc")


def test_results_of_ones_own_notebook_need_not_name_their_key(folder, write_quality):
    write_quality(folder)
    assert is_fresh(folder, "abc")


def test_figures_are_drawn_anew_where_a_caption_says_something_else(folder, monkeypatch):
    before = drawing_key(folder)
    assert drawing_key(folder) == before
    manifest = provenance.read_manifest(folder / provenance.MANIFEST)
    assert freshness.has_changed(manifest)
    monkeypatch.setattr(freshness, "has_changed", lambda manifest: False)
    assert drawing_key(folder) != before
