"""Every malformed input is refused in one line that says what and where, and nothing is written."""

import os
import tempfile
from pathlib import Path

import pytest
from grouplens import LAYOUTS
from malformed_inputs import USAGE, Case, all_cases, text
from malformed_parquet import packed

from click_data import plain
from jagged_ranking.cli import main

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_input(
    case: Case,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case.name.startswith("no permission") and os.geteuid() == 0:
        pytest.skip("root may read and write everything")
    monkeypatch.setattr(plain, "LARGEST", 5_000_000)
    folder, scratch, made = (tmp_path / name for name in ("in", "scratch", "made"))
    for place in (folder, scratch, made):
        place.mkdir()
    # PyTorch's compiler makes a folder for itself when it is first imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    case.write(folder)
    before = _listed(tmp_path)
    try:
        code = main(case.run_with(folder, made / "out"))
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (case.code, "")
    *usage, line = printed.err.splitlines()
    assert len(usage) == (code == USAGE)
    assert line.startswith("jagged")
    assert case.expected.replace("{in}", str(folder)).replace("{out}", str(made / "out")) in line
    assert _listed(tmp_path) == before


def test_no_case_is_there_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 150


def _listed(folder: Path) -> dict[str, int]:
    """All files below a folder, with their sizes, but for what opening a data set keeps."""
    found = (path for path in sorted(folder.rglob("*")) if ".cache" not in path.parts)
    return {str(path): path.lstat().st_size for path in found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_broken_of_movielens_was_whole(layout: str, tmp_path: Path) -> None:
    (tmp_path / "ml").mkdir()
    LAYOUTS[layout](tmp_path / "ml")
    out = str(tmp_path / "out")
    assert main(["prepare", "movielens", "--from", str(tmp_path / "ml"), "--out", out]) == 0


@pytest.mark.parametrize(
    ("name", "content"), [("log.csv", text().encode()), ("log.parquet", packed())]
)
def test_what_is_broken_of_a_log_was_whole(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    out = str(tmp_path / "out")
    assert main(["prepare", "log", "--from", str(tmp_path / name), "--out", out]) == 0
