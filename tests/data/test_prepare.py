"""What `prepare` leaves on disk, and `open_dataset` makes of it."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grouplens import ratings_csv
from small_log import SMALL, contents

from click_data import SOURCES, DataError, cli, open_dataset, prepare
from jagged_ranking.cli import build_parser, main


def test_dataset_json_describes_the_tables(tmp_path: Path) -> None:
    ratings = ratings_csv(tmp_path)
    out = prepare("movielens", from_path=tmp_path, out=tmp_path / "out", split=(0.5, 0.2, 0.3))
    info = json.loads((out / "dataset.json").read_text())
    assert info["source"] == "movielens"
    assert info["inputs"][0] == {
        "file": "ratings.csv",
        "sha256": hashlib.sha256(ratings.read_bytes()).hexdigest(),
    }
    assert info["counts"] == {
        "users": 3,
        "items": 5,
        "events": 10,
        "requests": {"train": 4, "valid": 2, "test": 3},
        "candidates": {"train": 5, "valid": 2, "test": 3},
        "positives": {"train": 3, "valid": 1, "test": 1},
        "new_items": {"train": 0.0, "valid": 0.0, "test": 1.0},
    }
    assert info["format"] == 2
    assert info["split_times"] == {"valid": 1030, "test": 1040}
    assert info["time_unit"] == "s"
    assert (info["tasks"], info["signals"]) == (["label"], ["label", "rating"])
    assert info["features"] == ["popularity", "trend", "age"]
    assert (info["item_features"], info["item_dense"], info["context"]) == ({"category": 4}, [], {})
    assert (info["timed"], info["candidates"], info["split"]) == ("all", "logged", "time")
    assert (info["num_items"], info["item_rows"]) == (4, 6)
    assert info["history_length"]["mean"] == 3.333
    assert info["history_length"]["p50"] == info["history_length"]["max"] == 4
    assert info["padding_waste"] == round(1 - (10 / 3) / 4, 4)


def test_columns_are_views_of_a_mapped_file_of_the_types_promised(tmp_path: Path) -> None:
    dataset = open_dataset(prepare("synthetic", out=tmp_path / "out", **SMALL))
    histories, train = dataset.histories, dataset.requests("train")
    mapped = [
        *((columns.item, np.int32) for columns in (histories, train)),
        *((columns.time, np.int64) for columns in (histories, train)),
        *((values, np.int32) for values in (train.user, train.prefix)),
        *((values, np.int32) for values in dataset.item_categories.values()),
        *((values, np.float32) for values in histories.signals.values()),
        *((values, np.float32) for values in train.features.values()),
        *((values, np.int8) for values in train.labels.values()),
    ]
    assert len(mapped) == 6 + 1 + 1 + 3 + 1
    for values, dtype in mapped:
        assert values.dtype == dtype
        assert not values.flags.owndata
        assert not values.flags.writeable
    for columns in (histories, train):
        assert columns.offsets.dtype == np.int64
        assert columns.offsets[0] == 0
        assert columns.offsets[-1] == len(columns.item)
        assert not columns.offsets.flags.writeable
    assert len(histories.item) == SMALL["events"]
    assert len(train) == len(train.user) == len(train.offsets) - 1
    assert sum(len(dataset.requests(split).item) for split in ("train", "valid", "test")) == 800
    assert train.time.max() < dataset.requests("valid").time.min()
    with pytest.raises(ValueError, match="no split 'all'"):
        dataset.requests("all")


def test_opening_writes_beside_the_data_or_where_told_never_in_the_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    elsewhere = tmp_path / "elsewhere"
    code = (
        "import sys; from click_data import open_dataset\n"
        "dataset = open_dataset(sys.argv[1], cache=sys.argv[2] or None)\n"
        "print(len(dataset.requests('test')), dataset.histories.item.sum())"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    for cache, place in (("", out / ".cache"), (str(elsewhere), elsewhere)):
        subprocess.run(
            [sys.executable, "-c", code, str(out), cache],
            check=True,
            env=clean | {"HOME": str(home)},
            cwd=tmp_path,
        )
        assert any(place.rglob("column item.flat"))
    assert list(home.rglob("*")) == []


def test_a_folder_that_cannot_be_written_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    (out / ".cache").write_text("a file where the cache would go")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    assert len(open_dataset(out).requests("test")) > 0
    assert any((tmp_path / "scratch").rglob("column item.flat"))


def test_opening_after_a_replacement_shows_the_new_data(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    first = open_dataset(out).requests("train").labels["label"].copy()
    prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert not np.array_equal(first, open_dataset(out).requests("train").labels["label"])


def test_opening_what_is_not_a_whole_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a prepared data set .*jagged prepare"):
        open_dataset(tmp_path)
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    good = contents(out)
    (out / "histories.parquet").write_bytes(good["histories.parquet"][:500])
    with pytest.raises(DataError, match=r"out: histories.parquet changed since .* --force"):
        open_dataset(out)
    (out / "items.parquet").unlink()
    with pytest.raises(DataError, match=r"items.parquet: missing"):
        open_dataset(out)
    (out / "dataset.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset.json: not readable"):
        open_dataset(out)
    info = json.loads(good["dataset.json"])
    del info["counts"]
    (out / "dataset.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"dataset.json: says nothing of counts.users; prepare"):
        open_dataset(out)
    (out / "dataset.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="format"):
        open_dataset(out)


def test_tables_that_changed_are_refused(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    other = prepare("synthetic", out=tmp_path / "other", seed=1, **SMALL)
    requests = pq.read_table(out / "requests.parquet")
    earlier = pa.array(requests["prefix"].to_numpy() // 2, pa.int32())
    at = requests.schema.get_field_index("prefix")
    pq.write_table(requests.set_column(at, "prefix", earlier), out / "requests.parquet")
    with pytest.raises(DataError, match=r"out: requests.parquet changed since .* --force"):
        open_dataset(out)
    # One table of another data set, with the same columns.
    good = contents(other)
    for name in ("histories.parquet", "items.parquet"):
        (other / name).write_bytes((out / name).read_bytes())
    with pytest.raises(DataError, match=r"other: histories.parquet, items.parquet changed since"):
        open_dataset(other)
    # What was written before dataset.json told of each file.
    for name, content in good.items():
        (other / name).write_bytes(content)
    info = json.loads(good["dataset.json"])
    del info["files"]
    (other / "dataset.json").write_text(json.dumps(info))
    assert open_dataset(other).digest == info["digest"]
    prepare("synthetic", out=other, seed=1, **SMALL)
    (other / "items.parquet").write_bytes((out / "items.parquet").read_bytes())
    with pytest.raises(DataError, match=r"one of histories.parquet, requests.parquet, items.par"):
        open_dataset(other)


@pytest.mark.parametrize(
    ("told", "command"),
    [
        (
            {
                "source": "log",
                "inputs": [{"file": "clicks.csv", "sha256": "0"}],
                "options": {
                    "split": [0.7, 0.1, 0.2],
                    "min_history": 2,
                    "columns": {"user_id": "my uid"},
                    "signals": ["price", "dwell"],
                    "time_unit": "ms",
                    "negatives": 1,
                    "sort": True,
                    "drop_bad_rows": False,
                    "separator": None,
                    "seed": 0,
                },
            },
            "log --from ... --split 0.7 0.1 0.2 --min-history 2 --column 'user_id=my uid' "
            "--signal price --signal dwell --time-unit ms --negatives 1 --sort",
        ),
        (
            {"source": "synthetic", "inputs": [], "options": {"users": 9, "seed": 3}},
            "synthetic --users 9 --seed 3",
        ),
        ({"source": "log", "sampled": {"of": "x"}, "options": {}}, "SOURCE --from ..."),
        ({}, "SOURCE --from ..."),
    ],
)
def test_format_1_is_refused_with_the_command_that_renews_it(
    told: dict[str, Any], command: str, tmp_path: Path
) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    (out / "dataset.json").write_text(json.dumps({"format": 1, "name": "old", **told}))
    (out / "samples.parquet").write_bytes((out / "requests.parquet").read_bytes())
    (out / "requests.parquet").unlink()
    with pytest.raises(DataError) as refused:
        open_dataset(out)
    again = f"jagged prepare {command} --out {out} --force"
    expected = f"not a data set of format 2; prepare it again: {again}"
    assert str(refused.value) == f"{out / 'dataset.json'}: {expected}"
    words = shlex.split(again.replace("...", "clicks.csv"))
    if "SOURCE" not in words:
        build_parser(words[1:]).parse_args(words[1:])


@pytest.mark.parametrize("mounted", [False, True])
def test_force_renews_format_1(
    mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    good = contents(out)
    (out / "dataset.json").write_text('{"format": 1}')
    (out / "requests.parquet").rename(out / "samples.parquet")
    monkeypatch.setattr("os.path.ismount", lambda path: mounted and Path(path) == out)
    with pytest.raises(DataError, match="holds another prepared data set; --force"):
        prepare("synthetic", out=out, **SMALL)
    prepare("synthetic", out=out, force=True, **SMALL)
    assert contents(out) == good


def test_the_command_says_what_it_made(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{t % 3},{t % 4},{t},{t % 2},{t / 2},0" for t in range(100)]
    path.write_text("\n".join(["uid,item_id,timestamp,label,price,shop", *rows]) + "\n")
    code, out, err = prepare_command(
        *("log", "--from", path, "--column", "user_id=uid", "--signal", "price"),
        *("--split", "0.6", "0.2", "0.2", "--out", tmp_path / "out", "--name", "mine"),
    )
    assert (code, err) == (0, "")
    assert "mine -> " in out
    assert "3 users, 4 items, 100 events" in out
    read = "user_id from uid, item_id, timestamp, label; signals price; separated by comma"
    assert f"  columns: {read}; not read: shop\n" in out
    assert "requests: train 60 with 60 candidates (50.0% positive), valid 20 with 20 " in out
    assert "candidates (logged) not seen in training: train 0.0%, valid 0.0%, test 0.0%\n" in out
    features = "popularity, trend, age"
    assert f"tasks: label; candidates' features: {features}; events': label, price\n" in out
    assert "split by time: valid from 1970-01-01 00:01, test from 1970-01-01 00:01\n" in out
    assert open_dataset(tmp_path / "out").info["signals"] == ["label", "price"]


def test_the_command_says_it_as_json(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "out"
    code, said, err = prepare_command("synthetic", "--events", 2000, "--out", out, "--json")
    assert (code, err) == (0, "")
    told = {"folder": str(out), **json.loads((out / "dataset.json").read_text())}
    assert json.loads(said) == told


def test_dropped_duplicates_are_counted(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{t % 3},{t % 4},{t},{t % 2}" for t in range(95)]
    path.write_text("\n".join(["user_id,item_id,timestamp,label", *rows, *rows[-5:]]) + "\n")
    arguments = ("log", "--from", path, "--sort", "--drop-duplicates", "--out", tmp_path / "out")
    code, out, _ = prepare_command(*arguments)
    assert code == 0
    assert "same user, item and time as an earlier row: 5 of 100 rows (5.0%)" in out
    assert open_dataset(tmp_path / "out").info["dropped"] == {"rows": 100, "duplicates": 5}


def test_dropped_bad_rows_are_counted_and_told(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{t % 3};{t % 4};{t};{t % 2}" for t in range(88)]
    bad = [f"{t % 3};{t % 4};{t};7" for t in range(88, 100)]
    path.write_text("\n".join(["user_id;item_id;timestamp;label", *rows, *bad]) + "\n")
    arguments = ("log", "--from", path, "--separator", "semicolon", "--drop-bad-rows")
    code, out, _ = prepare_command(*arguments, "--out", tmp_path / "out")
    assert code == 0
    assert "dropped, bad rows: 12 of 100 rows (12.0%); the first 10:\n" in out
    assert "    log.csv: line 90: label: '7' is not a label: 0 or 1\n" in out
    assert "line 99:" in out
    assert "line 100:" not in out


def test_the_examples_of_the_help_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    text = capsys.readouterr().out
    assert all(f"only with source {name}:" in text for name in SOURCES)
    _, _, examples = text.partition("examples:\n")
    commands = [shlex.split(line) for line in examples.replace("\\\n", "").splitlines()]
    assert {words[2] for words in commands} == set(SOURCES)
    for words in commands:
        assert words[0] == "jagged"
        build_parser(words[1:]).parse_args(words[1:])


def test_negatives_that_are_missing_are_counted(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "log.csv"
    # At one time user 0 does what both others do, who do one thing each.
    rows = [f"{user},{item},{t}" for t in range(100)
            for user, item in ((0, 1), (0, 2), (1, 1), (2, 2))]  # fmt: skip
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    code, out, _ = prepare_command("log", "--from", path, "--out", tmp_path / "out")
    assert code == 0
    assert "could not be drawn, since other users did nothing else at that time: 200\n" in out
    info = open_dataset(tmp_path / "out").info
    assert info["negatives_given_up"] == 200
    assert sum(info["counts"]["candidates"].values()) == 400 + 200


def test_the_list_of_data_sets(tmp_path: Path) -> None:
    text = cli.list_datasets(None)
    assert all(f"  {name}\n" in text for name in SOURCES)
    assert "grouplens.org" in text
    assert "redistribution" in text
    assert "here:" not in text
    (tmp_path / "ml_100k").mkdir()
    (tmp_path / "ml-1m.zip").write_bytes(b"")
    prepared = tmp_path / "ml_latest_small"  # where README.md prepares it, in data/
    prepare("synthetic", out=prepared, users=30, items=20, categories=4, events=400)
    text = cli.list_datasets(tmp_path)
    assert f"here: {tmp_path / 'ml_100k'}" in text
    assert f"here: {tmp_path / 'ml-1m.zip'}" in text
    assert text.count("here:") == 2
    assert f"There is no folder {tmp_path / 'gone'};" in cli.list_datasets(tmp_path / "gone")


def test_the_package_stands_alone() -> None:
    code = (
        "import sys, click_data, click_data.cli\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'jagged_ranking', 'jagged_kernels', 'torch', 'datasets'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
