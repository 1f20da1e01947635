"""A checkout of its own for each test: small notebooks, presets and a prepared dataset."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from doit.exceptions import TaskFailed
from import_graph import ROOT

from jagged_ranking import results
from jagged_ranking.cli import main
from jagged_ranking.reproduce import tasks

PARAMETERS = """\
out: str | None = None  # where results go
preset: str = "interactive"
data: str | None = None  # a prepared dataset
count = 3  # how many
rate = 0.5
lengths = [1, 2]
"""

ROW = (
    "rows = [results.row(op='toy', provider='toy', workload='w', mode='forward',\n"
    "                    metric='latency', unit='ms', value=float(count), run_id='ID')]\n"
)

# As the project's own notebooks do it; imports everything.
WHOLE = [
    "# A toy\n\nIt writes one row.",
    PARAMETERS,
    "from jagged_ranking import results\n"
    "from jagged_ranking.reproduce.lab import begin\n"
    "run = begin('ID', out=out, preset=preset, data=data, parameters={'count': count})",
    f"{ROW}manifest = run.save(results.frame(rows))",
]

# The same files in less time.
GOOD = [
    *WHOLE[:2],
    "import json, pathlib\nfrom jagged_ranking import results\nfolder = pathlib.Path(out)",
    f"{ROW}path = results.write(results.frame(rows), folder / 'results.parquet')",
    "manifest = {'id': 'ID', 'preset': preset, 'device': 'CPU', 'git_sha': 'abc',\n"
    "            'git_dirty': False, 'tests': {'outcome': 'passed'}, 'finished': 'now'}\n"
    "size = (folder / 'manifest.json').write_text(json.dumps(manifest))\n"
    'svg = \'<svg><path id="a"/><use href="#a"/></svg>\'\n'
    "size = (folder / 'ID.svg').write_text(svg)",
]

BAD = [*GOOD[:2], "fine = 1", "## The wrong part", "# why\nraise KeyError('no such\\nthing')"]


def make_notebook(path: Path, sources: list[str]) -> Path:
    """A notebook of these cells: those that begin with "#" and a word are Markdown."""
    cells = []
    for source in sources:
        source = source.replace("ID", path.stem)
        if source.startswith(("# A ", "## ")):
            cells.append(nbformat.v4.new_markdown_cell(source))
        else:
            cells.append(nbformat.v4.new_code_cell(source))
    cells[1].metadata["tags"] = ["parameters"]
    kernel = {"name": "elsewhere", "display_name": "not installed", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with notebooks 01_good and 02_bad, the preset `smoke`, and `data`."""
    root = tmp_path / "checkout"
    presets = root / "notebooks" / "params"
    presets.mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    (presets / "smoke.yaml").write_text("01_good:\n  count: 5\n")
    data = root / "data"
    data.mkdir()
    (data / "dataset.json").write_text(json.dumps({"name": "toy", "digest": "abc"}))
    make_notebook(root / "notebooks" / "01_good.ipynb", GOOD)
    make_notebook(root / "notebooks" / "02_bad.ipynb", BAD)
    monkeypatch.setenv("JAGGED_HOME", str(root))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/without_iris"), prepend=os.pathsep)
    return root


@pytest.fixture
def add_notebook(checkout: Path) -> Callable[[str, list[str]], Path]:
    """Put another notebook into the checkout."""
    return lambda name, sources: make_notebook(checkout / "notebooks" / f"{name}.ipynb", sources)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jagged reproduce` calls `jagged run` and starts no process for it, which would import torch
    and papermill again. Kernels are processes still."""

    def run(command: list[str]) -> TaskFailed | None:
        status = main(command[command.index("jagged_ranking.cli") + 1 :])
        return TaskFailed(f"returned {status}") if status else None

    monkeypatch.setattr(tasks, "_run", run)


@pytest.fixture
def good_cells() -> list[str]:
    """Cells of a notebook that writes the files of a run, quickly."""
    return GOOD


@pytest.fixture
def write_quality() -> Callable[..., None]:
    """Put results of two models on one dataset into a folder, with a manifest."""

    def write(folder: Path, **manifest: Any) -> None:
        rows = [
            results.row(
                op="ranking", provider=model, workload="toy", mode="test", metric=metric, unit="1",
                value=0.7, config={"seed": seed}, run_id="04_quality",
            )
            for model in ("mean_pool", "target_attention")
            for metric in ("auc", "gauc", "ne", "log_loss")
            for seed in (0, 1)
        ]  # fmt: skip
        results.write(results.frame(rows), folder / "results.parquet")
        made = {"id": "04_quality", "preset": "small", "device": "CPU", "git_sha": "abc"}
        made |= {"git_dirty": False, "versions": {"torch": "2.13.0"}, **manifest}
        (folder / "manifest.json").write_text(json.dumps(made))

    return write


@pytest.fixture
def whole_cells() -> list[str]:
    """Cells of a notebook that begins and saves as the project's own do."""
    return WHOLE
