"""What a prepared data set must hold, whoever wrote it.

Ids of items that there are, labels of 0 and 1, histories that end before what is asked about, and
counts that end before their request.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from click_data import schema
from click_data.errors import DataError
from click_data.pieces import pieces, pieces_of
from click_data.split import SPLITS
from click_data.store import ClickDataset, HistoryColumns, RequestColumns

_SAMPLE = 256  # candidates of each split, of which clicks are counted again
_PIECE = 2**20  # rows that are looked at at once: a training looks, which needs little memory
_SLACK = 1e-4  # of a logarithm in float32


def refuse_unsound(dataset: ClickDataset) -> None:
    """Raise DataError about the first row that says what cannot be, or what it must not know.

    Reads all tables once. Counts of a few hundred candidates are made again from the clicks before
    them; those of a sample of users are left, since they are of all users.
    """
    histories = dataset.histories
    _check_histories(dataset, histories)
    splits = {split: dataset.requests(split) for split in SPLITS}
    begin = 0
    for asked in splits.values():
        _Rows(dataset, histories, asked, begin).check()
        begin += len(asked)
    if "sampled" not in dataset.info:
        _check_train_counts(dataset, histories, splits["train"])
        _check_popularity(dataset, histories, splits)


def _fail(
    dataset: ClickDataset, table: str, column: str, message: str, row: int | None = None
) -> NoReturn:
    place = None if row is None else f"row {row}"
    raise DataError(message, file=dataset.folder / table, column=column, row=place)


def _first_beyond(values: NDArray[np.integer], end: int) -> int | None:
    """The place of the first value that is not in [0, end)."""
    if len(values) == 0 or (values.min() >= 0 and values.max() < end):
        return None
    return int(np.argmax((values < 0) | (values >= end)))


def _no_item(dataset: ClickDataset, item: np.int32) -> str:
    return f"item {item}, and {schema.ITEMS} has {dataset.item_rows:,} rows"


def _check_histories(dataset: ClickDataset, histories: HistoryColumns) -> None:
    offsets, events = histories.offsets, len(histories.item)
    for name, values in (("time", histories.time), *histories.signals.items()):
        if len(values) != events:
            message = f"{len(values):,} values where column item has {events:,}"
            _fail(dataset, schema.HISTORIES, name, message)
    bad = _first_beyond(histories.item, dataset.item_rows)
    if bad is not None:
        row = int(np.searchsorted(offsets, bad, side="right")) - 1
        _fail(dataset, schema.HISTORIES, "item", _no_item(dataset, histories.item[bad]), row)
    time = histories.time
    for some in pieces(max(events - 1, 0), _PIECE):
        back = np.flatnonzero(time[some.start + 1 : some.stop + 1] < time[some]) + some.start + 1
        inside = back[offsets[np.searchsorted(offsets, back)] != back]
        if len(inside):
            row = int(np.searchsorted(offsets, inside[0], side="right")) - 1
            _fail(dataset, schema.HISTORIES, "time", "time goes backwards", row)


@dataclass(frozen=True)
class _Rows:
    """The requests of one split, of which the first is row `begin` of the table."""

    dataset: ClickDataset
    histories: HistoryColumns
    asked: RequestColumns
    begin: int

    def check(self) -> None:
        """Raise about ids, labels and prefixes that cannot be, and about what is seen too early."""
        asked, dataset = self.asked, self.dataset
        bad = _first_beyond(asked.user, dataset.num_users)
        if bad is not None:
            self._fail("user", bad, f"user {asked.user[bad]} of {dataset.num_users:,}")
        bad = _first_beyond(asked.item, dataset.item_rows)
        if bad is not None:
            self._fail("item", self._request(bad), _no_item(dataset, asked.item[bad]))
        for task, values in asked.labels.items():
            bad = _first_beyond(values, 2)
            if bad is not None:
                message = f"{values[bad]} is not a label: 0 or 1"
                self._fail(schema.label_column(task), self._request(bad), message)
        for some in pieces(len(asked), _PIECE):
            self._check_prefixes(some)

    def _request(self, candidate: int) -> int:
        return int(np.searchsorted(self.asked.offsets, candidate, side="right")) - 1

    def _fail(self, column: str, row: int, message: str) -> NoReturn:
        _fail(self.dataset, schema.REQUESTS, column, message, self.begin + row)

    def _check_prefixes(self, some: slice) -> None:
        asked, offsets = self.asked, self.histories.offsets
        user, prefix = asked.user[some], asked.prefix[some].astype(np.int64)
        held = offsets[user + 1] - offsets[user]
        beyond = (prefix < 0) | (prefix > held)
        if beyond.any():
            bad = int(np.argmax(beyond))
            message = f"may see {prefix[bad]} events of a user with {held[bad]}"
            self._fail("prefix", some.start + bad, message)
        if self.dataset.info["timed"] == "requests":
            return
        seeing = np.flatnonzero(prefix)
        last = self.histories.time[offsets[user[seeing]] + prefix[seeing] - 1]
        time = asked.time[some][seeing]
        # What was shown may be asked about in the second of another event; what was done may not.
        given = self.dataset.info["candidates"] == "given" and self.dataset.info["timed"] == "all"
        late = last > time if given else last >= time
        if late.any():
            bad = int(np.argmax(late))
            message = f"may see an event at {last[bad]}, which is not before its time, {time[bad]}"
            self._fail("prefix", some.start + int(seeing[bad]), message)
        for row in (seeing[last == time] + some.start).tolist():
            self._check_click(row)

    def _check_click(self, row: int) -> None:
        """Raise if a request sees the click that it is about.

        An event of the same item and time may stand in a prefix beside the click, so a click is
        told to be inside only if no such event lies behind the prefix.
        """
        asked, histories = self.asked, self.histories
        user, time = asked.user[row], asked.time[row]
        start, stop = histories.offsets[user], histories.offsets[user + 1]
        begin, end = start + np.searchsorted(
            histories.time[start:stop], [time, time + 1], side="left"
        )
        seen = start + asked.prefix[row]
        inside, behind = histories.item[begin:seen], histories.item[seen:end]
        shown = slice(asked.offsets[row], asked.offsets[row + 1])
        clicked = asked.item[shown][asked.labels[self.dataset.tasks[0]][shown] == 1]
        own = np.isin(clicked, inside) & ~np.isin(clicked, behind)
        if own.any():
            message = f"may see the event that it is about, of item {clicked[own][0]} at {time}"
            self._fail("prefix", row, message)


def _check_train_counts(
    dataset: ClickDataset, histories: HistoryColumns, train: RequestColumns
) -> None:
    """Raise if an item has more clicks in the training period than are there.

    Those are events before validation begins, or where nobody knows when that is, what requests of
    training may see and their positives.
    """
    rows, bounds = dataset.item_rows, dataset.info.get("split_times")
    count = np.zeros(rows, np.int64)
    if bounds is not None and dataset.info["timed"] == "all":
        for some in pieces(len(histories.item), _PIECE):
            seen = histories.time[some] < bounds["valid"]
            count += np.bincount(histories.item[some][seen], minlength=rows)
    else:
        reach = np.zeros(dataset.num_users, np.int64)
        for some in pieces(len(train), _PIECE):
            np.maximum.at(reach, train.user[some], train.prefix[some])
        for items in _first_items(histories, reach):
            count += np.bincount(items, minlength=rows)
        label = train.labels[dataset.tasks[0]]
        for some in pieces(len(label), _PIECE):
            count += np.bincount(train.item[some][label[some] == 1], minlength=rows)
    said = dataset.items["train_count"].to_numpy()
    if (said > count).any():
        bad = int(np.argmax(said > count))
        message = (
            f"{said[bad]:,} clicks where the training period has {count[bad]:,}: "
            f"those of validation and test must not be counted"
        )
        _fail(dataset, schema.ITEMS, "train_count", message, bad)


def _check_popularity(
    dataset: ClickDataset, histories: HistoryColumns, splits: dict[str, RequestColumns]
) -> None:
    """Raise if one of some candidates has more clicks than its item has before the request."""
    if "popularity" not in dataset.features:
        return
    timed = dataset.info["timed"]
    chosen = {
        split: np.unique(np.linspace(0, len(asked.item) - 1, _SAMPLE, dtype=np.int64))
        for split, asked in splits.items()
        if len(asked.item)
    }
    item = np.concatenate([splits[split].item[some] for split, some in chosen.items()])
    request = {
        split: np.searchsorted(splits[split].offsets, some, side="right") - 1
        for split, some in chosen.items()
    }
    time = np.concatenate([splits[split].time[some] for split, some in request.items()])
    if timed == "none":
        counted = dataset.items["train_count"].to_numpy()[item]
    else:
        counted = np.zeros(len(item), np.int64)
        for items, times in _clicks(dataset, histories, splits):
            counted += _earlier(items, times, item, time, dataset.item_rows)
    said = np.concatenate(
        [splits[split].features["popularity"][some] for split, some in chosen.items()]
    )
    most = np.log1p(counted) * (1 + _SLACK)
    if not (said <= most).all():
        bad = int(np.argmin(said <= most))
        ends = np.cumsum([len(some) for some in chosen.values()])
        place = int(np.searchsorted(ends, bad, side="right"))
        split = list(chosen)[place]
        row = int(np.concatenate(list(request.values()))[bad])
        row += sum(len(splits[name]) for name in SPLITS[: SPLITS.index(split)])
        message = (
            f"{math.expm1(float(said[bad])):,.0f} clicks of item {item[bad]} before "
            f"{time[bad]}, where there are {counted[bad]:,}: later ones must not be counted"
        )
        _fail(dataset, schema.REQUESTS, schema.feature_column("popularity"), message, row)


def _clicks(
    dataset: ClickDataset, histories: HistoryColumns, splits: dict[str, RequestColumns]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Items and times of all clicks, in pieces."""
    if dataset.info["timed"] != "requests":
        for some in pieces(len(histories.item), _PIECE):
            yield histories.item[some], histories.time[some]
        return
    least = np.diff(histories.offsets)
    for asked in splits.values():
        for some in pieces(len(asked), _PIECE):
            np.minimum.at(least, asked.user[some], asked.prefix[some])
    # What all requests of a user may see precedes them, nobody knows by how much.
    for items in _first_items(histories, least):
        yield items, np.full(len(items), -1)
    for asked in splits.values():
        clicked = asked.labels[dataset.tasks[0]] == 1
        yield asked.item[clicked], np.repeat(asked.time, np.diff(asked.offsets))[clicked]


def _first_items(
    histories: HistoryColumns, count: NDArray[np.int64]
) -> Iterator[NDArray[np.int32]]:
    """Items of the first so many events of each user, in pieces; count: [users]."""
    offsets = histories.offsets
    for some in pieces_of(offsets, _PIECE):
        begin, end = int(offsets[some.start]), int(offsets[some.stop])
        lengths = np.diff(offsets[some.start : some.stop + 1])
        left = np.repeat(offsets[some] + count[some], lengths)
        yield histories.item[begin:end][np.arange(begin, end) < left]


def _earlier(
    items: NDArray[np.int32],
    times: NDArray[np.int64],
    item: NDArray[np.int32],
    time: NDArray[np.int64],
    item_rows: int,
) -> NDArray[np.int64]:
    """How many of some clicks are of each item at strictly earlier times than one each."""
    wanted = np.zeros(item_rows, bool)
    wanted[item] = True
    some = np.flatnonzero(wanted[items])
    some = some[np.lexsort((times[some], items[some]))]
    items, times = items[some], times[some]
    starts, ends = np.searchsorted(items, item), np.searchsorted(items, item, side="right")
    each: Iterable = zip(starts, ends, time, strict=True)
    return np.array([np.searchsorted(times[a:b], when) for a, b, when in each], np.int64)
