"""Interleaved timing: providers take turns, so that a clock that drifts drifts for everybody.

Each provider is warmed up, then takes its turn in every round. A turn is one call that does not
count (the allocator and the caches see this provider again) and `inner` calls that do. Rounds are
shuffled: whoever follows a neighbour that heats the card does not follow it always.

On a CPU a call is timed by the wall clock. On a GPU the time of the device and that of the host
are two numbers. The device's is taken by CUDA events, with the L2 cache overwritten before, and
with the device kept waiting until the host has issued the whole call: so it is the time in a
program whose host is ahead, and the same whether the host is fast or slow, alone or not. Where the
host falls behind all the same, the call is timed again with a longer wait. The host's time is how
long the call keeps it when the device has nothing else to do.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# Twice the L2 of the largest GPU in sight; triton.testing.do_bench writes as much.
FLUSH_BYTES = 256 * 2**20
# How long the device waits for the host: this many times what the host took before, and a little.
HEAD_START, LEAST_HEAD_START, MOST_HEAD_START = 2.0, 1e-4, 2e-2  # the latter in seconds
# Where the host was behind, the device waits this many times as long. A call that is late so often
# in a row waits for the device itself, and its time is what it is.
MORE_HEAD_START, LATE_CALLS = 4.0, 3
HOST_CALLS = 3  # in a turn, at most, that the host's time is taken of
_CYCLES_A_SECOND = 2e9  # of a GPU at its highest clock; at a lower one the device waits longer

Progress = Callable[[str], None]

_are_apart = False  # inside of `earlier_objects_apart`


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Args:
        rounds: turns of each provider.
        inner: counted calls in one turn, at most.
        warmup: calls before the first turn, at least one (compilation, caches, allocator).
        seconds: what one provider may take on one workload and mode, warm-up apart. Slow
            providers get fewer calls in a turn, then fewer turns, but always two samples.

    Raises:
        ValueError: no rounds, or no call in a turn.
    """

    rounds: int = 5
    inner: int = 10
    warmup: int = 3
    seconds: float = 2.0

    def __post_init__(self) -> None:
        # as notebooks call them
        for name, value in (("rounds", self.rounds), ("repeats", self.inner)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass
class InTurn:
    """A call on the next of several inputs each time; one that does not count, since its host was
    late, is made again on the same. So as many samples as inputs are of all of them."""

    call: Callable[[int], object]
    inputs: int
    made: int = 0

    def __call__(self) -> object:
        self.made += 1
        return self.call((self.made - 1) % self.inputs)

    def again(self) -> None:
        """The last call does not count."""
        self.made -= 1


@dataclass
class Timing:
    """Samples of one provider in ms, in the order they were taken, or why there are none.

    Args:
        samples: the device's time (on a CPU: the call's).
        host: the host's, on a GPU.
        failure: what the provider raised.
    """

    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    failure: Exception | None = None


@contextmanager
def earlier_objects_apart() -> Iterator[None]:
    """Inside of this, `gc.collect` does not look at what there was before: a compiler leaves
    millions of objects, a look at which takes longer than many a measurement. One inside of
    another changes nothing."""
    global _are_apart
    if _are_apart:
        yield
        return
    gc.collect()
    gc.freeze()
    _are_apart = True
    try:
        yield
    finally:
        _are_apart = False
        gc.unfreeze()


@contextmanager
def _garbage_when_asked() -> Iterator[None]:
    """Nobody is timed while garbage is looked for: that is done by `gc.collect` alone."""
    with earlier_objects_apart():
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()


@_garbage_when_asked()
def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    effort: Effort,
    progress: Progress | None = None,
) -> dict[str, Timing]:
    """Time every call; one that raises is out from then on, and keeps what it raised.

    Args:
        calls: provider name -> a call that does the work once and leaves nothing behind.
        device: where the work runs; its type decides the clock.
        effort: see `Effort`.
        progress: is told the name of the provider at each turn.
    """
    clock = _CudaClock(device) if device.type == "cuda" else _WallClock()
    timings = {name: Timing() for name in calls}
    plan: dict[str, tuple[int, int, float]] = {}
    for name, call in calls.items():
        if progress:
            progress(name)
        try:
            _warm_up(call, effort)
            start = clock.head_start(call)
            plan[name] = (*_plan(clock.time(call, 1, start)[0] / 1e3, effort), start)
        except Exception as error:
            _drop(timings[name], error, device)
    names = list(plan)
    order = random.Random(0)
    for turn in range(effort.rounds):
        order.shuffle(names)
        for name in names:
            turns, inner, start = plan[name]
            if turn >= turns or timings[name].failure:
                continue
            if progress:
                progress(name)
            try:
                call = calls[name]
                call()
                timings[name].samples += clock.time(call, inner, start)
                timings[name].host += clock.host(call, min(inner, HOST_CALLS))
            except Exception as error:
                _drop(timings[name], error, device)
            gc.collect()
    return timings


@contextmanager
def threads(device: torch.device | str, count: int) -> Iterator[None]:
    """Work on a CPU with `count` threads inside of this; a GPU does not care.

    Raises:
        ValueError: no thread.
    """
    if count < 1:  # as notebooks call them
        raise ValueError(f"cpu_threads must be at least 1, got {count}")
    before = torch.get_num_threads()
    if torch.device(device).type == "cpu":
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm_up(call: Callable[[], object], effort: Effort) -> None:
    start = time.perf_counter()
    for _ in range(max(1, effort.warmup)):
        call()
        if time.perf_counter() - start > effort.seconds:
            return


def _plan(seconds: float, effort: Effort) -> tuple[int, int]:
    """(turns, counted calls in a turn) that fit the budget at `seconds` a call."""
    calls = int(effort.seconds / max(seconds, 1e-9))
    turns = max(2, min(effort.rounds, calls // 2)) if effort.rounds > 1 else 1
    inner = max(1, min(effort.inner, calls // turns - 1))
    return turns, inner if effort.rounds > 1 else max(2, inner)


def _drop(timing: Timing, error: Exception, device: torch.device) -> None:
    timing.samples, timing.host = [], []
    # The traceback holds the frames, and those the tensors that did not fit.
    timing.failure = error.with_traceback(None)
    error.__context__ = error.__cause__ = None
    release(device)


def release(device: torch.device) -> None:
    """Give unused memory back to the GPU; a CPU's allocator keeps none."""
    if device.type != "cuda":
        return
    gc.collect()
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return  # a broken device fails every later row too, each with its own message


class _WallClock:
    def head_start(self, call: Callable[[], object]) -> float:
        return 0.0

    def time(self, call: Callable[[], object], repeats: int, start: float) -> list[float]:
        return [_wall_clock_ms(call) for _ in range(repeats)]

    def host(self, call: Callable[[], object], repeats: int) -> list[float]:
        return []


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def head_start(self, call: Callable[[], object]) -> float:
        """Seconds that the device is to wait for the host to issue the call."""
        seconds = statistics.median(self.host(call, HOST_CALLS)) / 1e3
        return min(HEAD_START * seconds + LEAST_HEAD_START, MOST_HEAD_START)

    def time(self, call: Callable[[], object], repeats: int, start: float) -> list[float]:
        torch.cuda.synchronize(self.device)
        pairs, wait, late = [], start, 0
        with torch.cuda.device(self.device):
            while len(pairs) < repeats:
                begin, end = self._issue(call, wait)
                if late < LATE_CALLS and begin.query():  # the device waits no more
                    late += 1
                    longer = min(MORE_HEAD_START * wait, MOST_HEAD_START)
                    wait = longer if late < LATE_CALLS else start
                    if isinstance(call, InTurn):
                        call.again()
                else:
                    pairs.append((begin, end))
                    late = late if late == LATE_CALLS else 0
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _issue(
        self, call: Callable[[], object], wait: float
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Events around a call, for which the device waits so many seconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(int(wait * _CYCLES_A_SECOND))
        begin.record()
        call()
        end.record()
        return begin, end

    def host(self, call: Callable[[], object], repeats: int) -> list[float]:
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize(self.device)
            samples.append(_wall_clock_ms(call))
        torch.cuda.synchronize(self.device)
        return samples


def _wall_clock_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
