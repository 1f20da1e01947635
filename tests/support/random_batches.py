"""Attention on random batches against float64: how exact it is where nobody has looked.

    python tests/support/random_batches.py [--count 10000] [--first 0] [-n 16] [--out FOLDER]

Batch number i is the same on every GPU. Lengths (empty users and long ones among them), scales and
windows are drawn anew for each; heads, head_dims, kinds of masks, dtypes, and whether queries have
offsets of their own, which kernels are compiled for, are one of `COMPILED` draws. Whoever
`jagged_attention` picks computes it, forward and backward, twice, which must give the same bits.
Errors must meet `attention_cases.Standard`. The table says how far from float64 ours and PyTorch's
mathematics are, relative to a rounding of the largest number of each result. docs/performance.md
has what `--out figures/exactness` leaves. Who is told to end tells what there is, and that it is
not all, and leaves an older result as it was.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

if not torch.cuda.is_available():  # before anything imports a kernel: Triton reads this once
    os.environ["TRITON_INTERPRET"] = "1"

from attention_cases import DEVICE, RESULTS, Case, Standard, error_of, largest, run

from jagged_ranking import provenance, results
from jagged_ranking.figures.exactness_goals import EXACTNESS, OURS, PYTORCH

# In Triton's interpreter products in bfloat16 are wrong, and long users take minutes.
INTERPRETED = DEVICE == "cpu"
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))
DIMS = (16, 32) if INTERPRETED else (16, 32, 64, 80, 96, 128, 256)
LONGEST = (5, 40) if INTERPRETED else (5, 40, 300, 2100)
TOKENS = 150 if INTERPRETED else 6000  # of a batch, about
COMPILED = 400  # thousands of compilations would take longer than all batches
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3))  # of queries, of keys


def draw(number: int) -> tuple[Case, torch.dtype, bool]:
    """(the problem, its dtype, whether queries and keys share their offsets)"""
    rng, compiled = random.Random(number), random.Random(f"compiled {number % COMPILED}")
    longest = rng.choice(LONGEST)

    def lengths(count: int) -> list[int]:
        some = [rng.choice((0, 1, rng.randint(1, longest), longest)) for _ in range(count)]
        while sum(some) > TOKENS:
            some[some.index(max(some))] //= 2
        return some

    users = rng.randint(1, 24)
    queries = lengths(users)
    kind = compiled.choice(("own", "own", "apart", "other"))
    window = rng.randint(0, longest), rng.randint(-1, longest)
    mask: dict[str, Any] = compiled.choice(({}, {"causal": True}, {"window": window}))
    if rng.random() < 0.2:
        mask = {**mask, "scale": rng.choice((-0.3, 0.01, 1.0))}
    heads, kv_heads = compiled.choice(HEADS)
    case = Case(
        queries,
        lengths(users) if kind == "other" else None,
        heads=heads,
        kv_heads=kv_heads,
        dim=compiled.choice(DIMS),
        mask=mask,
        offsets_dtype=compiled.choice((torch.int32, torch.int64)),
    )
    return case, compiled.choice(DTYPES), kind == "own"


def look_at(number: int) -> list[dict[str, Any]]:
    """A row for each result of a batch: errors, in roundings of its largest number and of ours by
    PyTorch's (see `Standard`), and what is wrong. An error that has no size is inf."""
    case, dtype, shared = draw(number)
    inputs = case.inputs(dtype, seed=number)
    if shared:
        inputs = inputs.with_shared_offsets()
    standard = Standard(inputs, **case.mask)
    ours, again = (run("triton", inputs, tile=None, **case.mask) for _ in range(2))
    rows = []
    for name in RESULTS:
        exact = standard.exact[name]
        rounding = torch.finfo(ours[name].dtype).eps * (largest(exact) or 1.0)
        row = {
            "batch": number,
            "dtype": str(dtype).removeprefix("torch."),
            "result": name,
            OURS: math.inf,
            PYTORCH: math.inf,
            "times": math.inf,
            "other bits": not _same_bits(ours[name], again[name]),
            "wrong": "",
        }
        try:
            row[PYTORCH] = error_of(standard.peer[name], exact) / rounding
            row[OURS] = error_of(ours[name], exact) / rounding
            row["times"] = standard.times_as_far(ours[name], name)
            standard.assert_met({name: ours[name]}, "ours")
            assert not row["other bits"], f"{name} is another the second time"
        except AssertionError as error:
            row["wrong"] = f"{error} ({case})"
        rows.append(row)
    return rows


def _same_bits(a: Tensor, b: Tensor) -> bool:
    first, second = (x.clone(memory_format=torch.contiguous_format) for x in (a, b))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def tell(rows: Sequence[dict[str, Any]]) -> int:
    """Prints the table and what is wrong; the exit status."""
    columns = ["dtype", "result", OURS, PYTORCH]
    errors = pd.DataFrame(rows, columns=columns).groupby(columns[:2]).agg(["median", "max"])
    print("errors in roundings of the largest number, the median and the worst batch")
    print(errors.to_string(float_format="{:.3g}".format))
    wrong = [row for row in rows if row["wrong"]]
    for row in wrong[:20]:
        print(f"batch {row['batch']}: {row['wrong']}")
    batches, bad = ({row["batch"] for row in some} for some in (rows, wrong))
    print(f"{len(batches)} batches, {len(bad)} wrong")
    return 1 if wrong else 0


def as_results(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Of each dtype, result and side, in the form of `results`: the median, and the worst batch."""
    found = []
    for (dtype, result), some in pd.DataFrame(rows).groupby(["dtype", "result"], sort=False):
        for provider in (OURS, PYTORCH):
            config: dict[str, Any] = {"batches": len(some)}
            config["worst"], config["worst_of"] = _worst(some, provider)
            if provider == OURS:
                config["times"], config["times_of"] = _worst(some, "times")
                config["other_bits"] = int(some["other bits"].to_numpy().sum())
            found.append(
                results.row(
                    run_id=EXACTNESS,
                    op=EXACTNESS,
                    provider=provider,
                    workload=str(dtype),
                    mode=str(result),
                    metric="error",
                    unit="roundings",
                    value=float(np.median(some[provider].to_numpy())),
                    config=config,
                )
            )
    return results.frame(found)


def _worst(rows: pd.DataFrame, column: str) -> tuple[float, int]:
    """The largest number, and of which batch it is."""
    values = rows[column].to_numpy()
    at = int(values.argmax())
    return float(values[at]), int(rows["batch"].to_numpy()[at])


def _begin(numbers: Any) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(numbers.get() % torch.cuda.device_count())


def _looked_at(numbers: Sequence[int], workers: int) -> Iterator[list[dict[str, Any]]]:
    if workers == 1:
        yield from map(look_at, numbers)
        return
    context = get_context("spawn")
    places = context.SimpleQueue()
    for place in range(workers):
        places.put(place)
    with ProcessPoolExecutor(workers, context, _begin, (places,)) as pool:
        try:
            chunk = max(1, min(10, len(numbers) // workers))
            yield from pool.map(look_at, numbers, chunksize=chunk)
        except KeyboardInterrupt:
            for process in active_children():  # the pool would wait for all that they have begun
                process.kill()
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="batches")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, too")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.n < 1:
        parser.error("--count and -n must be at least 1")
    numbers = range(options.first, options.first + options.count)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # now, and not after all the work
    begun = provenance.begin(DEVICE)
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for some in tqdm(_looked_at(numbers, options.n), total=len(numbers)):
            rows += some
    except KeyboardInterrupt:
        print(f"cut off: {len(numbers)} batches were asked for")
        tell(rows)
        return 1
    if options.out:
        parameters = {"count": options.count, "first": options.first}
        content = provenance.manifest(
            run_id=EXACTNESS, preset="interactive", parameters=parameters, begun=begun
        )
        results.write(as_results(rows), options.out / results.RESULTS)
        provenance.write_manifest(content, options.out / provenance.MANIFEST)
    return tell(rows)


if __name__ == "__main__":
    sys.exit(main())
