"""Results of training from disk that nobody measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
from made_up_results import MANIFEST

from jagged_ranking import results

# events -> GiB of anonymous memory, share of steps that is waiting
LOGS = {1_000_000: (1.0, 0.02), 10_000_000: (1.05, 0.021), 50_000_000: (1.3, 0.03)}


def streaming_results(**facts: Any) -> pd.DataFrame:
    """Three logs, of which a training takes a little more memory each."""
    rows = []
    for events, (memory, wait) in LOGS.items():
        config = {"events": events, "requests": events * 3 // 4, "model": "hstu"}
        config |= {"batch_size": 512, "log_bytes": 60 * events}
        config |= {"device": MANIFEST["device"], "device_type": "cuda", **facts}
        where: dict[str, Any] = {
            "op": "streaming",
            "provider": "from_disk",
            "workload": f"{events:,} events",
            "mode": "train",
            "config": config,
        }
        sizes = {"validated_memory": memory, "anonymous_memory": memory - 0.1}
        sizes |= {"prepare_memory": 4.0, "file_memory": 2.0, "started_memory": 0.9}
        rows += [
            results.row(metric=name, unit="bytes", value=gib * 2**30, **where)
            for name, gib in sizes.items()
        ]
        rows += [
            results.row(metric=name, unit="s", value=events / 1e6, **where)
            for name in ("prepare_seconds", "open_seconds", "start_seconds")
        ]
        rows.append(results.row(metric="wait_share", unit="1", value=wait, **where))
        rate = [24e3, 25e3, 26e3]
        rows.append(results.row(metric="samples_per_second", unit="1/s", samples=rate, **where))
    return results.frame(rows)
