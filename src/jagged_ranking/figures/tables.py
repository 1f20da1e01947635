"""Tables for people: the named workloads, model quality, claims; as frames or Markdown."""

import math

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import HOST, history_table
from jagged_ranking.figures.cached_goals import cached_tables
from jagged_ranking.figures.choice_goals import SLOW, slow_picks
from jagged_ranking.figures.claims import claims
from jagged_ranking.figures.hstu_points import hstu as hstu_of
from jagged_ranking.figures.hstu_points import hstu_schedule_ms
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.operation_points import largest, main_dtype, operations, standing
from jagged_ranking.figures.points import (
    SHORT,
    attention,
    modes_of,
    ours_of,
    schedule_ms,
    value_or_why,
)
from jagged_ranking.figures.quality_tables import budgets, quality
from jagged_ranking.figures.scaling_goals import scaling_rows
from jagged_ranking.figures.serving_tables import serving_tables
from jagged_ranking.figures.sparse_points import lists_ms, seen
from jagged_ranking.figures.sparse_points import sparse as sparse_points
from jagged_ranking.figures.streaming_goals import streaming_rows
from jagged_ranking.figures.throughput_tables import throughput_tables
from jagged_ranking.figures.verdicts import number
from jagged_ranking.measure.lineup import BY_LENGTH, JAGGED_LENGTHS

__all__ = [
    "budgets",
    "cached_tables",
    "claims",
    "history_table",
    "hstu",
    "interaction",
    "keys_seen",
    "memory",
    "number",
    "quality",
    "scaling",
    "serving_tables",
    "sparse",
    "speed",
    "streaming",
    "summaries",
    "target",
    "throughput_tables",
    "to_markdown",
]

LIMIT = "limit, forward"
HISTORY = (
    "The longest history cap that each kind of attention affords at a fixed cost of a training "
    "step, which all shorter ones must keep to as well, and the quality at the longest cap within "
    "it that was trained (gain over the shortest cap, 95% interval over users and seeds). " + HOST
)


def speed(results: pd.DataFrame) -> pd.DataFrame:
    """Median ms on the named workloads, forward / forward+backward, a column a provider.

    The limit is the least that the device allows; "schedule" is what building ours takes, once a
    batch, and is not in the column of ours.
    """
    table = attention(results, "latency")
    named = table[table["group"] == "workloads"]
    built = schedule_ms(results)
    first = {
        LIMIT: lambda rows: number(float(rows["limit_ms"].min())),
        "schedule": lambda rows: number(built.get(str(rows["workload"].iloc[0]), math.nan)),
    }
    if not built:
        del first["schedule"]
    return _by_workload(named, 1.0, first)


def memory(results: pd.DataFrame) -> pd.DataFrame:
    """Peak beyond the inputs on the named workloads, forward / forward+backward, GB (or MB, where
    nothing reaches a tenth of a GB; a column says which)."""
    table = attention(results, BEYOND)
    named = table[table["group"] == "workloads"]
    large = named["value"].max() >= 1e8
    unit = ("GB", 1e9) if large else ("MB", 1e6)
    return _by_workload(named, unit[1], {"unit": lambda rows: unit[0]})


def target(results: pd.DataFrame) -> pd.DataFrame:
    """Median ms of target attention, forward / forward+backward, a column a provider; N is the
    candidates a user. The peak is ours beyond the inputs."""
    table = attention(results, "latency")
    table = table[table["group"].isin(["target", "skew"])]
    peaks = ours_of(attention(results, BEYOND))
    built = schedule_ms(results)

    def peak(rows: pd.DataFrame) -> str:
        name = rows["workload"].iloc[0]
        found = [peaks.get((name, mode), math.nan) / 1e6 for mode in modes_of(table)]
        return " / ".join(number(value) for value in found)

    first = {
        "events": lambda rows: f"{rows['tokens'].iloc[0]:,}",
        LIMIT: lambda rows: number(float(rows["limit_ms"].min())),
        "schedule": lambda rows: number(built.get(str(rows["workload"].iloc[0]), math.nan)),
        "peak (MB)": peak,
    }
    if not built:
        del first["schedule"]
    return _by_workload(table, 1.0, first, shape=("B", "queries", "H", "D"))


def interaction(results: pd.DataFrame) -> pd.DataFrame:
    """Interaction operations on the batch with most tokens, forward / forward+backward: medians of
    ours and the best peer in ms, and ours as multiples of the limit and of that peer."""
    most = main_dtype(largest(operations(results, "latency")))
    if most.empty:
        return pd.DataFrame()
    found = standing(results)
    found = found[found["workload"].isin(most["workload"]) & found["dtype"].isin(most["dtype"])]
    rows = []
    for name, mine in found.groupby("op", sort=False):
        modes = [mine[mine["mode"] == mode] for mode in modes_of(mine)]

        def cells(column: str, digits: int | None = None, modes: list = modes) -> str:
            values = [float(rows[column].iloc[0]) for rows in modes]
            return " / ".join(number(v, digits) for v in values)

        peers = [style.look_of(p).label for rows in modes if (p := str(rows["peer"].iloc[0]))]
        rows.append(
            {
                "operation": str(name),
                "tokens": f"{mine['tokens'].iloc[0]:,}",
                "dtype": str(mine["dtype"].iloc[0]),
                "limit": cells("limit"),
                "jagged (ours)": cells("ours"),
                "ours / limit": cells("over_limit", 2),
                "best peer": " / ".join(dict.fromkeys(peers)),
                "its ms": cells("best"),
                "ours / best": cells("over_best", 2),
            }
        )
    return pd.DataFrame(rows)


def hstu(results: pd.DataFrame) -> pd.DataFrame:
    """Median ms of HSTU's attention on the named workloads, forward / forward+backward, a column a
    provider. "schedule" is not in the column of ours."""
    table = hstu_of(results, "latency")
    built = hstu_schedule_ms(results)
    first = {
        LIMIT: lambda rows: number(float(rows["limit_ms"].min())),
        "schedule": lambda rows: number(built.get(str(rows["workload"].iloc[0]), math.nan)),
    }
    if not built:
        del first["schedule"]
    return _by_workload(table[table["group"] == "workloads"], 1.0, first)


def sparse(results: pd.DataFrame) -> pd.DataFrame:
    """Median ms of attention to some of the keys, forward / forward+backward, a column a provider,
    over the length of users and on unequal lengths; peers see all keys, but DKernel."""
    table = sparse_points(results, "latency")
    table = table[table["group"].isin([BY_LENGTH, JAGGED_LENGTHS])]
    built = lists_ms(results)
    first = {
        "blocks seen": lambda rows: f"{rows['density'].iloc[0]:.1%}",
        "lists": lambda rows: number(built.get(str(rows["workload"].iloc[0]), math.nan)),
    }
    return _by_workload(table, 1.0, first)


def keys_seen(results: pd.DataFrame) -> pd.DataFrame:
    """How many keys the newest query sees, by one head (median of the heads) / by all together, a
    column a rule."""
    table = seen(results)
    rows = []
    for length, mine in table.groupby("max_len", sort=True):
        row = {"history": f"{int(str(length)):,}"}
        for rule in style.ordered(list(table["provider"].unique())):
            of_rule = mine[mine["provider"] == rule].set_index("metric")["value"]
            said = [f"{int(of_rule[name]):,}" for name in ("one_head", "all_heads")]
            row[style.look_of(rule).label] = " / ".join(dict.fromkeys(said))
        rows.append(row)
    return pd.DataFrame(rows)


def scaling(results: pd.DataFrame) -> pd.DataFrame:
    """Training on each number of ranks: samples a second, efficiency, what a step is made of."""
    return pd.DataFrame(scaling_rows(results)).fillna("")


def streaming(results: pd.DataFrame) -> pd.DataFrame:
    """Training from disk: memory, waiting and samples a second of each log."""
    return pd.DataFrame(streaming_rows(results)).fillna("")


def summaries(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what it is, table) of every table for reading that the results allow."""
    latency = "Latency in ms, forward / forward+backward, medians"
    found = [
        (latency, speed(results)),
        ("Peak memory beyond the inputs, forward / forward+backward", memory(results)),
        (f"Target attention. {latency}", target(results)),
        (f"Interaction operations. {latency}", interaction(results)),
        (f"HSTU's attention. {latency}", hstu(results)),
        (f"Attention to some of the keys. {latency}", sparse(results)),
        ("Keys that the newest query sees, by one head / by all heads", keys_seen(results)),
        (SLOW, slow_picks(results)),
        *quality(results),
        (HISTORY, history_table(results)),
        *cached_tables(results),
        *throughput_tables(results),
        ("Training from disk, by the length of the log", streaming(results)),
        *serving_tables(results),
        ("Training on several ranks", scaling(results)),
    ]
    return [(caption, table) for caption, table in found if len(table)]


def to_markdown(table: pd.DataFrame) -> str:
    """A pipe table of strings."""
    lines = [_pipe(list(map(str, table.columns))), _pipe(["---"] * len(table.columns))]
    lines += [_pipe([str(cell) for cell in row]) for row in table.itertuples(index=False)]
    return "\n".join(lines)


def _by_workload(
    table: pd.DataFrame, size: float, first: dict, shape: tuple[str, ...] = ("B", "H", "D")
) -> pd.DataFrame:
    # Who has no number at all is in the results, and would only widen the table.
    tried = table[~table["status"].isin(["missing", "unsupported"])]
    providers = style.ordered(list(tried["provider"].unique()))
    modes = modes_of(table)
    rows = []
    for workload, mine in table.groupby("workload", sort=False):
        facts = mine.iloc[0]
        row = {
            "workload": str(workload),
            ", ".join([*shape, "longest"]): ", ".join(f"{facts[k]:g}" for k in (*shape, "max_len")),
            "lengths": str(facts["distribution"]),
            "waste": f"{facts['waste']:.0%}",
            **{title: cell(mine) for title, cell in first.items()},
        }
        for provider in providers:
            cells = [
                _cell(mine[(mine["provider"] == provider) & (mine["mode"] == mode)], size)
                for mode in modes
            ]
            # One word is enough where the reason is the same for both.
            same = len(set(cells)) == 1 and cells[0] in {*SHORT.values(), ""}
            row[style.look_of(provider).label] = cells[0] if same else " / ".join(cells)
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(rows: pd.DataFrame, size: float) -> str:
    return "" if rows.empty else value_or_why(rows.iloc[0].to_dict(), size)


def _pipe(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
