"""Python in a process of its own: what a test does to Triton or to a device stays there."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with Triton as users have it: without this process' settings of the interpreter
    and caches."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
