"""What `begin` and `save` do for a notebook that JupyterLab or papermill runs."""

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jagged_ranking import paths, provenance, results
from jagged_ranking.figures import style
from jagged_ranking.reproduce import session
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import COMMAND_VARIABLE, KEY_VARIABLE
from jagged_ranking.reproduce.run_record import RunRecord
from jagged_ranking.reproduce.session import begin
from jagged_ranking.reproduce.synthetic_log import is_made, synthetic_log

SIZES: dict[str, Any] = {"users": 30, "items": 20, "categories": 4, "events": 600}


def began(tmp_path: Path, run_id: str = "01_speed", **options: Any) -> session.Session:
    options = {"out": str(tmp_path), "preset": "smoke", "device": "cpu", "parameters": {}} | options
    return begin(run_id, **options)


def one_row() -> pd.DataFrame:
    row = results.row(
        op="toy", provider="toy", workload="w", mode="forward", metric="latency", unit="ms",
        value=1.0, run_id="01_speed",
    )  # fmt: skip
    return results.frame([row])


@pytest.mark.parametrize(
    ("run_id", "options", "said"),
    [
        (
            "01_speed",
            {"parameters": {"workloads": "A,B"}},
            "01_speed: parameter `workloads` is list[str], not 'A,B'; papermill reads a list as "
            "-y '{NAME: [a, b]}'",
        ),
        ("01_speed", {"histories": "ml1m_ge4"}, "`histories` is list[str], not 'ml1m_ge4'"),
        ("01_speed", {"parameters": {"seconds": "long"}}, "`seconds` is float, not 'long'"),
        ("04_quality", {"datasets": "ml_100k"}, "`datasets` is list[str], not 'ml_100k'"),
        (
            "04_quality",
            {"parameters": {"options": {"epochs": "3"}}},
            "04_quality, options: parameter `epochs` is int, not '3'",
        ),
        ("04_quality", {"seed": []}, "04_quality: parameter `seeds` is empty"),
        ("04_quality", {"seed": [3, 0, 3]}, "04_quality: parameter `seeds` has 3 more than once"),
        ("01_speed", {"device": "gpu"}, "device 'gpu': must be auto, cpu or cuda"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    run_id: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as refused:
        began(tmp_path / "new", run_id, **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "new").exists()


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "default_device", lambda: "cpu")
    with pytest.raises(RunError, match="device 'cuda': PyTorch finds no GPU here"):
        began(tmp_path, device="cuda")


def test_options_of_a_data_set_that_is_not_there_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_one: dict[str, Any] = {"options": {"epochs": 2}}
    own = {"ml_100k": of_one, "mi_100k": of_one}
    began(tmp_path, "04_quality", seed=[0], datasets=["ml_100k"], parameters={"own": own})
    said = "`own` of mi_100k is not used: no data set of this run is called so\n"
    assert capsys.readouterr().out == said


def test_a_path_that_leads_nowhere_is_told_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In JupyterLab it is from the folder of the notebooks, which is not where the user stands."""
    monkeypatch.chdir(tmp_path)
    wrong: list[dict[str, Any]] = [{"data": "data/mine"}, {"histories": ["data/mine"]}]
    for options in wrong:
        with pytest.raises(RunError) as refused:
            began(tmp_path, **options)
        assert str(refused.value).startswith(f"{tmp_path / 'data' / 'mine'} does not exist")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A machine that has one; which were held."""
    held: list[list[int]] = []

    @contextmanager
    def alone(numbers: Iterable[int]) -> Iterator[None]:
        held.append([*numbers])
        yield

    monkeypatch.setattr(session, "default_device", lambda: "cuda")
    monkeypatch.setattr(session, "gpus_alone", alone)
    monkeypatch.setattr(provenance, "clocks", lambda device: None)
    return held


def test_a_gpu_is_taken_where_there_is_one(tmp_path: Path, gpu: list[list[int]]) -> None:
    for asked, taken in (("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        run = began(tmp_path, device=asked)
        assert (run.device, run.begun.device) == (taken, taken)
    assert not gpu  # what smoke times counts for nothing, and waits for nobody


def test_a_gpu_is_held_for_what_is_timed(tmp_path: Path, gpu: list[list[int]]) -> None:
    began(tmp_path, device="cpu", preset="small")
    assert not gpu
    began(tmp_path, device="auto", preset="small")
    assert gpu == [[0]]


def test_a_manifest_names_all_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.DATA_VARIABLE, str(tmp_path))
    for name in ("given", "more", "named"):
        (tmp_path / name).mkdir()
        described = {"name": f"the {name}", "digest": f"of {name}"}
        (tmp_path / name / "dataset.json").write_text(json.dumps(described))
    for name in ("here", "there"):
        table = pa.table({"length": np.array([1, 2])})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    run = began(
        tmp_path / "out",
        data=str(tmp_path / "given"),
        datasets=[f"{tmp_path}/more", "named", "missing"],
        histories=["here", f"{tmp_path}/there.parquet", "missing"],
    )
    lengths = hashlib.sha256(np.array([1, 2], "<i8").tobytes()).hexdigest()
    data = {f"the {name}": f"of {name}" for name in ("given", "more", "named")}
    read = {**data, "here": lengths, "there": lengths}
    assert run.data_digests == read
    assert run.save(results.frame([]))["data_digests"] == read


def test_a_manifest_says_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"tables": 1, "first": "then", "last": "then"}
    monkeypatch.setattr(session, "kept_tables", lambda: kept)
    made = began(tmp_path).save(results.frame([]))
    assert made["kept"] == kept
    assert provenance.read_manifest(tmp_path / provenance.MANIFEST)["kept"] == kept


def test_the_first_seed_is_the_runs(tmp_path: Path) -> None:
    assert began(tmp_path, "04_quality", seed=[3, 4]).seed == 3
    assert began(tmp_path, seed=5).seed == 5


def test_a_notebook_of_ones_own_has_any_parameters(tmp_path: Path) -> None:
    assert began(tmp_path, "mine", parameters={"workloads": "A"}).id == "mine"


def test_a_folder_that_cannot_be_written_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(session.tempfile, "TemporaryFile", refuse)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        began(tmp_path)


def test_figures_of_earlier_results_do_not_stay(tmp_path: Path) -> None:
    for name in ("01_speed_old.svg", "01_speed_old.pdf", "01_speed_old.png", "01_speed_mine.png"):
        (tmp_path / name).write_text("")
    (tmp_path / "02_memory_old.svg").write_text("")
    run = began(tmp_path)
    assert (tmp_path / "01_speed_old.svg").exists()  # until there are other results
    run.save(one_row())
    left = {path.name for path in tmp_path.glob("*.*") if path.suffix[1:] in style.FORMATS}
    assert left == {"01_speed_mine.png", "02_memory_old.svg"}


@pytest.mark.parametrize("writer", ["results.write", "provenance.write_manifest"])
def test_what_cannot_be_saved_leaves_earlier_results_with_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    run = began(tmp_path)
    run.save(results.frame([]))
    for kind in style.FORMATS:
        (tmp_path / f"01_speed_old.{kind}").touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"jagged_ranking.{writer}", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        run.save(one_row())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_manifest_names_the_command_and_the_key_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (COMMAND_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    run = began(tmp_path, "04_quality", seed=[3, 4], parameters={"models": ["din"]})
    made = run.save(results.frame([]))
    assert (made["command"], made["run_key"]) == ("04_quality.ipynb, run by hand", "")
    assert (made["seed"], made["parameters"]) == (3, {"models": ["din"]})
    monkeypatch.setenv(COMMAND_VARIABLE, "jagged reproduce")
    monkeypatch.setenv(KEY_VARIABLE, "abc")
    made = run.save(results.frame([]))
    assert (made["command"], made["run_key"]) == ("jagged reproduce", "abc")


def test_time_of_earlier_parts_is_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunRecord("01_speed", "failed", "abc", earlier_seconds=40.0).write(tmp_path)
    run = began(tmp_path)
    for key, earlier in (("abc", 40.0), ("def", 0.0)):
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert run.save(results.frame([]))["earlier_seconds"] == earlier


def test_synthetic_logs_of_other_options_lie_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path))
    first = synthetic_log(SIZES)
    more = SIZES | {"events": 900}
    second = synthetic_log(more)
    assert first != second  # a run that reads the first would else read the second
    assert is_made(SIZES, name="synthetic")
    assert is_made(more, name="synthetic")
    assert synthetic_log(SIZES) == first


def test_no_cell_of_a_table_is_cut(tmp_path: Path) -> None:
    claim = pd.DataFrame({"this run": ["12x at 95% waste, " * 5 + "0.9x at 0%"]})
    with pd.option_context("display.max_colwidth", 50):
        assert "0.9x at 0%" not in repr(claim)
        began(tmp_path)
        assert "0.9x at 0%" in repr(claim)


def test_tables_are_shown_without_the_marks_of_markdown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[pd.DataFrame] = []
    monkeypatch.setattr(session, "display", shown.append)
    table = pd.DataFrame({"times": [2.0, 3.0], "met": ["yes", "**no**"]})
    session.show_tables([("Time of *ours*. The goal: 1.6x", table)])
    assert capsys.readouterr().out == "Time of ours. The goal: 1.6x\n"
    assert shown[0].to_dict("list") == {"times": [2.0, 3.0], "met": ["yes", "no"]}
    assert table["met"].tolist() == ["yes", "**no**"]
