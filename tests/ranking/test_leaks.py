"""What knows the answer is no data to train on: `jagged train` says so before any work."""

from collections.abc import Callable
from pathlib import Path

import pytest
from planted_rows import Row, planted, put, rows_of

from click_data import prepare, schema
from jagged_ranking.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "data"
    return prepare("synthetic", out=folder, users=9, items=9, categories=3, events=300)


def sees_itself(made: Path) -> tuple[str, Callable[[list[Row]], object], str]:
    """The last request may see the event that it is about."""
    rows = rows_of(made, schema.REQUESTS)
    change = put(-1, "prefix", rows[-1]["prefix"] + len(rows[-1]["item"]))
    return schema.REQUESTS, change, f"column prefix, row {len(rows) - 1}: may see an event at "


def counts_all(made: Path) -> tuple[str, Callable[[list[Row]], object], str]:
    """The counts of training are of the whole log."""
    held = [item for row in rows_of(made, schema.HISTORIES) for item in row["item"]]

    def change(rows: list[Row]) -> None:
        for item, row in enumerate(rows):
            row["train_count"] = held.count(item)

    return schema.ITEMS, change, "column train_count, row "


@pytest.mark.parametrize("plant", [sees_itself, counts_all])
def test_leaking_data_is_not_trained_on(
    plant: Callable, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, change, line = plant(made)
    folder = planted(made, tmp_path / "data", table, change)
    run = tmp_path / "run"
    code = main(["train", "--data", str(folder), "--model", "mean_pool", "--out", str(run)])
    error = capsys.readouterr().err
    assert code == 1
    assert error.startswith(f"jagged: {folder / table}: {line}")
    assert error.count("\n") == 1
    assert not run.exists()
