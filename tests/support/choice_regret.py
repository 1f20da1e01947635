"""How much slower what `jagged_attention` picks is than the fastest kernels that could take a call.

    python tests/support/choice_regret.py [--count 60] [--first 0] [-n 8] [--out FOLDER]
    python tests/support/choice_regret.py --look-at N [N ...] [-n 8]

Batch number i is the same everywhere: lengths are drawn anew for each; head_dims, heads, masks,
scores, keys and dtypes, which kernels are compiled for, are one of `COMPILED` draws. Forward and
backward are timed apart, turn by turn, by every family of kernels that can take them, over tiles of
the schedule's own size and of Hopper's. Before that, processes compile all of it side by side. The
goal: of 95% of passes the pick is at most 3% slower than the fastest. docs/performance.md has what
`--out figures/choice_regret` leaves. `--look-at` prints all that was measured of some batches: for
rules, which are made by others than they are judged by.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from attention_cases import DEVICE
from left_results import leave
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    RequestKeys,
    SemiLocalKeys,
    SiLU,
    StridedKeys,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)
from jagged_kernels.attention import choice
from jagged_kernels.attention.choice import GENERAL, PLAIN, Family, Pass
from jagged_kernels.attention.operators import general, plain
from jagged_kernels.schedule.policy.hopper import HOPPER_TILES
from jagged_kernels.schedule.policy.plain import DEFAULT_TILES
from jagged_ranking import provenance, results
from jagged_ranking.figures.choice_goals import CHOICE, GOAL, NEAR, near_share, picks
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort

COMPILED = 40
TOKENS = 2**17 if DEVICE == "cuda" else 120
SHORTEST, LONGEST = (16, 16384) if DEVICE == "cuda" else (2, 40)
# The launch that a pass is chosen by.
PASSES: dict[str, Pass] = {"forward": "forward", "backward": "dkv"}
EFFORT = Effort(rounds=5, inner=5, seconds=0.3)
UNFINISHED = f"unfinished-{results.RESULTS}"


@dataclass(frozen=True)
class Draw:
    """A call; `options` are those of `jagged_attention`."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mean = sum(self.lengths) // max(len(self.lengths), 1)
        said = [f"{name}={value}" for name, value in self.options.items()]
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{len(self.lengths)} users of {mean}, {self.heads}/{self.kv_heads} x {self.dim}"
        return ", ".join([shape, dtype, *said])


def draw(number: int) -> Draw:
    rng, compiled = random.Random(number), random.Random(f"compiled {number % COMPILED}")
    mean = round(2 ** rng.uniform(math.log2(SHORTEST), math.log2(LONGEST)))
    users = max(1, TOKENS // mean)
    lengths = {
        "even": lambda: mean,
        "uniform": lambda: rng.randint(mean // 2, mean + mean // 2),
        # Its mean is some twice the median.
        "lognormal": lambda: max(1, min(round(mean / 2 * math.exp(rng.gauss(0, 1.2))), 8 * mean)),
    }[rng.choice(("even", "uniform", "lognormal"))]
    options: dict[str, Any] = {}
    if scores := compiled.choice((None, None, None, SiLU())):
        options["scores"] = scores
    kind = compiled.choice(("all", "causal", "causal", "window", "lists"))
    if kind == "lists":
        block = compiled.choice((64, 128))
        options["keys"] = compiled.choice(
            (
                StridedKeys(16, 4, block=block),
                SemiLocalKeys(1024, 256, block=block),
                RequestKeys(targets=min(8, mean // 2), block=block),
            )
        )
    elif kind == "window":
        options["window"] = (rng.randint(8, max(8, mean)), 0)
    else:
        options["causal"] = kind == "causal"
    heads, kv_heads = compiled.choice(((4, 4), (8, 8), (8, 2)))
    dim = compiled.choice((32, 64, 64, 128, 128, 256) if DEVICE == "cuda" else (16,))
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    dtype = compiled.choice(dtypes if DEVICE == "cuda" else dtypes[2:])
    return Draw(tuple(lengths() for _ in range(users)), heads, kv_heads, dim, dtype, options)


@contextmanager
def taken_by(wanted: Mapping[Pass, str]) -> Iterator[list[tuple[Pass, list[str], str]]]:
    """Inside, families of these names take the passes. Yields (pass, who can, who does) of each
    choice, as they are made."""
    seen: list[tuple[Pass, list[str], str]] = []
    asked: Pass = "forward"
    pick, pays = choice.pick, choice.first_that_pays

    def first(
        able: Sequence[tuple[Family, int, float]], tokens: int, users: int,
        tma: Callable[[], bool], width: int = 0,
    ) -> Family:  # fmt: skip
        there = {family.name: family for family, *_ in able if not family.hopper or tma()}
        if PLAIN.name in there:
            there.pop(GENERAL.name, None)  # the operator's kernels are the plain ones
        name = wanted.get(asked)
        family = pays(tuple(able), tokens, users, tma, width) if name is None else there[name]
        seen.append((asked, list(there), family.name))
        return family

    def picked(of_pass: Pass, *args: Any, **options: Any) -> Family:
        nonlocal asked
        asked = of_pass
        return pick(of_pass, *args, **options)

    choice.first_that_pays = first  # pyright: ignore[reportAttributeAccessIssue]
    plain.pick = general.pick = picked
    try:
        yield seen
    finally:
        choice.first_that_pays = pays
        plain.pick = general.pick = pick


class Batch:
    """A draw on the device."""

    def __init__(self, drawn: Draw) -> None:
        offsets = lengths_to_offsets(torch.tensor(drawn.lengths)).to(DEVICE)
        tokens = sum(drawn.lengths)
        # On the device: a host takes longer to draw them than all else takes.
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        on_device = {"generator": generator, "device": DEVICE}
        shapes = [(tokens, heads, drawn.dim) for heads in (drawn.heads, *[drawn.kv_heads] * 2)]
        self.leaves = [
            torch.randn(shape, **on_device).to(drawn.dtype).requires_grad_() for shape in shapes
        ]
        self.d_o = torch.randn(shapes[0], **on_device).to(drawn.dtype)
        self.qkv = [JaggedTensor(x, offsets) for x in self.leaves]
        self.options = {**drawn.options, "backend": "triton"}
        of_schedule = {n: v for n, v in drawn.options.items() if n != "scores"}
        self.schedules = [attention_schedule(*self.qkv[:2], **of_schedule)]
        for tile in (DEFAULT_TILES[0], HOPPER_TILES.get(drawn.dim)):
            known = {(one.tile_q, one.tile_k) for one in self.schedules}
            if "keys" not in of_schedule and tile is not None and (tile, tile) not in known:
                tiles = {"tile_q": tile, "tile_k": tile}
                self.schedules.append(attention_schedule(*self.qkv[:2], **of_schedule, **tiles))

    def calls(self, of_pass: str) -> tuple[dict[str, Callable[[], tuple[Tensor, ...]]], str]:
        """(who could take the pass -> its call, who does); names have the schedule's tile."""
        found: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
        rule = ""
        for schedule in self.schedules:
            with taken_by({}) as seen:
                out = self._forward(schedule)
                torch.autograd.grad(out, self.leaves, self.d_o, retain_graph=True)
            ((able, picked),) = [(able, who) for name, able, who in seen if name == PASSES[of_pass]]
            for name in able:
                called = f"{name}, tiles of {schedule.tile_q}"
                found[called] = self._call(of_pass, name, schedule, out)
                rule = rule or (called if name == picked else "")
        return found, rule

    def _forward(self, schedule: Any) -> Tensor:
        return jagged_attention(*self.qkv, **self.options, schedule=schedule).values

    def _call(
        self, of_pass: str, name: str, schedule: Any, out: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            with taken_by({PASSES[of_pass]: name}):
                if of_pass == "forward":
                    return (self._forward(schedule).detach(),)
                return torch.autograd.grad(out, self.leaves, self.d_o, retain_graph=True)

        return call


def rows(number: int, effort: Effort = EFFORT) -> Iterator[dict[str, Any]]:
    """Of each pass, what each that could take it took, in the form of `results`."""
    drawn = draw(number)
    batch, device = Batch(drawn), torch.device(DEVICE)
    for of_pass in PASSES:
        calls, rule = batch.calls(of_pass)
        timed = timing.interleaved(calls, device=device, effort=effort)
        for name, one in timed.items():
            if one.failure:
                raise one.failure
            yield results.row(
                run_id=CHOICE,
                op=CHOICE,
                provider=name,
                workload=str(drawn),
                mode=of_pass,
                metric="latency",
                unit="ms",
                samples=one.samples,
                config={"batch": number, "picked": name == rule},
            )
    del batch
    timing.release(device)


def compile_for(number: int) -> None:
    """All that `rows` will launch, launched once."""
    batch = Batch(draw(number))
    for of_pass in PASSES:
        for call in batch.calls(of_pass)[0].values():
            call()
    timing.release(torch.device(DEVICE))


def summary(found: pd.DataFrame) -> str:
    """What `picks` found, in words."""
    near, slowest = near_share(found), found["slower"].max()
    worst = found.sort_values("slower", ascending=False).head(20)
    shown = worst.to_string(index=False, float_format="{:.4g}".format)
    return (
        f"{shown}\n{near:.1%} of {len(found)} passes within {NEAR:g} of the fastest "
        f"(goal {GOAL:.0%}: {'met' if near >= GOAL else 'NOT met'}), the worst {slowest:.2f}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="of batches")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("-n", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, too")
    parser.add_argument(
        "--look-at", type=int, nargs="+", metavar="N", help="these batches, in full"
    )
    options = parser.parse_args(words)
    if options.look_at and options.out:
        parser.error("--look-at leaves no results: give --first and --count with --out")
    numbers = options.look_at or range(options.first, options.first + options.count)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # now, and not after all the work
    begun = provenance.begin(CHOICE, DEVICE)
    if options.n > 1:
        with ProcessPoolExecutor(options.n, get_context("spawn")) as pool:
            list(pool.map(compile_for, numbers))
    found: list[dict[str, Any]] = []
    for number in numbers:
        own = list(rows(number))
        found += own
        if options.out:  # of a run that is cut off it is all there is
            results.write(results.frame(found), options.out / UNFINISHED)
        passes = picks(results.frame(own))
        print(*map("{:.3f}".format, passes["slower"]), own[0]["workload"], flush=True)
        if options.look_at:
            for row in sorted(own, key=lambda row: (row["mode"] != "forward", row["value"])):
                print(f"  {row['mode']}, {row['provider']}: {row['value']:.4g} ms", flush=True)
    table = results.frame(found)
    print(summary(picks(table)))
    if options.out:
        parameters = {"count": options.count, "first": options.first}
        leave(options.out, table, parameters=parameters, begun=begun)
        (options.out / UNFINISHED).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
