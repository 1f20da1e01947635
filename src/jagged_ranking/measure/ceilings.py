"""What the device can do at best, measured in the run that it is held against."""

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from jagged_ranking import results
from jagged_ranking.devices import device_name
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort, interleaved


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_second: of a copy on the device, bytes read plus bytes written.
    flops_per_second: of a square matrix product in `dtype`."""

    bytes_per_second: float
    flops_per_second: float
    dtype: str

    @classmethod
    def from_table(cls, table: pd.DataFrame) -> "Ceilings":
        """What `ceiling_table` said."""
        value = dict(zip(table["metric"], table["value"], strict=True))
        config = json.loads(table["config"].iloc[0])
        return cls(value["bandwidth"], value["arithmetic"], config["ceiling_dtype"])

    def limit_ms(self, facts: dict[str, Any], mode: str) -> float:
        """What a workload (see `Workload.facts`) takes at these two speeds. What reads more than it
        writes may take a little less: a copy does as much of both, and they get in each other's
        way."""
        move = facts[f"bytes_{mode}"] / self.bytes_per_second
        compute = facts[f"flops_{mode}"] / self.flops_per_second
        return max(move, compute) * 1e3


def measure_ceilings(device: torch.device | str, *, dtype: torch.dtype) -> Ceilings:
    """A copy of 2 GB and an 8192^3 product of random numbers on a GPU; smaller on a CPU."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    copied = (2**31 if cuda else 2**26) // dtype.itemsize
    size = 8192 if cuda else 1024
    source = torch.randn(copied, device=device, dtype=dtype)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    timings = interleaved(
        {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(left, right, out=out)},
        device=device,
        effort=Effort(rounds=3, inner=10, seconds=1.0),
    )
    for timed in timings.values():
        if timed.failure:
            raise timed.failure
    copy_ms, matmul_ms = (sorted(t.samples)[len(t.samples) // 2] for t in timings.values())
    return Ceilings(
        bytes_per_second=2 * source.nbytes / (copy_ms / 1e3),
        flops_per_second=2 * size**3 / (matmul_ms / 1e3),
        dtype=str(dtype).removeprefix("torch."),
    )


def ceiling_table(
    *, device: torch.device | str, dtype: torch.dtype, cpu_threads: int = 1, **common: Any
) -> pd.DataFrame:
    """`measure_ceilings` as a table of results."""
    with timing.threads(device, cpu_threads):
        found = measure_ceilings(device, dtype=dtype)
    config = {"device": device_name(device), "ceiling_dtype": found.dtype}
    return results.frame(ceiling_rows(found, config=config, **common))


def ceiling_rows(ceilings: Ceilings, **common: Any) -> list[dict[str, Any]]:
    """The two ceilings as results rows of op "ceiling"."""
    named = {
        "bandwidth": ("copy", "B/s", ceilings.bytes_per_second),
        "arithmetic": ("matmul", "FLOP/s", ceilings.flops_per_second),
    }
    return [
        results.row(
            op="ceiling",
            provider=provider,
            workload="",
            mode="forward",
            metric=metric,
            unit=unit,
            value=value,
            **common,
        )
        for metric, (provider, unit, value) in named.items()
    ]
