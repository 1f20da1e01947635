"""From a checked log to histories, requests and items: the path that all sources take."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from click_data.arrays import gather, give_back, stable_order
from click_data.candidate_features import MADE, SHOWN, Clicks
from click_data.errors import DataError
from click_data.histories import Histories, histories_of
from click_data.leaks import leaks
from click_data.negatives import POOL, Blocks, draw, refuse_draws
from click_data.requests import Requests, asked_by_candidates, asked_by_events, seen_by_all
from click_data.schema import Prepared, feature_column, label_column, signal_column
from click_data.split import SPLITS, split_times
from click_data.statistics import count_splits, length_quantiles, padding_waste
from click_data.vocabulary import Vocabulary, item_categories, item_table, items_seen, order_items

MAX_EVENTS = 2**31 - 1  # list offsets in the tables are int32
TIMED = ("all", "requests", "none")

__all__ = ["MAX_EVENTS", "ClickLog", "build", "feature_column", "label_column", "signal_column"]


@dataclass(frozen=True)
class ClickLog:
    """A checked log, in any order.

    events: user_id and item_id (Int64 or String), time (Int64; a position among the user's events
        where they have no times). Optionally `label_column(task)` (Int8, 0 or 1) for tasks that
        events carry, `signal_column(name)` (Float32), and "item NAME" (Int64 or String, null =
        unknown): what an event says of its item, of which the first that is not null is taken;
        and, where events are asked about, "context NAME" (as of candidates), of which a request
        has that of its first event.
        Events of one user at one time keep their order.
    candidates: None, where each event is a candidate; or one row a shown candidate: request (Int64,
        one a list), user_id, time, item_id, `label_column(task)` for each task; optionally
        `feature_column(name)` (Float32), "context NAME" (Int64 or String: categorical; Float32:
        dense), split ("train", "valid" or "test") and prefix (Int64, how many of the user's events
        the request may see). Rows of a request agree in all but item, labels and features, and
        keep their order.
    items: None, or item_id with "item NAME" (categorical) and "dense NAME" (Float32) columns.
    tasks: of the labels; the first one is what is ranked by.
    time_unit: "s", "ms", "us" or "ns".
    timed: "all"; "requests": events have an order but no times, and precede every request that may
        see them; "none": there are positions alone.
    counted: how much was read, by what sets are published with (see `sources.published`).
    inputs: files read, as {"file": name, "sha256": ...}.
    negatives: items to draw per positive event as label 0, out of what other users did at the time;
        pool: of how many events at least.
    options: what the source was asked for, to be recorded.
    read: what was read of the input: "columns" by our names, and more where it helps to see it.
    dropped: how many "rows" the input has, and how many of them were left out, by the reason;
        empty if the source was not asked to leave any out.
    """

    name: str
    events: pl.DataFrame
    candidates: pl.DataFrame | None = None
    items: pl.DataFrame | None = None
    tasks: tuple[str, ...] = ("label",)
    time_unit: str = "s"
    timed: str = "all"
    counted: dict[str, int] = field(default_factory=dict)
    inputs: tuple[dict[str, str], ...] = ()
    negatives: int = 0
    pool: int = POOL
    options: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.timed not in TIMED:
            raise ValueError(f"timed is one of {', '.join(TIMED)}, not {self.timed!r}")
        if self.candidates is None and self.timed != "all":
            raise ValueError("events without times are no candidates: when they were is not known")
        if self.candidates is not None and self.negatives:
            raise ValueError("negatives are drawn for events, not beside candidates that are given")
        if self.candidates is not None and (taken := {*self._given_features} & {*MADE, SHOWN}):
            raise DataError(f"feature {min(taken)}: the name is taken by what is made of clicks")

    @property
    def _given_features(self) -> list[str]:
        columns = [] if self.candidates is None else self.candidates.columns
        return [name.removeprefix("feature ") for name in columns if name.startswith("feature ")]


def build(
    log: ClickLog, *, split: tuple[float, float, float], min_history: int, seed: int
) -> Prepared:
    """Sort, split, cut requests out of histories, draw, make features and give items their ids.

    A request without a prefix of its own may see its user's events at strictly earlier times: a
    history holds neither a candidate's event nor its twins of the same instant. Requests that may
    see fewer than `min_history` events are left out.

    Raises DataError for a log that cannot be split, or has nothing to learn or to test on.
    """
    rows = len(log.events) + (0 if log.candidates is None else len(log.candidates))
    if rows > MAX_EVENTS:
        raise DataError(f"{rows} events: more than {MAX_EVENTS} are not supported")
    items = order_items(log.events, log.candidates)
    histories = histories_of(log.events, log.candidates, items, log.tasks)
    said = item_categories(items, log.events, log.items)
    # Histories hold all else, and a long log does not fit into memory twice.
    log = replace(log, events=log.events.clear())
    give_back()
    given_split = log.candidates is not None and "split" in log.candidates.columns
    if log.candidates is None:
        asked = asked_by_events(histories, log.tasks)
        bounds = split_times(histories.time, split)
    else:
        asked = asked_by_candidates(log.candidates, histories, items, log.tasks, log.timed)
        bounds = None if given_split else split_times(asked.time, split)
    if bounds is not None:
        asked.period = np.searchsorted(bounds, asked.time, side="right").astype(np.int8)
    before = np.bincount(asked.period, minlength=len(SPLITS))
    old = seen_by_all(histories, asked) if log.timed == "requests" else None
    order = stable_order(asked.user, asked.time, asked.period)
    asked = asked.take(order[gather(asked.prefix, order) >= min_history]).coded()
    del order
    _refuse_empty(asked, before)
    as_of, given_up = asked.time, 0
    if log.negatives:
        asked, as_of, given_up = _with_draws(log, histories, asked, bounds, len(items), seed)
    _refuse_one_label(asked, log)
    warnings = leaks(asked, histories)

    clicks_before = bounds[0] if bounds is not None and log.timed == "all" else None
    seen = items_seen(histories, asked, clicks_before)
    given = log.candidates is not None
    vocabulary = Vocabulary.of(histories, asked, seen, len(items), log.timed, given=given)
    del seen
    features = _features(log, histories, asked, as_of, vocabulary, old)
    del as_of, old
    asked.features = {**features, **asked.features}
    asked.item = gather(vocabulary.id_of, asked.item)
    table, categories, dense = item_table(items, vocabulary, said, log.items)

    lengths = np.diff(histories.offsets)
    info = {
        "num_items": vocabulary.known + 1,
        "item_rows": len(items) + 1,
        "item_features": categories,
        "item_dense": dense,
        "tasks": list(log.tasks),
        "signals": list(histories.signals),
        "features": list(asked.features),
        "context": asked.context_codes,
        "timed": log.timed,
        "candidates": (
            "given" if log.candidates is not None
            else "drawn from others" if log.negatives
            else "logged"
        ),
        "counts": {
            "users": len(lengths),
            "items": len(items),
            "events": len(histories.item),
            **count_splits(
                asked.period,
                asked.lengths,
                asked.labels[log.tasks[0]],
                asked.item > vocabulary.known,
            ),
        },
        **({"read": log.read} if log.read else {}),
        **({"dropped": log.dropped} if log.dropped else {}),
        **({"negatives_given_up": given_up} if given_up else {}),
        **({"warnings": warnings} if warnings else {}),
        "split": "given" if given_split else "time",
        **({} if bounds is None else {"split_times": {"valid": bounds[0], "test": bounds[1]}}),
        "time_unit": log.time_unit,
        "history_length": length_quantiles(lengths),
        "padding_waste": padding_waste(lengths),
    }  # fmt: skip
    return Prepared(histories.table(vocabulary.id_of), asked.table(), table, info)


def _with_draws(
    log: ClickLog,
    histories: Histories,
    asked: Requests,
    bounds: tuple[int, int] | None,
    items: int,
    seed: int,
) -> tuple[Requests, NDArray[np.int64], int]:
    """Requests with drawn candidates, each one's `as_of`, and how many could not be drawn."""
    assert bounds is not None
    first = log.tasks[0]
    wanted = log.negatives * int((asked.labels[first] == 1).sum())
    refuse_draws(log.negatives, pool=log.pool, total=len(asked.item) + wanted, items=items)
    blocks = Blocks.of(histories, bounds, log.pool)
    rng = np.random.Generator(np.random.PCG64(seed))
    rows, drawn = draw(asked, blocks, first, log.negatives, rng)
    return asked.with_drawn(rows, drawn), blocks.begin(asked.time), wanted - len(rows)


def _features(
    log: ClickLog,
    histories: Histories,
    asked: Requests,
    as_of: NDArray[np.int64],
    vocabulary: Vocabulary,
    old: NDArray[np.bool_] | None,
) -> dict[str, NDArray[np.float32]]:
    """The features that every log's candidates have, and of what a log shows, how often it did.

    old: of events without times, which precede every request.
    """
    positive = asked.labels[log.tasks[0]] == 1
    if log.timed == "none":
        # A training positive is among the clicks of its item: counted, it would tell its label.
        own = positive & (np.repeat(asked.period, asked.lengths) == SPLITS.index("train"))
        known = np.log1p(vocabulary.train_count[asked.item] - own).astype(np.float32)
        return {name: known if name == "popularity" else np.zeros_like(known) for name in MADE}
    item, time = histories.item, histories.time
    items = len(vocabulary.id_of)
    if log.candidates is None:
        return Clicks.of(item, time, items).features(asked.item, as_of, asked.offsets)
    shown_at = np.repeat(asked.time, asked.lengths)
    if old is not None:
        # Nobody knows by how much. When the others came, nobody knows either: those that a request
        # shows as clicked are counted from there.
        start = int(asked.time.min()) - 1
        item = np.concatenate([item[old], asked.item[positive]])
        time = np.concatenate([np.full(int(old.sum()), start), shown_at[positive]])
    made = Clicks.of(item, time, items).features(asked.item, as_of, asked.offsets)
    shown = Clicks.of(asked.item, shown_at, items).features(asked.item, as_of, asked.offsets)
    return {**made, SHOWN: shown["popularity"]}


def _refuse_empty(asked: Requests, before: NDArray[np.int64]) -> None:
    """Raise if a split has no requests.

    before: requests of each split with histories of any length.
    """
    rows = np.bincount(asked.period, minlength=len(SPLITS))
    for index, name in enumerate(SPLITS):
        if rows[index] == 0:
            hint = "the log has none"
            if before[index]:
                hint = "none there has as long a history; a smaller min_history would help"
            raise DataError(f"no requests in the {name} period: {hint}")


def _refuse_one_label(asked: Requests, log: ClickLog) -> None:
    """Raise if the training split has nothing to tell apart."""
    label = asked.labels[log.tasks[0]][np.repeat(asked.period, asked.lengths) == 0]
    positives = int((label == 1).sum())
    if positives == len(label) and log.negatives:
        raise DataError(
            f"no item could be drawn as label 0: in none of the training period's pools (--pool "
            f"{log.pool}: events of about one time) is there another item that another user "
            f"touches; more users and items, or labels, are needed"
        )
    # Next items are told apart from what training draws.
    if positives == 0 or (positives == len(label) and log.timed != "none"):
        raise DataError(
            f"every label in the training period is {int(positives > 0)}: nothing to tell apart"
        )
