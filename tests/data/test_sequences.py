"""The `sequences` source: next items, with given negatives or without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from impression_logs import Change, Frames, at, nothing, twice, without, write

from click_data import DataError, open_dataset, prepare
from click_data.events import ClickLog
from click_data.sources import sequences
from click_data.sources.sequences import SequenceOptions

_SEQUENCES = {3: [11, 12, 13, 14], 1: [12, 11, 15, 16, 13], 2: [14, 12, 11]}


def log() -> Frames:
    """Three users; times are no positions, and rows are in no order of time."""
    rows = [
        (user, item, 1000 * place + user)
        for user, items in _SEQUENCES.items()
        for place, item in enumerate(items)
    ]
    events = pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")
    given = {"user_id": [1, 2, 3], "valid_item": [16, 12, 13], "test_item": [13, 11, 14]}
    negatives = [[14, 17, 18], [13, 15], [15, 16, 17]]
    return {
        "interactions": events[::-1],
        "test": pl.DataFrame(given | {"negatives": negatives}),
        "items": pl.DataFrame({"item_id": [11, 12], "category_id": [4, 5]}),
    }


def load(frames: Frames, folder: Path, **options: Any) -> ClickLog:
    return sequences.load(write(frames, folder), SequenceOptions(**options), 0)


def asked(log: ClickLog, split: str) -> list[tuple[Any, ...]]:
    """User, prefix, items and labels of each request of a split."""
    assert log.candidates is not None
    mine = log.candidates.filter(pl.col("split") == split)
    named = ("user_id", "prefix", "item_id", "label label")
    each = mine.group_by("request", maintain_order=True).agg(
        pl.col("user_id", "prefix").first(), "item_id", pl.col("label label").sum()
    )
    return each.select(named).rows()


def test_the_last_items_are_asked_about_among_given_negatives(tmp_path: Path) -> None:
    found = load(log(), tmp_path)
    assert (found.timed, found.tasks) == ("none", ("label",))
    assert found.events.filter(pl.col("user_id") == 1).rows() == [
        *((1, 12, 0), (1, 11, 1), (1, 15, 2), (1, 16, 3), (1, 13, 4))
    ]
    assert asked(found, "train") == [(1, 1, [11], 1), (1, 2, [15], 1), (3, 1, [12], 1)]
    assert asked(found, "valid") == [
        *((1, 3, [16, 14, 17, 18], 1), (2, 1, [12, 13, 15], 1), (3, 2, [13, 15, 16, 17], 1))
    ]
    assert asked(found, "test") == [
        *((1, 4, [13, 14, 17, 18], 1), (2, 2, [11, 13, 15], 1), (3, 3, [14, 15, 16, 17], 1))
    ]
    assert found.items is not None
    assert found.items.rows() == [(11, 4), (12, 5)]


def test_without_negatives_more_items_can_be_held_out(tmp_path: Path) -> None:
    frames = log()
    del frames["test"]
    one = load(frames, tmp_path / "one", holdout=1)
    assert asked(one, "test") == [(1, 4, [13], 1), (2, 2, [11], 1), (3, 3, [14], 1)]
    two = load(frames, tmp_path / "two", holdout=2)
    assert asked(two, "train") == []
    assert asked(two, "valid") == [(1, 1, [11], 1), (1, 2, [15], 1), (3, 1, [12], 1)]


def test_from_the_command_to_requests(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = write(log(), tmp_path / "songs")
    code, said, _ = prepare_command("sequences", "--from", folder, "--out", tmp_path / "out")
    assert (code, "valid 3 with 11 candidates" in said) == (0, True)
    dataset = open_dataset(tmp_path / "out")
    assert (dataset.name, dataset.info["timed"]) == ("songs", "none")
    test = dataset.requests("test")
    assert test.offsets.tolist() == [0, 3, 7, 11]  # by position in the sequence
    item_ids = dataset.items["item_id"].to_pylist()
    assert [item_ids[item] for item in test.item] == [11, 13, 15, 14, 15, 16, 17, 13, 14, 17, 18]
    out = prepare("sequences", from_path=folder, out=tmp_path / "held", holdout=1)
    assert len(open_dataset(out).requests("test").item) == 3


class Case(NamedTuple):
    name: str
    change: Change
    line: str
    options: tuple[tuple[str, int], ...] = ()


CASES = [
    Case("no item", without("interactions", "item_id"), "interactions.parquet: column item_id: mi"),
    Case("no negatives", without("test", "negatives"), "test.parquet: column negatives: missing"),
    Case("no events", lambda frames: frames.pop("interactions"), "not a folder with interactions"),
    Case("no test", lambda frames: frames.pop("test"), "no test.parquet with negatives in this fo"),
    Case("holdout 0", nothing, "--holdout 0: must be at least 1", (("holdout", 0),)),
    Case("no time", at("interactions", "timestamp", 2, None), "column timestamp, row 2: no time"),
    Case(
        "an item twice",
        at("test", "negatives", 0, [14, 17, 14]),
        "test.parquet: column negatives, row 0, element 2: 14 is in this list already",
    ),
    Case(
        "the item itself",
        at("test", "negatives", 1, [13, 11]),
        "column negatives, row 1, element 1: 11 is the test item itself",
    ),
    Case("no list", at("test", "negatives", 2, None), "column negatives, row 2: no list"),
    Case("no candidates", at("test", "negatives", 2, []), "column negatives, row 2: an empty list"),
    Case(
        "another item",
        at("test", "valid_item", 2, 12),
        "column valid_item, row 2: 12 is not what the user's events end with",
    ),
    Case("a user twice", twice("test", 0), "column user_id, row 3: 1 is the user of an earlier"),
    Case(
        "a user less",
        lambda frames: frames.update(test=frames["test"][:2]),
        "no row of user 3, whose last item is asked about",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_log_is_refused(case: Case, tmp_path: Path) -> None:
    frames = log()
    case.change(frames)
    with pytest.raises(DataError) as caught:
        load(frames, tmp_path, **dict(case.options))
    assert case.line in str(caught.value)
    assert "\n" not in str(caught.value)
