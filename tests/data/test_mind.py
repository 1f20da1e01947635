"""The `mind` source: MIND as Microsoft publishes it."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from click_data import DataError, open_dataset
from click_data.events import ClickLog
from click_data.sources import mind
from click_data.sources.mind import MindOptions

TRAIN = [
    "1\tU8\t11/11/2019 9:05:58 AM\tN3 N1 N3\tN4-1 N2-0",
    "2\tU5\t11/12/2019 12:00:00 AM\t\tN2-0 N4-0 N5-1",
    "3\tU8\t11/13/2019 1:02:03 PM\tN3 N1 N3\tN2-1 N1-0 N5-0",
]
DEV = [
    "1\tU8\t11/15/2019 8:00:00 AM\tN3 N1 N3 N5\tN4-0 N2-1",
    "2\tU6\t11/15/2019 9:00:00 AM\tN1\tN6-1 N2-0",
    "3\tU5\t11/15/2019 10:00:00 PM\t\tN6-0 N4-1",
]
_REST = "https://x\t[]\t[]"
NEWS = [
    f'N1\tnews\tworld\t"Opened" and not closed\tSome "words\t{_REST}',
    f"N2\tsports\tgolf\tT\tA\t{_REST}",
    f"N4\tsports\ttennis\tT\t\t{_REST}",
]


def written(
    folder: Path, train: list[str] = TRAIN, dev: list[str] | None = DEV, news: list[str] = NEWS
) -> Path:
    for name, lines in (("MINDsmall_train", train), ("MINDsmall_dev", dev)):
        if lines is not None:
            (folder / name).mkdir(parents=True)
            (folder / name / "behaviors.tsv").write_text("\n".join(lines) + "\n")
            (folder / name / "news.tsv").write_text("\n".join(news) + "\n")
    return folder


def load(folder: Path, *, by_time: bool = False) -> ClickLog:
    return mind.load(folder, MindOptions(by_time=by_time), 0)


def test_train_and_dev_with_its_first_half_for_validation(tmp_path: Path) -> None:
    log = load(written(tmp_path / "mind"))
    assert (log.name, log.timed) == ("mind", "requests")
    assert log.candidates is not None
    lists = log.candidates.group_by("request", maintain_order=True).agg(
        pl.col("user_id", "time", "prefix", "split").first(), "item_id", "label label"
    )
    assert lists.drop("request", "time").rows() == [
        ("U8", 3, "train", ["N4", "N2"], [1, 0]),
        ("U5", 0, "train", ["N2", "N4", "N5"], [0, 0, 1]),
        ("U8", 3, "train", ["N2", "N1", "N5"], [1, 0, 0]),
        ("U8", 4, "valid", ["N4", "N2"], [0, 1]),
        ("U6", 1, "test", ["N6", "N2"], [1, 0]),
        ("U5", 0, "test", ["N6", "N4"], [0, 1]),
    ]
    assert lists["time"][0] == 1_573_463_158  # 2019-11-11 09:05:58 UTC
    assert log.events.rows() == [
        *(("U6", "N1", 0), ("U8", "N3", 0), ("U8", "N1", 1), ("U8", "N3", 2), ("U8", "N5", 3))
    ]
    assert log.items is not None
    assert log.items.rows() == [
        ("N1", "news", "world"),
        ("N2", "sports", "golf"),
        ("N4", "sports", "tennis"),
    ]
    assert len(log.inputs) == 4


@pytest.mark.parametrize("form", ["by time", "one folder", "in the folder"])
def test_the_split_can_be_by_time(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "mind", dev=DEV if form == "by time" else None)
    folder = folder / "MINDsmall_train" if form == "in the folder" else folder
    log = load(folder, by_time=form == "by time")
    assert log.candidates is not None
    assert "split" not in log.candidates.columns


def test_from_the_command_to_requests(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = written(tmp_path / "mind")
    code, said, error = prepare_command("mind", "--from", folder, "--out", tmp_path / "out")
    assert (code, error) == (0, "")
    assert "train 3 with 8 candidates" in said
    dataset = open_dataset(tmp_path / "out")
    assert dataset.info["timed"] == "requests"
    assert dataset.requests("test").prefix.tolist() == [1, 0]
    assert dataset.item_features == {"category": 3, "subcategory": 4}


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (
            [*TRAIN, "4\tU5\t11/13/2019 1:02:03 PM\t\t"],
            "behaviors.tsv: column impressions, line 4: no news was shown: a list without candi",
        ),
        (
            [*TRAIN[:2], "3\tU8\t11/13/2019 1:02:03 PM\tN3 N1 N3\tN2-1 N1-2"],
            "column impressions, line 3, element 1: 'N1-2' is not a news id and its label",
        ),
        (
            [TRAIN[0], TRAIN[1].replace("-0", "").replace("-1", ""), TRAIN[2]],
            "line 2, element 0: 'N2' is not a news id and its label, as N123-1 is (a test set has",
        ),
        (
            [TRAIN[0].replace("N3 N1 N3", "N1"), *TRAIN[1:]],
            "column history, line 1: does not begin like the longest history of the same user",
        ),
        (
            [TRAIN[0].replace("11/11/2019", "2019-11-11"), *TRAIN[1:]],
            "column time, line 1: '2019-11-11 9:05:58 AM' is not a time, as 11/15/2019 8:55:22 AM",
        ),
        ([TRAIN[0], "2\tU5"], "column time, line 2: "),
        ([TRAIN[0].replace("U8", ""), *TRAIN[1:]], "column user_id, line 1: no id: the value is"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:40],
)
def test_bad_lines_are_refused(train: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(written(tmp_path, train=train))
    assert line in str(caught.value)


def test_a_folder_without_behaviors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no behaviors.tsv in this folder, nor in one inside it"):
        load(tmp_path)


def test_news_shown_again_in_one_list_is_dropped(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    train = [TRAIN[0].replace("N4-1 N2-0", "N4-0 N2-0 N4-1"), *TRAIN[1:]]
    folder = written(tmp_path / "mind", train=train)
    code, said, _ = prepare_command("mind", "--from", folder, "--out", tmp_path / "out")
    assert code == 0
    assert "train 3 with 8 candidates" in said
    assert "dropped, shown for the second time in one list: 1 of 15 rows (6.7%)\n" in said
    train_lists = open_dataset(tmp_path / "out").requests("train")
    assert train_lists.labels["label"].tolist()[:2] == [1, 0]
