"""Where a result comes from: the manifest that lies beside every results file.

`begin` is called before the work and notes time, clocks and code; `manifest` is called after it and
describes command, parameters, data, versions and device; `write_manifest` writes it.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.code_roots import CODE_FOLDERS, code_hash, roots_of
from jagged_ranking.devices import clocks, device_name, driver_version
from jagged_ranking.facts import document
from jagged_ranking.results import atomic

# The code that a suite's status is about, whether it was of all tests or of the kernels' alone.
TESTED = ("kernels",)
CODE_PLACES = (*CODE_FOLDERS, "notebooks", "pyproject.toml")
PACKAGES = ("torch", "triton", "numpy", "pandas", "pyarrow", "matplotlib", "scikit-learn")
# What is measured where it is installed: package -> module.
PEERS = {
    "dkernel": "dkernel",
    "fbgemm-gpu": "fbgemm_gpu",
    "flash-attn-4": "flash_attn",
    "flashinfer-python": "flashinfer",
    "generative-recommenders": "generative_recommenders",
}
TEST_STATUS = "build/test-status.json"
MANIFEST = "manifest.json"  # beside the results
_OPTION = re.compile(r"--?[A-Za-z]")
_LONGEST = 80  # of what a parameter was set to, where it is shown


def git_state(root: Path | None = None) -> dict[str, Any]:
    """{"sha": ..., "dirty": bool or None}: the commit, and whether its code has been changed.

    Results and whatever else lies in a checkout is no code: a run that writes there changes none.
    A copy without git's own folder may say where it comes from in JAGGED_GIT_SHA; a trailing
    "-dirty" there marks a changed tree. Else the SHA is "unknown".
    """
    root = root or paths.ROOT
    sha = _git(root, "rev-parse", "HEAD")
    if sha is not None:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *CODE_PLACES)
        new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE_PLACES)
        added = [name for name in (new or "").splitlines() if name.endswith((".py", ".ipynb"))]
        return {"sha": sha, "dirty": bool(changed or added)}
    given = os.environ.get("JAGGED_GIT_SHA", "")
    if given:
        return {"sha": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    return {"sha": "unknown", "dirty": None}


def suite_status(root: Path | None = None) -> dict[str, Any]:
    """What the last run of a suite with all tests of the kernels said, or "unknown" if it was of
    other kernels."""
    root = root or paths.ROOT
    try:
        status = json.loads((root / TEST_STATUS).read_text())
        same_code = status["code_hash"] == code_hash(root, TESTED)
    except (OSError, ValueError, KeyError, TypeError):
        return {"outcome": "unknown"}
    return status if same_code else {"outcome": "unknown"}


def versions() -> dict[str, str | None]:
    """Versions of what decides results; None where it is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *PEERS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # A module may lie there without saying its version.
            there = package in PEERS and importlib.util.find_spec(PEERS[package])
            found[package] = "unknown" if there else None
    import torch  # heavy, and only this function needs it

    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    found["cudnn"] = None if cudnn is None else str(cudnn)
    found["driver"] = driver_version() if torch.cuda.is_available() else None
    return found


@dataclass(frozen=True)
class Beginning:
    """What is to be done, and time, clocks and code before that."""

    run_id: str
    device: str
    seconds: float
    clocks: dict[str, int] | None
    code: dict[str, Any]


def begin(run_id: str, device: Any = "cpu", *, root: Path | None = None) -> Beginning:
    """Call before the work, which may take so long that code is changed or another commit checked
    out meanwhile; hand what it returns to `manifest`.

    Args:
        run_id: the notebook's id, e.g. "01_speed".
        device: that the work is done on.
        root: the checkout, where it is not the one of this package.
    """
    return Beginning(
        run_id=run_id,
        device=str(device),
        seconds=time.monotonic(),
        clocks=clocks(device),
        code=_code_now(run_id, root or paths.ROOT),
    )


def _code_now(run_id: str, root: Path) -> dict[str, Any]:
    state, roots = git_state(root), roots_of(run_id)
    return {
        "git_sha": state["sha"],
        "git_dirty": state["dirty"],
        "code_roots": list(roots),
        "code_hash": code_hash(root, roots),
        "tests": suite_status(root),
    }


def manifest(
    *,
    preset: str,
    parameters: Mapping[str, Any],
    begun: Beginning,
    seed: int | None = None,
    data_digests: Mapping[str, str] | None = None,
    command: str | None = None,
    run_key: str = "",
) -> dict[str, Any]:
    """Everything that somebody needs to judge or repeat a result, as a JSON-ready dict.

    Args:
        preset: "smoke", "small", "paper" or "interactive"; figures mark "smoke" visibly.
        parameters: the notebook's parameters as they were used.
        begun: what `begin` returned before the work.
        seed: the seed of the run, where it has one.
        data_digests: name -> sha256 of each dataset that was read.
        command: the command line; by default this process's own.
        run_key: the key under which the run is fresh.
    """
    return {
        "id": begun.run_id,
        "preset": preset,
        **begun.code,
        "command": command if command is not None else shlex.join(sys.argv),
        "parameters": json.loads(json.dumps(dict(parameters), default=str)),
        "seed": seed,
        "data_digests": dict(data_digests or {}),
        "versions": versions(),
        "device": device_name(begun.device),
        "device_type": begun.device.split(":")[0],
        "platform": platform.platform(),
        "clocks": {"before": begun.clocks, "after": clocks(begun.device)},
        "finished": utc(),
        "wall_seconds": round(time.monotonic() - begun.seconds, 1),
        "run_key": run_key,
    }


def utc(seconds: float | None = None) -> str:
    """A time (now, where none is given) in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def changes_of_preset(manifest: Mapping[str, Any]) -> list[str]:
    """What the command of a run set besides its preset: ["seconds=0.07"]; of what is long, the
    beginning."""
    changes: list[list[str]] = []
    inside = False
    for word in _words(str(manifest.get("command", ""))):
        if _OPTION.match(word):
            inside = word in ("-p", "--parameter")
            if inside:
                changes.append([])
        elif inside:  # a value with blanks, in a command that was kept without its quotes
            changes[-1].append(word)
    return [textwrap.shorten(" ".join(change), _LONGEST, placeholder=" ...") for change in changes]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # not one of a shell
        return command.split()


def write_manifest(content: Mapping[str, Any], path: Path | str) -> Path:
    """Write as indented JSON with sorted keys, whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(document(content, indent=2, sort_keys=True) + "\n")
    return Path(path)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Read a manifest; a ValueError of one line where it is not one."""
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a manifest: {error}") from error
    for key in ("id", "preset"):
        if not isinstance(content, dict) or not isinstance(content.get(key), str):
            raise ValueError(f"{path}: not a manifest: it names no {key}")
    return content


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
