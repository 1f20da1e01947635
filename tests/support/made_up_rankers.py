"""Made-up results about rankers: how well they rank, over the cap on histories too, what a step of
their training takes, and what serving them does."""

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
from made_up_results import MANIFEST

from jagged_ranking import results

_SEEDS = 3


def quality_results() -> pd.DataFrame:
    """Three models, three seeds, a floor, and differences with intervals."""
    level = {"mean_pool": 0.0, "target_attention": 0.006, "transformer": 0.008}
    base = {"auc": 0.757, "gauc": 0.7, "ne": 0.86, "log_loss": 0.59}
    return _quality("ml_100k", level, {"counts": -0.011}, base)


def quality_with_floor(metric: str, value: float, difference: float) -> pd.DataFrame:
    """`quality_results` where the floor has this score, and is so far from mean-pooling."""
    table = quality_results()
    floor = table["provider"] == "counts"
    table.loc[floor & (table["metric"] == metric), "value"] = value
    table.loc[floor & (table["metric"] == f"{metric}_difference"), "value"] = difference
    return table


def list_results() -> pd.DataFrame:
    """The same of lists of candidates, with all floors."""
    level = {"mean_pool": 0.0, "din": 0.004}
    floors = {"counts": -0.02, "popularity": -0.04, "repeats": -0.01}
    base = {"auc": 0.67, "gauc": 0.6, "ne": 0.9, "log_loss": 0.3}
    lists = {"list_auc": 0.62, "mrr": 0.55, "hr@10": 0.8, "ndcg@10": 0.6}
    return _quality("shown", level, floors, {**base, **lists})


def next_item_results() -> pd.DataFrame:
    """Of next items, under the name of a set of which there are published scores."""
    base = {"list_auc": 0.85, "mrr": 0.3, "hr@10": 0.5, "ndcg@10": 0.3}
    every = {"all_hr@10": 0.07, "all_ndcg@10": 0.04}
    level, floors = {"mean_pool": 0.0, "sasrec": 0.01}, {"popularity": -0.03}
    return _quality("lastfm_s3rec", level, floors, {**base, **every})


HISTORY_CAPS = {
    "trivago_val100k": (10, 20, 50, 100, 200, 500, 885),
    "ml_latest_small": (10, 20, 50, 100, 200, 500, 1000, 2698),
    "synthetic_far": (10, 20, 50, 100, 200, 500, 1000, 3143),
}


HOST_MS = 15.0  # that a step of any kind takes to launch


def history_results() -> pd.DataFrame:
    """Quality over the cap, of a transformer, and a step's costs: of jagged attention a line in the
    events that there are, of what pads one in the square of the cap; the masked one runs out of
    memory at the longest."""
    rng = np.random.default_rng(2)
    rows = []
    for dataset, caps in HISTORY_CAPS.items():
        metrics = ("list_auc", "mrr", "auc") if "trivago" in dataset else ("gauc", "auc")
        longest, gap = caps[-1], 60 if dataset == "synthetic_far" else 1
        for cap in caps:
            gain = 0.02 * math.log1p(max(0.0, cap - gap) / 40)
            config = {"model": "transformer", "cap": cap, "longest": longest}
            ranked: dict[str, Any] = {"op": "ranking_by_cap", "provider": "transformer"}
            ranked |= {"workload": dataset, "mode": "test", "unit": "1"}
            for metric in metrics:
                for seed in range(_SEEDS):
                    value = 0.6 + gain + 0.002 * float(rng.standard_normal())
                    facts = {**config, "seed": seed}
                    rows.append(results.row(metric=metric, value=value, config=facts, **ranked))
                if metric != "auc" and cap > caps[0]:
                    facts = {**config, "low": gain - 0.006, "high": gain + 0.006}
                    ranked_gain = {**ranked, "metric": f"{metric}_gain", "value": gain}
                    rows.append(results.row(config=facts, **ranked_gain))
            rows += _step_rows(dataset, cap, longest)
        for metric, unit in (("latency", "ms"), ("peak_memory", "bytes")):
            value = _step_cost("padded_flash", 100, metric)
            config = {"model": "transformer", "cap": 100, "device": MANIFEST["device"]}
            budget: dict[str, Any] = {"op": "budget", "provider": "padded_flash", "mode": "train"}
            budget |= {"workload": dataset, "metric": metric, "unit": unit, "config": config}
            rows.append(results.row(value=value, **budget))
    return results.frame(rows)


def _step_rows(dataset: str, cap: int, longest: int) -> list[dict[str, Any]]:
    config = {"model": "transformer", "cap": cap, "longest": longest, "B": 1024, "waste": 0.85}
    config["device"] = MANIFEST["device"]
    rows = []
    for kind in ("jagged", "padded_sdpa", "padded_flash", "nested"):
        one: dict[str, Any] = {"op": "training_step", "provider": kind, "workload": dataset}
        one |= {"mode": "train", "config": config}
        for metric, unit in (("latency", "ms"), ("peak_memory", "bytes")):
            cost = _step_cost(kind, cap, metric)
            if kind == "padded_sdpa" and cap == longest:
                numbers: dict[str, Any] = {"status": "out_of_memory", "message": "refused"}
            else:
                numbers = {"samples": [0.97 * cost, cost, 1.03 * cost]}
            rows.append(results.row(metric=metric, unit=unit, **numbers, **one))
        if numbers.get("status") is None:
            rows.append(results.row(metric="host_time", unit="ms", samples=[HOST_MS] * 3, **one))
    return rows


def _step_cost(kind: str, cap: int, metric: str) -> float:
    tokens = 1024 * 400 * (1 - math.exp(-cap / 400))
    padded = 1024 * cap
    scores = {"jagged": 0.0, "nested": 0.0, "padded_flash": 1.0, "padded_sdpa": 3.0}[kind]
    if metric == "latency":
        real = {"jagged": 1.0, "nested": 1.6}.get(kind, 1.2)
        return 1.5 + real * tokens * 8e-5 + scores * padded * (1e-5 + cap * 2e-8)
    return 2e8 + tokens * 1500.0 + scores * padded * 1000.0


def _quality(
    dataset: str, level: dict[str, float], floors: dict[str, float], base: dict[str, float]
) -> pd.DataFrame:
    """Scores of models and floors that are so much better than mean-pool's, `base`."""
    rng = np.random.default_rng(1)
    rows = []
    common: dict[str, Any] = {"op": "ranking", "workload": dataset, "mode": "test", "unit": "1"}
    for metric, at in base.items():
        sign = -1 if metric in ("ne", "log_loss") else 1
        for floor, gain in floors.items():
            value = at + sign * gain
            rows.append(results.row(provider=floor, metric=metric, value=value, **common))
        for model, gain in level.items():
            for seed in range(_SEEDS):
                value = at + sign * gain + 0.0012 * float(rng.standard_normal())
                config = {"seed": seed}
                scored: dict[str, Any] = {"metric": metric, "value": value, "config": config}
                rows.append(results.row(provider=model, **scored, **common))
        for model, gain in {**level, **floors}.items():
            if model != "mean_pool":
                value = sign * gain
                bounds = {"low": value - 0.004, "high": value + 0.004}
                extra: dict[str, Any] = {
                    "metric": f"{metric}_difference",
                    "value": value,
                    "config": bounds,
                }
                rows.append(results.row(provider=model, **extra, **common))
    return results.frame(rows)


def throughput_results() -> pd.DataFrame:
    """Whole steps of two models on four batches: padded flash takes as long as ours without padding
    and 2.4 times as long at 85%, in 1.2 to 3 times the memory; HSTU's has no flash kernels, and
    every score in memory fits nowhere but without padding. Eight layers and compiled steps on the
    batches of given waste alone."""
    batches = (("waste 0%", "waste", 0.0), ("waste 85%", "waste", 0.85))
    batches += (("lognormal 1024", "cap", 0.87), ("globo_clicks", "real", 0.97))
    rows = []
    for model, (name, group, waste), layers in itertools.product(
        ("hstu", "sasrec"), batches, (4, 8)
    ):
        if layers == 8 and group != "waste":
            continue
        requests = 128 if waste == 0 else 853
        config = {"model": model, "layers": layers, "cap": 1024, "group": group, "waste": waste}
        config |= {"B": requests, "tokens": 131072, "device": MANIFEST["device"]}
        for kind, mode in itertools.product(
            ("jagged", "padded_flash", "padded_dense", "nested"),
            ("eager", "torch.compile", "CUDA graph"),
        ):
            where: dict[str, Any] = {"provider": kind, "workload": name, "mode": mode}
            where["config"] = config
            if mode == "CUDA graph" and kind == "nested":
                lost = {"status": "unsupported", "message": "the step cannot be captured: it waits"}
                rows.append(
                    results.row(op="throughput", metric="step_time", unit="ms", **lost, **where)
                )
            elif mode == "eager" or (name, layers, kind) == ("waste 85%", 4, "jagged"):
                rows += _throughput_rows(kind, where, eager=mode == "eager")
    return results.frame(rows)


def _throughput_rows(kind: str, where: dict[str, Any], *, eager: bool) -> list[dict[str, Any]]:
    config = where["config"]
    model, waste, layers = config["model"], config["waste"], config["layers"]
    trouble: dict[str, Any] = {}
    if model == "hstu" and kind in ("padded_flash", "nested"):
        trouble = {"status": "unsupported", "message": f"attention {kind} is a softmax"}
    elif kind == "padded_dense" and waste:
        trouble = {"status": "out_of_memory", "message": "CUDA out of memory"}
    times = {"jagged": 1.0, "nested": 1.5, "padded_dense": 9.0, "padded_flash": 1.05}
    padded = {"padded_flash": 1.35}.get(kind, 0.0) * waste / 0.85
    ms = 4.0 * layers * (times[kind] + padded) * (1.0 if eager else 0.8)
    host = 0.04 if kind == "jagged" else 0.02
    memory = 1e9 * layers * (1.0 if kind == "jagged" else 1.2 + 1.8 * waste / 0.85)
    found = [
        ("step_time", "ms", ms),
        ("samples_per_second", "1/s", config["B"] / ms * 1e3),
        ("device_time", "ms", (1 - host) * ms),
        ("host_share", "1", host),
        ("energy", "J", 0.6 * ms / config["B"]),
    ]
    if eager:
        found += [("peak_memory", "bytes", memory), ("peak_memory_minus_inputs", "bytes", memory)]
    rows = [
        results.row(
            op="throughput", metric=metric, unit=unit, **where,
            **(trouble or {"samples": [0.98 * value, value, 1.02 * value]}),
        )
        for metric, unit, value in found
    ]  # fmt: skip
    shares = {"batch": 0.05, "embeddings": 0.1, "attention": 0.15, "encoder, the rest": 0.2}
    shares |= {"head and loss": 0.05, "attention, backward": 0.2, "backward": 0.2}
    shares |= {"optimiser": 0.05}
    if eager and not trouble:
        for part, share in shares.items():
            value = share * (1 - host) * ms
            rows.append(
                results.row(op="throughput_part", metric=part, unit="ms", value=value, **where)
            )
    return rows


def serving_results() -> pd.DataFrame:
    """Requests to two models at two caps: padded flash takes 1.2 times as long as ours and 1.5
    times its memory, and a cache spares a transformer half of its time by the wall and 9 tenths
    of the device's. HSTU has neither, and every score in memory fits at the smaller cap alone. In
    CUDA graphs ours takes a quarter of its time, and padded flash a third of its own."""
    rows = []
    kinds = (("jagged", 1.0), ("padded_flash", 1.2), ("padded_dense", 3.0), ("jagged_cached", 0.5))
    for model, cap, (candidates, requests), (kind, times) in itertools.product(
        ("transformer", "hstu"), (1024, 16384), ((1, 1), (100, 1), (100, 32)), kinds
    ):
        trouble: dict[str, Any] = {}
        if model == "hstu" and kind in ("padded_flash", "jagged_cached"):
            trouble = {"status": "unsupported", "message": f"hstu has no {kind}"}
        elif kind == "padded_dense" and cap > 1024:
            trouble = {"status": "out_of_memory", "message": "CUDA out of memory"}
        ms = times * (2.0 + 0.01 * candidates) * cap / 1024
        device = 0.1 * ms / times if kind == "jagged_cached" else 0.9 * ms
        memory = 1e6 * {"jagged": 2, "padded_flash": 3}.get(kind, 1) * requests
        found = [
            ("latency", "ms", ms),
            ("latency_p99", "ms", 2 * ms),
            ("device_time", "ms", device),
            ("requests_per_second", "1/s", requests * 1e3 / ms),
            ("peak_memory", "bytes", memory + 1e6),
            ("peak_memory_minus_inputs", "bytes", memory),
        ]
        if kind == "jagged_cached" and not trouble:
            found.append(("cache_memory", "bytes", 1024.0 * cap))
        config = {"model": model, "layers": 4, "cap": cap, "requests": requests, "waste": 0.8}
        config |= {"candidates": candidates, "B": requests, "tokens": cap, "new_events": 8}
        config |= {"device": MANIFEST["device"]}
        asked = [("scoring", *one) for one in found]
        if part := {"jagged": 4, "padded_flash": 3}.get(kind):
            faster = {"ms": 1 / part, "1/s": part}
            asked += [("CUDA graph", m, u, v * faster[u]) for m, u, v in found if u in faster]
        for mode, metric, unit, value in asked:
            rows.append(
                results.row(
                    op="serving", provider=kind, mode=mode, metric=metric, unit=unit,
                    workload=f"{requests} x {candidates} candidates, cap {cap}", config=config,
                    **(trouble or {"samples": [0.98 * value, value, 1.02 * value]}),
                )
            )  # fmt: skip
    return results.frame(rows)
