"""However a run ends, it ends whole: no process and no folder is left, and nothing is printed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jagged_ranking.cli import main
from jagged_ranking.processes import temporary_folder
from jagged_ranking.reproduce.run_record import earlier_seconds

RUN = ("run", "01_good", "--quiet")
REPRODUCE = ("reproduce", "--only", "01")
SIDE_BY_SIDE = (*REPRODUCE, "-n", "2")


# What `compare_models` does, with a worker that never ends, and without torch: that its workers
# begin so is in tests/ranking/training/test_experiment.py.
LONG = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from jagged_ranking.processes import end_worker_with_parent as begin
pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin)
Path("FILE").touch() if pool.submit(int).result() == 0 else None
pool.submit(time.sleep, 300).result()
"""

# The first time for long, then done.
SLOW = """
import time
from pathlib import Path
if not Path("FILE").exists():
    Path("FILE").touch()
    time.sleep(300)
"""


@pytest.fixture
def begin(
    checkout: Path, add_notebook: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.Popen]]:
    """Begin a command whose notebook trains for long in a pool of workers."""
    # Not below tmp_path, which may be too long for a kernel's sockets.
    monkeypatch.setenv("TMPDIR", tempfile.mkdtemp(prefix="jt-", dir="/tmp"))
    long = LONG.replace("FILE", str(tmp_path / "worker"))

    def start(*arguments: str) -> subprocess.Popen:
        add_notebook("01_good", ["# A long one", "count = 1", long])
        process = subprocess.Popen(
            [sys.executable, "-m", "jagged_ranking.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        until((tmp_path / "worker").exists)
        begun.extend([psutil.Process(process.pid), *family(process)])
        return process

    begun: list[psutil.Process] = []
    yield start
    for process in begun:  # what a test that failed has found alive
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(os.environ["TMPDIR"])


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is so, and fail where it does not come to be."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, true
        time.sleep(0.05)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that a command has started, and theirs."""
    return psutil.Process(process.pid).children(recursive=True)


def ends_quietly(process: subprocess.Popen, number: int, others: list[psutil.Process]) -> None:
    """Wait for a command that was told a signal, and see that nothing is left and nothing said."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out + err
    assert "Traceback" not in out + err, out + err
    assert "pending" not in out + err  # what asyncio says of tasks that were left
    assert not psutil.wait_procs(others, timeout=10)[1]
    assert not list(Path(os.environ["TMPDIR"]).glob("jagged-*"))


@pytest.mark.parametrize(
    ("tell", "number", "command"),
    [
        (os.kill, signal.SIGINT, REPRODUCE),
        (os.killpg, signal.SIGINT, REPRODUCE),  # a terminal
        (os.killpg, signal.SIGTERM, RUN),  # `timeout`
        (os.kill, signal.SIGTERM, SIDE_BY_SIDE),
    ],
)
def test_a_signal_ends_everything_quietly(begin, checkout, tell, number, command):
    process = begin(*command)
    others = family(process)
    assert len(others) >= 2  # the kernel and its worker
    tell(process.pid, number)
    ends_quietly(process, number, others)
    (record,) = (checkout / "figures" / "runs").glob("*/01_good/run.json")
    part = json.loads(record.read_text())
    assert (part["status"], part["error"]) == ("failed", "interrupted")
    assert part["seconds"] > 0


def test_the_time_of_a_part_that_was_cut_off_is_kept(
    begin, checkout, add_notebook, whole_cells, capfd
):
    slow = SLOW.replace("FILE", str(checkout.parent / "worker"))
    add_notebook("03_whole", [*whole_cells[:2], slow, *whole_cells[2:]])
    record = checkout / "figures" / "runs" / "interactive" / "03_whole" / "run.json"
    command = ["run", "03_whole", "--quiet", "--data", str(checkout / "data")]
    process = begin(*command)
    others = family(process)
    process.send_signal(signal.SIGINT)
    ends_quietly(process, signal.SIGINT, others)
    first = json.loads(record.read_text())
    assert (first["status"], first["error"]) == ("failed", "interrupted")
    assert first["seconds"] > 0

    assert main(command) == 0  # the file is there now: nothing to wait for
    last = json.loads(record.read_text())
    assert last["earlier_seconds"] == first["seconds"]
    manifest = json.loads(record.with_name("manifest.json").read_text())
    assert manifest["earlier_seconds"] == first["seconds"]
    whole = last["seconds"] + first["seconds"]
    said = f"03_whole: {whole:.0f} s in parts, {last['seconds']:.0f} s the last, results in"
    assert said in capfd.readouterr().out

    assert earlier_seconds(record.parent, last["key"]) == 0  # of the next one


@pytest.mark.parametrize("command", [RUN, REPRODUCE], ids=["run", "reproduce"])
def test_nothing_outlives_a_command_that_is_killed(begin, command):
    process = begin(*command)
    others = family(process)
    process.kill()
    assert not psutil.wait_procs(others, timeout=30)[1]
    process.communicate(timeout=10)  # nobody holds its stdout


def test_drawing_by_several_processes_ends_quietly(checkout, write_quality):
    folders = [checkout / "figures" / f"04_quality_{number}" for number in range(4)]
    for folder in folders:
        folder.mkdir(parents=True)
        write_quality(folder)
    code = (  # as on a machine of two cores
        "import os, sys\nfrom jagged_ranking.cli import main\nos.cpu_count = lambda: 2\n"
        f"if __name__ == '__main__': sys.exit(main(['figures', {str(checkout / 'figures')!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: any("spawn_main" in " ".join(one.cmdline()) for one in family(process)))
    others = family(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert not psutil.wait_procs(others, timeout=10)[1]
    assert not [path for folder in folders for path in folder.glob(".*")]


def test_folders_of_dead_processes_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder("jagged-kernel-") as alive:
        dead = tmp_path / "jagged-kernel-dead"
        dead.mkdir()
        (dead / "kernel.json").touch()
        other = tmp_path / "other"
        other.mkdir()
        with temporary_folder("jagged-kernel-") as mine:
            assert sorted(tmp_path.iterdir()) == sorted([alive, mine, other])
    assert list(tmp_path.iterdir()) == [other]
