"""Made-up results in the shape of a GPU run: every provider, failures included."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from jagged_ranking import results
from jagged_ranking.code_roots import code_hash
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.lineup import (
    AUTHORS,
    BY_BLOCKS,
    BY_LENGTH,
    RETRIEVAL,
    sparse_providers,
)
from jagged_ranking.measure.pointwise import HSTU
from jagged_ranking.measure.providers import MODES
from jagged_ranking.measure.sparse.sparse_workloads import (
    SparseWorkload,
    jagged_lengths,
    random_by_density,
    retrieval,
    strided_by_density,
    strided_by_length,
)
from jagged_ranking.measure.workload_sets import (
    head_dim_sweep,
    length_sweep,
    skew_sweep,
    target_workloads,
    token_sweep,
    waste_sweep,
    with_options,
    workloads,
)

# Times the limit of the padded (dense) or of the real work.
_DENSE = {"dense_eager": 11.0, "dense_flash": 2.4, "dense_cudnn": 1.6}
_JAGGED = {"jagged": 2.2, "njt_sdpa": 4.0, "flex": 4.4, "varlen_attn": 3.0}
MANIFEST: dict[str, Any] = {
    "id": "01_speed",
    "preset": "paper",
    "device": "Imaginary GPU 80GB",
    "device_type": "cuda",
    "git_sha": "0123456789abcdef",
    "git_dirty": False,
    "code_hash": code_hash(),
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580.1"},
}


def attention_results() -> pd.DataFrame:
    """A-G, N and the sweeps: latency and memory of seven providers, one of them missing."""
    rng = np.random.default_rng(0)
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    rows = []
    for workload in [*workloads(), *waste_sweep(), *length_sweep(), *head_dim_sweep()]:
        facts = workload.facts()
        padding = 1 / (1 - facts["waste"])
        scores = workload.users * workload.heads * workload.max_len**2 * 2.0
        token_bytes = facts["bytes_forward"] / 4
        for mode in MODES:
            limit = ceilings.limit_ms(facts, mode)
            config = {**facts, "limit_ms": limit, "device": MANIFEST["device"]}
            where: dict[str, Any] = {"op": "attention", "workload": workload.name, "mode": mode}
            where["config"] = config
            for name, factor in {**_DENSE, **_JAGGED, "flash_attn_4": math.nan}.items():
                dense = name in _DENSE
                inputs = token_bytes * 4 * (padding if dense else 1)
                beyond = token_bytes * (1 if mode == "forward" else 5) * (padding if dense else 1)
                beyond += 4 * scores if name == "dense_eager" else 0.0
                trouble: dict[str, Any] = {}
                if math.isnan(factor):
                    trouble = {"status": "missing", "message": "flash_attn.cute is not installed"}
                elif inputs + beyond > 80e9:
                    trouble = {"status": "out_of_memory", "message": "refused"}
                ms = limit * factor * (padding**1.1 if dense else 1) + (3.0 if "njt" in name else 0)
                draws = [] if trouble else list(ms * np.exp(0.03 * rng.standard_normal(20)))
                values = {"peak_memory": inputs + beyond, "peak_memory_minus_inputs": beyond}
                one = {**where, "provider": name, **trouble}
                rows.append(results.row(metric="latency", unit="ms", samples=draws, **one))
                if draws:
                    kept = [0.4 if name == "jagged" else 0.5] * 3
                    rows.append(results.row(metric="host_time", unit="ms", samples=kept, **one))
                rates = [facts[f"flops_{mode}"] / (draw / 1e3) for draw in draws]
                if rates:
                    rows.append(
                        results.row(metric="useful_flops", unit="FLOP/s", samples=rates, **one)
                    )
                for metric, value in values.items():
                    number: dict[str, Any] = {} if trouble else {"value": value}
                    rows.append(results.row(metric=metric, unit="bytes", **number, **one))
        built: dict[str, Any] = {"op": "schedule", "provider": "jagged", "workload": workload.name}
        built |= {"mode": "forward", "metric": "latency", "unit": "ms"}
        rows.append(results.row(samples=[0.03, 0.031, 0.032], config=facts, **built))
    return results.frame(rows)


def target_results() -> pd.DataFrame:
    """T1-T6 and a sweep over skew: ours, its policies, and FA2 that waits for the longest user."""
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    policies = {"jagged": 1.1, "jagged_rows": 2.0, "jagged_split": 1.3, "jagged_stream": 1.1}
    rows = []
    for workload in [*target_workloads(), *skew_sweep((16, 64))]:
        facts = workload.facts()
        names = policies if workload.group == "skew" else {"jagged": 1.2}
        for mode in MODES:
            limit = ceilings.limit_ms(facts, mode)
            config = {**facts, "limit_ms": limit, "device": MANIFEST["device"]}
            times = {name: limit * factor + 0.01 for name, factor in names.items()}
            times["varlen_attn"] = 2 * limit + workload.max_len * 1.5e-5
            for name, ms in times.items():
                one: dict[str, Any] = {"op": "attention", "workload": workload.name, "mode": mode}
                one |= {"config": config, "provider": name}
                rows.append(results.row(metric="latency", unit="ms", samples=[ms] * 3, **one))
                for metric in ("peak_memory", "peak_memory_minus_inputs"):
                    peak = 1.5 * facts["bytes_forward"]
                    rows.append(results.row(metric=metric, unit="bytes", value=peak, **one))
    return results.frame(rows)


def hstu_results() -> pd.DataFrame:
    """B, C, D and a sweep under every kind of attention: ours at 2 of the limit, its authors' at
    2.9, which have no biases; padded PyTorch fits nowhere but on B and in the sweep."""
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    batches = [batch for batch in workloads() if batch.name in "BCD"]
    batches += waste_sweep((0.5, 0.85, 0.95))
    kinds = [HSTU(targets=t, biased=b) for b in (False, True) for t in (0, 16)]
    rows = []
    for hstu, batch in itertools.product(kinds, batches):
        workload = replace(batch, causal=True, hstu=hstu)
        facts = workload.facts()
        dense = 30 / (1 - facts["waste"]) ** 2
        times = {
            "jagged": 2.0,
            "jagged_softmax": 2.1,
            "hstu_triton": 2.9,
        }
        for mode in MODES:
            limit = ceilings.limit_ms(facts, mode)
            config = {**facts, "limit_ms": limit, "device": MANIFEST["device"]}
            where: dict[str, Any] = {"op": workload.op, "workload": batch.name, "mode": mode}
            where["config"] = config
            for name, factor in {**times, "dense_hstu": dense}.items():
                trouble: dict[str, Any] = {}
                if name == AUTHORS and hstu.biased:
                    trouble = {"status": "unsupported", "message": "triton_hstu_mha has no biases"}
                elif name == "dense_hstu" and batch.name in "CD":
                    trouble = {"status": "out_of_memory", "message": "refused"}
                one = {**where, "provider": name, **trouble}
                ms = limit * factor * (1.6 if hstu.biased else 1.0) + 0.01
                draws = [] if trouble else [0.98 * ms, ms, 1.03 * ms]
                rows.append(results.row(metric="latency", unit="ms", samples=draws, **one))
                for metric in ("peak_memory", "peak_memory_minus_inputs"):
                    peak = {} if trouble else {"value": facts["bytes_forward"] * factor}
                    rows.append(results.row(metric=metric, unit="bytes", **peak, **one))
        built: dict[str, Any] = {"op": "schedule", "provider": "jagged", "workload": batch.name}
        built |= {"mode": "forward", "metric": "latency", "unit": "ms"}
        took = 0.05 if hstu.targets else 0.03
        rows.append(results.row(samples=[took] * 3, config=facts, **built))
    return results.frame(rows)


def interaction_results() -> pd.DataFrame:
    """All operations on both sweeps, the largest batch in float32 too: ours at 1.2 of the limit,
    1.4 with the backward, and a launch; padded at 3 and its padding; FBGEMM missing."""
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    swept = token_sweep((128, 8192))
    batches = [*swept, *waste_sweep((0.0, 0.5, 0.9), users=512, max_len=1024, heads=1)]
    batches += with_options(swept[-1:], dtype=torch.float32)
    rows = []
    for name, operation in OPERATIONS.items():
        for batch in batches:
            facts = batch.facts()
            token = facts["bytes_forward"] / 4
            for mode in MODES if operation.backward else MODES[:1]:
                training = mode != "forward"
                facts |= {f"flops_{mode}": 0.0, f"bytes_{mode}": token * (5 if training else 2)}
                limit = ceilings.limit_ms(facts, mode)
                config = {**facts, "limit_ms": limit, "device": MANIFEST["device"]}
                one: dict[str, Any] = {"op": name, "workload": batch.name, "mode": mode}
                one["config"] = config
                times = {"jagged": (1.4 if training else 1.2) * limit + 0.005}
                times["padded"] = 3 * limit / (1 - facts["waste"]) + 0.004
                for provider, ms in times.items():
                    one["provider"] = provider
                    rows.append(results.row(metric="latency", unit="ms", samples=[ms] * 3, **one))
                    if batch.name == "users 8192":
                        for metric in ("peak_memory", "peak_memory_minus_inputs"):
                            peak = token * (1 if provider == "jagged" else 8)
                            rows.append(results.row(metric=metric, unit="bytes", value=peak, **one))
                one |= {"provider": "fbgemm_sll", "status": "missing", "message": "not installed"}
                rows.append(results.row(metric="latency", unit="ms", **one))
    return results.frame(rows)


SPARSE_LENGTHS = (1024, 16_384, 65_536)


def sparse_results() -> pd.DataFrame:
    """Attention to some of the keys: ours takes 1.2 times a block's share of dense attention, and
    3% of that besides; flash-attn 4 takes 0.9 of ours on all keys, FA2 1.4, DKernel is missing.
    Lists take 1% of dense attention, those of retrieval 2% and a part of K."""
    found = strided_by_length(SPARSE_LENGTHS)
    found += strided_by_density((32, 8, 2, 1), (4,)) + random_by_density((0.05, 0.25, 0.5, 1.0))
    found += retrieval((64, 512), (4, 64), users=2)
    found += jagged_lengths([w for w in workloads() if w.name in "CD"])
    rows = []
    for one in found:
        rows += _sparse_rows(one)
    for length in SPARSE_LENGTHS:
        seen = {"strided": [256 + length / 16] * 4, "semi_local": [320] * 4}
        seen |= {"retrieved": [1280] * 4, "all_keys": [length] * 4}
        for rule, by_head in seen.items():
            config = {"rule": rule, "max_len": length, "H": 4, "D": 64, "block": 64}
            config |= {
                "stride": 16,
                "local": 4,
                "window": 256,
                "first": 64,
                "newest": 4,
                "top_k": 16,
            }
            where: dict[str, Any] = {"op": "keys_seen", "provider": rule, "mode": "forward"}
            where |= {"workload": f"length {length}", "unit": "keys", "config": config}
            together = [length if rule == "strided" else by_head[0]]
            rows.append(results.row(metric="one_head", samples=by_head, **where))
            rows.append(results.row(metric="all_heads", samples=together, **where))
    return results.frame(rows)


def _sparse_rows(one: SparseWorkload) -> list[dict[str, Any]]:
    facts = {**one.facts(), "device": MANIFEST["device"]}
    group, density, rows = facts["group"], facts["density"], []
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    for mode in MODES:
        dense = 2 * ceilings.limit_ms(one.batch.facts(), mode)
        relative = 0.03 + (1.2 if group != BY_BLOCKS else 1.0) * density
        times = {"jagged": relative * dense, "jagged_dense": dense, "varlen_attn": 1.4 * dense}
        times |= {"flash_attn_4": 0.9 * dense}
        times["jagged_padded"] = times["jagged"] / (1 - facts["waste"])
        config = {**facts, "limit_ms": ceilings.limit_ms(facts, mode)}
        for name in sparse_providers("cuda", group=group, rule=facts["rule"]):
            where: dict[str, Any] = {"op": "sparse_attention", "provider": name, "mode": mode}
            where |= {"workload": one.name, "config": config}
            if name == "dkernel":
                trouble = {"status": "missing", "message": "dkernel is not installed"}
                rows.append(results.row(metric="latency", unit="ms", **trouble, **where))
                continue
            ms = times[name]
            rows.append(
                results.row(
                    metric="latency", unit="ms", samples=[0.97 * ms, ms, 1.05 * ms], **where
                )
            )
            if group == BY_LENGTH:
                peak = facts["bytes_forward"] / 4 * (1 if mode == "forward" else 5)
                peak *= 1.1 if name == "jagged" else 1.0
                metric = "peak_memory_minus_inputs"
                rows.append(results.row(metric=metric, unit="bytes", value=peak, **where))
    built: dict[str, Any] = {"provider": "jagged", "workload": one.name, "mode": "forward"}
    built |= {"metric": "latency", "unit": "ms", "config": facts}
    share = 2 * ceilings.limit_ms(one.batch.facts(), "forward")
    share *= 0.3 if group == RETRIEVAL and facts["queries"] == 64 else 0.01
    rows.append(results.row(op="lists", samples=[share] * 3, **built))
    if group == RETRIEVAL:
        rows.append(results.row(op="lists_with_transpose", samples=[1.5 * share] * 3, **built))
    return rows
