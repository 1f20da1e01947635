"""The two distributions: what their wheels hold, what the pins say.

The project's own holds all three packages; `kernels/` builds one of jagged_kernels alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import matplotlib
import pytest
import yaml
from import_graph import PACKAGES, ROOT
from new_pins import merged
from processes import run_python

import jagged_kernels
from jagged_ranking.code_roots import TRAINING, code_hash

OF_THE_KERNELS = {"torch", "triton"}
DISTRIBUTIONS = {
    "jagged-flash-attention": (ROOT, set(PACKAGES)),
    "jagged-kernels": (ROOT / "kernels", {"jagged_kernels"}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The folder of each distribution's sdist, and of the wheel that is built of the sdist."""
    folders = {}
    for name, (source, _) in DISTRIBUTIONS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folders[name])]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folders


def _wheel(folder: Path) -> zipfile.ZipFile:
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _name(requirement: str) -> str:
    """What `Name_of>=2; python_version > '3'` requires: name-of."""
    found = re.match(r"[\w.\-]+", requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_wheel_holds_its_packages_whole_and_nothing_else(built, distribution):
    _, packages = DISTRIBUTIONS[distribution]
    held = set(_wheel(built[distribution]).namelist())
    for package in packages:
        folder = PACKAGES[package]
        assert f"{package}/py.typed" in held
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                assert name in held, f"{name} is not in the wheel"
    tops = {name.split("/")[0] for name in held if not name.split("/")[0].endswith(".dist-info")}
    assert tops == packages


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_wheel_says_its_version_and_licence(built, distribution):
    wheel = _wheel(built[distribution])
    metadata = _metadata(wheel)
    assert metadata["Name"] == distribution
    assert metadata["Version"] == jagged_kernels.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    (licence,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_sdist_holds_what_lies_beside_its_packages(built, distribution):
    source, _ = DISTRIBUTIONS[distribution]
    beside = {path.name for path in source.iterdir() if path.suffix in (".md", ".cff", ".toml")}
    (sdist,) = built[distribution].glob("*.tar.gz")
    with tarfile.open(sdist) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    assert beside | {"README.md", "LICENSE"} <= names


def test_an_sdist_holds_the_results_that_figures_and_tests_read(built):
    (sdist,) = built["jagged-flash-attention"].glob("*.tar.gz")
    with tarfile.open(sdist) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    committed = {path.parent for path in ROOT.glob("figures/*/manifest.json")}
    kept = [folder / name for folder in committed for name in ("manifest.json", "results.parquet")]
    assert {path.relative_to(ROOT).as_posix() for path in kept} <= names
    assert ".ci/run" in names


def test_the_kernels_wheel_requires_torch_and_triton_only(built):
    required = _metadata(_wheel(built["jagged-kernels"])).get_all("Requires-Dist", [])
    assert {_name(line) for line in required} == OF_THE_KERNELS
    whole = _project(ROOT)["dependencies"]
    assert _project(ROOT / "kernels")["dependencies"] == [
        line for line in whole if _name(line) in OF_THE_KERNELS
    ]


def test_the_citation_names_the_licence_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == _project(ROOT)["license"]
    (paper,) = citation["references"]
    assert {"type": "other", "value": "arXiv:2409.15373"} in paper["identifiers"]


ALONE = """
import sys

for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it were not installed

import importlib.metadata

import torch
from jagged_kernels import JaggedTensor, __file__, attention_schedule, jagged_attention

x = JaggedTensor(torch.ones(5, 2, 8, requires_grad=True), torch.tensor([0, 3, 3, 5]))
y = jagged_attention(x, x, x, schedule=attention_schedule(x))
y.values.sum().backward()
print(__file__, importlib.metadata.version("jagged-kernels"), y.values.sum().item())
"""


def test_the_kernels_wheel_works_alone(built, tmp_path):
    _wheel(built["jagged-kernels"]).extractall(tmp_path)
    missing = [*(set(PACKAGES) - {"jagged_kernels"}), "triton"]
    done = run_python(ALONE, *missing, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    initial = tmp_path / "jagged_kernels" / "__init__.py"
    assert done.stdout.split() == [str(initial), jagged_kernels.__version__, "80.0"]


def test_the_wheel_holds_the_notebooks_and_their_presets_once(built):
    held = [
        name for name in _wheel(built["jagged-flash-attention"]).namelist() if "notebooks/" in name
    ]
    own = [p for p in (ROOT / "notebooks").rglob("*") if p.suffix in (".ipynb", ".yaml")]
    of_users = [path for path in own if ".ipynb_checkpoints" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in of_users]
    assert sorted(held) == sorted(f"jagged_ranking/{name}" for name in names)


# One operation on one batch, beside the presets of the wheel.
TINY = """
synthetic: {users: 60, items: 30, categories: 3, events: 900}
05_interaction_kernels:
  {operations: [jagged_sum], users: [4], wastes: [], weighed_users: 4, columns: 4, rounds: 1}
"""


class Installed(NamedTuple):
    """An installed wheel: the folder of all, that of its packages, and its programs, run in
    home/work or in another folder there."""

    home: Path
    site: Path
    call: Callable[..., CompletedProcess[str]]

    def jagged(self, *arguments: str) -> CompletedProcess[str]:
        return self.call("jagged", *arguments)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Installed:
    """`jagged` as `pip install` of the wheel leaves it, in an environment and a folder of its own.

    What it depends on is lent by the environment of the tests.
    """
    home = tmp_path_factory.mktemp("home")
    place = home / "venv"
    venv.create(place, symlinks=True)
    (wheel,) = built["jagged-flash-attention"].glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    within = {"base": str(place), "platbase": str(place)}
    site = Path(sysconfig.get_path("purelib", vars=within))
    lent = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    paths = [str(ROOT / "tests" / "support" / "without_iris"), *lent]
    (site / "lent.pth").write_text("\n".join(paths), encoding="utf-8")
    (site / "jagged_ranking" / "notebooks" / "params" / "tiny.yaml").write_text(TINY)
    fonts = matplotlib.get_cachedir()
    kept = {
        n: v for n, v in os.environ.items() if not n.startswith(("JAGGED_", "CLICK_", "PYTHON"))
    }

    def call(program: str, *arguments: str, folder: str = "work") -> CompletedProcess[str]:
        (home / folder).mkdir(exist_ok=True)
        return subprocess.run(
            [place / "bin" / program, *arguments],
            cwd=home / folder,
            # matplotlib's list of fonts, which takes seconds to make, is lent too.
            env={**kept, "XDG_CACHE_HOME": str(home / "cache"), "MPLCONFIGDIR": fonts},
            capture_output=True,
            text=True,
            check=False,
        )

    return Installed(home, site, call)


def test_an_installed_wheel_reproduces_outside_of_any_checkout(installed):
    work, cache = installed.home / "work", installed.home / "cache" / "jagged-flash-attention"
    only = ("--preset", "tiny", "--only", "05")
    done = installed.jagged("reproduce", *only)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "report: figures/report.html"
    assert "1 of 1 notebooks are good" in done.stdout
    folder = work / "figures" / "runs" / "tiny" / "05_interaction_kernels"
    assert (folder / "results.parquet").is_file()
    assert sorted(path.name for path in cache.iterdir()) == ["cache", "data", "doit.json"]
    assert (
        "fresh   05_interaction_kernels" in installed.jagged("reproduce", *only, "--dry-run").stdout
    )

    done = installed.jagged("figures", "figures/runs/tiny/05_interaction_kernels")
    assert (done.returncode, done.stdout) == (0, "nothing changed\n"), done.stderr
    assert [path.name for path in work.iterdir()] == ["figures"]
    done = installed.jagged("figures")  # there is no README.md to fill in
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no results.parquet with a manifest.json, here or one folder below" in done.stderr
    assert not list(installed.site.rglob("build"))


def test_an_installed_wheel_knows_its_presets_and_where_it_lies(installed):
    plan = installed.jagged("reproduce", "--preset", "smoke", "--dry-run")
    assert len(re.findall(r"^run +\d\d_", plan.stdout, re.MULTILINE)) == len(
        list((ROOT / "notebooks").glob("*.ipynb"))
    )
    assert plan.stdout.endswith("figures: figures/runs/smoke\n")
    assert f"installed  {installed.site / 'jagged_ranking'}\n" in installed.jagged("doctor").stdout


def test_the_lab_works_on_copies_that_it_names(installed):
    say = "from jagged_ranking.reproduce.lab_command import working_notebooks as w; print(w())"
    work = installed.home / "lab"

    def said() -> list[str]:
        return installed.call("python", "-c", say, folder="lab").stdout.splitlines()

    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert said() == [*(f"copied   notebooks/{name}" for name in names), str(work / "notebooks")]
    mine = work / "notebooks" / names[0]
    mine.write_text("mine")
    (work / "notebooks" / names[1]).unlink()
    kept = [f"{'copied' if name == names[1] else 'yours':<8} notebooks/{name}" for name in names]
    assert said()[:-1] == kept
    assert mine.read_text() == "mine"


def test_code_has_one_hash_in_a_checkout_and_installed(installed):
    say = (
        "from jagged_ranking.code_roots import TRAINING, code_hash\n"
        "print(code_hash(), code_hash(roots=TRAINING))"
    )
    done = installed.call("python", "-c", say)
    assert done.stdout.split() == [code_hash(ROOT), code_hash(ROOT, roots=TRAINING)], done.stderr


def test_every_dependency_has_an_exact_pin_without_an_address():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\-]+==[\w.!]+", line) for line in pins)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    project = _project(ROOT)
    for needed in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        assert _name(needed) in pinned, f"{needed} is not in constraints.txt"


def test_new_pins_keep_those_of_extras_that_are_not_installed():
    old = "# note\nsubmitit==1.5.4\ntorch==2.12.0\nfbgemm_gpu-cpu==1.8.0\nPyYAML==6.0.2\n"
    frozen = "pyyaml==6.0.3\ntorch==2.13.0+cpu\nfilelock==4.2.11\n"
    new = "fbgemm_gpu-cpu==1.8.0\nfilelock==4.2.11\npyyaml==6.0.3\nsubmitit==1.5.4\n"
    assert merged(old, frozen) == f"# note\n{new}torch==2.13.0\n"
    with pytest.raises(ValueError, match="no version in 'mine @ file:///mine'"):
        merged(old, "mine @ file:///mine\n")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    assert merged(pins, "") == pins
