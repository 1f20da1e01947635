"""`--out`: a whole data set in its place, or all as it was."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_log import FILES, SMALL, contents

from click_data import DataError, open_dataset, prepare, schema
from click_data.holding import held
from click_data.lengths import write_lengths


def test_nothing_but_the_four_files_is_left(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "deep" / "out", **SMALL)
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_same_again_is_kept_and_another_needs_force(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    before = contents(out)
    written = (out / "requests.parquet").stat().st_mtime_ns
    prepare("synthetic", out=out, **SMALL)
    assert (out / "requests.parquet").stat().st_mtime_ns == written
    with pytest.raises(DataError, match="--force"):
        prepare("synthetic", out=out, seed=1, **SMALL)
    assert contents(out) == before
    prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert contents(out) != before
    assert open_dataset(out).info["options"]["seed"] == 1


def test_a_damaged_one_is_not_taken_for_the_same(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    good = contents(out)
    (out / "requests.parquet").write_bytes(good["requests.parquet"][:-10])
    with pytest.raises(DataError, match="--force"):
        prepare("synthetic", out=out, **SMALL)
    prepare("synthetic", out=out, force=True, **SMALL)
    assert contents(out) == good


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match="not"):
            prepare("synthetic", out=out, force=True, **SMALL)
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    prepare("synthetic", out=tmp_path / "empty", **SMALL)
    assert sorted(contents(tmp_path / "empty")) == FILES


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_while_writing_leaves_things_as_they_were(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if existing:
        prepare("synthetic", out=out, **SMALL)
    before = contents(out) if existing else None

    def full(path: Path) -> str:
        assert path.exists()
        raise OSError("No space left on device")

    monkeypatch.setattr(schema, "file_digest", full)
    with pytest.raises(DataError, match="No space left"):
        prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    assert before is None or contents(out) == before


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_working_directory_as_out(
    existing: bool,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare_command: Callable[..., tuple[int, str, str]],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if existing:
        prepare("synthetic", out=out, **SMALL)
        _ = open_dataset(out).histories
    before = contents(out)
    monkeypatch.chdir(out)
    if fails:
        fail_to_move(monkeypatch, "requests.parquet")
    sizes = [f"--{name}={size}" for name, size in SMALL.items()]
    code, said, err = prepare_command("synthetic", "--seed=1", *sizes, "--out=.", "--force")
    assert code == int(fails), err
    if fails:
        assert (err.count("\n"), contents(out)) == (1, before)
    else:
        assert "synthetic -> ." in said
        assert sorted(path.name for path in Path.cwd().iterdir()) == FILES
        assert open_dataset(".").info["options"]["seed"] == 1


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV])
def test_a_mount_point_as_out(
    existing: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if existing:
        prepare("synthetic", out=out, **SMALL)
    before = contents(out)
    plain = Path.replace

    def busy(self: Path, target: Path) -> Path:
        if out in (self, Path(target)):
            raise OSError(code, os.strerror(code))
        return plain(self, target)

    monkeypatch.setattr(Path, "replace", busy)
    prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert open_dataset(out).info["options"]["seed"] == 1
    assert contents(out) != before
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == out)
    again = contents(out)
    fail_to_move(monkeypatch, "requests.parquet")
    with pytest.raises(DataError, match="cannot be written"):
        prepare("synthetic", out=out, seed=2, force=True, **SMALL)
    assert contents(out) == again


def test_a_folder_in_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    plain = Path.mkdir

    def locked(self: Path, *args: Any, **options: Any) -> None:
        if self.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        plain(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", locked)
    for seed in (0, 1):
        prepare("synthetic", out=out, seed=seed, force=True, **SMALL)
        assert sorted(path.name for path in out.iterdir()) == FILES
        assert open_dataset(out).info["options"]["seed"] == seed
    with pytest.raises(DataError, match=r"new: cannot be written .*Permission denied"):
        prepare("synthetic", out=tmp_path / "new", **SMALL)


def fail_to_move(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The second table of the new ones cannot be moved; back it can."""
    plain = Path.replace

    def broken(self: Path, target: Path) -> Path:
        if self.name == name and self.parent.name.endswith(".new"):
            raise OSError(errno.EIO, "broken")
        return plain(self, target)

    monkeypatch.setattr(Path, "replace", broken)


def test_other_files_are_not_deleted_with_a_data_set(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "out", **SMALL)
    (out / "run").mkdir()
    before = contents(out)
    with pytest.raises(DataError, match=r"--force would delete: run; move them away"):
        prepare("synthetic", out=out, seed=1, force=True, **SMALL)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _left(place: Path, ending: str, number: int = 4_000_000) -> Path:
    """What a process that was killed had made beside a place."""
    return place.with_name(f".{place.name}.{number}.{ending}")


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    for left in (_left(place, "new"), place / _left(place, "new").name):
        left.mkdir(parents=True)
        (left / "requests.parquet").touch()
    others = [tmp_path / ".mine.my.new", tmp_path / ".other.12.new"]
    for other in others:
        other.mkdir()
    prepare("synthetic", out=place, **SMALL)
    assert sorted(tmp_path.iterdir()) == sorted([place, *others])
    assert sorted(contents(place)) == FILES


def test_what_a_living_process_makes_is_left_to_it(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    (theirs := _left(place, "new")).mkdir()
    with held(theirs):
        prepare("synthetic", out=place, **SMALL)
        assert theirs.is_dir()


def test_a_data_set_that_was_moved_away_when_its_process_was_killed_is_put_back(
    tmp_path: Path,
) -> None:
    place = prepare("synthetic", out=tmp_path / "mine", **SMALL)
    before = contents(place)
    place.replace(_left(place, "old"))
    with pytest.raises(DataError, match="holds another prepared data set"):
        prepare("synthetic", out=place, seed=1, **SMALL)
    assert contents(place) == before
    assert list(tmp_path.iterdir()) == [place]


def test_lengths_that_were_not_finished_are_swept(tmp_path: Path) -> None:
    folder = prepare("synthetic", out=tmp_path / "mine", **SMALL)
    (left := _left(tmp_path / "lengths.parquet", "new")).touch()
    write_lengths(folder, tmp_path / "lengths.parquet")
    assert not left.exists()
