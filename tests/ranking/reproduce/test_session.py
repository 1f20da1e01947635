"""What `begin` and `save` do for a notebook that JupyterLab or papermill runs."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jagged_ranking import paths, results
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
    table: pd.DataFrame = results.frame(
        [
            results.row(
                op="toy", provider="toy", workload="w", mode="forward", metric="latency",
                unit="ms", value=1.0, run_id="01_speed",
            )
        ]
    )  # fmt: skip
    run.save(table)
    left = {path.name for path in tmp_path.glob("*.*") if path.suffix[1:] in style.FORMATS}
    assert left == {"01_speed_mine.png", "02_memory_old.svg"}


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
