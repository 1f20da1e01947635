"""Scripts of `tests/support` that start ranks, run from a test, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def run_script(script: Path, *words: Any) -> dict[str, Any]:
    """What it printed, as JSON. Without GPUs: where there are some, a process that has trained
    cannot be forked."""
    ran = subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        env={**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def assert_a_line_of_rank_0(found: dict[str, Any], line: str) -> None:
    """All ranks failed, rank 0 said why in one line, and rank 1 nothing."""
    assert all(found["statuses"])
    assert found["said"][0].startswith("jagged: ")
    assert line in found["said"][0]
    assert found["said"][0].count("\n") == 1
    assert found["said"][1] == ""
