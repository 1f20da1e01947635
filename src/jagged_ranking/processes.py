"""Processes that end with the one that started them, or are one of several that torchrun started,
and folders that one process holds."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from click_data.holding import hold

# Set for a process that is to end with its parent, which has this number.
PARENT_VARIABLE = "JAGGED_PARENT"
POLL_SECONDS = 0.5
_RANDOM = 8  # characters that `tempfile` puts behind a prefix
_own_gpus: set[int] = set()  # that `gpus_alone` holds
BUSY_SECONDS = 5.0  # what was killed needs some to end


class BusyError(ValueError):
    """Another process is at work in a folder; the message is one line for the user."""


def launched() -> int:
    """How many processes torchrun has started, this one among them; 1 where it has not."""
    # WORLD_SIZE alone is also set by schedulers of clusters, around processes of no group.
    if "LOCAL_RANK" not in os.environ:
        return 1
    said = os.environ.get("WORLD_SIZE", "")
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"WORLD_SIZE must be a number of processes, got {said!r}")
    return int(said)


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent is gone, if that asked for it.

    However the parent ended: a signal that nobody can handle (SIGKILL) reaches it alone.
    """
    if not (given := os.environ.pop(PARENT_VARIABLE, "")):
        return
    parent = int(given)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def end_worker_with_parent() -> None:
    """The same for a process that `multiprocessing` started, which ends at once.

    Without it a worker waits for work for ever: it holds the other end of its own queue.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a worker"

    def watch() -> None:
        parent.join()  # waits on a pipe that closes with the parent
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes that are started in the block do not hear Ctrl-C, which a terminal tells them too:
    each would print where it was. This one hears it behind the block, and ends with them."""
    resource_tracker.ensure_running()  # at its own start it would let interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for the time of the block.

    Raises:
        BusyError: another process holds it, and does so for `BUSY_SECONDS` more.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    handle = None
    with suppress(OSError):  # without locks go on as if alone
        while (handle := hold(folder)) is None:
            if time.monotonic() > deadline:
                raise BusyError(f"{folder}: another run writes there; --out takes another folder")
            time.sleep(0.1)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def sweep(folder: Path, name: str = "*.*") -> None:
    """Delete what `results.atomic` had begun as `name` in a folder, by a process that was killed.

    This process must hold the folder: of one that is alive the file would be missed.
    """
    stem, suffix = os.path.splitext(name)
    for stale in folder.glob(f".{stem}-{'?' * _RANDOM}{suffix}"):
        with suppress(OSError):  # another user's
            stale.unlink()


@contextmanager
def among_others(folder: Path, name: str = "*.*") -> Iterator[None]:
    """Say for the time of the block that this process writes files into a folder, as others may.

    Who comes while there is no other sweeps it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # without locks, or with others, nothing is swept
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep(folder, name)
        _share(handle)
        yield
    finally:
        os.close(handle)


def _share(handle: int) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # one who sweeps, or who holds the folder for itself
            time.sleep(0.01)
        except OSError:
            return


def last_line(said: str) -> str:
    """What a process said last, blank lines apart."""
    return ([line for line in said.split("\n") if line.strip()] or ["no word"])[-1]


@contextmanager
def temporary_folder(
    prefix: str, *, longest: int | None = None, place: Path | None = None
) -> Iterator[Path]:
    """An empty folder for the time of the block; those of processes that are gone are deleted.

    A process that is killed cannot delete its own.

    Args:
        longest: characters that its path may have: where the usual place for temporary folders is
            too deep for that, the folder lies in /tmp.
        place: where it lies, made if need be; None is the usual place for temporary folders.
    """
    place = place or Path(tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    if longest is not None and len(f"{place}/{prefix}") + _RANDOM > longest:
        place = Path("/tmp")
    for stale in place.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or gone by now
            if (held := hold(stale)) is not None:
                shutil.rmtree(stale, ignore_errors=True)
                os.close(held)
    folder, handle = _make_and_hold(prefix, place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _make_and_hold(prefix: str, place: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            handle = hold(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return folder, None  # without locks nobody deletes it, either
        # Another process may have taken it for a stale one before it was held.
        if handle is not None and folder.exists():
            return folder, handle
        if handle is not None:
            os.close(handle)


@contextmanager
def gpus_alone(numbers: Iterable[int]) -> Iterator[None]:
    """Hold GPUs, by their numbers in this process, for the time of the block, so that two timing
    runs never share a card. Waits for whoever has one, and says so; one that this process holds
    already is its own."""
    new = {number: _hold_gpu(number) for number in sorted(set(numbers) - _own_gpus)}
    _own_gpus.update(new)
    try:
        yield
    finally:
        _own_gpus.difference_update(new)
        for handle in new.values():
            if handle is not None:
                os.close(handle)


def _hold_gpu(number: int) -> int | None:
    """None where there are no locks: then go on as if alone."""
    import torch

    name = torch.cuda.get_device_properties(number).uuid
    path = Path(tempfile.gettempdir()) / f"jagged-gpu-{name}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # another user's
            path.chmod(0o666)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"GPU {number}: waiting for another timing run there ({path})", file=sys.stderr)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        os.close(handle)
        return None
    return handle
