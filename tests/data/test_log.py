"""The `log` source: your own Parquet or CSV."""

import datetime as dt
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from click_data import ClickDataset, DataError, open_dataset, prepare

SPLIT = (0.5, 0.25, 0.25)
FRAME = pl.DataFrame(
    {
        "user_id": [1, 2, 1, 2, 1, 2, 1, 2],
        "item_id": [5, 6, 6, 5, 7, 7, 5, 6],
        "timestamp": [10, 11, 12, 13, 14, 15, 16, 17],
        "label": [0, 1, 1, 0, 1, 0, 1, 0],
        "category": ["a", "b", "b", "a", None, "c", "a", "b"],
        "price": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5],
    }
)


def opened(path: Path, **options: Any) -> ClickDataset:
    out = path.parent / f"out-{path.name}"
    options = {"split": SPLIT, "force": True} | options
    return open_dataset(prepare("log", from_path=path, out=out, **options))


def refusal(frame: pl.DataFrame, path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        opened(written(frame, path))
    return caught.value


def written(frame: pl.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    elif path.suffix == ".gz":
        frame.write_csv(path.with_suffix(""))
        path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    else:
        frame.write_csv(path, separator="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.mark.parametrize("name", ["log.parquet", "log.csv", "log.tsv", "log.csv.gz"])
def test_formats_give_the_same_histories(name: str, tmp_path: Path) -> None:
    dataset = opened(written(FRAME, tmp_path / name), signals=("price",))
    histories = dataset.histories
    assert dataset.name == "log"
    assert histories.offsets.tolist() == [0, 4, 8]
    # The training period is the first four events: items 5 and 6 twice each, 7 not at all.
    assert histories.item.tolist() == [1, 2, 3, 1, 2, 1, 3, 2]
    assert (dataset.num_items, dataset.item_rows) == (3, 4)
    assert dataset.item_categories["category"].tolist() == [0, 1, 2, 0]  # c is not of training
    assert histories.time.tolist() == [10, 12, 14, 16, 11, 13, 15, 17]
    assert histories.signals["label"].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert histories.signals["price"].tolist() == [0.5, 2.5, 4.5, 6.5, 1.5, 3.5, 5.5, 7.5]
    assert histories.signals["price"].dtype == np.float32
    assert [len(dataset.requests(split)) for split in ("train", "valid", "test")] == [4, 2, 2]


def test_a_folder_of_parquet_is_its_files_in_order_of_name(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    written(FRAME[4:], folder / "part-1.parquet")
    written(FRAME[:4], folder / "part-0.parquet")
    whole = opened(written(FRAME, tmp_path / "log.parquet"))
    assert opened(folder).digest == whole.digest


def test_mapped_columns_and_string_ids(tmp_path: Path) -> None:
    renamed = FRAME.with_columns(
        pl.format("u{}", "user_id").alias("user_id"), pl.format("i{}", "item_id").alias("item_id")
    ).rename({"user_id": "uid", "item_id": "sku", "timestamp": "at", "label": "click"})
    names = {"user_id": "uid", "item_id": "sku", "timestamp": "at", "label": "click"}
    dataset = opened(written(renamed, tmp_path / "log.csv"), columns=names)
    plain = opened(written(FRAME, tmp_path / "log.parquet"))
    assert dataset.histories.item.tolist() == plain.histories.item.tolist()
    labels = [of.requests("train").labels["label"].tolist() for of in (dataset, plain)]
    assert labels[0] == labels[1]
    assert dataset.items["item_id"].to_pylist() == [None, "i5", "i6", "i7"]
    users = pl.read_parquet(dataset.folder / "histories.parquet")["user_id"]
    assert users.to_list() == ["u1", "u2"]


@pytest.mark.parametrize("text", ["007", "7.0", "+7", "7 7"])
def test_text_ids_stay_text_unless_all_are_plain_integers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{user},{5 + time % 2},{time},{time % 2}" for time, user in enumerate(["7", text] * 4)]
    path.write_text("\n".join(["user_id,item_id,timestamp,label", *rows]) + "\n")
    dataset = opened(path)
    assert dataset.num_users == 2
    assert dataset.items["item_id"].to_pylist() == [None, 5, 6]


@pytest.mark.parametrize(
    ("times", "unit", "stored"),
    [
        ([1.0, 2.9, 3.0, 4.5], "s", [1, 2, 3, 4]),
        ([1_500, 2_500, 3_500, 4_500], "ms", [1_500, 2_500, 3_500, 4_500]),
        (["1970-01-01T00:00:01", "1970-01-01 00:00:02.5", "1970-01-02", "1970-01-02T00:00:01"],
         "s", [1, 2, 86_400, 86_401]),
        (["1970-01-01T00:00:01Z", "1970-01-01T01:00:02+01:00", "1970-01-01T00:00:03",
          "1970-01-01 00:00:04+00:00"], "ms", [1_000, 2_000, 3_000, 4_000]),
        ([dt.datetime(1970, 1, 1, 0, 0, s, 250_000) for s in (1, 2, 3, 4)], "ms",
         [1_250, 2_250, 3_250, 4_250]),
        ([dt.datetime(1970, 1, 1, 0, 0, s, 250_000) for s in (1, 2, 3, 4)], "s", [1, 2, 3, 4]),
        ([dt.date(1970, 1, day) for day in (1, 2, 3, 4)], "s", [0, 86_400, 172_800, 259_200]),
        ([1, 2, 3, 2**61 + 1], "ns", [1, 2, 3, 2**61 + 1]),
        ([1, 2, 3, 4_133_980_799], "s", [1, 2, 3, 4_133_980_799]),  # the end of 2100
    ],
)  # fmt: skip
def test_times(times: list, unit: str, stored: list[int], tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"user_id": [1] * 4, "item_id": [1, 2, 1, 2], "timestamp": times, "label": [0, 1, 0, 1]}
    )
    paths = [written(frame, tmp_path / "log.parquet"), written(frame, tmp_path / "log.csv")]
    for path in paths:
        dataset = opened(path, time_unit=unit)
        assert dataset.histories.time.tolist() == stored
        assert dataset.info["time_unit"] == unit


def test_a_date_with_the_year_last_is_not_guessed_at(tmp_path: Path) -> None:
    frame = FRAME.with_columns(timestamp=pl.Series([f"0{day}/02/2020" for day in range(1, 9)]))
    assert "row 0: '01/02/2020' is neither" in str(refusal(frame, tmp_path / "log.parquet"))


def test_sort_and_drop_duplicates_accept_what_is_otherwise_refused(tmp_path: Path) -> None:
    plain = opened(written(FRAME, tmp_path / "log.parquet"))
    # Written backwards and one row twice: the same log once more, but for which of the two is kept.
    messy = pl.concat([FRAME.reverse(), FRAME[2:3].with_columns(label=pl.lit(0, pl.Int64))])
    path = written(messy, tmp_path / "messy.parquet")
    dataset = opened(path, sort=True, drop_duplicates=True)
    assert dataset.digest == plain.digest
    assert dataset.info["options"]["sort"] is True


def test_one_time_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    frame = FRAME.with_columns(timestamp=pl.Series([10, 10, 10, 10, 14, 15, 15, 17]))
    dataset = opened(written(frame, tmp_path / "log.parquet"), signals=("price",))
    assert dataset.histories.signals["price"].tolist() == [0.5, 2.5, 4.5, 6.5, 1.5, 3.5, 5.5, 7.5]


def test_without_labels_events_are_positives_among_drawn_negatives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "user_id": rng.integers(10, size=200),
            "item_id": rng.integers(50, size=200),
            "timestamp": np.arange(200),
        }
    )
    path = written(frame, tmp_path / "log.parquet")
    dataset = opened(path)
    train = dataset.requests("train")
    assert dataset.signals == ()  # every event is the same
    assert (len(train), len(train.item), train.labels["label"].sum()) == (100, 200, 100)
    assert dataset.info["options"]["negatives"] == 1
    assert dataset.info["options"]["seed"] == 0
    assert opened(path, negatives=2).info["counts"]["candidates"]["train"] == 300
    assert opened(path, pool=10).digest != dataset.digest
    assert opened(path, seed=1).digest != opened(path, seed=0).digest == dataset.digest


def test_labels_are_used_alone_unless_negatives_are_asked_for(tmp_path: Path) -> None:
    path = written(FRAME, tmp_path / "log.parquet")
    dataset = opened(path)
    assert dataset.info["counts"]["candidates"]["train"] == 4
    assert "seed" not in dataset.info["options"]
    assert "--negatives" in str(refusal(FRAME.with_columns(label=1), tmp_path / "likes.parquet"))
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {"user_id": rng.integers(9, size=90), "item_id": rng.integers(50, size=90)}
    )
    path = written(frame.with_columns(timestamp=np.arange(90), label=1), tmp_path / "likes.parquet")
    dataset = opened(path, negatives=1)
    assert dataset.info["counts"]["candidates"]["train"] == 90
    assert dataset.info["counts"]["positives"]["train"] == 45


def test_a_signal_may_be_a_column_that_is_read_as_something_else(tmp_path: Path) -> None:
    path = written(FRAME.with_columns(pl.col("item_id") + 2**24), tmp_path / "log.parquet")
    plain = opened(path)
    names = {"category": "item_id"}
    dataset = opened(path, signals=("item_id", "timestamp"), columns=names)
    assert dataset.items["item_id"].to_pylist() == [None, *(2**24 + n for n in (5, 6, 7))]
    assert dataset.items["original category"] == dataset.items["item_id"]
    assert dataset.histories.item.tolist() == plain.histories.item.tolist()
    ids = np.array([5, 6, 7, 5, 6, 5, 7, 6]) + 2**24
    assert dataset.histories.signals["item_id"].tolist() == ids.astype(np.float32).tolist()
    assert dataset.histories.signals["timestamp"].tolist() == plain.histories.time.tolist()


def test_a_category_that_stands_for_nothing_is_unknown(tmp_path: Path) -> None:
    words = pl.Series(["NaN", "null", "b", "a", "", "c", "None", "b"])
    dataset = opened(written(FRAME.with_columns(category=words), tmp_path / "log.csv"))
    assert dataset.items["item_id"].to_pylist() == [None, 5, 6, 7]
    # Of item 5 "a" is said later; of item 6 "b" first; of 7 only "c".
    assert dataset.items["original category"].to_pylist() == [None, "a", "b", "c"]


@pytest.mark.parametrize("separator", ["\t", ";", "|", ","])
@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_separator_is_that_of_the_columns_wanted(
    separator: str, name: str, mark: str, tmp_path: Path
) -> None:
    plain = opened(written(FRAME, tmp_path / "plain.parquet"))
    path = tmp_path / name
    odd = FRAME.with_columns(pl.lit("3,5;6").alias("price, and; more"))
    text = (mark + odd.write_csv(separator=separator)).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    dataset = opened(path)
    assert dataset.digest == plain.digest
    assert dataset.info["read"]["separator"] == separator


def test_a_separator_of_your_own(tmp_path: Path) -> None:
    plain = opened(written(FRAME, tmp_path / "plain.parquet"))
    path = tmp_path / "log.txt"
    path.write_text(FRAME.write_csv(separator="^"))
    assert opened(path, separator="^").digest == plain.digest
    with pytest.raises(DataError, match=r"log.txt: .*--separator"):
        opened(path)
    with pytest.raises(DataError, match=r"--separator '::': not one character"):
        opened(path, separator="::")
    with pytest.raises(DataError, match=r"plain.parquet: is Parquet, which needs no --separator"):
        opened(tmp_path / "plain.parquet", separator=",")


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_bad_rows_can_be_left_out(name: str, tmp_path: Path) -> None:
    plain = opened(written(FRAME, tmp_path / "plain.parquet"), signals=("price",))
    header, *rows = FRAME.write_csv().encode().splitlines()
    bad = [b"1,7,soon,1,a,1.5", b"1,caf\xe9,12,1,a,1.5", b"1,7,12,1,a,1.5,9", b"", b"Total,,,,,8"]
    bad += [b"1,nan,11,2,a,1e300"]
    lines = [header, rows[0], *bad[:3], *rows[1:5], *bad[3:], *rows[5:]]
    text = b"\n".join(lines) + b"\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    dataset = opened(path, signals=("price",), drop_bad_rows=True)
    assert dataset.digest == plain.digest
    dropped = dataset.info["dropped"]
    assert (dropped["rows"], dropped["bad_rows"]) == (13, 5)
    told = dropped["first_bad_rows"]
    places = [3, 4, 5, 11, 12]
    assert [line.split(": ")[:2] for line in told] == [[name, f"line {n}"] for n in places]
    assert "timestamp: 'soon' is neither" in told[0]
    assert "bytes that are not UTF-8" in told[1]
    assert "7 fields where 6 belong" in told[2]
    assert "item_id: no id" in told[3]
    assert all(part in told[4] for part in ("item_id: 'nan'", "label: '2'", "price: '1e300'"))


def test_left_out_rows_of_several_files_are_told_ten_at_most(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    wrong = FRAME.with_columns(timestamp=pl.lit(-1, pl.Int64))
    written(pl.concat([FRAME[:4], wrong[:3]]), folder / "part-0.parquet")
    written(pl.concat([FRAME[4:], wrong]), folder / "part-1.parquet")
    dropped = opened(folder, drop_bad_rows=True).info["dropped"]
    assert dropped["bad_rows"] == 11
    assert len(dropped["first_bad_rows"]) == 10
    assert dropped["first_bad_rows"][2].startswith("part-0.parquet: row 6: timestamp: -1 is a neg")
    assert dropped["first_bad_rows"][3].startswith("part-1.parquet: row 4: timestamp")
    with pytest.raises(DataError, match=r"part-0.parquet: column timestamp, row 0: .*2 more"):
        opened(written(wrong[:3], tmp_path / "part-0.parquet"), drop_bad_rows=True)
