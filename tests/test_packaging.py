"""The distribution: what the wheel holds, what depends on what, what the pins say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from processes import run_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "jagged_kernels": ROOT / "kernels" / "jagged_kernels",
    "jagged_ranking": ROOT / "src" / "jagged_ranking",
    "click_data": ROOT / "data_prep" / "click_data",
}
# jagged_kernels <- jagged_ranking -> click_data
MAY_IMPORT = {
    "jagged_kernels": set(),
    "jagged_ranking": {"jagged_kernels", "click_data"},
    "click_data": set(),
}
OF_THE_KERNELS = {"torch", "triton"}


def _imports(path: Path) -> set[str]:
    """Top-level names that a file imports, lazily or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package):
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files
    for path in files:
        others = _imports(path) & set(PACKAGES) - {package}
        assert others <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {others}"


def test_the_kernels_need_torch_and_triton_only():
    for path in PACKAGES["jagged_kernels"].rglob("*.py"):
        outside = _imports(path) - set(sys.stdlib_module_names) - {"jagged_kernels"}
        assert outside <= OF_THE_KERNELS, f"{path.relative_to(ROOT)} imports {outside}"


def test_importing_the_kernels_imports_no_one_elses_tensors():
    """What converts from and to other libraries asks for them when it is called."""
    code = "import sys, jagged_kernels; print(sorted({'torchrec', 'pyarrow'} & set(sys.modules)))"
    found = run_python(code)
    assert found.stdout.strip() == "[]", found.stderr


def test_no_package_beside_the_three():
    """A stray __init__.py would make an importable `kernels`, `src` or `data_prep`."""
    assert not [
        root for root in ("kernels", "src", "data_prep") if (ROOT / root / "__init__.py").exists()
    ]


def test_the_wheel_holds_the_three_packages_whole(tmp_path):
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{package}/{path.relative_to(folder).as_posix()}"
                assert name in held, f"{name} is not in the wheel"
    tops = {name.split("/")[0] for name in held if not name.split("/")[0].endswith(".dist-info")}
    assert tops == set(PACKAGES)


def test_every_dependency_has_an_exact_pin_without_an_address():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\-]+==[\w.!]+", line) for line in pins)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for needed in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        name = re.match(r"[\w.\-]+", needed)
        assert name is not None
        assert name[0].lower().replace("_", "-") in pinned, f"{needed} is not in constraints.txt"
