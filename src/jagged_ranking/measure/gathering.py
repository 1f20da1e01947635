"""What all contests of one table share, and the table."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from jagged_ranking import results
from jagged_ranking.devices import device_name
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings, ceiling_rows, measure_ceilings
from jagged_ranking.measure.timing import Effort


@dataclass(frozen=True)
class Gathered:
    """A table that grows.

    device_name: how rows call the device.
    options: of every `Contest` of the table.
    rows: so far.
    """

    device_name: str
    options: dict[str, Any]
    rows: list[dict[str, Any]]

    def table(self) -> pd.DataFrame:
        """In the form of `jagged_ranking.results`."""
        return results.frame(self.rows)


@contextmanager
def gathering(
    device: torch.device,
    dtype: torch.dtype,
    *,
    effort: Effort | None,
    ceilings: Ceilings | None,
    run_id: str,
    run_key: str,
    cpu_threads: int,
) -> Iterator[Gathered]:
    """Inside of this a table is measured, which begins with the ceilings of the device.

    Args:
        device: where everything runs.
        dtype: of the ceilings, where they are None and so are measured.
        effort, ceilings, run_id, run_key, cpu_threads: see `measure_attention`.
    """
    with timing.threads(device, cpu_threads), timing.earlier_objects_apart():
        name = device_name(device)
        if ceilings is None:
            ceilings = measure_ceilings(device, dtype=dtype)
        common = {"run_id": run_id, "run_key": run_key}
        config = {"device": name, "ceiling_dtype": ceilings.dtype}
        options = {
            "device": device,
            "effort": effort or Effort(),
            "ceilings": ceilings,
            "common": common,
        }
        yield Gathered(name, options, ceiling_rows(ceilings, config=config, **common))
