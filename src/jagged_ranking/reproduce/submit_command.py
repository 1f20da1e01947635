"""`jagged submit`: `jagged train` or `jagged reproduce` as a job of SLURM, by submitit.

Each rank of a training is a task of the job, with the environment that torchrun would give it. A
training that is preempted, or runs out of time, is queued again and goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from jagged_ranking.first_line import first_line

COMMANDS = ("train", "reproduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the job may have, and then the command that it runs."""
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument(
        "--gpus", type=int, default=1, help="of each machine, 0 for none (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, help="processes of a training on each machine (default: one a GPU)"
    )
    parser.add_argument("--cpus", type=int, default=8, help="of each rank (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="at most (default: %(default)s)")
    parser.add_argument("--partition", help="of the cluster")
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("jobs"),
        metavar="DIR",
        help="folder for what the job prints, which its machines see too (default: %(default)s)",
    )
    parser.add_argument("--wait", action="store_true", help="until the job is done")
    parser.add_argument(
        "--local", action="store_true", help="here, without a cluster, by the same launcher; waits"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="train ... | reproduce ...",
        help="the command, as it would be typed behind jagged",
    )


class Job:
    """The command in one task of the job; what it returns is the command's exit status."""

    def __init__(self, words: list[str], *, folder: str) -> None:
        self.words, self.folder = words, folder

    def __call__(self) -> int:
        """Runs it where it was submitted."""
        os.chdir(self.folder)
        if self.words[0] == "train":
            where = import_module("submitit").helpers.TorchDistributedEnvironment()
            # a rank takes the GPU of its number among all of the machine
            where.export(set_cuda_visible_devices=False, overwrite=True)
        return import_module("jagged_ranking.cli").main(self.words)

    def checkpoint(self) -> Any:
        """submitit asks for it when the job is to end before it is done."""
        more = ["--resume"] if self.words[0] == "train" and "--resume" not in self.words else []
        again = Job([*self.words, *more], folder=self.folder)
        return import_module("submitit").helpers.DelayedSubmission(again)


def run(arguments: argparse.Namespace) -> int:
    """Submits the job and prints its number; the worst status of its tasks where it is waited for.

    Raises ValueError, before anything is submitted, for a command that is none, options that do not
    fit, and where submitit or the cluster is missing.
    """
    words = _checked(arguments)
    try:
        submitit = import_module("submitit")
    except ImportError as error:
        raise ValueError(
            f"submit needs the extra slurm (pip install 'jagged-flash-attention[slurm]'): {error}"
        ) from None
    arguments.logs.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.AutoExecutor(
            folder=arguments.logs.resolve(), cluster="local" if arguments.local else "slurm"
        )
        executor.update_parameters(**_parameters(arguments, words[0]))
        job = executor.submit(Job(words, folder=os.getcwd()))
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise ValueError(f"no job: {first_line(error)}") from error
    print(f"job {job.job_id}: jagged {' '.join(words)}, prints to {arguments.logs}/", flush=True)
    if not (arguments.wait or arguments.local):
        return 0
    return _waited_for(job, submitit)


def _checked(arguments: argparse.Namespace) -> list[str]:
    words = [word for place, word in enumerate(arguments.words) if place or word != "--"]
    if not words or words[0] not in COMMANDS:
        said = repr(words[0]) if words else "none"
        raise ValueError(f"submit runs {' or '.join(COMMANDS)}, got {said}")
    import_module("jagged_ranking.cli").build_parser(words).parse_args(words)  # or it ends here
    for name in ("nodes", "cpus", "minutes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.gpus < 0 or (arguments.ranks is not None and arguments.ranks < 1):
        raise ValueError("--gpus must not be negative, and --ranks at least 1")
    if words[0] != "train" and (arguments.nodes > 1 or arguments.ranks is not None):
        raise ValueError(f"{words[0]} is one process: --nodes and --ranks are for train")
    return words


def _parameters(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    ranks = arguments.ranks or max(1, arguments.gpus)
    found = {
        "name": f"jagged-{command}",
        "nodes": arguments.nodes,
        "tasks_per_node": ranks if command == "train" else 1,
        "gpus_per_node": arguments.gpus,
        "cpus_per_task": arguments.cpus,
        "timeout_min": arguments.minutes,
    }
    if arguments.partition:
        found["slurm_partition"] = arguments.partition
    return found


def _waited_for(job: Any, submitit: Any) -> int:
    """The worst status of its tasks, whose words are those of this process."""
    utils, lost = submitit.core.utils, ""
    statuses = [1]
    try:
        statuses = job.results()
    except (utils.FailedJobError, utils.UncompletedJobError) as error:
        lost = first_line(error)
    print(_own_words(job.stdout() or ""), end="")
    print(job.stderr() or "", end="", file=sys.stderr)
    if lost:
        raise ValueError(f"job {job.job_id} is gone: {lost}")
    return max(statuses)


def _own_words(text: str) -> str:
    """Without submitit's."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("submitit "))
