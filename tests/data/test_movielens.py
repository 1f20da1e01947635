"""MovieLens ratings in each published layout give the same, right tables."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grouplens import MOVIES, RATINGS, ratings_csv, zipped

from click_data import DataError, open_dataset, prepare

SPLIT = (0.5, 0.2, 0.3)


def tables(folder: Path) -> dict[str, list[dict]]:
    names = ("histories", "requests", "items")
    return {name: pl.read_parquet(folder / f"{name}.parquet").to_dicts() for name in names}


def test_every_layout_gives_the_tables_worked_out_by_hand(
    layout: Callable[[Path], Path], tmp_path: Path
) -> None:
    layout(tmp_path)
    out = prepare("movielens", from_path=tmp_path, out=tmp_path / "out", split=SPLIT)
    # Ten events by time: 1000 1000 1000 1010 1020 | 1030 1030 | 1040 1050 1060.
    # Train counts: movies 10: 2, 20: 2, 30: 1; genres Comedy 2, Drama 2, Horror 1.
    # Movies 40 and 50 are not in the training period: new items. So is the genre War not, but
    # Comedy is.
    rows = [
        (None, 0, 0, None),
        (10, 2, 1, "Comedy"),
        (20, 2, 2, "Drama"),
        (30, 1, 3, "Horror"),
        (40, 0, 1, "Comedy"),
        (50, 0, 0, "War"),
    ]
    names = ("item_id", "train_count", "category", "original category")
    assert tables(out)["items"] == [dict(zip(names, row, strict=True)) for row in rows]
    assert tables(out)["histories"] == [
        {
            "user_id": 2,
            "item": [2, 1, 3, 4],
            "time": [1000, 1010, 1030, 1050],
            "label": [0, 1, 0, 0],
            "rating": [3.0, 4.0, 1.0, 2.0],
        },
        {
            "user_id": 7,
            "item": [1, 3, 2, 5],
            "time": [1000, 1000, 1020, 1060],
            "label": [0, 1, 1, 0],
            "rating": [2.0, 5.0, 4.0, 3.0],
        },
        {
            "user_id": 9,
            "item": [1, 4],
            "time": [1030, 1040],
            "label": [1, 1],
            "rating": [5.0, 4.0],
        },
    ]
    columns = ("split", "time", "user", "prefix", "item", "label label")
    assert [tuple(row[c] for c in columns) for row in tables(out)["requests"]] == [
        ("train", 1000, 0, 0, [2], [0]),
        ("train", 1000, 1, 0, [1, 3], [0, 1]),  # of one second: neither sees the other
        ("train", 1010, 0, 1, [1], [1]),
        ("train", 1020, 1, 2, [2], [1]),
        ("valid", 1030, 0, 2, [3], [0]),
        ("valid", 1030, 2, 0, [1], [1]),
        ("test", 1040, 2, 1, [4], [1]),
        ("test", 1050, 0, 3, [4], [0]),
        ("test", 1060, 1, 3, [5], [0]),
    ]
    # Earlier ratings of the movie, of everybody, and how long ago the first one was.
    made = [(row["feature popularity"], row["feature age"]) for row in tables(out)["requests"]]
    expected = [[(0, 0)], [(0, 0), (0, 0)], [(1, 10)], [(1, 20)], [(1, 30)], [(2, 30)], [(0, 0)]]
    expected += [[(1, 10)], [(0, 0)]]
    for (popularity, age), of in zip(made, expected, strict=True):
        assert popularity == pytest.approx([math.log1p(count) for count, _ in of])
        assert age == pytest.approx([math.log1p(time) for _, time in of])


def test_folder_zip_ratings_file_and_nested_folder_are_the_same_data(
    layout: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "ml-x"
    folder.mkdir()
    ratings = layout(folder)
    archive = zipped(folder, tmp_path / "ml-x.zip")
    nested = tmp_path / "unpacked"
    nested.mkdir()
    (nested / "ml-x").symlink_to(folder)
    digests = set()
    for number, path in enumerate((folder, ratings, archive, nested)):
        out = prepare("movielens", from_path=path, out=tmp_path / f"out{number}", split=SPLIT)
        digests.add(open_dataset(out).digest)
    assert len(digests) == 1
    info = json.loads((tmp_path / "out2" / "dataset.json").read_text())
    assert info["name"] == "ml-x"
    assert str(tmp_path) not in json.dumps(info)


def test_parquet_of_the_same_ratings_is_the_same_data(tmp_path: Path) -> None:
    plain = tmp_path / "csv"
    plain.mkdir()
    ratings_csv(plain)
    names = sorted({genres.split("|")[0] for genres in MOVIES.values()})
    user, item, rating, timestamp = zip(*RATINGS, strict=True)
    table = pa.table({"user_id": user, "item_id": item, "timestamp": timestamp, "rating": rating})
    category = [names.index(MOVIES[movie].split("|")[0]) for movie in item]
    table = table.append_column("category_id", [category])
    table = table.replace_schema_metadata({"category_names": json.dumps(names)})
    (tmp_path / "parquet").mkdir()
    pq.write_table(table, tmp_path / "parquet" / "interactions.parquet")
    digests = set()
    for kind in ("csv", "parquet"):
        out = prepare("movielens", from_path=tmp_path / kind, out=tmp_path / f"{kind}-out")
        digests.add(open_dataset(out).digest)
    assert len(digests) == 1


def test_threshold_moves_labels_and_is_recorded(tmp_path: Path) -> None:
    ratings_csv(tmp_path)
    out = prepare(
        "movielens", from_path=tmp_path, out=tmp_path / "out", split=SPLIT, threshold=5, name="five"
    )
    dataset = open_dataset(out)
    assert dataset.name == "five"
    assert dataset.info["options"]["threshold"] == 5
    signals = dataset.histories.signals
    assert (signals["label"] == (signals["rating"] >= 5)).all()
    assert signals["label"].sum() == 2


def test_without_the_list_of_movies_items_have_no_category(tmp_path: Path) -> None:
    ratings_csv(tmp_path)
    (tmp_path / "movies.csv").unlink()
    dataset = open_dataset(
        prepare("movielens", from_path=tmp_path, out=tmp_path / "out", split=SPLIT)
    )
    assert dataset.item_features == {}
    assert dataset.item_categories == {}
    assert dataset.num_items == 4


def test_likes_only_are_refused_with_the_command_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5,1\n1,2,4,2\n")
    with pytest.raises(DataError, match=r"ratings.csv: column rating: .*prepare log .*--negatives"):
        prepare("movielens", from_path=tmp_path, out=tmp_path / "out")
