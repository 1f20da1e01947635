"""What `jagged reproduce` has its notebooks read: the data given, or some users of it."""

from pathlib import Path
from typing import Any

import pytest

from click_data import open_dataset, prepare
from jagged_ranking.cli import main
from jagged_ranking.reproduce.parameters import read_preset
from jagged_ranking.reproduce.run_data import SAMPLE
from jagged_ranking.reproduce.run_record import read_record
from jagged_ranking.reproduce.settings import make_settings

SIZES: dict[str, Any] = {"users": 40, "items": 60, "categories": 6, "events": 800}


@pytest.fixture
def data(checkout: Path) -> Path:
    return prepare("synthetic", out=checkout / "mine", **SIZES)


def _preset(checkout: Path, sample: str) -> None:
    (checkout / "notebooks" / "params" / "smoke.yaml").write_text(f"sample: {sample}\n")


def _reproduce(*arguments: str) -> int:
    return main(["reproduce", "--only", "01", *arguments])


@pytest.mark.usefixtures("in_this_process")
def test_smoke_takes_some_users_of_larger_data(
    checkout: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _preset(checkout, "{requests: 200, longest: 400}")
    assert _reproduce("--data", str(data), "--dry-run") == 0
    assert "make    data: " in (said := capfd.readouterr().out)
    assert f"a sample of the users of {data}" in said
    assert not (checkout / "build" / "data").exists()

    assert _reproduce("--data", str(data)) == 0
    assert "running  data: " in capfd.readouterr().out
    record = read_record(checkout / "figures" / "runs" / "smoke" / "01_good")
    assert record is not None
    sample = open_dataset(record.parameters["data"])
    assert sample.info["sampled"]["of"] == open_dataset(data).digest
    whole = open_dataset(data).info["counts"]["requests"]
    assert 200 <= sum(sample.info["counts"]["requests"].values()) < sum(whole.values())
    assert sample.name.endswith("of 40 users)")

    assert make_settings(data=data).data.is_there()
    _preset(checkout, "{requests: 300, longest: 400}")
    other = make_settings(data=data).data
    assert not other.is_there()
    other.make()
    assert open_dataset(other.folder).num_users > sample.num_users


def test_samples_of_other_data_or_by_other_code_lie_beside_each_other(
    checkout: Path, data: Path
) -> None:
    _preset(checkout, "{requests: 200, longest: 400}")
    found = [make_settings(data=data).data.folder]
    assert make_settings(data=data).data.folder == found[0]
    (checkout / "data_prep").mkdir()
    (checkout / "data_prep" / "sampling.py").write_text("x = 1\n")
    found.append(make_settings(data=data).data.folder)
    other = prepare("synthetic", out=checkout / "other", **{**SIZES, "events": 900})
    found.append(make_settings(data=other).data.folder)
    assert len(set(found)) == 3


def test_data_that_is_no_larger_is_read_itself(checkout: Path, data: Path) -> None:
    for sample in ("{requests: 10_000, longest: 10}", "{}"):
        _preset(checkout, sample)
        found = make_settings(data=data).data
        assert (found.folder, found.is_there()) == (data, True)


def test_a_preset_that_says_something_else_of_samples_is_refused(
    checkout: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _preset(checkout, "{users: 10}")
    assert _reproduce("--data", str(data)) == 1
    line = "jagged: preset smoke: `sample` needs requests and longest, and nothing else\n"
    assert capfd.readouterr().err == line


def test_only_smoke_takes_samples() -> None:
    presets = Path(__file__).parents[2] / "notebooks" / "params"
    sampling = [
        path.stem for path in presets.glob("*.yaml") if SAMPLE in read_preset(path.stem, presets)
    ]
    assert sampling == ["smoke"]
