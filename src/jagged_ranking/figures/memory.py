"""Memory figures: peak memory along the sweeps, ratios to dense attention, named workloads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking.figures import style, sweeps
from jagged_ranking.figures.panels import Claim
from jagged_ranking.figures.points import attention, of_group

TOTAL = "peak_memory"
BEYOND = "peak_memory_minus_inputs"

# arXiv 2409.15373, abstract. "53% more memory-efficient" may mean that dense flash attention
# needs 1.53x of ours, or that ours saves 53% of it (2.13x): a band from one to the other.
CLAIMS = {
    "dense_eager": Claim(22.0, "paper: up to 22x"),
    "dense_flash": Claim(1.53, "paper: 53% (1.53x or 2.13x)", upper=1 / (1 - 0.53)),
}
MEMORY = sweeps.Quantity(
    swept=TOTAL,
    name="memory",
    label="peak memory, inputs included",
    unit=sweeps.bytes_unit,
    limits=False,
    ratio="memory_ratio",
    ratio_label="times the memory of ours",
    claims=CLAIMS,
)
TITLES = {
    **sweeps.titles("memory", "Peak memory (inputs included)"),
    "memory_ratio": "How many times the memory of jagged attention dense attention and dense flash "
    "attention need, by padding waste and by the longest history, with the paper's claims",
    "memory_workloads": "Peak memory beyond the inputs of jagged attention and its peers, on each "
    f"workload, {sweeps.BOTH_MODES}",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_memory_by_<sweep>`: the peak, inputs included;
    `<id>_memory_ratio`: of the peak, inputs included;
    `<id>_memory_workloads`: the peak beyond the inputs.
    """
    with style.look():
        figures = sweeps.figures_of(MEMORY, results, manifest)
        if len(named := of_group(attention(results, BEYOND), "workloads")):
            figures["memory_workloads"] = sweeps.memory_figure(named, manifest)
        return style.save_all(figures, TITLES, manifest, out)
