"""`jagged lab`: what is started, not what it does then."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from jagged_ranking import paths
from jagged_ranking.cli import main
from jagged_ranking.reproduce import lab_command
from jagged_ranking.reproduce.lab_command import working_notebooks


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_root_is_allowed_where_the_user_is_root(monkeypatch, capsys, user, allowed):
    started = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    assert main(["lab", "--port", "8899", "--ip", "0.0.0.0", "--no-browser"]) == 0
    ((program, command, environment),) = started
    assert (program, command[0]) == (sys.executable, sys.executable)
    options = ["-m", "jupyterlab", str(paths.NOTEBOOKS), "--ip=0.0.0.0", "--port=8899"]
    assert command[1:7] == [*options, "--no-browser"]
    assert ("--allow-root" in command) == allowed
    assert environment[paths.WORK_VARIABLE] == str(paths.ROOT)
    said = capsys.readouterr().out
    assert f"notebooks: {paths.shown(paths.NOTEBOOKS)}\n" in said
    assert "open the address with a token" in said


@pytest.fixture
def installed(checkout, tmp_path, monkeypatch):
    """Without a checkout: where the notebooks are copied to."""
    monkeypatch.setattr(paths, "has_checkout", lambda: False)
    monkeypatch.setenv(paths.WORK_VARIABLE, str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "notebooks"


def test_a_notebook_that_was_copied_in_part_is_not_the_users_own(installed, monkeypatch):
    copy = shutil.copyfile

    def full(source, target):
        Path(target).write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lab_command.shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/01_good\.ipynb'"):
        working_notebooks()
    assert not list(installed.iterdir())
    monkeypatch.setattr(lab_command.shutil, "copyfile", copy)
    assert working_notebooks() == installed
    assert {path.name for path in installed.iterdir()} == {"01_good.ipynb", "02_bad.ipynb"}


def test_a_browser_is_opened_unless_told_otherwise(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given[1]))
    assert main(["lab"]) == 0
    assert "--no-browser" not in started[0]
