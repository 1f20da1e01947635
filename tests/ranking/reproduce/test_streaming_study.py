"""Training from disk as a study, on tiny logs, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jagged_ranking import results
from jagged_ranking.reproduce import streaming_study, streaming_worker
from jagged_ranking.reproduce.lab import measured_streaming
from jagged_ranking.reproduce.streaming_worker import PeakMemory

OPTIONS: dict[str, Any] = {"model": "mean_pool", "dim": 8, "heads": 1, "batch_size": 16}


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAGGED_BUILD", str(tmp_path / "build"))
    return tmp_path / "build"


def measured(logs: list[int], **changes: Any) -> Any:
    given: dict[str, Any] = {"options": OPTIONS, "steps": 4, "device": "cpu", "cpu_threads": 1}
    return measured_streaming(logs, **{**given, "seed": 0, "run_id": "here", **changes})


def test_a_log_is_prepared_trained_from_and_deleted(build: Path) -> None:
    table = measured([3000])
    assert set(table["status"]) == {"ok"}
    found = table.set_index("metric")["value"]
    assert 0 < found["started_memory"] < found["anonymous_memory"] <= found["validated_memory"]
    assert found["file_memory"] > 0
    assert 0 < found["wait_share"] < 1
    rows = results.select(table, metric=["step_time", "samples_per_second"]).set_index("metric")
    assert [len(of) for of in rows["samples"]] == [4, 4]
    requests = [ms * rate / 1e3 for ms, rate in zip(*rows["samples"], strict=True)]
    assert requests == pytest.approx([16.0] * 4)
    facts = json.loads(table["config"].iloc[0])
    assert facts["events"] == 3000
    assert 0 < facts["requests"] < 3000
    assert facts["log_bytes"] > 3000 * 16
    assert list((build / "data").iterdir()) == []


def test_waiting_is_a_share_of_the_time_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    log = {"log_bytes": 1, "requests": 2, "digest": "d"}
    log |= dict.fromkeys(("prepare_seconds", "open_seconds", "prepare_memory"), 1.0)
    found = dict.fromkeys(("start_seconds", "started_memory", "anonymous_memory"), 2.0)
    found |= dict.fromkeys(("validated_memory", "file_memory"), 3.0)
    steps = {"step_time": [10.0, 30.0, 20.0], "wait": [1.0, 0.0, 2.0], "requests": [5, 6, 4]}
    said = {"prepare": log, "train": {**found, **steps}}
    monkeypatch.setattr(streaming_study, "_said_by", lambda task, *_: dict(said[task]))
    table = measured([3000]).set_index("metric")
    assert table.loc["wait_share", "value"] == pytest.approx(3 / 60)
    assert table.loc["step_time", "value"] == 20.0
    assert table.loc["samples_per_second", "samples"] == pytest.approx([500.0, 200.0, 200.0])


def test_a_log_too_short_for_its_steps_is_a_row_that_says_so() -> None:
    (row,) = measured([300], steps=1000).to_dict("records")
    assert row["status"] == "error"
    assert "1010 asked" in row["message"]


@pytest.mark.parametrize(
    ("changes", "said"), [({"steps": 0}, "at least 1"), ({"options": {"dims": 8}}, "dims")]
)
def test_bad_options_are_refused_before_anything_is_made(
    changes: dict[str, Any], said: str, build: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        measured([3000], **changes)
    assert not build.exists()
    assert measured([]).empty


def test_memory_is_the_peak_of_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_worker, "_EVERY", 3600.0)  # so that only we look
    memory = PeakMemory()
    before = memory.look()
    held = bytearray(b"x" * 2**26)
    memory.look()
    del held
    memory.look()
    assert memory.anonymous - before > 2**26 * 0.9
