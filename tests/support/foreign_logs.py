"""Click logs as others write them: made up, in forms that nobody prepared for `jagged prepare`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START = int(datetime(2024, 3, 29, 12, tzinfo=UTC).timestamp())
SPAN = 4 * 86_400  # seconds; Europe's clocks go from +01:00 to +02:00 in the middle
CATEGORIES = 8


class Event(NamedTuple):
    """One click; the time is in UTC seconds since 1970, and no two are at one time."""

    user: int
    item: int
    time: int
    label: int
    price: float

    @property
    def category(self) -> int:
        return self.item % CATEGORIES


@dataclass(frozen=True)
class ForeignLog:
    """A log that was written.

    options: what `jagged prepare log --from PATH --out DIR` needs beyond.
    events: what is in it, in time order, rows without a user left out.
    users, items: how the log calls them, by number.
    """

    path: Path
    options: tuple[str, ...]
    events: tuple[Event, ...]
    users: tuple[str, ...]
    items: tuple[str, ...]


def made_up(number: int, seed: int = 0) -> tuple[Event, ...]:
    """Events in time order: users return to what they like, and like some categories more."""
    rng = np.random.default_rng(seed)
    users, items = max(6, number // 60), max(16, number // 15)
    likes = rng.integers(CATEGORIES, size=(users, 2))
    times = np.sort(rng.choice(SPAN, number, replace=False)) + START
    events = []
    for n, time in enumerate(times):
        user = int(users * rng.random() ** 2)
        item = int(rng.integers(items)) if n >= items else n
        liked = item % CATEGORIES in likes[user]
        label = int(rng.random() < (0.8 if liked else 0.3))
        events.append(Event(user, item, int(time), label, float(rng.integers(1, 400)) / 4))
    return tuple(events)


def tabs_and_local_times(
    folder: Path, number: int = 6000, *, seed: int = 0, zone: bool = True
) -> ForeignLog:
    """A .csv that is separated by tabs, with a byte order mark, its own names and local times.

    zone: write how far the clock is from UTC; else the same clock without saying so.
    """
    events = made_up(number, seed)
    users, items = _names(events, "Käufer {}", "{:05}")
    lines = ["Kunde\tSeite\tArtikel\tWarengruppe\tZeitpunkt\tgekauft\tPreis"]
    for event in events:
        clock = datetime.fromtimestamp(event.time, ZoneInfo("Europe/Berlin"))
        time = clock if zone else clock.replace(tzinfo=None)
        place = f"{users[event.user]}\tStart, Suche\t{items[event.item]}\tGruppe {event.category}"
        lines.append(f"{place}\t{time}\t{event.label}\t{event.price}")
    path = folder / "besuche.csv"
    path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    names = {"user_id": "Kunde", "item_id": "Artikel", "timestamp": "Zeitpunkt"}
    names |= {"label": "gekauft", "category": "Warengruppe"}
    options = (*_columns(names), "--signal", "Preis")
    return ForeignLog(path, options, events, users, items)


def parquet_with_nulls(folder: Path, number: int = 6000, *, seed: int = 1) -> ForeignLog:
    """Parquet without labels, with ids in words, and nulls: each tenth visit is of nobody known."""
    events = made_up(number, seed)
    users, items = _names(events, "visitor-{}", "sku-{}")
    anonymous = [n % 10 == 7 for n in range(len(events))]
    times = pa.array([event.time * 1_000_000 for event in events], pa.int64())
    table = {
        "visitor": [None if no else users[e.user] for e, no in zip(events, anonymous, strict=True)],
        "sku": [items[event.item] for event in events],
        "at": times.cast(pa.timestamp("us", tz="America/New_York")),
        "shelf": [None if e.category == 0 else f"shelf-{e.category}" for e in events],
        "dwell": [None if n % 3 else event.price for n, event in enumerate(events)],
    }
    path = folder / "visits.parquet"
    pq.write_table(pa.table(table), path)
    names = {"user_id": "visitor", "item_id": "sku", "timestamp": "at", "category": "shelf"}
    known = tuple(e for e, no in zip(events, anonymous, strict=True) if not no)
    return ForeignLog(path, (*_columns(names), "--drop-bad-rows"), known, users, items)


def json_lines(folder: Path, number: int = 6000, *, seed: int = 2) -> ForeignLog:
    """JSON lines, which must be converted first; the category comes late in the file."""
    events = made_up(number, seed)
    users, items = _names(events, "{}", "{}")
    path = folder / "my clicks.jsonl"
    with path.open("w") as file:
        for n, event in enumerate(events):
            time = datetime.fromtimestamp(event.time, UTC).isoformat().replace("+00:00", "Z")
            shelf = None if n < number // 2 else f"shelf {event.category}"
            row = {"user_id": event.user, "item_id": event.item, "timestamp": time}
            file.write(json.dumps({**row, "label": event.label, "category": shelf}) + "\n")
    return ForeignLog(path, (), events, users, items)


def _names(
    events: Sequence[Event], user: str, item: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    users = max(event.user for event in events) + 1
    items = max(event.item for event in events) + 1
    return tuple(map(user.format, range(users))), tuple(map(item.format, range(items)))


def _columns(names: dict[str, str]) -> tuple[str, ...]:
    return tuple(part for pair in names.items() for part in ("--column", "=".join(pair)))
