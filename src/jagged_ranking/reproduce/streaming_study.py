"""Training from disk: what memory it takes, and how long it waits for batches, by the length of the
log.

For each length a synthetic log is prepared in a process of its own, trained from in another, and
deleted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking import paths, results
from jagged_ranking.devices import device_name
from jagged_ranking.figures.streaming_points import FROM_DISK, STREAMING
from jagged_ranking.processes import PARENT_VARIABLE, gpus_alone, last_line, temporary_folder
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.training.config import TrainConfig

WORKER = "jagged_ranking.reproduce.streaming_worker"
LONGEST_SECONDS = 1800.0  # of one process
# Of the synthetic logs: events of a user, and of an item, on average; and the most items.
_OF_A_USER, _OF_AN_ITEM, _MOST_ITEMS = 100, 50, 200_000
_UNITS = {
    "prepare_seconds": "s",
    "open_seconds": "s",
    "prepare_memory": "bytes",
    "start_seconds": "s",
    "started_memory": "bytes",
    "anonymous_memory": "bytes",
    "validated_memory": "bytes",
    "file_memory": "bytes",
}


def measured_streaming(
    logs: Sequence[int],
    *,
    options: Mapping[str, Any],
    steps: int,
    device: str,
    cpu_threads: int,
    seed: int,
    run_id: str,
) -> pd.DataFrame:
    """`streaming` of logs of so many events each, each kept in `build/cache` as soon as it is done.

    Raises:
        ValueError: a log without events, no steps, or an option that there is not; before anything
            is measured.
    """
    if min([*logs, steps, 1]) < 1:
        raise ValueError(f"logs and steps must be at least 1, got {[*logs]}, {steps}")
    config = TrainConfig.from_dict({**options, "seed": seed})
    tables = [
        cached(
            streaming,
            events,
            options=config.to_dict(),
            steps=steps,
            device=device,
            cpu_threads=cpu_threads,
            run_id=run_id,
        )
        for events in logs
    ]
    return pd.concat(tables, ignore_index=True) if tables else results.frame([])


def streaming(
    events: int,
    *,
    options: Mapping[str, Any],
    steps: int,
    device: str,
    cpu_threads: int,
    run_id: str,
) -> pd.DataFrame:
    """Prepare a log, and train from its files.

    Args:
        events: of the synthetic log.
        options: of `TrainConfig`.
        steps: that are timed.
        device: "cuda" or "cpu".
        cpu_threads: of the training, on a CPU.
        run_id: for the column `id`.

    Returns:
        Rows of op `STREAMING`, provider `FROM_DISK`, mode "train", the workload "N events".
        Metrics: "prepare_seconds", "open_seconds" (of opening it first, in which columns are laid
        flat and looked through) and "prepare_memory" (bytes; the peak of that process);
        "start_seconds" (from opening it again to behind the first step), "started_memory" (bytes
        when nothing of the log was there, libraries alone), "anonymous_memory" (bytes; the peak of
        the training), "validated_memory" (of all, with predictions of the whole validation split
        judged), "file_memory" (bytes of files that were mapped at once, at most), "step_time" (ms),
        "samples_per_second" (requests), "wait_share" (of the steps' time, in which the device had
        no batch, see `BatchClock`). What failed is a row that says why.
    """
    where: dict[str, Any] = {
        "op": STREAMING,
        "provider": FROM_DISK,
        "workload": f"{events:,} events",
        "mode": "train",
        "run_id": run_id,
    }
    facts = {
        "events": events,
        "model": options["model"],
        "batch_size": options["batch_size"],
        "max_history": options["max_history"],
        "device": device_name(device),
        "device_type": device,
    }
    print(f"{events:,} events", end=": ", flush=True)
    alone = gpus_alone([0]) if device == "cuda" else nullcontext()
    try:
        # beside what is kept: the usual place for temporary folders may itself be memory
        with temporary_folder("streaming-", place=paths.BUILD / "data") as folder, alone:
            asked: dict[str, Any] = {"data": str(folder / "log"), "seed": options["seed"]}
            log = _said_by("prepare", folder, {**asked, "log": log_of(events)})
            facts |= {name: log.pop(name) for name in ("log_bytes", "requests", "digest")}
            training = {"options": dict(options), "steps": steps}
            training |= {"device": device, "cpu_threads": cpu_threads}
            found = _said_by("train", folder, {**asked, **training})
    except subprocess.SubprocessError as error:
        failed = results.row(
            **where,
            metric="samples_per_second",
            unit="1/s",
            status="error",
            message=str(error),
            config=facts,
        )
        return results.frame([failed])
    where["config"] = facts
    rows = [
        results.row(**where, metric=metric, unit=unit, value={**log, **found}[metric])
        for metric, unit in _UNITS.items()
    ]
    taken, requests = found["step_time"], found["requests"]
    rates = [1e3 * some / ms for some, ms in zip(requests, taken, strict=True)]
    share = sum(found["wait"]) / sum(taken)
    rows += [
        results.row(**where, metric="step_time", unit="ms", samples=taken),
        results.row(**where, metric="samples_per_second", unit="1/s", samples=rates),
        results.row(**where, metric="wait_share", unit="1", value=share),
    ]
    return results.frame(rows)


def log_of(events: int) -> dict[str, int]:
    """Options of a synthetic log: of any length, users have as many events on average."""
    categories = 60
    users = max(1, events // _OF_A_USER)
    items = max(categories, min(_MOST_ITEMS, events // _OF_AN_ITEM))
    return {"users": users, "items": items, "categories": categories, "events": events}


def _said_by(task: str, folder: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a process found, which ends with this one.

    Raises:
        SubprocessError: it failed, or did not end in time; its last line.
    """
    out = folder / f"{task}.json"
    command = [sys.executable, "-m", WORKER, task, json.dumps(asked), str(out)]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    try:
        subprocess.run(
            command,
            env=environment,
            timeout=LONGEST_SECONDS,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise subprocess.SubprocessError(f"{task}: {last_line(error.stderr)}") from error
    return json.loads(out.read_text())
