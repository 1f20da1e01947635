"""One process of `streaming_study`: it prepares a synthetic log, or trains from a prepared one, and
says what memory of its own it needed for that.

Of the memory of a process the anonymous part counts: pages of files the system drops when others
need the room, and reads them again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WARM_UP = 10  # steps that compile, and that read what the first batches need
_EVERY = 0.02  # seconds between two looks


class PeakMemory:
    """Bytes that a process has at most from now on, looked at all the time: anonymous, and pages of
    files beside it."""

    def __init__(self) -> None:
        self.anonymous = self.files = 0
        threading.Thread(target=self._watch, daemon=True, name="memory").start()

    def _watch(self) -> None:
        while True:
            self.look()
            time.sleep(_EVERY)

    def look(self) -> int:
        """Anonymous bytes now."""
        lines = Path("/proc/self/status").read_text().splitlines()
        kilobytes = {name: text.split()[0] for name, _, text in (x.partition(":") for x in lines)
                     if name in ("RssAnon", "RssFile")}  # fmt: skip
        now, files = (1024 * int(kilobytes[name]) for name in ("RssAnon", "RssFile"))
        self.anonymous, self.files = max(self.anonymous, now), max(self.files, files)
        return now


class _Enough(Exception):
    """So many steps were asked for."""


def prepare_log(asked: Mapping[str, Any]) -> dict[str, float]:
    """Prepare a synthetic log, open it for the first time, and have the system forget its pages."""
    from click_data import open_dataset, prepare

    memory, begun = PeakMemory(), time.perf_counter()
    folder = prepare("synthetic", out=asked["data"], seed=asked["seed"], **asked["log"])
    prepared = time.perf_counter()
    dataset = open_dataset(folder)
    opened = time.perf_counter()
    found = {
        "prepare_seconds": prepared - begun,
        "open_seconds": opened - prepared,
        "prepare_memory": memory.anonymous,
        "log_bytes": dataset.nbytes,
        "requests": len(dataset.requests("train")),
        "digest": dataset.digest,
    }
    del dataset
    _forget(folder)
    return found


def _forget(folder: Path) -> None:
    """Have no page of these files in memory, where the system does as it is told."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def train_from_log(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Some steps of the trainer, then what the end of its first epoch needs beside the model's
    answers: made-up ones of all validation candidates are judged."""
    import numpy as np
    import torch

    from click_data import open_dataset
    from jagged_ranking.data.batch_clock import BatchClock
    from jagged_ranking.evaluation.evaluate import Evaluation
    from jagged_ranking.training.config import TrainConfig
    from jagged_ranking.training.trainer import train

    device = torch.device(asked["device"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)
    else:
        torch.set_num_threads(asked["cpu_threads"])
    memory = PeakMemory()
    at_first, begun = memory.look(), time.perf_counter()
    dataset, clock = open_dataset(asked["data"]), BatchClock(device)
    begin: list[float] = []

    def enough(step: int) -> None:
        begin.append(time.perf_counter())
        if step > WARM_UP + asked["steps"]:
            raise _Enough

    try:
        train(
            TrainConfig.from_dict(asked["options"]),
            dataset,
            progress=False,
            device=device,
            after_step=enough,
            from_disk=True,
            through=clock,
        )
        raise ValueError(
            f"{len(begin)} steps in all epochs of {dataset.name}, {WARM_UP + asked['steps']} asked"
        )
    except _Enough:
        pass
    wholes, waits, requests = clock.steps(WARM_UP)
    found = {
        "start_seconds": begin[0] - begun,
        "step_time": wholes,
        "wait": waits,
        "requests": requests,
        "started_memory": at_first,
        "anonymous_memory": memory.anonymous,
    }
    valid = dataset.requests("valid")
    answers = np.random.default_rng(asked["options"]["seed"]).random(len(valid.item))
    Evaluation.of("valid", valid, answers, train_ctr=0.5)
    return {**found, "validated_memory": memory.anonymous, "file_memory": memory.files}


TASKS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "prepare": prepare_log,
    "train": train_from_log,
}


if __name__ == "__main__":
    from jagged_ranking.processes import end_with_parent

    end_with_parent()
    try:
        said = TASKS[sys.argv[1]](json.loads(sys.argv[2]))
        Path(sys.argv[3]).write_text(json.dumps(said))
    except (ValueError, OSError, RuntimeError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
