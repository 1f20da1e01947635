"""Which backward of long users is the fastest on a Hopper GPU: in two passes or in one.

    python tests/support/backward_passes.py [NAME ...] [--rounds N] [--repeats N] [--out FILE.csv]
    python tests/support/backward_passes.py --check VARIANT

Each variant is checked first, in a process of its own, so that one that waits for ever is a row
that says so: its gradients against float64 on users of odd lengths, with masks and grouped heads,
and 20 more runs against the first to the bit. Those that were right are timed, turn by turn, on the
workloads NAME (by default those of the goals, masks, grouped heads and short ones), backward alone:
the table has the median, its ratio to that of two passes, and the peak of memory. What turns cost,
at which tiles add to dQ, says a variant that is no backward and not checked: nobody waits for one.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from attention_cases import Case, Inputs, Standard
from told_tables import ToldTable
from torch import Tensor

from jagged_kernels.schedule.policy.hopper import HopperConfig, is_hopper, one_pass_config
from jagged_ranking.measure import timing
from jagged_ranking.measure.peak_memory import peak_memory
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import workloads
from jagged_ranking.measure.workloads import Workload, setup

TWO = "two passes"
GRADIENTS = ("dq", "dk", "dv")
RERUNS = 20
# More than any turn, and with what the last tile counts no overflow.
ANYBODYS = 2**29
PATIENCE = 300  # seconds that a check may take, most of them for the compiler

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Variant:
    """A backward.

    Fields:
        configs: of one pass, by head_dim; those that it takes.
        waits: for a tile's turn; else dQ is wrong, and the time a bound.
    """

    configs: Mapping[int, HopperConfig] | None = None
    waits: bool = True

    def run(self, given: Any, offsets: Tensor, **options: Any) -> Gradients:
        from jagged_kernels.attention.hopper import backward

        if self.configs is None:
            return backward.launch_backward(*given, **options)
        config = self.configs[given[2].shape[2]]
        given = (*given, offsets)
        with nullcontext() if self.waits else nobody_waits():
            return backward.launch_backward_in_one_pass(*given, **options, config=config)


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Inside, so many tiles seem to have added to every block of dQ that it is anybody's turn."""
    from jagged_kernels.attention.hopper import one_pass

    launch = one_pass.launch

    def launch_counted(kernel: Any, grid: Any, arguments: Any, *rest: Any, **options: Any) -> None:
        # The first counts tiles that programs have taken.
        arguments[kernel.arg_names.index("counts_ptr")][1:] = ANYBODYS
        launch(kernel, grid, arguments, *rest, **options)

    one_pass.launch = launch_counted
    try:
        yield
    finally:
        one_pass.launch = launch


def _laid_out(dim: int, **changed: Any) -> HopperConfig:
    return replace(one_pass_config(dim), **changed)


_BOTH = {dim: one_pass_config(dim) for dim in (64, 128)}
VARIANTS = {
    TWO: Variant(),
    "one pass": Variant(_BOTH),
    "one pass, no turns": Variant(_BOTH, waits=False),
    "one pass, turned": Variant({64: _laid_out(64, turned=True)}),
    "one pass, 3 stages": Variant({64: _laid_out(64, stages=3)}),
    "one pass, 2 stages": Variant({128: _laid_out(128, stages=2)}),
    "one pass, 64 keys": Variant({64: _laid_out(64, consumers=1, residents=2)}),
}  # fmt: skip


def takes(variant: Variant, head_dim: int) -> bool:
    return variant.configs is None or head_dim in variant.configs


def arguments(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, d_lse: Tensor | None, offsets: Tensor,
    mask: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What the launchers take, with the forward's results."""
    from jagged_kernels.attention.plain.forward import launch_forward
    from jagged_kernels.schedule.policy.hopper import HOPPER_TILES
    from jagged_kernels.schedule.rows import build_rows

    left, right = mask.get("window") or (-1, -1)
    right = 0 if mask.get("causal") else right
    tokens, tile = q.shape[0], HOPPER_TILES[q.shape[2]]
    rows = build_rows(offsets, offsets, tokens=tokens, tile=tile, left=left, right=right)
    rows_t = build_rows(offsets, offsets, tokens=tokens, tile=tile, left=right, right=left)
    options = {"left": left, "right": right, "scale": 1 / math.sqrt(q.shape[2])}
    o, lse2 = launch_forward(q, k, v, rows, tile_q=tile, **options)
    d_lse2 = None if d_lse is None else d_lse * math.log(2)
    return (d_o, d_lse2, q, k, v, o, lse2, rows, rows_t), options


# --- checks ---------------------------------------------------------------------------------------


def cases(dim: int) -> Iterator[tuple[str, Case]]:
    draw = random.Random(0)
    causal = {"causal": True}
    masks: list[dict[str, Any]] = [{}, causal, {"window": (300, 100)}]
    for mask in masks:
        lengths = [0, 1, 64, 128, 129, 1000, *(draw.randint(1, 700) for _ in range(12))]
        yield f"{mask or 'no mask'}", Case(lengths, heads=4, kv_heads=4, dim=dim, mask=mask)
    yield "grouped, causal", Case([700, 65, 300], heads=4, kv_heads=2, dim=dim, mask=causal)
    short = [draw.randint(1, 130) for _ in range(400)]
    yield "many short users", Case(short, heads=4, kv_heads=4, dim=dim)


def check(name: str) -> None:
    """
    Raises:
        AssertionError: it is wrong, or not the same in every run, and where.
    """
    variant = VARIANTS[name]
    for dim in (64, 128):
        if not takes(variant, dim):
            continue
        for what, case in cases(dim):
            inputs = case.inputs(torch.bfloat16)
            _check_case(variant, inputs, case.mask, f"head_dim {dim}, {what}:")
    print("right")


def _check_case(variant: Variant, inputs: Inputs, mask: dict[str, Any], where: str) -> None:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.d_o, inputs.d_lse)
    given, options = arguments(*tensors, inputs.q_offsets, mask)
    first = variant.run(given, inputs.q_offsets, **options)
    Standard(inputs, **mask).assert_met(dict(zip(GRADIENTS, first, strict=True)), where)
    for _ in range(RERUNS):
        again = variant.run(given, inputs.q_offsets, **options)
        for gradient, one, other in zip(GRADIENTS, first, again, strict=True):
            assert torch.equal(one, other), f"{where} {gradient} is not the same in every run"


def verdict(name: str) -> str:
    """ "right", or in one line what is wrong."""
    command = [sys.executable, __file__, "--check", name]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not come to an end within {PATIENCE} s"
    said = (ran.stdout if ran.returncode == 0 else ran.stderr).strip()
    return said.splitlines()[-1] if said else f"it ended with {ran.returncode}, silently"


# --- times ----------------------------------------------------------------------------------------


# (length, head_dim): tiles of a user are more than half of the programs, or their number is odd.
LONG = (
    (2048, 64), (2816, 64), (2842, 64), (5000, 64), (8190, 64), (8192, 64), (12_000, 64),
    (4000, 128), (4096, 128), (9004, 128),
)  # fmt: skip

# Name -> query heads of a key head.
GROUPED = {f"grouped {length} x {dim}": 4 for length, dim in LONG}
# Name -> (head_dim, events that a query sees before itself).
WINDOWS = {f"window {before} x {dim}": (dim, before) for dim in (64, 128) for before in (256, 1024)}


def measured_workloads() -> dict[str, Workload]:
    goals = {one.name: one for one in workloads()}
    found = [
        *(one for one in goals.values() if one.head_dim in (64, 128)),
        *(
            _full(f"causal {length} x {dim}", length, dim, causal=True)
            for dim in (64, 128)
            for length in (1024, 2048, 4096, 16384, 65536)
        ),
        *(replace(goals[name], name=f"causal {name}", causal=True) for name in ("F", "G", "N")),
        *(
            _full(f"{kind}{length} x {dim}", length, dim)
            for length, dim in LONG
            for kind in ("", "grouped ")
        ),
        *(_full(name, 4096, dim) for name, (dim, _) in WINDOWS.items()),
        *(
            _full(f"{length} x {dim}", length, dim, heads=4)
            for dim in (64, 128)
            for length in (128, 256, 512, 1024)
        ),
    ]
    return {one.name: one for one in found}


def _full(
    name: str, length: int, head_dim: int, *, heads: int = 8, causal: bool = False
) -> Workload:
    """Some 131,072 tokens of users of one length."""
    return Workload(
        name=name, users=131_072 // length, heads=heads, head_dim=head_dim,
        max_len=length, distribution="full", causal=causal,
    )  # fmt: skip


DEFAULT = ("C", "D", "F", "G", "N", "A", "B")


def rows(
    workload: Workload, names: Sequence[str], effort: Effort, device: torch.device
) -> Iterator[dict[str, Any]]:
    batch = setup(workload, device)
    offsets = batch.offsets
    mask: dict[str, Any] = {"causal": True} if workload.causal else {}
    if workload.name in WINDOWS:
        mask = {"window": (WINDOWS[workload.name][1], 0)}
    heads = slice(None, None, GROUPED.get(workload.name, 1))
    k, v = (x[:, heads].contiguous() for x in (batch.k, batch.v))
    given, options = arguments(batch.q, k, v, batch.dout, None, offsets, mask)
    runs: dict[str, Callable[[], Gradients]] = {
        name: (lambda variant=VARIANTS[name]: variant.run(given, offsets, **options))
        for name in names
        if takes(VARIANTS[name], workload.head_dim)
    }
    expected = runs[TWO]()
    differ = {name: difference(expected, run()) for name, run in runs.items()}
    del expected
    timed = timing.interleaved(runs, device=device, effort=effort)
    two = statistics.median(timed[TWO].samples)
    products = 5 / 2 * workload.facts()["flops_forward"]  # S, dP, dV, dK, dQ
    for name, one in timed.items():
        row: dict[str, Any] = {"workload": workload.name, "variant": name}
        if one.failure:
            yield {**row, "said": f"{type(one.failure).__name__}: {one.failure}".splitlines()[0]}
            continue
        took = statistics.median(one.samples)
        peak = peak_memory(runs[name], inputs=(), device=device).beyond_inputs
        yield {
            **row,
            "ms": took,
            "ratio": took / two,
            # Of a window's pairs nobody has counted them.
            "TFLOP/s of 5 products": math.nan if "window" in mask else products / took / 1e9,
            "peak, MB": peak / 1e6,
            "differs": differ[name] if VARIANTS[name].waits else math.nan,
        }


def difference(expected: Gradients, found: Gradients) -> float:
    """The largest of the gradients' errors, each relative to its size."""
    pairs = zip(expected, found, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = measured_workloads()
    checkable = [name for name, variant in VARIANTS.items() if variant.waits]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--check", metavar="VARIANT", choices=checkable, help="this one alone")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", choices=VARIANTS)
    parser.add_argument("--unchecked", action="store_true", help="time without checks before")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--repeats", type=int, default=8, help="timed calls in a turn")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table as a file, too")
    options = parser.parse_args(words)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]} is no workload; there are {', '.join(known)}")
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or not is_hopper(device):
        parser.error("this needs a Hopper GPU")
    if options.check:
        check(options.check)
        return 0
    names = [name for name in VARIANTS if name in (options.variants or VARIANTS)]
    if not options.unchecked:
        checked = [name for name in names if VARIANTS[name].waits]
        with ThreadPoolExecutor(4) as pool:
            said = dict(zip(checked, pool.map(verdict, checked), strict=True))
        print(pd.Series(said, name="check").to_string(), flush=True)
        names = [name for name in names if said.get(name, "right") == "right" or name == TWO]
    if TWO not in names:
        names.insert(0, TWO)
    effort = Effort(rounds=options.rounds, inner=options.repeats, seconds=2.0)
    told = ToldTable(options.out)
    of_goals = {one.name for one in workloads()}
    for name in options.names or (*DEFAULT, *(name for name in known if name not in of_goals)):
        told.add(rows(known[name], names, effort, device))
        timing.release(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
