"""A process that torchrun has started joins the others, and leaves when one of them does.

Before anything is trained, what differs or is missing on any rank is one line of rank 0, and all
ranks end with an error. Later, a rank that is gone is noticed at the next exchange, within a step;
torchrun tells the others too. What waits meanwhile, for a device or another rank, cannot answer:
a thread says that it was told, and an alarm ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jagged_ranking.devices import default_device
from jagged_ranking.first_line import first_line
from jagged_ranking.processes import PARENT_VARIABLE, end_with_parent
from jagged_ranking.training.rank_group import RankGroup, RankLostError

# For the slowest rank: it may compile, or write a large checkpoint, while others wait.
TIMEOUT = timedelta(minutes=10)
Group = TypeVar("Group", bound=RankGroup)
GRACE_SECONDS = 5  # what is told to end has so long
_NO_SIGNAL = b"\0"  # where bytes are the numbers of signals


@contextmanager
def joined(device: str | None, kind: type[Group] = RankGroup) -> Iterator[Group]:
    """The ranks of this run; for a process that ends with the block, or soon after an error in it.

    Args:
        device: cpu, cuda (a GPU of its own for each rank of a machine), or None for what there is.
        kind: of what is returned.

    Raises:
        ValueError: a backend or a GPU is missing, or the ranks cannot meet.
        RankLostError: another rank is gone.
    """
    os.environ[PARENT_VARIABLE] = str(os.getppid())  # torchrun
    end_with_parent()
    hushed = threading.Event()
    with _end_in_time(hushed), _spoken(hushed):
        if not dist.is_available() or not dist.is_gloo_available():
            raise ValueError("torchrun needs a PyTorch with torch.distributed and gloo")
        try:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the processes cannot meet: {first_line(error)}") from error
        hosts = RankGroup(torch.device("cpu"), None)
        own = hosts.each(lambda: _own_device(device))
        hosts.agree({"device": own.type})
        yield kind(own, None if own.type == "cpu" else _gpus_together(own))
        dist.destroy_process_group()


def _own_device(name: str | None) -> torch.device:
    """That of this rank among those of its machine."""
    name = name or default_device()
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: under torchrun it is cpu, or cuda for a GPU a rank")
    if name == "cpu":
        return torch.device(name)
    number, ranks = (int(os.environ.get(key, "0")) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    found = torch.cuda.device_count()
    if max(number + 1, ranks) > found:
        raise ValueError(
            f"{max(number + 1, ranks)} ranks on this machine need as many GPUs, it has {found}: "
            "--nproc-per-node takes fewer, --device cpu none"
        )
    if not dist.is_nccl_available():
        raise ValueError("this PyTorch has no NCCL, which GPUs need: --device cpu does without")
    device = torch.device("cuda", number)
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise ValueError(f"--device {device}: {first_line(error)}") from error
    return device


def _gpus_together(device: torch.device) -> Any:
    """The process group of all ranks' GPUs, which have met.

    An error is not told the others, who may wait for this GPU: they end when this process does.
    """
    torch.cuda.set_device(device)
    try:
        group = dist.new_group(backend="nccl", timeout=TIMEOUT)
        one = torch.ones((), device=device)
        dist.all_reduce(one, group=group)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ValueError(f"NCCL on {device}: {first_line(error)}") from error
    return group


@contextmanager
def _spoken(hushed: threading.Event) -> Iterator[None]:
    """An error of all ranks is one line of rank 0, that of another alone a line of its own.
    Whatever the error, the process ends soon: what is left of a group may wait for ever.

    Args:
        hushed: set where rank 0 speaks for this one.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except BaseException as error:
        alone = isinstance(error, RankLostError) or not isinstance(error, ValueError | OSError)
        silent = rank and not alone
        if silent:
            hushed.set()
        elif threading.current_thread() is threading.main_thread():
            # torchrun's may come before the line is written, which would be lost
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not alone and dist.is_available() and dist.is_initialized():
            # the first to end has the others ended, who may not have heard yet why
            with suppress(RuntimeError, ValueError):
                dist.monitored_barrier(timeout=timedelta(seconds=GRACE_SECONDS))
        if silent:
            time.sleep(GRACE_SECONDS)  # rank 0 says it, ends, and then torchrun ends this one
        signal.alarm(GRACE_SECONDS)
        if silent:
            raise ValueError(f"rank {rank}: {error}") from error
        raise


@contextmanager
def _end_in_time(hushed: threading.Event) -> Iterator[None]:
    """A signal that is to end this process does, and that it came is said, if not `hushed`: Python
    answers it when a call returns, and one that waits for a GPU, or for a rank that is gone, may
    never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)

    def watch() -> None:
        if os.read(read, 1) != _NO_SIGNAL:
            signal.alarm(GRACE_SECONDS)
            if not hushed.is_set():
                sys.stderr.write(  # in one piece, as the command line writes its errors
                    f"jagged: rank {os.environ.get('RANK', '0')} was told to end, perhaps since "
                    "another rank has ended; --resume goes on from the last checkpoint\n"
                )

    watching = threading.Thread(target=watch, daemon=True, name="signals")
    watching.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        # not by closing the pipe: a process that was forked meanwhile may hold it open
        os.write(write, _NO_SIGNAL)
        watching.join()  # its line would be lost
        os.close(read)
        os.close(write)
