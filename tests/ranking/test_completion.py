"""What a shell is told behind `jagged`, and that it is told soon."""

import os
import subprocess
import sys

import pytest

from jagged_ranking import cli, paths

argcomplete = pytest.importorskip("argcomplete")

# As the shell's hook calls it: answers go to descriptor 8, and what was imported to stdout.
ASK = """
import atexit, os, sys
os.dup2(1, 8)
exit = os._exit
def end(status):
    sys.stdout.write("\\v" + " ".join(sorted(name for name in sys.modules if "." not in name)))
    sys.stdout.flush()
    exit(status)
os._exit = end
from jagged_ranking.cli import main
sys.argv = ["jagged"]
sys.exit(main())
"""
HEAVY = {"torch", "numpy", "pandas", "pyarrow", "polars", "matplotlib", "papermill", "nbformat"}


def completed(line: str, **environment: str) -> tuple[set[str], set[str]]:
    """What may stand at the end of a line, and what was imported to find out."""
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **asked, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    answers, _, imported = done.stdout.partition("\v")
    assert imported, done.stderr
    return {answer.strip() for answer in answers.split("\n")} - {""}, set(imported.split())


NOTEBOOKS = {path.stem for path in (paths.ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("jagged rep", {"reproduce"}),
        ("jagged run 0", {name for name in NOTEBOOKS if name.startswith("0")}),
        ("jagged run 01_speed --preset ", {"paper", "small", "smoke"}),
        ("jagged reproduce --preset sm", {"small", "smoke"}),
        ("jagged reproduce --only 01_speed 04", {"04_quality"}),
        ("jagged --verbose run 05", {"05_interaction_kernels"}),
    ],
)
def test_names_are_completed_without_anything_heavy(line, offered):
    answers, imported = completed(line)
    assert answers == offered
    assert not HEAVY & imported


def test_prepared_data_sets_are_offered(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "dataset.json").write_text("{}")
    answers, imported = completed("jagged run 01 --data /", CLICK_DATA_DIR=str(tmp_path))
    assert str(tmp_path / "mine") in answers
    assert str(tmp_path / "other") not in answers
    assert not HEAVY & imported


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_command_needs_torch_to_be_completed(command):
    answers, imported = completed(f"jagged {command} --")
    assert "--verbose" in answers
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("jagged train --model t", {"target_attention", "transact", "transformer"}),
        ("jagged prepare s", {"sequences", "synthetic"}),
    ],
)
def test_options_of_other_packages_are_completed_without_torch(line, offered):
    answers, imported = completed(line)
    assert answers == offered
    assert not {"torch", "triton", "pandas", "matplotlib", "papermill"} & imported


def test_what_goes_wrong_offers_nothing(tmp_path):
    assert completed("jagged run 0", JAGGED_HOME=str(tmp_path))[0] == set()


def test_without_argcomplete_all_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setattr(sys, "argv", ["jagged", "cache"])
    assert cli.main() == 0
    assert "results" in capsys.readouterr().out


def test_the_mark_stands_where_the_shells_hook_looks():
    with open(cli.__file__, encoding="utf-8") as source:
        assert "PYTHON_ARGCOMPLETE_OK" in source.read(1024)
