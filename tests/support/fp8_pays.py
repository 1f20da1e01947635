"""What attention in FP8 costs and gives on a Hopper GPU, beside the forward in bf16.

    python tests/support/fp8_pays.py [NAME ...] [--out FOLDER]

On the named workloads (head_dims 64 and 128) take turns: the forward in bf16; the kernel for FP8
alone; with the queries' rounding, as in a call over keys that are kept; and with all rounding. Then
the error of both forwards on a workload's longest user, against float64 attention of the numbers as
they came, relative to its result (both in the root of mean squares). `--out figures/fp8_pays`
leaves a result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from left_results import leave
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    fp8_attention,
    fp8_keys,
    jagged_attention,
)
from jagged_kernels.attention.fp8 import HEAD_DIMS
from jagged_kernels.attention.fp8_numbers import quantise_queries
from jagged_kernels.schedule.policy.hopper import fp8_config, is_hopper
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window
from jagged_ranking import provenance, results
from jagged_ranking.figures.fp8_goals import BF16, FP8_PAYS, KEPT, KERNEL, WHOLE
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import workloads
from jagged_ranking.measure.workloads import Batch, Workload, setup

# Float64 attention has a score in memory for each pair.
LONGEST_JUDGED = 4096
# Relative, beyond which a result is wrong: some times what roundings make of normal numbers.
BF16_ERROR, FP8_ERROR = 0.01, 0.1
DEFAULT = ("C", "D", "F", "G", "N")


def known_workloads() -> dict[str, Workload]:
    return {one.name: one for one in workloads() if one.head_dim in HEAD_DIMS}


def calls_of(batch: Batch) -> dict[str, Callable[[], Any]]:
    """What is timed, without a gradient."""
    from jagged_kernels.attention.hopper.fp8_forward import launch_fp8_forward

    w, tokens = batch.workload, batch.q.shape[0]
    left, right = resolve_window(w.causal, None)
    q, k, v = (JaggedTensor(x, batch.offsets) for x in (batch.q, batch.k, batch.v))
    schedule = attention_schedule(q, k, causal=w.causal, head_dim=w.head_dim)
    rows = build_rows(
        batch.offsets, batch.offsets, tokens=tokens, tile=fp8_config(w.head_dim).tile_q, left=left,
        right=right,
    )  # fmt: skip
    keys, (numbers, q_scales) = fp8_keys(k, v), quantise_queries(batch.q)
    scales = (q_scales, keys.k_scale, keys.v_scale)

    def kernel() -> tuple[Tensor, Tensor | None]:
        return launch_fp8_forward(
            numbers, keys.k, keys.v_t, scales, rows, left=left, right=right,
            scale=w.head_dim**-0.5, dtype=batch.q.dtype, with_lse=False,
        )  # fmt: skip

    return {
        BF16: lambda: jagged_attention(q, k, v, causal=w.causal, schedule=schedule),
        KERNEL: kernel,
        KEPT: lambda: fp8_attention(q, keys, causal=w.causal, schedule=schedule),
        WHOLE: lambda: fp8_attention(q, fp8_keys(k, v), causal=w.causal, schedule=schedule),
    }


def check(calls: Mapping[str, Callable[[], Any]], errors: Mapping[str, float], name: str) -> None:
    """Ends the process where anybody is wrong on a workload: nobody is timed then.

    Args:
        calls: see `calls_of`; all others are held against the forward in bf16.
        errors: see `errors_of`.
        name: of the workload.
    """
    exact, *others = (_values(call()).float() for call in calls.values())
    far = {who: float((one - exact).norm() / exact.norm())
           for who, one in zip([*calls][1:], others, strict=True)}  # fmt: skip
    for who, error in {**far, BF16: errors[BF16]}.items():
        allowed = BF16_ERROR if who == BF16 else FP8_ERROR
        if not error <= allowed:  # NaN too
            raise SystemExit(f"fp8_pays: {who} on {name} is off by {error:.3g}, not {allowed:g}")


def _values(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.values


def errors_of(batch: Batch) -> dict[str, float]:
    """Of the longest user's last tokens, in a batch of their own."""
    end = int(batch.offsets[1 + int(batch.lengths.argmax())])
    start = end - min(int(batch.lengths.max()), LONGEST_JUDGED)
    q, k, v = (JaggedTensor.from_list([x[start:end]]) for x in (batch.q, batch.k, batch.v))
    doubles = [x.with_values(x.values.double()) for x in (q, k, v)]
    causal = batch.workload.causal
    exact = jagged_attention(*doubles, causal=causal, backend="reference").values
    found = {
        BF16: jagged_attention(q, k, v, causal=causal),
        KERNEL: fp8_attention(q, fp8_keys(k, v), causal=causal),
    }
    return {
        name: float((x.values.double() - exact).norm() / exact.norm()) for name, x in found.items()
    }


@torch.no_grad()
def rows_of(workload: Workload, effort: Effort, device: torch.device) -> Iterator[dict[str, Any]]:
    """In the form of `results`."""
    where: dict[str, Any] = {
        "run_id": FP8_PAYS, "op": FP8_PAYS, "workload": workload.name, "mode": "forward"
    }  # fmt: skip
    batch = setup(workload, device)
    where["config"] = workload.facts()
    calls, errors = calls_of(batch), errors_of(batch)
    check(calls, errors, workload.name)
    timed = timing.interleaved(calls, device=device, effort=effort)
    for name, one in timed.items():
        if one.failure:
            raise one.failure
        yield results.row(provider=name, metric="latency", unit="ms", samples=one.samples, **where)
    for name, error in errors.items():
        yield results.row(provider=name, metric="error", unit="", value=error, **where)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = known_workloads()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls in a turn")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, too")
    given = parser.parse_args(words)
    names = given.names or [name for name in DEFAULT if name in known]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]} is no workload of these; there are {', '.join(known)}")
    device = torch.device("cuda", 0)
    if not (torch.cuda.is_available() and is_hopper(device)):
        raise SystemExit("fp8_pays: there is no Hopper GPU here")
    effort = Effort(rounds=given.rounds, inner=given.repeats, seconds=1.0)
    begun = provenance.begin(FP8_PAYS, "cuda")
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += rows_of(known[name], effort, device)
        found = results.frame(rows)
        told = found.loc[found["workload"] == name, ["workload", "provider", "metric", "value"]]
        print(told.to_string(index=False, float_format="{:.4g}".format), flush=True)
        timing.release(device)
    if given.out:
        parameters = {"names": names, "rounds": given.rounds, "repeats": given.repeats}
        leave(given.out, results.frame(rows), parameters=parameters, begun=begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
