"""Whether a change makes something slower: an earlier checkout and this one, timed turn by turn.

    python tests/support/old_and_new.py OLD [NAME ...] [--out FILE.csv]

OLD is a commit, or a folder that holds an earlier checkout. Its packages are copied under names of
their own, so that both run in one process, on the same numbers. By default the workloads A to N,
T1 to T6, K, L and W and the interaction operations at `--users` users of up to 1,024 events are
timed; on a CPU, small ones. Results are compared first. "Noise" is how far the medians of a
checkout's turns lie apart: a smaller difference than that says nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from told_tables import ToldTable
from torch import Tensor

from jagged_ranking.measure import timing
from jagged_ranking.measure.providers.base import FORWARD, MODES
from jagged_ranking.measure.timing import Effort

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"jagged_kernels": "kernels", "jagged_ranking": "src"}
OLD_SUFFIX = "_of_old"

Run = Callable[[str], tuple[Tensor, ...]]


def copy_old(old: str, place: Path) -> None:
    """The packages of the earlier checkout below `place`, as jagged_kernels_of_old and so on."""
    source = Path(old)
    if not source.is_dir():
        command = ["git", "-C", str(ROOT), "archive", old, *PACKAGES.values()]
        archive = subprocess.run(command, capture_output=True, check=False)
        if archive.returncode:
            said = archive.stderr.decode().strip()
            raise SystemExit(f"{old} is no folder, and no commit: {said}")
        source = place / "checkout"
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(source, filter="data")
    for package, folder in PACKAGES.items():
        if not (source / folder / package).is_dir():
            raise SystemExit(f"{old}: there is no {folder}/{package}")
        copied = place / f"{package}{OLD_SUFFIX}"
        shutil.copytree(source / folder / package, copied)
        for path in copied.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in PACKAGES:  # of operators in PyTorch, too
                text = text.replace(name, name + OLD_SUFFIX)
            path.write_text(text, encoding="utf-8")


class Side:
    """One of the two checkouts."""

    def __init__(self, package: str, device: torch.device, users: int) -> None:
        self.package, self.device = package, device
        sets, small = self._module("workload_sets"), device.type == "cpu"
        own = sets.small_workloads() if small else sets.workloads()
        target = sets.small_target_workloads() if small else sets.target_workloads()
        self.attention = {one.name: one for one in (*own, *target, *self._hard(small))}
        dtype = torch.float32 if small else torch.bfloat16
        (self.tokens,) = sets.token_sweep([users], dtype=dtype)
        self.problems = self._module("interaction.measurement").PROBLEMS
        self.operations = self._module("interaction.catalogue").OPERATIONS

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.measure.{name}")

    def _hard(self, small: bool) -> Sequence[Any]:
        """K, L and W; none of a checkout from before they were there."""
        if importlib.util.find_spec(f"{self.package}.measure.hard_workloads") is None:
            return ()
        hard = self._module("hard_workloads")
        return hard.small_hard_workloads() if small else hard.hard_workloads()

    def run(self, name: str) -> Run:
        """Does the work of a mode on the workload or the operation once."""
        if name in self.attention:
            batch = self._module("workloads").setup(self.attention[name], self.device)
            provider = self._module("providers").PROVIDERS["jagged"]
            return provider.prepare(batch).run
        problems = self._module("interaction.problem")
        layout = self._module("interaction.layout").Layout(self.tokens, self.device)
        problem = self.problems[name](layout)
        with torch.no_grad():
            outputs = problems.several(problem.call("auto", *problem.inputs))
        gradients = [torch.ones_like(out) for out in outputs]
        return problems.Ready(problem.ours(), problem.inputs, gradients).run

    def modes(self, name: str) -> Sequence[str]:
        found = self.operations.get(name)
        return MODES if found is None or found.backward else (FORWARD,)


def difference(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The largest, relative to the largest number of the tensor it is in."""
    worst = 0.0
    for a, b in zip(old, new, strict=True):
        if a.numel():
            size = float(a.double().abs().max()) or 1.0
            worst = max(worst, float((a.double() - b.double()).abs().max()) / size)
    return worst


def noise(samples: Sequence[float], turns: int) -> float:
    """How far the medians of the turns lie apart, relative to the median of all."""
    size = max(1, len(samples) // turns)
    medians = [statistics.median(samples[i : i + size]) for i in range(0, len(samples), size)]
    return (max(medians) - min(medians)) / statistics.median(samples)


def rows(old: Side, new: Side, name: str, effort: Effort) -> Iterator[dict[str, Any]]:
    runs = {"old": old.run(name), "new": new.run(name)}
    for mode in new.modes(name):
        differ = difference(*(run(mode) for run in runs.values()))
        timed = timing.interleaved(
            {side: (lambda run=run, mode=mode: run(mode)) for side, run in runs.items()},
            device=new.device,
            effort=effort,
        )
        for one in timed.values():
            if one.failure:
                raise one.failure
        was, now = (statistics.median(one.samples) for one in timed.values())
        yield {
            "what": name,
            "mode": mode,
            "old, ms": was,
            "new, ms": now,
            "new / old": now / was,
            "noise": max(noise(one.samples, effort.rounds) for one in timed.values()),
            "results differ": differ,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", metavar="OLD", help="a commit, or the folder of a checkout")
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads, operations; all")
    parser.add_argument("--users", type=int, default=8192, help="of interaction operations")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each checkout")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls in a turn")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table as a file, too")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    effort = Effort(rounds=options.rounds, inner=options.repeats, seconds=1.0)
    with tempfile.TemporaryDirectory() as place:
        copy_old(options.old, Path(place))
        sys.path.insert(0, place)
        try:
            old = Side(f"jagged_ranking{OLD_SUFFIX}", device, options.users)
            new = Side("jagged_ranking", device, options.users)
            there = [
                name
                for name in (*new.attention, *new.operations)
                if name in old.attention or name in old.operations
            ]
            if unknown := [name for name in options.names if name not in there]:
                parser.error(f"{unknown[0]} is not in both; there are {', '.join(there)}")
            table = ToldTable(options.out)
            for name in options.names or there:
                table.add(rows(old, new, name, effort))
                timing.release(device)
        finally:
            sys.path.remove(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
