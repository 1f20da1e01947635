"""What attention in FP8 costs and gives on a Hopper GPU, beside the forward in bf16.

    python tests/support/fp8_pays.py [--head-dims 64 128] [--lengths 1024 4096 ...] [--causal]
    python tests/support/fp8_pays.py --layout stages=3 [...]

On the same batches take turns: the forward in bf16; the kernel for FP8 alone; with the queries'
rounding, as in a call over keys that are kept; and with all rounding. Then the error of both
forwards, against float64 attention of the numbers as they came, relative to its result (both in
the root of mean squares). `--layout` changes how the kernel is laid out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hopper_pays import Batch
from torch import Tensor

from jagged_kernels import JaggedTensor, fp8_attention, fp8_keys, jagged_attention
from jagged_kernels.attention.fp8_numbers import of_tokens, scales_of
from jagged_kernels.schedule.policy.hopper import (
    HopperConfig,
    forward_config,
    fp8_config,
    is_hopper,
)
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort

BF16, KERNEL, KEPT, WHOLE = "bf16", "fp8", "fp8, queries rounded", "fp8, all rounded"


def calls_of(batch: Batch, config: HopperConfig, *, causal: bool) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    from jagged_kernels.attention.hopper.forward import launch_forward
    from jagged_kernels.attention.hopper.fp8_forward import launch_fp8_forward
    from jagged_kernels.attention.hopper.fp8_quantise import launch_quantise

    left, right = resolve_window(causal, None)
    band: dict[str, Any] = {"left": left, "right": right, "scale": batch.dim**-0.5}
    rows, fp8_rows = (
        build_rows(
            batch.offsets, batch.offsets, tokens=batch.tokens, tile=tile, left=left, right=right
        )
        for tile in (forward_config(batch.dim).tile_q, config.tile_q)
    )
    q, k, v = (JaggedTensor(x, batch.offsets) for x in (batch.q, batch.k, batch.v))
    keys, q_scale = fp8_keys(k, v), scales_of(q)
    numbers = launch_quantise(batch.q, of_tokens(q_scale, batch.offsets, batch.tokens))
    scales = (q_scale, keys.k_scale, keys.v_scale)

    def kernel() -> tuple[Tensor, Tensor | None]:
        return launch_fp8_forward(
            numbers, keys.k, keys.v_t, scales, fp8_rows, **band, dtype=batch.q.dtype,
            with_lse=False, config=config,
        )  # fmt: skip

    return {
        BF16: lambda: launch_forward(batch.q, batch.k, batch.v, rows, **band, with_lse=False),
        KERNEL: kernel,
        KEPT: lambda: fp8_attention(q, keys, causal=causal),
        WHOLE: lambda: fp8_attention(q, fp8_keys(k, v), causal=causal),
    }


def errors_of(batch: Batch, *, causal: bool) -> dict[str, float]:
    """Of the batch's first user, in a batch of its own."""
    end = int(batch.offsets[1])
    q, k, v = (JaggedTensor.from_list([x[:end]]) for x in (batch.q, batch.k, batch.v))
    doubles = [x.with_values(x.values.double()) for x in (q, k, v)]
    exact = jagged_attention(*doubles, causal=causal, backend="reference").values
    found = {
        BF16: jagged_attention(q, k, v, causal=causal),
        KERNEL: fp8_attention(q, fp8_keys(k, v), causal=causal),
    }
    return {
        f"{name}, error": float((x.values.double() - exact).norm() / exact.norm())
        for name, x in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head-dims", type=int, nargs="+", choices=(64, 128), default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=2**17, help="in a batch")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--spread", default="even", help="of the lengths, as in hopper_pays.py")
    parser.add_argument("--layout", metavar="NAME=N,...", help="of the kernel for FP8")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls in a turn")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table as a file, too")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        raise SystemExit("fp8_pays: there is no Hopper GPU here")
    device = torch.device("cuda", 0)
    effort = Effort(rounds=options.rounds, inner=options.repeats, seconds=1.0)
    changes: Any = [one.split("=") for one in (options.layout or "").split(",") if one]
    changes = {name: int(number) for name, number in changes}
    rows: list[dict[str, Any]] = []
    for dim in options.head_dims:
        config = replace(fp8_config(dim), **changes)
        for mean in options.lengths:
            batch = Batch(
                mean, tokens=options.tokens, heads=options.heads, dim=dim, dtype=torch.bfloat16,
                device=device, spread=options.spread,
            )  # fmt: skip
            calls = calls_of(batch, config, causal=options.causal)
            timed = timing.interleaved(calls, device=device, effort=effort)
            took = {}
            for name, one in timed.items():
                if one.failure:
                    raise one.failure
                took[name] = statistics.median(one.samples)
            row = {"head_dim": dim, "length": mean}
            row |= {f"{name}, ms": ms for name, ms in took.items()}
            row |= {f"{BF16} / {name}": took[BF16] / took[name] for name in (KERNEL, KEPT, WHOLE)}
            rows.append(row | errors_of(batch, causal=options.causal))
            print(pd.DataFrame(rows[-1:]).T.to_string(header=False), flush=True)
            timing.release(device)
    name = torch.cuda.get_device_name(0)
    print(name, "causal" if options.causal else "all keys", f"{options.heads} heads", sep=", ")
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="{:.4g}".format))
    if options.out:
        table.to_csv(options.out, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
