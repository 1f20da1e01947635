"""Data sets of next items are refused before a notebook begins that cannot train on them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from click_data import prepare
from jagged_ranking.cli import main
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.next_items import check_next_items
from jagged_ranking.reproduce.plan import make_plan


@pytest.fixture(scope="module")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set of this name, of 9 users' sequences of next items."""
    folder = tmp_path_factory.mktemp("next") / "songs"
    folder.mkdir()
    events = [(user, (user + 3 * time) % 20, time) for user in range(9) for time in range(6)]
    names = ("user_id", "item_id", "timestamp")
    columns = dict(zip(names, zip(*events, strict=True), strict=True))
    pq.write_table(pa.table(columns), folder / "interactions.parquet")
    return prepare("sequences", from_path=folder, out=folder / "prepared", name="songs", holdout=1)


@pytest.mark.parametrize("notebook", ["04_quality", "06_history_length", "09_history_cache"])
@pytest.mark.parametrize("given", ["data", "datasets"])
def test_a_notebook_that_cannot_train_on_them_does_not_begin(
    songs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], notebook: str, given: str
) -> None:
    where = ["--data", str(songs)] if given == "data" else ["-p", f"datasets=[{songs}]"]
    out = tmp_path / "out"
    assert main(["run", notebook, *where, "--preset", "smoke", "--out", str(out)]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"jagged: {notebook}: songs has next items alone, which ")
    assert said.count("\n") == 1
    assert ("`jagged run" in said) == (notebook != "09_history_cache")
    assert not out.exists()


@pytest.mark.parametrize("notebook", ["04_quality", "06_history_length"])
def test_what_the_line_says_is_taken(songs: Path, notebook: str) -> None:
    with pytest.raises(RunError) as why:
        check_next_items(make_plan(notebook, preset="smoke", data=songs))
    jagged, run, name, p, own, more = shlex.split(str(why.value).split("`")[1])
    assert (jagged, run, name, p, more) == ("jagged", "run", notebook, "-p", "...")
    check_next_items(make_plan(name, preset="smoke", assignments=[own], data=songs))


@pytest.mark.parametrize(
    "options",
    [
        {"models": "din", "options": "{loss: next_item, head: dot}"},
        {"models": "sasrec,din", "options": "{loss: next_item, head: dot}"},
        {"models": "[]", "options": "{loss: next_item, head: dot}"},
        {"models": "sasrec", "options": "{loss: next_item}"},
        {"models": "sasrec", "options": "{head: dot}"},
    ],
)
def test_half_of_it_is_not(songs: Path, options: dict[str, str]) -> None:
    given = [f"{name}={value}" for name, value in options.items()]
    with pytest.raises(RunError, match="songs has next items alone"):
        check_next_items(make_plan("04", assignments=given, data=songs))


@pytest.mark.parametrize("notebook", ["01", "05", "10", "12"])
def test_notebooks_that_train_on_no_data_set_take_them(songs: Path, notebook: str) -> None:
    check_next_items(make_plan(notebook, preset="smoke", data=songs))


def test_a_reproduction_names_all_that_it_would_stop_at(
    songs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "--data", str(songs), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    said = capfd.readouterr().err
    assert said.startswith(
        "jagged: 04_quality, 06_history_length, 09_history_cache: songs has next items alone, "
    )
    assert said.endswith("; --only names other notebooks\n")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([*words, "--only", "01", "05", "--dry-run"]) == 0
