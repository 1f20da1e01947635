"""`jagged run` executes a notebook for real, and says where and why one fails."""

import errno
import json
import sys

import nbformat
import pytest

from jagged_ranking import devices, processes, results
from jagged_ranking.cli import main
from jagged_ranking.reproduce import notebook, tasks
from jagged_ranking.reproduce.plan import make_plan


def test_a_notebook_runs_with_its_parameters(checkout, tmp_path, capfd):
    arguments = ["--preset", "smoke", "--data", str(checkout / "data"), "-p", "lengths=3,4"]
    assert main(["run", "01", *arguments, "--out", str(tmp_path / "o"), "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("01_good: ")
    assert err == ""
    folder = tmp_path / "o" / "01_good"
    assert results.read(folder / "results.parquet")["value"].tolist() == [5.0]  # the preset's
    record = json.loads((folder / "run.json").read_text())
    assert (record["id"], record["status"], record["error"]) == ("01_good", "ok", "")
    assert record["parameters"]["lengths"] == [3, 4]
    assert record["parameters"]["data"] == str(checkout / "data")
    executed = nbformat.read(folder / "01_good.ipynb", as_version=4)
    assert "lengths = [3, 4]" in "".join(cell.source for cell in executed.cells)


@pytest.mark.parametrize(
    ("device", "preset", "given", "told"),
    [
        ("cpu", "paper", (), True),
        ("cpu", "paper", ("-p", "device=cpu"), False),
        ("cuda", "paper", (), False),
        ("cpu", "smoke", (), False),
    ],
)
def test_a_preset_for_a_gpu_says_that_there_is_none(
    device, preset, given, told, checkout, add_notebook, monkeypatch, capfd
):
    (checkout / "notebooks" / "params" / "paper.yaml").write_text("03_quick: {}\n")
    add_notebook("03_quick", ["# Quick", 'device: str = "auto"', "1 + 1"])
    monkeypatch.setattr(devices, "default_device", lambda: device)
    assert main(["run", "03_quick", "--preset", preset, "--quiet", *given]) == 0
    said = "preset paper is sized for a data-centre GPU, and PyTorch finds none here"
    assert (said in capfd.readouterr().err) == told


def test_a_run_by_hand_leaves_results_and_manifest_in_the_checkout(
    checkout, add_notebook, whole_cells
):
    slow = ("datasets", "nbformat", "papermill", "polars")  # what it needs none of
    look = f"import sys\nprint([name for name in {slow} if name in sys.modules])\nimport datasets"
    add_notebook("03_whole", [*whole_cells, look])
    assert main(["run", "03_whole", "--data", str(checkout / "data")]) == 0
    folder = checkout / "figures" / "runs" / "interactive" / "03_whole"
    assert results.read(folder / "results.parquet")["value"].tolist() == [3.0]  # the default
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["preset"] == "interactive"
    assert manifest["parameters"] == {"count": 3}
    assert manifest["data_digests"] == {"toy": "abc"}
    assert manifest["run_key"] == json.loads((folder / "run.json").read_text())["key"]
    executed = nbformat.read(folder / "03_whole.ipynb", as_version=4)
    said = [o.text for c in executed.cells for o in c.get("outputs", []) if "text" in o]
    assert said == ["[]\n"]  # and no word of widgets, which are missing


def test_the_kernel_is_this_interpreter_in_an_empty_folder(add_notebook, checkout, capfd):
    check = (
        "import os, sys\n"
        f"assert sys.executable == {sys.executable!r}, sys.executable\n"
        "assert not [name for name in os.listdir() if name.endswith('.ipynb')]\n"
        f"assert not os.getcwd().startswith({str(checkout)!r})"
    )
    add_notebook("03_where", ["# A check", "count = 1", check])
    assert main(["run", "03_where"]) == 0, capfd.readouterr().err


def test_a_deep_folder_for_temporary_files(checkout, tmp_path, monkeypatch, capfd):
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert main(["run", "01_good", "--preset", "smoke"]) == 0, capfd.readouterr().err


def test_data_is_looked_for_where_the_user_stood(add_notebook, tmp_path, monkeypatch, capfd):
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLICK_DATA_DIR", "logs")
    check = (
        "from jagged_ranking import paths\n"
        f"assert str(paths.DATA) == {str(tmp_path / 'logs')!r}, paths.DATA"
    )
    add_notebook("03_data", ["# A check", "count = 1", check])
    assert main(["run", "03_data"]) == 0, capfd.readouterr().err


def test_paths_mean_where_the_user_stood(
    checkout, add_notebook, whole_cells, tmp_path, monkeypatch, capfd
):
    check = (
        f"from jagged_ranking import paths\nassert str(paths.ROOT) == {str(checkout)!r}, paths.ROOT"
    )
    add_notebook("03_whole", [*whole_cells, check])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAGGED_HOME", "checkout")
    arguments = ["-p", "out=mine", "-p", "data=checkout/data"]
    assert main(["run", "03_whole", *arguments]) == 0, capfd.readouterr().err
    for name in ("results.parquet", "manifest.json", "run.json", "03_whole.ipynb"):
        assert (tmp_path / "mine" / name).is_file(), name
    manifest = json.loads((tmp_path / "mine" / "manifest.json").read_text())
    assert manifest["data_digests"] == {"toy": "abc"}


def test_data_by_path_are_those_where_the_user_stood(checkout, add_notebook, tmp_path, monkeypatch):
    lists = "histories: list[str] = []\ndatasets: list[str] = []"
    add_notebook("03_real", ["# A toy", lists, "x = 1"])
    monkeypatch.chdir(tmp_path)
    for name in ("histories", "datasets"):
        plan = make_plan("03_real", assignments=[f"{name}=checkout/data,name"])
        assert plan.parameters[name] == [str(checkout / "data"), "name"]


@pytest.mark.usefixtures("checkout")
def test_no_folder_is_the_default_one(tmp_path):
    plan = make_plan("01_good", assignments=["out=none"], out=tmp_path / "o")
    assert plan.folder == tmp_path / "o" / "01_good"
    assert plan.parameters["out"] == str(plan.folder)


def test_one_run_at_a_time_in_a_folder(checkout, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(processes, "BUSY_SECONDS", 0.0)
    for command in (["run", "01"], ["reproduce", "--only", "01"]):
        arguments = [*command, "--data", str(checkout / "data"), "--out", str(tmp_path / "o")]
        busy = tmp_path / "o" / ("01_good" if command[0] == "run" else "")
        busy.mkdir(parents=True, exist_ok=True)
        with processes.alone_in(busy):
            assert main(arguments) == 1
        out, err = capfd.readouterr()
        said = f"jagged: {busy}: another run writes there; --out takes another folder\n"
        assert (out, err) == ("", said)
        assert not list((tmp_path / "o").rglob("*.json"))


def test_a_run_that_is_killed_is_never_taken_for_a_good_one(checkout, tmp_path, monkeypatch):
    """Nothing can be written down then: it is before."""
    folder = tmp_path / "o" / "01_good"
    seen = []

    def look(*given, **options):
        seen.append(json.loads((folder / "run.json").read_text()))
        return ""

    monkeypatch.setattr(notebook, "execute", look)
    for _ in range(2):
        assert main(["run", "01", "--out", str(tmp_path / "o"), "--quiet"]) == 0
        assert json.loads((folder / "run.json").read_text())["status"] == "ok"
    assert [(one["status"], one["error"]) for one in seen] == [("failed", "interrupted")] * 2
    assert seen[0]["key"] == make_plan("01", out=tmp_path / "o").key()


def test_a_full_disk_is_named(checkout, tmp_path, monkeypatch, capfd):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device")  # as `write` of a file raises it

    monkeypatch.setattr(notebook, "execute_notebook", full)
    assert main(["run", "01", "--out", str(tmp_path / "o"), "--quiet"]) == 1
    err = capfd.readouterr().err
    said = f"No space left on device: '{tmp_path / 'o' / '01_good'}'\n"
    assert err.startswith("jagged: ")
    assert err.endswith(said)
    record = json.loads((tmp_path / "o" / "01_good" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "No space left on device" in record["error"]  # and not as if somebody had stopped it


def test_a_cell_that_finds_a_full_disk_names_it(checkout, add_notebook, whole_cells, capfd):
    full = (
        "import errno\nfrom pathlib import Path\nfrom jagged_ranking import results\n"
        "def write(*given):\n    raise OSError(errno.ENOSPC, 'No space left')\n"
        "results.write = write"
    )
    add_notebook("03_whole", [*whole_cells[:3], full, *whole_cells[3:]])
    assert main(["run", "03_whole", "--data", str(checkout / "data"), "--quiet"]) == 1
    folder = checkout / "figures" / "runs" / "interactive" / "03_whole"
    assert f"No space left: '{folder}'" in capfd.readouterr().err


def test_a_failure_names_notebook_cell_and_error(checkout, capfd):
    assert main(["run", "02_bad"]) == 1
    err = capfd.readouterr().err
    said = "02_bad failed: cell 5, In [4], `raise KeyError('no such\\nthing')`: KeyError:"
    assert said in err
    assert "Traceback" not in err
    folder = checkout / "figures" / "runs" / "interactive" / "02_bad"
    assert str(folder / "02_bad.ipynb") in err
    executed = nbformat.read(folder / "02_bad.ipynb", as_version=4)
    assert any(
        output.ename == "KeyError" for c in executed.cells for output in c.get("outputs", [])
    )
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"


def test_verbose_shows_the_traceback_and_what_the_kernel_prints(checkout, add_notebook, capfd):
    cells = ["# A toy", "count = 1", "print('from the kernel')", "raise KeyError('gone')"]
    add_notebook("03_bad", cells)
    for given, shown in (([], False), (["--verbose"], True)):
        assert main(["run", "03_bad", *given]) == 1
        err = capfd.readouterr().err
        assert ("Traceback (most recent call last)" in err) == shown
        assert ("from the kernel" in err) == shown
        assert "03_bad failed: cell 4" in err


def test_reproduce_hands_verbose_on(checkout, capfd, monkeypatch):
    command = ["reproduce", "--only", "02", "--data", str(checkout / "data")]
    # What is asked by the process of a notebook, in its place.
    ask = "import sys; from jagged_ranking.verbosity import is_verbose; sys.exit(3 + is_verbose())"
    monkeypatch.setattr(tasks, "_command", lambda *_: [sys.executable, "-c", ask])
    for given, status in (["--verbose"], 4), ([], 3):
        assert main([*command, *given]) == 1
        assert f"returned {status}" in capfd.readouterr().err


def test_a_kernel_that_dies_is_a_failure_of_its_cell(add_notebook, capfd):
    add_notebook("03_dies", ["# A toy", "count = 1", "x = 1", "import os; os._exit(1)", "y = 1"])
    assert main(["run", "03_dies", "-p", "count=2"]) == 1
    assert "cell 4, `import os; os._exit(1)`: the kernel died" in capfd.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3}'])
def test_what_is_not_a_notebook_is_one_line(checkout, capfd, content):
    (checkout / "notebooks" / "03_not.ipynb").write_text(content)
    assert main(["run", "03_not"]) == 1
    err = capfd.readouterr().err
    assert "not a notebook" in err
    assert err.count("\n") == 1
