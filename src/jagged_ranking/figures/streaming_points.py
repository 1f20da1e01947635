"""From results rows of training from disk to what figures and tables show."""

import math

import pandas as pd

from jagged_ranking.results import select, with_config

# The op of its rows, which are of the notebook of whole training steps.
STREAMING, FROM_DISK = "streaming", "from_disk"
# What this project set itself, of a log of so many events: less than this share of a step waiting
# for the batch, and anonymous memory of at most so many bytes.
GOAL_EVENTS, WAIT_GOAL, MEMORY_LIMIT = 50_000_000, 0.05, 4 * 2**30
# And of at most so many bytes more for each event that a log has more than the shortest of at least
# so many: below that, passes over columns hold all of a log at once.
GROWTH_LIMIT, GROWTH_FROM = 16.0, 1_000_000
# A training's peak of anonymous memory, with the end of an epoch, in which predictions are judged.
MEMORY = "validated_memory"
_FACTS = ("events", "requests", "model", "batch_size", "log_bytes", "device", "device_type")


def streamed(results: pd.DataFrame, *metrics: str) -> pd.DataFrame:
    """Rows of these metrics, facts of log and training as columns, the shortest log first."""
    table = with_config(select(results, op=STREAMING, metric=metrics), *_FACTS)
    return table.sort_values(by="events", kind="stable")


def by_log(results: pd.DataFrame) -> list[dict]:
    """Of each log its facts and every metric; NaN of one that there is not."""
    found: dict[str, dict] = {}
    every = streamed(results, *dict.fromkeys(select(results, op=STREAMING)["metric"]))
    for row in every.to_dict("records"):
        log = found.setdefault(row["workload"], {name: row[name] for name in _FACTS})
        log[row["metric"]] = row["value"] if row["status"] == "ok" else math.nan
    return list(found.values())


def growth(logs: list[dict]) -> list[float]:
    """Bytes of anonymous memory that each log takes for each event it has more than the shortest of
    those of at least `GROWTH_FROM`; NaN of that, and of those below."""
    long = [log for log in logs if log["events"] >= GROWTH_FROM]
    found = []
    for log in logs:
        more = log["events"] - long[0]["events"] if long else 0
        known = more > 0 and {MEMORY} <= set(log) & set(long[0])
        found.append((log[MEMORY] - long[0][MEMORY]) / more if known else math.nan)
    return found
