"""Is nothing lost? Kills commands at random moments, and looks at what is left and what follows.

    make kills
    .venv/bin/python tests/support/kills.py --moments 20 --seed 0
    .venv/bin/python tests/support/kills.py train --moments 5

It is not part of `make test-all`, which kills a training once: 20 moments of each command take half
an hour on two cores. Besides `jagged` commands there is `open`: `open_dataset` of a data set that
was not mapped into memory before.

First a command runs undisturbed, for its numbers and its duration. Then it begins anew in a fresh
place, and at a moment its process gets SIGKILL, alone: what it has started must end by itself. In
most places it is killed again as it goes on, before it may come to its end. Half of the kills wait
some seconds for the next file that is being written: hardly any other meets one. Then:

- No process is left: all of a command have a variable in their environment by which they are found.
- Each file is whole, or has a temporary name and is gone when the command has come to its end.
- What was done and kept is not done again: trainings, measurements, epochs, finished notebooks.
- A notebook whose end was printed is fresh.
- The numbers at the end are those of the undisturbed run, to the bit. Timings have none to compare.

A line a moment; the status is 0 only if nothing was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from killed_files import (
    Place,
    kept_data,
    kept_epochs,
    kept_results,
    mapped_bytes,
    prepared_bytes,
    quality_and_shapes,
    weights_and_losses,
)
from marked_process import MarkedProcess

from click_data import prepare

ROOT = Path(__file__).resolve().parents[2]
AIMING_SECONDS = 3.0
START = 0.3  # share of the time of a command in which it has nothing to do yet
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_FINISHED = re.compile(r"^(\w+): .*, results in ", re.MULTILINE)
SMALL = {"users": 80, "items": 60, "categories": 4, "events": 4000}
LARGE = {"users": 5000, "items": 500, "categories": 20, "events": 2_000_000}
PRESET = """\
02_memory: {providers: [jagged, dense_flash], workloads: [A], wastes: [0.5], waste_users: 4,
  waste_max_len: 32, max_lens: [32], padded_tokens: 256, head_dims: [16], heads: 1, head_dim: 16,
  data_users: 4}
04_quality: {models: [mean_pool, target_attention], seeds: [0, 1], replicates: 20,
  options: {epochs: 3, batch_size: 128, max_history: 20, dim: 8, hidden: [8]}}
"""
NOTEBOOKS = ("02_memory", "04_quality")


@dataclass(frozen=True)
class Command:
    """A command that may be killed.

    Attributes:
        arguments: of Python, with DATA and OUT for folders.
        numbers: what a place holds in the end that must be the same in each.
        kept: what it holds at any time that must not be done again.
        log: the synthetic log, prepared before, that it reads; None if it prepares one itself.
    """

    arguments: tuple[str, ...]
    numbers: Callable[[Place], Any]
    kept: Callable[[Place], dict[str, Any]]
    log: Mapping[str, Any] | None


def _options(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


_SMALL_MODEL = ("--dim", "8", "--hidden", "8", "--max-history", "20", "--batch-size", "64")
_LONG = ("--epochs", "25", "--patience", "25", "--checkpoint-steps", "7")
_JAGGED = ("-m", "jagged_ranking.cli")
_OPEN = """\
import sys
from click_data import open_dataset
dataset = open_dataset(sys.argv[1])
dataset.histories, dataset.items, dataset.requests("train")
"""
COMMANDS = {
    "reproduce": Command(
        (*_JAGGED, "reproduce", "--preset", "tiny", "--data", "DATA", "--out", "OUT"),
        quality_and_shapes,
        kept_results,
        SMALL,
    ),
    "train": Command(
        (*_JAGGED, "train", "--data", "DATA", "--out", "OUT", "--resume", *_SMALL_MODEL, *_LONG),
        weights_and_losses,
        kept_epochs,
        SMALL,
    ),
    "prepare": Command(
        (*_JAGGED, "prepare", "synthetic", "--out", "DATA", *_options(LARGE)),
        prepared_bytes,
        kept_data,
        None,
    ),
    "open": Command(("-c", _OPEN, "DATA"), mapped_bytes, kept_data, LARGE),
}


@dataclass
class Undisturbed:
    """A run that nobody killed: how long it took, its numbers and its files."""

    seconds: float
    numbers: Any
    names: Any


@dataclass
class Journey:
    """One place from its first kill to the end: a line a kill, and what was violated."""

    lines: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    kills: int = 0


@contextlib.contextmanager
def fresh_place(*, data: Path | None) -> Iterator[Place]:
    """A place with the notebooks and, where one is given, a copy of a data set."""
    with tempfile.TemporaryDirectory(prefix="jk-", dir="/tmp", ignore_cleanup_errors=True) as root:
        place = Place(Path(root))
        presets = place.home / "notebooks" / "params"
        presets.mkdir(parents=True)
        (place.home / "pyproject.toml").touch()
        (presets / "tiny.yaml").write_text(PRESET)
        for name in NOTEBOOKS:
            shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", place.home / "notebooks")
        place.temporary.mkdir()
        if data is not None:
            shutil.copytree(data, place.data)
        yield place


def adopt(yes: bool) -> None:
    """Whether orphans come to this process and not to process 1, as they do on a desktop to the
    session's manager."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, int(yes), 0, 0, 0)


def start(command: Command, place: Place) -> MarkedProcess:
    """Start a command in its place."""
    folders = {"DATA": str(place.data), "OUT": str(place.out)}
    folders_of_code = ("tests/support/without_iris", "kernels", "src", "data_prep")
    code = [str(ROOT / folder) for folder in folders_of_code]
    return MarkedProcess(
        [folders.get(word, word) for word in command.arguments],
        mark=place.root.name,
        said=place.root / "said.txt",
        environment={
            "JAGGED_HOME": str(place.home),
            "TMPDIR": str(place.temporary),
            "PYTHONPATH": os.pathsep.join(code),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor"),  # not TMPDIR
        },
    )


def await_unfinished(running: MarkedProcess, place: Place) -> None:
    """Until a file is being written, which takes milliseconds, but not for long."""
    deadline = time.monotonic() + AIMING_SECONDS
    while time.monotonic() < deadline and running.ends_within(0) is None:
        if any(place.being_written()):
            return
        time.sleep(0.001)


def undisturbed(command: Command, data: Path | None) -> Undisturbed:
    """Run a command to its end. RuntimeError if it fails, or leaves what no killed one may."""
    with fresh_place(data=data) as place:
        began = time.monotonic()
        running = start(command, place)
        status = running.ends_within(600)
        seconds = time.monotonic() - began
        running.end()
        if status != 0:
            raise RuntimeError(f"it fails undisturbed:\n{running.said()}")
        if wrong := [*place.broken(), *map(str, place.temporary.iterdir())]:
            raise RuntimeError(f"it leaves undisturbed: {wrong}")
        return Undisturbed(seconds, command.numbers(place), place.names())


def journey(
    command: Command,
    moments: Sequence[float],
    normal: Undisturbed,
    data: Path | None,
    *,
    aimed: bool,
) -> Journey:
    """Begin a command in a fresh place, kill it at each moment, and let it come to its end.

    Args:
        moments: each a share, 0 to 1, of the time that the command needs from there.
        aimed: whether the first kill and the third wait for the next file to be written, else the
            second.
    """
    done = Journey()
    with fresh_place(data=data) as place:
        finished: set[str] = set()
        kept: dict[str, Any] = {}
        left_to_do = normal.seconds
        for number, share in enumerate(moments, 1):
            moment = share * left_to_do
            began = time.monotonic()
            running = start(command, place)
            try:
                early = running.ends_within(moment) is not None
                others = len(running.alive()) - 1
                if number % 2 == aimed:
                    await_unfinished(running, place)
                early |= not running.kill()
                moment = time.monotonic() - began
                if early:
                    if number == 1:  # the machine was busy with something else at first
                        normal.seconds = min(normal.seconds, moment)
                    done.lines.append(f"kill {number} at {moment:5.1f} s: it had ended before")
                    break
                done.kills += 1
                seconds, wrong = running.left()
            finally:
                running.end()
            finished |= set(_FINISHED.findall(running.said()))
            wrong += place.broken()
            if not place.broken():
                wrong += _lost(kept, now := command.kept(place))
                kept = now
            wrong += [f"{name} is not kept" for name in finished - set(kept)]
            unfinished = [*filter(place.is_temporary, place.files()), *place.temporary.iterdir()]
            done.lines.append(
                f"kill {number} at {moment:5.1f} s: {others} other processes, gone after "
                f"{seconds:.1f} s; kept {len(kept)}, finished {len(finished)}, "
                f"temporary {len(unfinished)}"
            )
            done.violations += [f"after kill {number} at {moment:.1f} s: {one}" for one in wrong]
            left_to_do = max(START * normal.seconds, left_to_do - moment)
        done.violations += _come_to_the_end(command, place, normal, kept, finished)
    return done


def _come_to_the_end(
    command: Command,
    place: Place,
    normal: Undisturbed,
    kept: dict[str, Any],
    finished: set[str],
) -> list[str]:
    """Start the command again, now to its end; what is wrong then."""
    running = start(command, place)
    try:
        status = running.ends_within(600)
        _, wrong = running.left()
    finally:
        running.end()
    if status != 0:
        return [*wrong, f"started again it ends with {status}: {running.said()[-2000:]}"]
    wrong += place.broken()
    wrong += _lost(kept, command.kept(place))
    wrong += [
        f"{name} had finished and ran again"
        for name in sorted(finished)
        if f"fresh    {name}\n" not in running.said()
    ]
    wrong += [f"left behind: {path.name}" for path in place.temporary.iterdir()]
    names = place.names()
    wrong += [f"left behind: {name}" for name in sorted((names - normal.names).elements())]
    wrong += [f"missing: {name}" for name in sorted((normal.names - names).elements())]
    if not wrong and command.numbers(place) != normal.numbers:
        wrong.append("other numbers than undisturbed")
    return [f"at the end: {one}" for one in wrong]


def _lost(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {'made again' if name in now else 'lost'}"
        for name, value in before.items()
        if now.get(name) != value
    ]


def draw(moments: int, generator: random.Random) -> list[list[float]]:
    """So many moments in places, half of them the second or third kill in theirs.

    The first kills are spread evenly: one in each of as many parts of the duration.
    """
    parts = (moments + 1) // 2
    first = [(part + generator.random()) / parts for part in range(parts)]
    places = [[share] for share in first]
    generator.shuffle(places)
    for _ in range(moments - len(places)):
        # Those with one kill or two take another: some none, some two.
        chosen = generator.choice([place for place in places if len(place) < 3])
        chosen.append(generator.random())
    return places


def watch(name: str, *, moments: int, seed: int, say: Callable[[str], None] = print) -> list[str]:
    """Kill one of `COMMANDS` at so many moments; what was violated."""
    command = COMMANDS[name]
    with contextlib.ExitStack() as stack:
        data = None
        if command.log is not None:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "data"
            options: dict[str, Any] = {**command.log}
            prepare("synthetic", out=data, **options)
        normal = undisturbed(command, data)
        say(f"{name}: {normal.seconds:.1f} s undisturbed")
        violations: list[str] = []
        generator = random.Random(seed)
        kills = places = 0
        while kills < moments and places < 3 * moments:  # some come to their end before
            for shares in draw(moments - kills, generator):
                places += 1
                done = journey(command, shares, normal, data, aimed=places % 2 == 0)
                kills += done.kills
                for line in done.lines:
                    say(f"{name} {places:2}, {line}")
                for one in done.violations:
                    say(f"{name} {places:2}, VIOLATED {one}")
                violations += done.violations
        if kills < moments:
            violations.append("too few kills")
        say(f"{name}: {kills} kills in {places} places, {len(violations)} violations")
    return violations


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill commands and see whether anything is lost.")
    parser.add_argument("names", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}")
    parser.add_argument("--moments", type=int, default=20, help="of each command (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in COMMANDS]:
        parser.error(f"no command {unknown[0]}; there are {', '.join(COMMANDS)}")
    adopt(True)

    def say(line: str) -> None:
        print(line, flush=True)

    found = [
        watch(name, moments=options.moments, seed=options.seed, say=say)
        for name in options.names or COMMANDS
    ]
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main())
