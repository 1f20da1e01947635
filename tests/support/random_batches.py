"""Attention on random batches against float64: how exact it is where nobody has looked.

    python tests/support/random_batches.py [--count 10000] [--first 0] [-n 16] [--seconds S]
                                           [--out FOLDER]

Batch number i is the same on every GPU. Lengths (empty users and long ones among them), scales and
windows are drawn anew for each; heads, head_dims, kinds of masks, dtypes, and whether queries have
offsets of their own, which kernels are compiled for, are one of `COMPILED` draws. Whoever
`jagged_attention` picks computes it, forward and backward, twice, which must give the same bits.
No error may be more than `GOAL` times that of PyTorch's mathematics in the same dtype, or of one
`rounding`, where PyTorch is closer than that or has no number. Where one is, PyTorch may be lucky:
few sums, whose roundings cancel. Then it is asked again, with its sums in `ORDERS` other orders; a
batch where it is as far off in one of them is wrong, and counted as lucky, too. Nor may one fail
`attention_cases.Standard`, which tests hold attention to: `FACTOR` times PyTorch's, where sums that
cancel are allowed many roundings. docs/performance.md has what `--out figures/exactness` leaves.

What is compiled alike is looked at in a row, so that no process loads all kernels. After
`--seconds` no batch is begun: the results are of those that were, and some kernels are in none. Who
is told to end tells what there is, and that it is not all, and leaves an older result as it was.
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
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

if not torch.cuda.is_available():  # before anything imports a kernel: Triton reads this once
    os.environ["TRITON_INTERPRET"] = "1"

from attention_cases import (
    DEVICE,
    FACTOR,
    RESULTS,
    Case,
    Inputs,
    Standard,
    error_of,
    largest,
    run,
    sdpa_in_order,
)
from left_results import leave

from jagged_ranking import provenance, results
from jagged_ranking.figures.exactness_goals import ALL, EXACTNESS, GOAL, ORDERS, OURS, PYTORCH
from jagged_ranking.figures.verdicts import met

# In Triton's interpreter products in bfloat16 are wrong, and long users take minutes.
INTERPRETED = DEVICE == "cpu"
DTYPES = (torch.float32, torch.float16, *(() if INTERPRETED else (torch.bfloat16,)))
DIMS = (16, 32) if INTERPRETED else (16, 32, 64, 80, 96, 128, 256)
LONGEST = (5, 40) if INTERPRETED else (5, 40, 300, 2100)
TOKENS = 150 if INTERPRETED else 6000  # of a batch, about
COMPILED = 400  # thousands of compilations would take longer than all batches
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3))  # of queries, of keys

TIMES, BY_FLOOR = "times", "by floor"  # errors by PyTorch's: what the goal is of, and what tests do
LUCKY = "lucky"  # whether PyTorch is as far off in another order
WORST = 5  # batches, by the former


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
    """A row for each result of a batch: errors in roundings, ours by PyTorch's, and what is wrong.
    An error that has no size is inf."""
    case, dtype, shared = draw(number)
    inputs = case.inputs(dtype, seed=number)
    if shared:
        inputs = inputs.with_shared_offsets()
    standard = Standard(inputs, **case.mask)
    ours, again = (run("triton", inputs, tile=None, **case.mask) for _ in range(2))
    rows = []
    for name in RESULTS:
        exact, peer = standard.exact[name], standard.peer[name]
        one = rounding(exact, peer.dtype)
        of_peer, _ = _error(peer, exact)
        error, said = _error(ours[name], exact)
        row = {
            "batch": number,
            "dtype": str(dtype).removeprefix("torch."),
            "result": name,
            OURS: error / one,
            PYTORCH: of_peer / one,
            TIMES: _times(error, of_peer, one),
            BY_FLOOR: _times(error, of_peer, max(one, standard.least(name))),
            "other bits": not _same_bits(ours[name], again[name]),
            "case": str(case),
        }
        lucky = False
        if not said and met(row[TIMES], GOAL) != "yes":
            said = f"{row[TIMES]:.3g} times PyTorch's error"
            if math.isfinite(of_peer):
                others = _in_other_orders(inputs, case, name, exact)
                lucky = met(_times(error, others, one), GOAL) == "yes"
        elif not said and row[BY_FLOOR] > FACTOR:
            said = f"{row[BY_FLOOR]:.3g} times what tests judge by"
        rows.append({**row, "wrong": said, LUCKY: lucky})
    return rows


def _in_other_orders(inputs: Inputs, case: Case, result: str, exact: Tensor) -> float:
    """PyTorch's largest error with the columns of queries and keys in `ORDERS` other orders; one
    that gives no number says nothing."""
    errors = [0.0]
    for seed in range(ORDERS):
        order = torch.randperm(case.dim, generator=torch.Generator().manual_seed(seed))
        found = sdpa_in_order(inputs, order.to(DEVICE), **case.mask)
        error, _ = _error(found[result], exact)
        errors += [error] if math.isfinite(error) else []
    return max(errors)


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """What the largest number of a result may be off by where it is rounded to a dtype: half of
    its eps, or below the normal numbers half the distance of two."""
    limits = torch.finfo(dtype)
    return limits.eps / 2 * max(largest(exact), limits.smallest_normal)


def _error(result: Tensor, exact: Tensor) -> tuple[float, str]:
    """(the error, nothing), or (inf, why it has no size)."""
    try:
        error = error_of(result, exact)
    except AssertionError as failure:
        return math.inf, str(failure) or f"the shape is {tuple(result.shape)}"
    return error, "" if math.isfinite(error) else f"error {error}"


def _times(error: float, of_peer: float, least: float) -> float:
    """By PyTorch's, or by what counts at least: alone where PyTorch has no number, from which
    nobody can be further off. `least` is not 0."""
    return error / (max(of_peer, least) if math.isfinite(of_peer) else least)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    first, second = (x.clone(memory_format=torch.contiguous_format) for x in (a, b))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def tell(rows: Sequence[dict[str, Any]]) -> int:
    """Prints the table, the worst batches and what is wrong; the exit status."""
    if not rows:
        print("no batch was looked at")
        return 1
    table = pd.DataFrame(rows)
    of, columns = ["dtype", "result"], [OURS, PYTORCH, TIMES, BY_FLOOR]
    errors = pd.DataFrame(rows, columns=of + columns).groupby(of).agg(["median", "max"])
    print("errors in roundings of the largest number, the median and the worst batch")
    print(errors.to_string(float_format="{:.3g}".format))
    print("the worst batches")
    for row in _worst_batches(table).to_dict("records"):
        numbers = ", ".join(f"{name} {row[name]:.3g}" for name in columns)
        print(f"batch {row['batch']}, {row['dtype']} {row['result']}: {numbers}; {row['case']}")
    bad = [row for row in rows if row["wrong"] or row["other bits"]]
    for row in bad[:20]:
        bits = "another the second time" if row["other bits"] else ""
        said = " and ".join(filter(None, (row["wrong"], bits)))
        print(f"wrong: batch {row['batch']}, {row['dtype']} {row['result']}: {said}; {row['case']}")
    counted = _counts(table)
    told = (
        "{batches} batches, {wrong} wrong, {other_bits} with other bits, PyTorch lucky in {lucky}"
    )
    print(told.format(**counted))
    return 1 if bad else 0


def as_results(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """In the form of `results`: of each dtype, result and side the median and the worst batch; and
    in how many batches anything is wrong, with the worst of all."""
    table = pd.DataFrame(rows)
    row_of = partial(results.row, run_id=EXACTNESS, op=EXACTNESS)
    found = []
    for (dtype, result), some in table.groupby(["dtype", "result"], sort=False):
        for provider in (OURS, PYTORCH):
            config = {"batches": len(some), **_worst(some, provider, "worst")}
            if provider == OURS:
                config |= {**_counts(some), **_worst(some, TIMES), **_worst(some, BY_FLOOR)}
            found.append(
                row_of(
                    provider=provider,
                    workload=str(dtype),
                    mode=str(result),
                    metric="error",
                    unit="roundings",
                    value=float(np.median(some[provider].to_numpy())),
                    config=config,
                )
            )
    counts = _counts(table)
    kept = ("batch", "dtype", "result", TIMES, BY_FLOOR, "case")
    worst = [
        {name: _json(row[name]) for name in kept}
        for row in _worst_batches(table).to_dict("records")
    ]
    of_all = {**counts, **_worst(table, TIMES), **_worst(table, BY_FLOOR), "worst_batches": worst}
    found.append(
        row_of(
            provider=OURS,
            workload=ALL,
            mode=ALL,
            metric="wrong",
            unit="batches",
            value=counts["wrong"],
            config=of_all,
        )
    )
    return results.frame(found)


def _counts(rows: pd.DataFrame) -> dict[str, int]:
    """Of batches, of which each has many rows."""
    some = {
        "batches": rows,
        "wrong": rows[rows["wrong"] != ""],
        "other_bits": rows[rows["other bits"]],
        "lucky": rows[rows[LUCKY]],
    }
    return {name: int(of_these["batch"].nunique()) for name, of_these in some.items()}


def _worst(rows: pd.DataFrame, column: str, name: str = "") -> dict[str, Any]:
    """The largest number of a column, and of which batch it is."""
    name = name or column.replace(" ", "_")
    row = rows.iloc[int(rows[column].to_numpy().argmax())]
    return {name: _json(float(row[column])), f"{name}_of": int(row["batch"])}


def _worst_batches(rows: pd.DataFrame) -> pd.DataFrame:
    """The result that is the furthest off of each of the worst batches."""
    ordered = rows.sort_values([TIMES, OURS], ascending=False, kind="stable")
    return ordered.drop_duplicates("batch").head(WORST)


def _json(value: Any) -> Any:
    """JSON has no inf: the word, which `float` reads."""
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _begin(numbers: Any) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(numbers.get() % torch.cuda.device_count())


def _look_until(deadline: float, number: int) -> list[dict[str, Any]]:
    """Nothing after the deadline. It is the same time in all processes of a machine."""
    return look_at(number) if monotonic() < deadline else []


def _looked_at(
    numbers: Sequence[int], workers: int, deadline: float
) -> Iterator[list[dict[str, Any]]]:
    look = partial(_look_until, deadline)
    in_a_row = sorted(numbers, key=lambda number: number % COMPILED)
    if workers == 1:
        yield from map(look, in_a_row)
        return
    context = get_context("spawn")
    places = context.SimpleQueue()
    for place in range(workers):
        places.put(place)
    with ProcessPoolExecutor(workers, context, _begin, (places,)) as pool:
        try:
            chunk = max(1, len(numbers) // max(COMPILED, workers))
            yield from pool.map(look, in_a_row, chunksize=chunk)
        except KeyboardInterrupt:
            for process in active_children():  # the pool would wait for all that they have begun
                process.kill()
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="batches")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="after which none is begun"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, too")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.n < 1:
        parser.error("--count and -n must be at least 1")
    numbers = range(options.first, options.first + options.count)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # now, and not after all the work
    begun = provenance.begin(EXACTNESS, DEVICE)
    deadline = monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for some in tqdm(_looked_at(numbers, options.n, deadline), total=len(numbers)):
            rows += some
    except KeyboardInterrupt:
        print(f"cut off: {len(numbers)} batches were asked for")
        tell(rows)
        return 1
    if options.out and rows:
        parameters = {"count": options.count, "first": options.first}
        if math.isfinite(options.seconds):
            parameters["seconds"] = options.seconds
        leave(options.out, as_results(rows), parameters=parameters, begun=begun)
    return tell(rows)


if __name__ == "__main__":
    sys.exit(main())
