"""MovieLens ratings in each published layout give the same, right tables."""

import json
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
    names = ("histories", "samples", "items")
    return {name: pl.read_parquet(folder / f"{name}.parquet").to_dicts() for name in names}


def test_every_layout_gives_the_tables_worked_out_by_hand(
    layout: Callable[[Path], Path], tmp_path: Path
) -> None:
    layout(tmp_path)
    out = prepare("movielens", from_path=tmp_path, out=tmp_path / "out", split=SPLIT)
    # Ten events by time: 1000 1000 1000 1010 1020 | 1030 1030 | 1040 1050 1060.
    # Train counts: movies 10: 2, 20: 2, 30: 1; genres Comedy 2, Drama 2, Horror 1.
    assert tables(out)["items"] == [
        {"item_id": None, "category": 0, "category_id": None, "train_count": 0},
        {"item_id": 10, "category": 1, "category_id": "Comedy", "train_count": 2},
        {"item_id": 20, "category": 2, "category_id": "Drama", "train_count": 2},
        {"item_id": 30, "category": 3, "category_id": "Horror", "train_count": 1},
    ]
    # Movies 40 and 50 are not in the training period: unknown. So is genre War, but not Comedy.
    assert tables(out)["histories"] == [
        {
            "user_id": 2,
            "item": [2, 1, 3, 0],
            "category": [2, 1, 3, 1],
            "time": [1000, 1010, 1030, 1050],
            "label": [0, 1, 0, 0],
            "rating": [3.0, 4.0, 1.0, 2.0],
        },
        {
            "user_id": 7,
            "item": [1, 3, 2, 0],
            "category": [1, 3, 2, 0],
            "time": [1000, 1000, 1020, 1060],
            "label": [0, 1, 1, 0],
            "rating": [2.0, 5.0, 4.0, 3.0],
        },
        {
            "user_id": 9,
            "item": [1, 0],
            "category": [1, 1],
            "time": [1030, 1040],
            "label": [1, 1],
            "rating": [5.0, 4.0],
        },
    ]
    columns = ("split", "time", "user", "prefix", "item", "category", "label")
    assert [tuple(row[c] for c in columns) for row in tables(out)["samples"]] == [
        ("train", 1000, 0, 0, 2, 2, 0),
        ("train", 1000, 1, 0, 1, 1, 0),  # the twin of the same second sees nothing either
        ("train", 1000, 1, 0, 3, 3, 1),
        ("train", 1010, 0, 1, 1, 1, 1),
        ("train", 1020, 1, 2, 2, 2, 1),
        ("valid", 1030, 0, 2, 3, 3, 0),
        ("valid", 1030, 2, 0, 1, 1, 1),
        ("test", 1040, 2, 1, 0, 1, 1),
        ("test", 1050, 0, 3, 0, 1, 0),
        ("test", 1060, 1, 3, 0, 0, 0),
    ]


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
    assert (dataset.histories.label == (dataset.histories.signals["rating"] >= 5)).all()
    assert dataset.histories.label.sum() == 2


def test_without_the_list_of_movies_every_category_is_unknown(tmp_path: Path) -> None:
    ratings_csv(tmp_path)
    (tmp_path / "movies.csv").unlink()
    dataset = open_dataset(
        prepare("movielens", from_path=tmp_path, out=tmp_path / "out", split=SPLIT)
    )
    assert dataset.num_categories == 1
    assert not dataset.histories.category.any()
    assert dataset.num_items == 4


def test_likes_only_are_refused_with_the_command_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5,1\n1,2,4,2\n")
    with pytest.raises(DataError, match=r"ratings.csv: column rating: .*prepare log .*--negatives"):
        prepare("movielens", from_path=tmp_path, out=tmp_path / "out")
