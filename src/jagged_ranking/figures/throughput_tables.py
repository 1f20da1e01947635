"""Tables of whole training steps for reading: everybody, beside the goals that ours is held to."""

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.points import value_or_why
from jagged_ranking.figures.throughput_points import CELL, MODES, steps

# metric, what it is called, what its values are divided by.
_SHOWN = (
    ("samples_per_second", "Samples a second in training", 1.0),
    ("peak_memory", "Peak memory of a training step, GB", 1e9),
    ("energy", "Energy of a training step, mJ a sample", 1e-3),
)


def throughput_tables(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what it is, table): a row a batch, model, number of layers and mode of which anybody has a
    number, a column a kind of attention."""
    found = []
    for metric, title, size in _SHOWN:
        table = steps(results, metric)
        table = table[table["mode"].isin(MODES)]
        kinds = style.ordered(list(table["provider"].unique()))
        cells = [mine for _, mine in table.groupby(CELL, sort=False)]
        rows = [_row(mine, kinds, size) for mine in cells if (mine["status"] == "ok").any()]
        if rows:
            found.append((title, pd.DataFrame(rows)))
    return found


def _row(mine: pd.DataFrame, kinds: list[str], size: float) -> dict[str, str]:
    facts = mine.iloc[0]
    cells = {row["provider"]: row for row in mine.to_dict("records")}
    return {
        "batch": str(facts["workload"]),
        "requests": f"{facts['B']:,}",
        "waste": f"{facts['waste']:.0%}",
        "model": style.look_of(str(facts["model"])).label,
        "layers": str(facts["layers"]),
        "mode": str(facts["mode"]),
        **{style.look_of(kind).label: value_or_why(cells.get(kind), size) for kind in kinds},
    }
