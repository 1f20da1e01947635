"""Logs in forms of others, through the commands of the README, and back as `click_data` opens
them."""

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from foreign_logs import (
    CATEGORIES,
    ForeignLog,
    json_lines,
    parquet_with_nulls,
    tabs_and_local_times,
)
from refusal import Command, refused

from click_data import ClickDataset, open_dataset

NUMBER = 1200


def prepared(command: Command, path: Path, *options: str) -> tuple[ClickDataset, str]:
    """The data set that the README's command makes of a log, and what it prints."""
    out = path.parent / "data"
    code, said, error = command("log", "--from", path, "--out", out, *options)
    assert (code, error) == (0, "")
    return open_dataset(out), said


def held(dataset: ClickDataset) -> dict[str, list[tuple[str, int, int]]]:
    """Item, time and label of each user's events, in their order, by the names of the log."""
    histories = dataset.histories
    label = histories.signals.get("label", np.ones(len(histories.item)))  # if all are the same
    items = [str(name) for name in dataset.items["item_id"].to_pylist()]
    users = dataset._open("histories.parquet")["user_id"].to_pylist()  # pyright: ignore[reportPrivateUsage]
    rows = [
        (items[item], int(time), int(label))
        for item, time, label in zip(histories.item, histories.time, label, strict=True)
    ]
    bounds = zip(users, histories.offsets, histories.offsets[1:], strict=False)
    return {str(user): rows[begin:end] for user, begin, end in bounds}


def wanted(log: ForeignLog, *, labels: bool = True) -> dict[str, list[tuple[str, int, int]]]:
    """The same of what was written."""
    rows: dict[str, list[tuple[str, int, int]]] = {}
    for event in log.events:
        row = (log.items[event.item], event.time, event.label if labels else 1)
        rows.setdefault(log.users[event.user], []).append(row)
    return rows


def test_tabs_and_local_times(tmp_path: Path, prepare_command: Command) -> None:
    log = tabs_and_local_times(tmp_path, NUMBER)
    text = log.path.read_text()
    assert "+01:00\t" in text
    assert "+02:00\t" in text
    dataset, said = prepared(prepare_command, log.path, *log.options)
    assert held(dataset) == wanted(log)
    assert dataset.info["counts"]["events"] == NUMBER
    assert sum(dataset.info["counts"]["candidates"].values()) == NUMBER
    assert dataset.item_features == {"category": CATEGORIES + 1}
    in_order = sorted(log.events, key=lambda event: (log.users[event.user], event.time))
    assert dataset.histories.signals["Preis"].tolist() == [event.price for event in in_order]
    assert "user_id from Kunde" in said
    assert "separated by tab" in said
    assert "not read: Seite" in said


def test_times_without_a_zone_are_utc(
    tmp_path: Path, prepare_command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tabs_and_local_times(tmp_path, NUMBER, zone=False)
    dataset, _ = prepared(prepare_command, log.path, *log.options)
    first, last = min(event.time for event in log.events), max(event.time for event in log.events)
    # Berlin's clock read as UTC: an hour late before the change, two after it.
    assert int(dataset.histories.time.min()) == first + 3600
    assert int(dataset.histories.time.max()) == last + 7200
    with pytest.raises(SystemExit):
        prepare_command("--help")
    assert "without a zone is UTC" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "form",
    [
        "2024-04-01 02:{:02}:00+02",
        "2024-04-01 02:{:02}:00 +02",
        "2024-04-01 02:{:02}:00 +0200",
        "2024-04-01 02:{:02}:00+0200",
        "2024-04-01 02:{:02}:00.250+02",
        "2024-04-01T02:{:02}:00+02:00",
        "2024-03-31 20:{:02}:00-04",
    ],
)
def test_zones_as_others_write_them(form: str, tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    lines = [f"{n % 2},{n % 3},{form.format(n)},{n // 2 % 2}" for n in range(20)]
    path.write_text("\n".join(["user_id,item_id,timestamp,label", *lines]) + "\n")
    dataset, _ = prepared(prepare_command, path)
    midnight = 1_711_929_600  # 2024-04-01 00:00 UTC
    assert sorted(dataset.histories.time.tolist()) == [midnight + 60 * n for n in range(20)]


@pytest.mark.parametrize("zone", [" UTC", "UTC", "Z", " Z"])
def test_utc_by_its_name(zone: str, tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    lines = [f"{n % 2},{n % 3},1970-01-02 00:{n:02}:00{zone},{n // 2 % 2}" for n in range(20)]
    path.write_text("\n".join(["user_id,item_id,timestamp,label", *lines]) + "\n")
    dataset, _ = prepared(prepare_command, path)
    assert sorted(dataset.histories.time.tolist()) == [86_400 + 60 * n for n in range(20)]


def test_parquet_with_nulls(tmp_path: Path, prepare_command: Command) -> None:
    log = parquet_with_nulls(tmp_path, NUMBER)
    *columns, drop = log.options
    error = refused(prepare_command, tmp_path, "log", "--from", log.path, *columns)
    left_out = NUMBER - len(log.events)
    assert f"{log.path}: column visitor, row 7: no id: the value is missing (and " in error
    assert f"{drop} leaves out the bad rows, {left_out} of 1,200" in error
    dataset, said = prepared(prepare_command, log.path, *log.options)
    assert held(dataset) == wanted(log, labels=False)
    assert f"dropped, bad rows: {left_out} of 1,200 rows" in said
    assert dataset.item_features == {
        "category": CATEGORIES
    }  # one of the categories is null, unknown
    label = dataset.requests("train").labels["label"]
    assert 0 < int(label.sum()) < len(label)


@pytest.mark.parametrize("form", ["lines", "lines in gzip", "an array"])
def test_json(form: str, tmp_path: Path, prepare_command: Command) -> None:
    log = json_lines(tmp_path, NUMBER)
    path = log.path
    if form == "lines in gzip":
        path = log.path.with_name("clicks.json.gz")
        path.write_bytes(gzip.compress(log.path.read_bytes()))
    if form == "an array":
        path = log.path.with_name('it\'s "mine" $HOME.json')
        path.write_text(json.dumps([json.loads(line) for line in log.path.open()], indent=1))
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: holds JSON; write it as Parquet first, as with: ")
    _, _, conversion = error.partition("as with: ")
    subprocess.run(conversion, shell=True, check=True, cwd=tmp_path)
    converted = path.with_name(f"{path.name}.parquet")
    dataset, _ = prepared(prepare_command, converted, *log.options)
    assert held(dataset) == wanted(log)
    assert dataset.item_features == {"category": CATEGORIES + 1}
