"""A process that its GPU does not serve any more makes room for another.

After an access outside of memory CUDA refuses a process everything, and each of its tests would
fail. Of several processes (pytest-xdist) it ends behind the test that failed, which is said to have
crashed it, too, and another one goes on with those that are left. A process by itself stops.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch


def refuses_everything() -> bool:
    """Whether the current GPU does."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # torch.AcceleratorError is one
        return True
    return False


def watch(config: pytest.Config, is_lost: Callable[[], bool] = refuses_everything) -> None:
    """Ask after each test that fails, in the processes that run tests."""
    one_of_several = hasattr(config, "workerinput")
    if one_of_several or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_LostGpu(is_lost, one_of_several), "lost-gpu")


class _LostGpu:
    def __init__(self, is_lost: Callable[[], bool], one_of_several: bool) -> None:
        self.is_lost, self.one_of_several = is_lost, one_of_several
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(trylast=True)  # what the test said has been sent
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed, self.failed = self.failed, False
        if failed and self.is_lost():
            if self.one_of_several:
                os._exit(1)
            pytest.exit(f"after {nodeid} the GPU refuses this process everything", returncode=1)
