"""Training on several GPUs, or processes of a CPU: samples a second, what a step is made of, memory
of a rank; batches shared out by tokens and by users. And the same on more GPUs than there are, by
`scaling_model`."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from click_data import open_dataset
from jagged_ranking import results
from jagged_ranking.data.batch import RequestTable
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.devices import device_name, usable_cores
from jagged_ranking.figures.scaling_points import BALANCES, MEASURED, SIMULATED
from jagged_ranking.models.model_config import has_self_attention
from jagged_ranking.processes import PARENT_VARIABLE, gpus_alone, last_line, temporary_folder
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.reproduce.click_logs import find_prepared
from jagged_ranking.reproduce.scaling_model import Assumptions, fitted, simulated
from jagged_ranking.reproduce.synthetic_log import synthetic_log
from jagged_ranking.training.config import TrainConfig

WORKER = "jagged_ranking.reproduce.scaling_worker"
PARTS = ("batch", "forward", "backward", "exchange", "update")
LONGEST_SECONDS = 900.0  # of the ranks of one measurement


def scaling_data(dataset: str | None, log: Mapping[str, Any]) -> str:
    """The folder of a prepared data set, by name or folder, or of a synthetic log of these options
    where none is named or it is not at hand, which is said."""
    found = find_prepared([dataset] if dataset else [])
    return str(found[0]) if found else synthetic_log(log, name="synthetic_scaling")


def scaling(
    data: str,
    *,
    ranks: Sequence[int],
    options: Mapping[str, Any],
    requests: int,
    steps: int,
    rounds: int,
    device: str,
    cpu_threads: int,
    sizes: Sequence[int],
    sigmas: Sequence[float | None],
    assumptions: Mapping[str, Any],
    draws: int,
    seed: int,
    run_id: str,
) -> pd.DataFrame:
    """Measured and simulated scaling, kept in `build/cache`.

    Args:
        data: a prepared data set.
        ranks: how many, at each point; 1 is always measured. More than there are GPUs (on a CPU:
            cores) are rows that say so.
        options: of `TrainConfig`.
        requests: a rank and step, on average.
        steps: in a turn.
        rounds: turns of each way to balance.
        device: "cuda" or "cpu".
        cpu_threads: of each rank.
        sizes: numbers of GPUs to simulate.
        sigmas: of lognormal lengths there; None for lengths as the data has them.
        assumptions: of `Assumptions`.
        draws: batches of each simulation.
        seed: of order, weights and draws.
        run_id: for the column `id`.

    Returns:
        Rows of op "scaling" and "scaling_simulated", workload "N ranks", provider one of
        `BALANCES`; see `measured_ranks` and `simulated_ranks`.

    Raises:
        ValueError: no number of ranks, or one below 1; an option that there is not.
    """
    if not ranks or min([*ranks, *sizes]) < 1 or min(requests, steps, rounds, draws) < 1:
        raise ValueError("ranks, sizes, requests, steps, rounds and draws must be at least 1")
    config = TrainConfig.from_dict({**options, "seed": seed})
    assumed = Assumptions(**{**assumptions, "dim": config.dim})
    there = torch.cuda.device_count() if device == "cuda" else usable_cores()
    measured = cached(
        measured_ranks,
        data,
        ranks=sorted({1, *ranks}),
        there=min(there, max(ranks)),  # what was missing on another machine may be here
        options=config.to_dict(),
        requests=requests,
        steps=steps,
        rounds=rounds,
        device=device,
        cpu_threads=cpu_threads,
        seed=seed,
        run_id=run_id,
    )
    rows = simulated_ranks(
        measured, data, config, requests, sizes, sigmas, assumed, draws=draws, run_id=run_id
    )
    return pd.concat([measured, results.frame(rows)], ignore_index=True)


def measured_ranks(
    data: str,
    *,
    ranks: Sequence[int],
    there: int,
    options: Mapping[str, Any],
    requests: int,
    steps: int,
    rounds: int,
    device: str,
    cpu_threads: int,
    seed: int,
    run_id: str,
) -> pd.DataFrame:
    """Rows of op "scaling", mode "train", of each number of ranks and each way to balance:
    "throughput" (requests a second, a sample a turn), "step" (ms), the parts of a step in ms, means
    over ranks and medians over steps ("batch", "forward", "backward", "waiting" for the slowest
    rank, "exchange", "update"), "imbalance" (most tokens of a rank over the mean; of squares, where
    these are balanced) and "peak_memory" (bytes, of the fullest rank; on GPUs only). The samples of
    "compute" (ms, mode "rank_step") are of single steps of single ranks; their tokens and squares
    are in config. More ranks than there are GPUs (on a CPU: cores), `there`, are rows that say so.
    """
    asked = {
        "data": data,
        "options": dict(options),
        "requests": requests,
        "steps": steps,
        "rounds": rounds,
        "device": device,
        "cpu_threads": cpu_threads,
        "seed": seed,
    }
    # Who opens a data set first lays its columns flat: once for all ranks, and not by each of them
    # at the same time, of whom some wait for others.
    open_dataset(Path(data))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(gpus_alone(range(min(max(ranks), there))))
        for count in ranks:
            print(f"{count} ranks", end=" ", flush=True)
            lacks = f"{'GPUs' if device == 'cuda' else 'cores'} that are here: {there}"
            found, message = ([], lacks) if count > there else _run_ranks(count, asked)
            status = "missing" if count > there else "error"
            for balance in BALANCES:
                where: dict[str, Any] = {
                    "op": MEASURED,
                    "provider": balance,
                    "workload": f"{count} ranks",
                    "mode": "train",
                    "run_id": run_id,
                }
                facts = {"ranks": count, "requests": requests, "model": options["model"]}
                facts |= {"device": device_name(device), "device_type": device}
                if found:
                    rows += _rows(found, balance, where, facts, asked)
                else:
                    rows.append(
                        results.row(
                            **where,
                            metric="throughput",
                            unit="1/s",
                            status=status,
                            message=message,
                            config=facts,
                        )
                    )
    return results.frame(rows)


def _run_ranks(count: int, asked: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """What each rank found, or none of them and why; processes that end with this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with temporary_folder("jagged-scaling-") as folder:
        shared = {
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": asked["cpu_threads"],
            PARENT_VARIABLE: os.getpid(),
        }
        command = [sys.executable, "-m", WORKER, json.dumps(asked), str(folder / "found-")]
        running = []
        for rank in range(count):
            own = {name: str(value) for name, value in {**shared, "RANK": rank}.items()}
            with (folder / f"said-{rank}").open("w") as said:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **own, "LOCAL_RANK": str(rank)},
                    stdout=said,
                    stderr=said,
                )
            running.append(process)
        failed = _ended(running)
        if failed is None:
            texts = [(folder / f"found-{rank}").read_text() for rank in range(count)]
            return [json.loads(text) for text in texts], ""
        said = (folder / f"said-{failed}").read_text(errors="replace")
        return [], f"rank {failed} of {count}: {last_line(said)}"


def _ended(running: list[subprocess.Popen]) -> int | None:
    """The first rank that failed, or did not end in time; None where all are done."""
    deadline = time.monotonic() + LONGEST_SECONDS
    failed: int | None = None
    try:
        while failed is None and any(process.poll() is None for process in running):
            bad = [rank for rank, process in enumerate(running) if process.poll()]
            if bad or time.monotonic() > deadline:
                failed = bad[0] if bad else 0
            time.sleep(0.05)
        bad = [rank for rank, process in enumerate(running) if process.poll()]
        return failed if failed is not None else bad[0] if bad else None
    finally:
        for process in running:
            process.kill()
            process.wait()


def _rows(
    found: list[dict[str, Any]],
    balance: str,
    where: dict[str, Any],
    facts: dict[str, Any],
    asked: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    turns = [rank["turns"][balance] for rank in found]  # [ranks][turns]
    seconds = np.max([[turn["seconds"] for turn in rank] for rank in turns], axis=0)
    # the last batch of an epoch may be smaller
    asked_for = np.sum([[np.sum(turn["of"], axis=0)[0] for turn in rank] for rank in turns], axis=0)
    parts = np.array([[step for turn in rank for step in turn["parts"]] for rank in turns])
    of = np.array([[step for turn in rank for step in turn["of"]] for rank in turns])
    squared = has_self_attention(str(facts["model"]))
    cost = of[:, :, 2 if squared else 1].astype(float)
    facts = {
        **facts,
        "dense_bytes": found[0]["dense_bytes"],
        "table_bytes": found[0]["table_bytes"],
        "tokens": int(np.median(of[:, :, 1].sum(0))),
        "squared": squared,
    }

    def row(metric: str, unit: str, **values: Any) -> dict[str, Any]:
        return results.row(**{**where, "config": facts, **values}, metric=metric, unit=unit)

    yield row("throughput", "1/s", samples=asked_for / seconds)
    yield row("step", "ms", samples=1e3 * seconds / asked["steps"])
    # Who comes last to an exchange waits for nobody: what others take longer, they waited.
    exchange = parts[:, :, PARTS.index("exchange")]
    least = exchange.min(axis=0)
    means = {name: parts[:, :, place].mean(axis=0) for place, name in enumerate(PARTS)}
    means |= {"exchange": least, "waiting": (exchange - least).mean(axis=0)}
    for name, values in means.items():
        yield row(name, "ms", samples=values)
    yield row("imbalance", "1", samples=cost.max(axis=0) / cost.mean(axis=0).clip(1))
    busy = of[:, :, 0] > 0
    compute = (parts[:, :, 1] + parts[:, :, 2])[busy]
    seen = {"tokens_of": of[:, :, 1][busy].tolist(), "squares_of": of[:, :, 2][busy].tolist()}
    yield row("compute", "ms", samples=compute, mode="rank_step", config={**facts, **seen})
    peak = max(turn["peak"] for rank in turns for turn in rank)
    if facts["device_type"] == "cuda":
        yield row("peak_memory", "bytes", value=float(peak))


def simulated_ranks(
    measured: pd.DataFrame,
    data: str,
    config: TrainConfig,
    requests: int,
    sizes: Sequence[int],
    sigmas: Sequence[float | None],
    assumed: Assumptions,
    *,
    draws: int,
    run_id: str,
) -> Iterator[dict[str, Any]]:
    """Rows of op "scaling_simulated", mode "train": what `scaling_model.simulated` returns, in ms
    and bytes, and "efficiency" (of 1 rank's time for as many requests); sigma and what was assumed
    and fitted are in config. None where nothing was measured."""
    compute = results.select(measured, metric="compute", status="ok")
    if compute.empty:
        return
    facts = [json.loads(text) for text in compute["config"]]
    updates = results.select(measured, metric="update", status="ok")
    fit = fitted(
        [n for one in facts for n in one["tokens_of"]],
        [n for one in facts for n in one["squares_of"]],
        [ms for samples in compute["samples"] for ms in samples],
        [ms for samples in updates["samples"] for ms in samples],
    )
    logged = _tokens(data, config)
    said = {**vars(assumed), **vars(fit), "requests": requests, "model": config.model}
    for sigma in sigmas:
        alone: dict[str, float] = {}
        for size in sorted({1, *sizes}):
            parts = simulated(
                fit,
                logged,
                ranks=size,
                requests=requests,
                sigma=math.nan if sigma is None else sigma,
                squared=facts[0]["squared"],
                dense_bytes=facts[0]["dense_bytes"],
                assumed=assumed,
                draws=draws,
                seed=config.seed,
            )
            for balance, values in parts:
                alone.setdefault(balance, values["step"])
                values["efficiency"] = alone[balance] / values["step"]
                for metric, value in values.items():
                    unit = "bytes" if metric.endswith("bytes") else "ms"
                    yield results.row(
                        op=SIMULATED,
                        provider=balance,
                        workload=f"{size} ranks",
                        mode="train",
                        metric=metric,
                        unit="1" if metric == "efficiency" else unit,
                        value=value,
                        config={**said, "ranks": size, "sigma": sigma},
                        run_id=run_id,
                    )


def _tokens(data: str, config: TrainConfig) -> np.ndarray:
    """Of each request that is trained on, int64."""
    dataset = open_dataset(Path(data))
    table = RequestTable.from_columns(dataset.requests("train"))
    loader = RequestLoader(
        HistoryStore.from_dataset(dataset, torch.device("cpu")),
        table,
        batch_size=1,
        max_history=config.max_history,
    )
    return loader.tokens(loader.order(0))
