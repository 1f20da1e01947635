"""What timing on a GPU needs of CUDA, where there is none."""

from __future__ import annotations

import contextlib

import pytest
import torch

from jagged_ranking.measure import timing


class FakeGpu:
    """A host and a queue of work, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.done = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.done = max(gpu.host, gpu.done)

            def query(self) -> bool:
                return self.at <= gpu.host

            def elapsed_time(self, other: Event) -> float:
                assert max(self.at, other.at) <= gpu.host, "read before the device was there"
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.issue(cycles / 2e9))

    def issue(self, seconds: float) -> None:
        """Work for the device, behind all that it has."""
        self.done = max(self.host, self.done) + seconds

    def wait(self) -> None:
        """The host, for the device."""
        self.host = max(self.host, self.done)

    def clock(self) -> timing._CudaClock:
        """The one that times calls on it."""
        clock = timing._CudaClock.__new__(timing._CudaClock)
        clock.device, clock.flush = torch.device("cpu"), torch.empty(1)
        return clock
