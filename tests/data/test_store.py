"""Reading a prepared dataset needs less than making one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_log import SMALL

from click_data import prepare
from click_data.schema import read_info
from click_data.summary import summary

_NO_NETWORK = """\
import sys
reached = []
def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"):
        reached.append((event, arguments))
        raise OSError(f"{event} while a data set is read")
sys.addaudithook(refuse)
"""
_READ = """\
from click_data import open_dataset
dataset = open_dataset(sys.argv[1])
print(dataset.num_users, len(dataset.histories.item), dataset.items.num_rows)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare("synthetic", out=tmp_path / "log", **SMALL)


def _run(code: str, folder: Path) -> list[str]:
    """What some code prints in a fresh process, in which nothing says that it is offline."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    command = [sys.executable, "-c", code, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_reading_and_telling_need_no_polars(folder: Path) -> None:
    no_polars = "import sys; sys.modules['polars'] = None\n"
    tell = "from click_data.summary import summary; print(summary(dataset.info, dataset.folder))"
    first, *told = _run(no_polars + _READ + tell, folder)
    assert first == "40 800 61"
    assert told == summary(read_info(folder), folder).splitlines()


def test_reading_asks_nobody_over_a_network(folder: Path) -> None:
    # Whoever is refused may go on in silence.
    assert _run(f"{_NO_NETWORK}{_READ}print(reached)", folder) == ["40 800 61", "[]"]
