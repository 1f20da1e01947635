"""Manifests: code hash, git state, test status, whole files."""

import json
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from jagged_ranking import provenance
from jagged_ranking.code_roots import CODE_FOLDERS, code_hash, has_changed, roots_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Three packages of one file each, and a folder that is not code."""
    for folder in (*CODE_FOLDERS, "notebooks"):
        (tmp_path / folder / "inner").mkdir(parents=True)
        (tmp_path / folder / "inner" / "a.py").write_text(f"x = '{folder}'\n")
    return tmp_path


def test_git_state(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAGGED_GIT_SHA", raising=False)
    assert provenance.git_state(checkout) == {"sha": "unknown", "dirty": None}
    monkeypatch.setenv("JAGGED_GIT_SHA", "abc123-dirty")
    assert provenance.git_state(checkout) == {"sha": "abc123", "dirty": True}

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(checkout), *who, *arguments], check=True)

    git("init", "-q")
    assert provenance.git_state(checkout) == {"sha": "abc123", "dirty": True}  # no commit yet
    git("add", ".")
    git("commit", "-qm", "one")
    state = provenance.git_state(checkout)
    assert len(state["sha"]) == 40
    assert state["dirty"] is False
    (checkout / "lengths").mkdir()
    (checkout / "lengths" / "log.parquet").touch()
    (checkout / "src" / "notes.txt").touch()
    assert provenance.git_state(checkout)["dirty"] is False  # that is no code
    new = checkout / "src" / "inner" / "new.py"
    new.touch()
    assert provenance.git_state(checkout)["dirty"] is True
    new.unlink()
    assert provenance.git_state(checkout)["dirty"] is False
    notebook = checkout / "notebooks" / "13_new.ipynb"
    notebook.touch()
    assert provenance.git_state(checkout)["dirty"] is True
    notebook.unlink()
    (checkout / "src" / "inner" / "a.py").write_text("changed")
    assert provenance.git_state(checkout)["dirty"] is True


def test_results_that_a_run_writes_do_not_change_the_code(checkout: Path) -> None:
    results = checkout / "figures" / "01_speed" / "manifest.json"
    results.parent.mkdir(parents=True)
    results.write_text("old")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(checkout), *who, *command], check=True)
    results.write_text("new")
    assert provenance.git_state(checkout)["dirty"] is False


def test_test_status_counts_for_exactly_the_kernels_that_were_tested(checkout: Path) -> None:
    path = checkout / provenance.TEST_STATUS
    assert provenance.suite_status(checkout) == {"outcome": "unknown"}
    path.parent.mkdir()
    tested = code_hash(checkout, provenance.TESTED)
    status = {"suite": "all", "outcome": "passed", "code_hash": tested}
    path.write_text(json.dumps(status))
    assert provenance.suite_status(checkout) == status
    (checkout / "src" / "inner" / "a.py").write_text("changed")
    assert provenance.suite_status(checkout) == status
    (checkout / "kernels" / "inner" / "a.py").write_text("changed")
    assert provenance.suite_status(checkout) == {"outcome": "unknown"}
    path.write_text("{broken")
    assert provenance.suite_status(checkout) == {"outcome": "unknown"}


def test_manifest_says_what_is_needed_and_survives_a_round_trip(
    checkout: Path, tmp_path: Path
) -> None:
    made = provenance.manifest(
        preset="smoke",
        parameters={"folder": tmp_path, "rounds": 3},
        begun=provenance.begin("01_speed", root=checkout),
        seed=7,
        data_digests={"toy": "d1"},
        command="jagged run 01_speed",
    )
    path = provenance.write_manifest(made, tmp_path / "out" / "manifest.json")
    assert provenance.read_manifest(path) == made
    assert made["parameters"] == {"folder": str(tmp_path), "rounds": 3}
    assert made["device"].startswith("CPU (")
    assert made["clocks"] == {"before": None, "after": None}
    assert made["versions"]["torch"]
    assert made["code_roots"] == list(roots_of("01_speed"))
    assert made["code_hash"] == code_hash(checkout, roots_of("01_speed"))
    assert made["wall_seconds"] >= 0


def test_a_manifest_says_what_it_was_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot, seconds = [{"sm_mhz": 345}, {"sm_mhz": 1980}], [10.0, 72.04]
    monkeypatch.setattr(provenance, "clocks", lambda device: hot.pop(0))
    monkeypatch.setattr(provenance, "device_name", lambda device: f"the name of {device}")
    monkeypatch.setattr(provenance.time, "monotonic", lambda: seconds.pop(0))
    status = {"outcome": "passed", "code_hash": code_hash(checkout, provenance.TESTED)}
    (checkout / "build").mkdir()
    (checkout / provenance.TEST_STATUS).write_text(json.dumps(status))
    made = provenance.manifest(
        preset="small",
        parameters={},
        begun=provenance.begin("04_quality", "cuda:1", root=checkout),
        seed=7,
        data_digests={"toy": "d1"},
        command="jagged run 04",
        run_key="abc",
    )
    told = {"id": "04_quality", "preset": "small", "seed": 7, "command": "jagged run 04"}
    told |= {"data_digests": {"toy": "d1"}, "run_key": "abc", "tests": status}
    told |= {"device": "the name of cuda:1", "device_type": "cuda", "wall_seconds": 62.0}
    told |= {"clocks": {"before": {"sm_mhz": 345}, "after": {"sm_mhz": 1980}}}
    assert {name: made[name] for name in told} == told


def test_times_are_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        assert provenance.utc(0.0) == "1970-01-01T00:00:00Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_peer_may_lie_there_without_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = {"there-without-version": "there_without_version", "not-there": "not_there"}
    (tmp_path / "there_without_version.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(provenance, "PEERS", peers)
    found = provenance.versions()
    assert (found["there-without-version"], found["not-there"]) == ("unknown", None)
    assert found["pandas"] == pd.__version__


def test_the_driver_decides_results_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "driver_version", lambda: "580.1")
    for there, driver in ((True, "580.1"), (False, None)):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert provenance.versions()["driver"] == driver


def test_a_manifest_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    provenance.write_manifest({"id": "01_speed", "preset": "smoke"}, path)
    before = path.read_bytes()
    write = Path.write_text

    def cut_off(self: Path, text: str, *given: str) -> None:
        write(self, text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(OSError, match="No space left"):
        provenance.write_manifest({"id": "02_memory", "preset": "small"}, path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before


def test_a_manifest_names_the_code_that_the_work_began_with(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAGGED_GIT_SHA", "abc123")
    begun = provenance.begin("01_speed", root=checkout)
    before = code_hash(checkout, roots_of("01_speed"))
    # What somebody does who waits for the end.
    monkeypatch.setenv("JAGGED_GIT_SHA", "def456-dirty")
    (checkout / "kernels" / "jagged_kernels" / "core").mkdir(parents=True)
    (checkout / "kernels" / "jagged_kernels" / "core" / "a.py").write_text("changed")
    made = provenance.manifest(preset="smoke", parameters={}, begun=begun)
    assert (made["git_sha"], made["git_dirty"]) == ("abc123", False)
    assert made["code_hash"] == before
    assert has_changed(made, checkout)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"preset": "smoke"}',
        '{"id": "01_speed"}',
        '{"id": "01_speed", "preset": 3}',
    ],
)
def test_what_is_no_manifest_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json: not a manifest"):
        provenance.read_manifest(path)
