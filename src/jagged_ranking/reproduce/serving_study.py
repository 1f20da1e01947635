"""What a request costs where a ranker is served: how long its caller waits, how many are answered a
second, and what a cache of histories saves.

A request brings its history and its candidates, as ids on the device; it is answered when its
logits are on the host. Its history is encoded once, whatever the number of candidates, or, from a
cache, not at all: its new events alone are. Who takes part is compared with float32 first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from jagged_ranking import results
from jagged_ranking.figures.serving_points import CACHED, SCORING, SERVING, TAIL
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.measure import timing
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.timing import Effort
from jagged_ranking.models.model_config import has_self_attention
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.reproduce.request_batches import RequestBatches, of_requests
from jagged_ranking.reproduce.serving_contest import ServingContest
from jagged_ranking.reproduce.step_contest import PEAKS, WALL, Entry, facts_of, on_device
from jagged_ranking.training.config import TrainConfig

_UNITS = {
    "latency": "ms",
    TAIL: "ms",
    "device_time": "ms",
    "requests_per_second": "1/s",
    **dict.fromkeys(PEAKS, "bytes"),
}
_PARTS = 4  # of a pass over all requests; two turns, the fewest that there are, have two each
_ENOUGH = 3600.0  # seconds, for whoever is to be timed on every batch


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """One model under one kind of requests.

    Args:
        model: its name.
        layers: of it; 1 where events do not attend to one another.
        cap: the longest history; lengths are lognormal up to it.
        candidates: of each request.
        requests: that are answered together.
    """

    model: str
    layers: int
    cap: int
    candidates: int
    requests: int

    @property
    def name(self) -> str:
        """The workload of its rows."""
        return f"{self.requests} x {self.candidates} candidates, cap {self.cap}"


def serving_points(
    *,
    models: Sequence[str],
    layers: int,
    caps: Sequence[int],
    candidates: Sequence[int],
    requests: Sequence[int],
    at_candidates: int,
) -> list[ServingPoint]:
    """Every history cap with every number of candidates, one request at a time; and every cap with
    every number of requests together, of `at_candidates` each.

    Raises:
        ValueError: a model that there is not, a number below 1, or no point at all.
    """
    numbers = {"caps": caps, "candidates": candidates, "requests": requests}
    for name, given in {**numbers, "at_candidates": [at_candidates], "layers": [layers]}.items():
        if wrong := [number for number in given if number < 1]:
            raise ValueError(f"{name} must be at least 1, got {wrong[0]}")
    kinds = [(number, 1) for number in candidates]
    kinds += [(at_candidates, together) for together in requests]
    found = []
    for model in models:
        deep = has_self_attention(model)
        for cap, (asked, together) in itertools.product(caps, dict.fromkeys(kinds)):
            shape = {"cap": cap, "candidates": asked, "requests": together}
            found.append(ServingPoint(model=model, layers=layers if deep else 1, **shape))
    if not found:
        raise ValueError("nothing to measure: no model, no cap, or neither candidates nor requests")
    return found


def describe_points(points: Sequence[ServingPoint]) -> pd.DataFrame:
    """A row a history cap: what is asked of every model."""
    rows = []
    for cap in dict.fromkeys(point.cap for point in points):
        mine = [point for point in points if point.cap == cap]
        alone = sorted({point.candidates for point in mine if point.requests == 1})
        together = sorted({(one.requests, one.candidates) for one in mine if one.requests > 1})
        rows.append(
            {
                "history cap": f"{cap:,}",
                "candidates of one request": ", ".join(map(str, alone)),
                "requests x candidates": ", ".join(f"{n} x {c}" for n, c in together),
                "models": ", ".join(dict.fromkeys(point.model for point in mine)),
            }
        )
    return pd.DataFrame(rows).set_index("history cap")


def measured_serving(points: Sequence[ServingPoint], **common: Any) -> pd.DataFrame:
    """`serving` at each point, each kept in `build/cache` as soon as it is done.

    Raises:
        ValueError: an option or a kind of attention that there is not; before anything is measured.
    """
    for point in points:
        _configs(point, **common)
    tables = []
    for number, point in enumerate(points, 1):
        print(f"{number} of {len(points)}, {point.model}, {point.name}", end=": ")
        tables.append(cached(serving, point, **common))
    return pd.concat(tables, ignore_index=True)


def serving(
    point: ServingPoint,
    *,
    attentions: Sequence[str],
    graphed_attentions: Sequence[str] = (),
    options: Mapping[str, Any],
    items: int,
    drawn: int,
    new_events: int,
    page_size: int,
    effort: Effort,
    device: str,
    seed: int = 0,
    cpu_threads: int = 1,
    run_id: str = "",
) -> pd.DataFrame:
    """Measure requests of one kind, of different histories in turn.

    Args:
        point: what is asked, of which model.
        attentions: kinds of attention, see `ModelConfig.attention`.
        graphed_attentions: those of them that are also measured as CUDA graphs, on a GPU.
        options: further ones of `TrainConfig`.
        items: that there are.
        drawn: requests with histories of their own, about; two batches at least.
        new_events: of a request over a cached history.
        page_size: of the caches.
        effort: see `Effort`; its rounds are passes over all requests, each in two turns or so.
        device: "cuda" or "cpu".
        seed: of weights and requests.
        cpu_threads: on a CPU.
        run_id: for the column `id`.

    Returns:
        Rows of op `SERVING`, the provider being the kind of attention that encodes the whole
        history of each request, or `CACHED`: ours, over histories whose keys and values are kept
        but for the new events; mode `SCORING`, or `GRAPH`, without memory, which a graph keeps.
        Metrics: "latency" (ms by the wall, from ids on the device to logits
        on the host; the value is the median over requests of all lengths), `TAIL` (the 99th
        percentile of the same), "requests_per_second" (of one caller after another, by the mean),
        "device_time" (ms; on a GPU; of every batch once), "peak_memory" and
        "peak_memory_minus_inputs" (bytes; on the batch with the longest history; caches are
        inputs), "cache_memory" (bytes; of a user of as many events as the cap) and "rel_error" (of
        logits).
    """
    where = torch.device(device)
    lengths = of_requests(
        point.cap,
        requests=point.requests,
        batches=max(2, drawn // point.requests),
        seed=seed,
    )
    with timing.threads(where, cpu_threads), timing.earlier_objects_apart():
        made = RequestBatches(
            lengths, items=items, candidates=point.candidates, device=where, seed=seed
        )
        every = made.each()
        asked = _configs(
            point,
            attentions=attentions,
            graphed_attentions=graphed_attentions,
            options=options,
            seed=seed,
        )
        configs, need_a_gpu = on_device(asked, where)
        contest = ServingContest(
            op=SERVING,
            workload=point.name,
            configs=configs,
            shape=made.shape,
            batches=every,
            new_events=new_events,
            page_size=page_size,
            facts={"cap": point.cap, "requests": point.requests, "items": items},
            run_id=run_id,
        )
        contest.facts |= facts_of(every) | {"candidates": point.candidates}
        contest.check()
        _times(contest, effort)
        contest.weigh([entry for entry in contest.configs if entry.mode == SCORING])
        contest.say_failures(_UNITS)
        contest.say_graphs_need_a_gpu(need_a_gpu, "latency")
        contest.say_caches()
        timing.release(where)
    return results.frame(contest.found)


def _configs(
    point: ServingPoint,
    *,
    attentions: Sequence[str],
    graphed_attentions: Sequence[str] = (),
    options: Mapping[str, Any],
    seed: int = 0,
    **others: Any,
) -> dict[Entry, TrainConfig]:
    """Who takes part; `others` are not theirs."""
    given = {**options, "model": point.model, "layers": point.layers, "max_history": point.cap}
    given |= {"event_time": "arrival", "seed": seed}
    asked = [(kind, SCORING) for kind in attentions]
    asked += [(kind, GRAPH) for kind in graphed_attentions]
    found = {Entry(*one): TrainConfig.from_dict({**given, "attention": one[0]}) for one in asked}
    found[Entry(CACHED, SCORING)] = TrainConfig.from_dict({**given, "attention": OURS})
    return found


class _Pass:
    """All batches of requests, one after another, each waited for: a part of them at each call.

    A host whose cores others use, too, has slow spells of a second or so. Whoever took few long
    turns would be judged by those that it met; short ones meet them alike.
    """

    def __init__(self, call: Callable[[int], torch.Tensor], parts: Sequence[list[int]]) -> None:
        self.call, self.parts = call, parts
        self.samples: list[list[float]] = []  # ms, of each batch of a part, a list a call

    def __call__(self) -> None:
        part = self.parts[len(self.samples) % len(self.parts)]
        self.call(part[0]).cpu()  # the processor's caches see this provider again
        found = []
        for number in part:
            start = time.perf_counter()
            self.call(number).cpu()
            found.append((time.perf_counter() - start) * 1e3)
        self.samples.append(found)

    def whole(self, calls: int) -> list[float]:
        """ms of each batch of the last so many calls, as far as these are passes over all batches:
        so everybody's samples are of the same requests."""
        most = calls // len(self.parts) * len(self.parts)
        return [ms for part in self.samples[-most:] for ms in part]


def _parts(batches: int) -> list[list[int]]:
    """The numbers of the batches, in parts of a pass."""
    return [part.tolist() for part in np.array_split(range(batches), min(_PARTS, batches))]


def _times(contest: ServingContest, effort: Effort) -> None:
    """Rows of the times of all who have not failed."""
    calls, batches = contest.calls(), len(contest.batches)
    parts = _parts(batches)
    passes = {entry: _Pass(call, parts) for entry, call in calls.items()}
    # A turn is two calls. The first, that `interleaved` does not count, is as good as the second.
    often = replace(effort, rounds=max(2, effort.rounds * len(parts) // 2), inner=1)
    for entry, counted in contest.interleaved(passes, often, WALL).items():
        samples = passes[entry].whole(2 * len(counted))
        contest.row(entry, "latency", "ms", samples=samples)
        contest.row(entry, TAIL, "ms", value=float(np.percentile(samples, 99)))
        rate = contest.facts["requests"] * 1e3 / float(np.mean(samples))
        contest.row(entry, "requests_per_second", "1/s", value=rate)
    if contest.device.type == "cuda":
        for entry, samples in _device_times(contest, calls, effort).items():
            contest.row(entry, "device_time", "ms", samples=samples)
        return
    for entry in calls:
        said = "a CPU is its own host"
        contest.row(entry, "device_time", "ms", status="unsupported", message=said)


def _device_times(
    contest: ServingContest, calls: Mapping[Entry, Callable[[int], torch.Tensor]], effort: Effort
) -> dict[Entry, list[float]]:
    """ms of the device of all who have not failed, of every batch once: nobody is so slow that his
    samples are of fewer requests than the others'."""
    batches = len(contest.batches)
    turns = {entry: timing.InTurn(call, batches) for entry, call in calls.items()}
    once = replace(effort, rounds=1, inner=batches, warmup=1, seconds=_ENOUGH)
    return contest.interleaved(turns, once, contest.device)
