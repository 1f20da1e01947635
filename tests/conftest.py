"""What all tests share: the interpreter without a GPU, the click logs, the suite's status."""

import gc
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As many processes as there are cores: threads of each would wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports a kernel: Triton reads this once.
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
elif worker := os.environ.get("PYTEST_XDIST_WORKER"):  # gw0, gw1, ... take turns on the GPUs
    torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())

import long_tests
import lost_gpu
import pytest
import short_suite
from filelock import FileLock

if not torch.cuda.is_available():
    from lean_interpreter import make_lean
    from triton.runtime import interpreter

    make_lean(interpreter)

from jagged_ranking import provenance
from jagged_ranking.code_roots import code_hash

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test` asks for."""
    parser.addoption("--short", action="store_true", help="the shorter suite: see short_suite.py")


def pytest_collection() -> None:
    """What is imported and collected stays: there is no garbage until tests run."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nobody looks through modules and tests again for garbage: they are millions of objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; of the rest, the shorter suite leaves some out."""
    run = items
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        run = [item for item in items if not item.get_closest_marker("gpu")]
    if config.option.short:
        out = set(short_suite.left_out(run))
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = long_tests.first(items, processes)


# What a process may keep of a GPU's memory between tests, since all processes share it.
_KEPT_BYTES = 2**30


@pytest.fixture(autouse=True)
def _shared_memory() -> Iterator[None]:
    """Gives back what PyTorch keeps of a GPU's memory, where that is much."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory() -> Iterator[None]:
    """One test at a time of those that take a good part of a GPU's memory."""
    with FileLock(Path(tempfile.gettempdir()) / "jagged-tests-much-memory.lock"):
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def matmul() -> Iterator[Any]:
    """`torch.backends.cuda.matmul`, put back to products in float32. Not by monkeypatch: torch
    makes its attributes up when they are asked for, and it would delete them."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the public click logs: CLICK_DATA_DIR, else ../shared/data."""
    folder = Path(os.environ.get("CLICK_DATA_DIR") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no click logs at {folder}; set CLICK_DATA_DIR")
    return folder.resolve()


class _Status:
    """Counts outcomes, and writes them for the manifests.

    Only of all tests, or (on a GPU machine) all tests of the kernels: what they say of the kernels
    is what manifests quote.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.counts: Counter[str] = Counter()
        options = config.option
        named = [Path(str(argument).partition("::")[0]).resolve() for argument in config.args]
        self.suite = "all" if ROOT in named or ROOT / "tests" in named else "kernels"
        # The code that is tested is the code that is imported now, whatever changes meanwhile.
        self.code_hash = code_hash(ROOT, provenance.TESTED)
        self.whole = (
            (self.suite == "all" or ROOT / "tests" / "kernels" in named)
            and not hasattr(config, "workerinput")  # one of several processes of pytest-xdist
            and not (options.keyword or options.markexpr or options.deselect)
            and not (options.ignore or options.ignore_glob or options.collectonly or options.short)
            and not (getattr(options, "lf", False) or getattr(options, "stepwise", False))
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            self.counts[outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        unfinished = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not self.whole or unfinished or session.shouldstop:
            return
        status = {
            "suite": self.suite,
            "outcome": "passed" if exitstatus == pytest.ExitCode.OK else "failed",
            "counts": dict(sorted(self.counts.items())),
            "code_hash": self.code_hash,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        path = ROOT / provenance.TEST_STATUS
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the outcomes."""
    config.pluginmanager.register(_Status(config), "suite-status")
    if torch.cuda.is_available():
        lost_gpu.watch(config)
