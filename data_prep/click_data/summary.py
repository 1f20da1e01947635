"""What a prepared data set holds, in a few lines."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click_data.time_units import UNITS

SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar", " ": "space"}
_REASONS = {
    "duplicates": "the same user, item and time as an earlier row",
    "shown_again": "shown for the second time in one list",
    "clicked_unseen": "clicks of what the list does not hold",
}
_SHOWN = 20  # columns not read that a line lists


def summary(info: dict[str, Any], folder: Path) -> str:
    """A few lines that say what a prepared data set holds."""
    counts, lengths = info["counts"], info["history_length"]
    requests = ", ".join(
        f"{name} {number:,} with {counts['candidates'][name]:,} candidates "
        f"({counts['positives'][name] / counts['candidates'][name]:.1%} positive)"
        for name, number in counts["requests"].items()
    )
    new = ", ".join(f"{name} {share:.1%}" for name, share in counts["new_items"].items())
    return "\n".join(
        (
            f"{info['name']} -> {folder}",
            f"  {counts['users']:,} users, {counts['items']:,} items, {counts['events']:,} events",
            *_read(
                info.get("read"), [name for name in info["signals"] if name not in info["tasks"]]
            ),
            *_dropped(info.get("dropped", {})),
            f"  requests: {requests}",
            f"  candidates ({info['candidates']}) not seen in training: {new}",
            *_given_up(info),
            *_told(info),
            f"  split {_when(info)}",
            f"  history: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, "
            f"longest {lengths['max']:,} events; "
            f"padding waste {info['padding_waste']:.1%} in batches of 256",
            *(f"  warning: {line}" for line in info.get("warnings", [])),
        )
    )


def _told(info: dict[str, Any]) -> list[str]:
    """A line that says what there is to learn, and from what."""
    items = [f"{name} ({number - 1:,})" for name, number in info["item_features"].items()]
    parts = {
        "tasks": info["tasks"],
        "candidates' features": info["features"],
        "items'": [*items, *info["item_dense"]],
        "requests'": list(info["context"]),
        "events'": info["signals"],
    }
    return ["  " + "; ".join(f"{what}: {', '.join(of)}" for what, of in parts.items() if of)]


def _read(read: dict[str, Any] | None, signals: list[str]) -> list[str]:
    """A line that says which columns were taken for what."""
    if read is None:
        return []
    columns = [o if o == t else f"{o} from {t}" for o, t in read["columns"].items()]
    parts = [", ".join(columns)]
    if signals:
        parts.append(f"signals {', '.join(signals)}")
    if "separator" in read:
        separator = read["separator"]
        parts.append(f"separated by {SEPARATORS.get(separator, separator)}")
    if "encoding" in read:
        parts.append(f"encoded in {read['encoding']}")
    if read["unread"]:
        some = ", ".join(read["unread"][:_SHOWN]) + ", ..." * (len(read["unread"]) > _SHOWN)
        parts.append(f"not read: {some}")
    return [f"  columns: {'; '.join(parts)}"]


def _dropped(dropped: dict[str, Any]) -> list[str]:
    """Lines that say how many rows were left out, and why."""
    lines = []
    if "bad_rows" in dropped:
        number, rows = dropped["bad_rows"], dropped["rows"]
        first = dropped["first_bad_rows"]
        which = f"; the first {len(first)}:" if number > len(first) else ":" if number else ""
        share = f"{number / rows:.1%}"
        lines.append(f"  dropped, bad rows: {number:,} of {rows:,} rows ({share}){which}")
        lines += [f"    {line}" for line in first]
    for reason, why in _REASONS.items():
        if reason in dropped:
            number, rows = dropped[reason], dropped["rows"]
            share = f"{number / rows:.1%}"
            lines.append(f"  dropped, {why}: {number:,} of {rows:,} rows ({share})")
    return lines


def _when(info: dict[str, Any]) -> str:
    """When validation and test begin: dates show whether times were read as they were meant."""
    if "split_times" not in info:
        return "as the log has it"
    unit = UNITS[info["time_unit"]]
    starts = {
        name: datetime.fromtimestamp(t / unit, UTC) for name, t in info["split_times"].items()
    }
    return "by time: " + ", ".join(
        f"{name} from {start:%Y-%m-%d %H:%M}" for name, start in starts.items()
    )


def _given_up(info: dict[str, Any]) -> list[str]:
    number = info.get("negatives_given_up", 0)
    why = "other users did nothing else at that time"
    return [f"  negatives that could not be drawn, since {why}: {number:,}"] if number else []
