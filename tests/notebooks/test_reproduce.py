"""`jagged reproduce`: what is fresh is skipped, what fails is named, the report has everything."""

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jagged_ranking.cli import main
from jagged_ranking.figures import style
from jagged_ranking.reproduce import run_data
from jagged_ranking.reproduce.freshness import is_fresh, run_key
from jagged_ranking.reproduce.run_record import RunRecord


@pytest.fixture
def reproduce(checkout: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Run `jagged reproduce` on the checkout's data: (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["reproduce", "--data", str(checkout / "data"), *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


@pytest.mark.usefixtures("in_this_process")
def test_a_second_run_skips_what_is_fresh(checkout, reproduce):
    status, out, err = reproduce("--only", "01")
    assert status == 0, err
    assert "running  01_good" in out
    record = checkout / "figures" / "runs" / "smoke" / "01_good" / "run.json"
    first = record.read_bytes()

    status, out, _ = reproduce("--only", "01")
    assert status == 0
    assert "fresh    01_good" in out
    assert "running" not in out
    assert record.read_bytes() == first
    assert out.splitlines()[-2].startswith("figures: ")
    assert out.splitlines()[-1] == f"report: {checkout / 'figures' / 'report.html'}"

    plan = reproduce("--dry-run")[1].splitlines()
    assert [line.split() for line in plan[1:-1]] == [["fresh", "01_good"], ["run", "02_bad"]]
    assert plan[0].startswith("there   data: ")
    forced = reproduce("--dry-run", "--force", "--only", "01")[1]
    assert "run     01_good" in forced
    assert record.read_bytes() == first

    (checkout / "notebooks" / "params" / "smoke.yaml").write_text("01_good: {count: 6}\n")
    assert "run     01_good" in reproduce("--dry-run", "--only", "01")[1]
    assert record.read_bytes() == first
    assert "running  01_good" in reproduce("--only", "01")[1]
    second = record.read_bytes()
    assert second != first
    assert "running  01_good" in reproduce("--only", "01", "--force")[1]
    assert record.read_bytes() != second

    key = json.loads(record.read_text())["key"]
    assert is_fresh(record.parent, key)
    table = record.parent / "results.parquet"
    table.write_bytes(table.read_bytes()[:-100])  # a copy that was cut off
    assert not is_fresh(record.parent, key)
    assert reproduce("--only", "02")[0] == 1  # the report is of all
    page = (checkout / "figures" / "report.html").read_text()
    assert "results.parquet: not a readable Parquet file" in page
    assert "running  01_good" in reproduce("--only", "01")[1]
    assert is_fresh(record.parent, key)
    table.unlink()
    assert not is_fresh(record.parent, key)


def test_the_key_follows_source_parameters_code_and_data(checkout):
    notebook, data = checkout / "notebooks" / "01_good.ipynb", checkout / "data"
    parameters = {"count": 1, "out": "a", "data": "b"}
    key = run_key(notebook, parameters, data)
    assert key == run_key(notebook, {"count": 1, "out": "elsewhere"}, data)
    others = {run_key(notebook, {"count": 2}, data), run_key(notebook, parameters, None)}

    content = json.loads(notebook.read_text())
    content["cells"][2]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "hi"}]
    notebook.write_text(json.dumps(content))
    assert run_key(notebook, parameters, data) == key  # outputs do not count
    content["cells"][2]["source"] = "x = 1"
    notebook.write_text(json.dumps(content))
    others.add(run_key(notebook, parameters, data))

    (checkout / "src").mkdir()
    (checkout / "src" / "new.py").write_text("x = 1\n")
    others.add(run_key(notebook, parameters, data))
    (data / "dataset.json").write_text(json.dumps({"name": "toy", "digest": "def"}))
    others.add(run_key(notebook, parameters, data))
    (data / "dataset.json").write_text(json.dumps({"name": "other", "digest": "def"}))
    others.add(run_key(notebook, parameters, data))  # results say the name
    assert len(others | {key}) == 7


def test_code_that_only_draws_is_not_in_the_key(checkout, add_notebook, whole_cells):
    notebook = add_notebook("01_speed", whole_cells)
    key = run_key(notebook, {}, None)
    for room, same in (("figures", True), ("training", True), ("measure/providers", False)):
        new = checkout / "src" / "jagged_ranking" / room / "new.py"
        new.parent.mkdir(parents=True)
        new.write_text("x = 1\n")
        assert (run_key(notebook, {}, None) == key) == same, room


@pytest.mark.usefixtures("in_this_process")
def test_figures_of_a_fresh_run_are_drawn_as_code_draws_today(
    checkout, reproduce, add_notebook, good_cells, write_quality, monkeypatch
):
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    add_notebook("04_quality", good_cells)
    assert reproduce("--only", "04")[0] == 0
    folder = checkout / "figures" / "runs" / "smoke" / "04_quality"
    write_quality(folder)  # what there is to draw
    drawing = checkout / "src" / "jagged_ranking" / "figures" / "new.py"
    drawing.parent.mkdir(parents=True)
    for source in ("x = 1\n", "x = 2\n"):
        assert "fresh    04_quality" in reproduce("--only", "04")[1]
        assert not list(folder.glob("*_scores.svg"))  # nothing is drawn where nothing changed
        drawing.write_text(source)
        assert "fresh    04_quality" in reproduce("--only", "04")[1]
        (drawn,) = folder.glob("*_scores.svg")
        drawn.unlink()


def test_a_failed_notebook_is_named_and_the_others_go_on(checkout, reproduce):
    good = (checkout / "notebooks" / "01_good.ipynb").read_text()
    (checkout / "notebooks" / "03_after.ipynb").write_text(good.replace("01_good", "03_after"))
    assert main(["run", "01", "--preset", "smoke", "--data", str(checkout / "data")]) == 0
    status, out, err = reproduce("-n", "2")
    assert status == 1
    assert "fresh    01_good" in out  # whoever ran it
    assert "2 of 3 notebooks are good" in out
    assert re.search(r"FAILED 02_bad: cell 5, In \[4\], `raise KeyError.*KeyError", err)
    assert err.count("FAILED") == 1
    for name in ("01_good", "03_after"):
        assert (checkout / "figures" / "runs" / "smoke" / name / "results.parquet").is_file()
    assert "Traceback" not in out + err

    page = (checkout / "figures" / "report.html").read_text()
    assert page.count("<svg") == 2  # every figure
    assert 'id="01_good-0-a"' in page  # ids are unique in the page
    assert 'href="#03_after-0-a"' in page
    assert re.search(r"status failed.*\n?.*02_bad.*KeyError", page)
    assert "A smoke run" in page
    assert "http" not in re.sub(r'xmlns[:\w]*="[^"]*"', "", page)  # nothing is loaded


@pytest.mark.usefixtures("in_this_process")
def test_results_of_a_failed_notebook_are_not_shown(checkout, reproduce):
    assert reproduce("--only", "01")[0] == 0
    notebook = checkout / "notebooks" / "01_good.ipynb"
    notebook.write_text(notebook.read_text().replace("float(count)", "float('x')"))
    status, _, err = reproduce("--only", "01")
    assert status == 1
    assert "FAILED 01_good: cell 4" in err
    page = (checkout / "figures" / "report.html").read_text()
    assert "<svg" not in page
    assert "ValueError" in page


@pytest.mark.usefixtures("in_this_process")
def test_what_failed_is_named_where_there_can_be_no_report(reproduce, monkeypatch):
    def full(settings):
        raise OSError(errno.ENOSPC, "No space left on device", str(settings.report))

    monkeypatch.setattr("jagged_ranking.reproduce.report.write_report", full)
    status, _, err = reproduce("--only", "02")
    assert status == 1
    assert "FAILED 02_bad: cell 5" in err
    assert re.search(r"\njagged: .*No space left on device: '.*report\.html'\n\Z", err)


def test_without_its_data_a_notebook_has_to_run(checkout, capfd):
    folder = checkout / "figures" / "runs" / "smoke" / "01_good"
    folder.mkdir(parents=True)
    RunRecord("01_good", "ok", "abc").write(folder)  # of a log that was deleted since
    assert main(["reproduce", "--only", "01", "--dry-run"]) == 0
    made, notebook, _ = capfd.readouterr().out.splitlines()
    assert made.startswith("make    data: ")
    assert notebook == "run     01_good"


def test_data_that_cannot_be_made_is_a_failure(checkout, capfd, monkeypatch):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "log.parquet")

    folder = checkout / "figures" / "runs" / "smoke" / "01_good"
    folder.mkdir(parents=True)
    RunRecord("01_good", "ok", "abc").write(folder)  # of an earlier run
    monkeypatch.setattr(run_data, "synthetic_log", full)
    assert main(["reproduce", "--only", "01"]) == 1
    out, err = capfd.readouterr()
    assert "0 of 1 notebooks are good" in out
    assert re.search(r"FAILED data: .*No space left on device: 'log.parquet'", err)
    assert "FAILED 01_good: did not run" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "no preset `huge`"),
        (["--only", "07"], "`07` is not a notebook"),
        (["-n", "0"], "at least one"),
        (["--data", "/nowhere"], "`jagged prepare SOURCE --from PATH --out DIR`"),
    ],
)
def test_a_wrong_request_runs_nothing(checkout, reproduce, arguments, message):
    status, out, err = reproduce(*arguments)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (checkout / "figures").exists()
