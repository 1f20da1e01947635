"""Manifests: code hash, git state, test status, whole files."""

import json
import subprocess
from pathlib import Path

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
