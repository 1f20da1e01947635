"""`jagged lab`: what is started, not what it does then."""

import os
import sys

import pytest

from jagged_ranking import paths
from jagged_ranking.cli import main


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


def test_a_browser_is_opened_unless_told_otherwise(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given[1]))
    assert main(["lab"]) == 0
    assert "--no-browser" not in started[0]
