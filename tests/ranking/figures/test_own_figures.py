"""docs/figures.md: figures and tables of one's own, drawn from the committed results."""

import re
from pathlib import Path
from typing import Any

import pytest

from jagged_ranking.figures import style

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")


def test_the_documented_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").symlink_to(ROOT / "figures")
    # What the page changes is as it was for the next test.
    for name in ("LOOKS", "RC"):
        monkeypatch.setattr(style, name, dict(getattr(style, name)))
    monkeypatch.setattr(style, "FORMATS", style.FORMATS)
    told: dict[str, Any] = {}
    own, panel, table = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(own, told)
    assert set(told["table"]["provider"]) == set(told["shown"])
    exec(panel, told)
    assert {path.name for path in told["drawn"]} == {
        path.name for path in (tmp_path / "paper").iterdir()
    }
    fonts = {
        font for path in told["drawn"] for font in re.findall(rb"DejaVu\w+", path.read_bytes())
    }
    assert fonts
    assert all(font.startswith(b"DejaVuSerif") for font in fonts)
    width, height = told["figure"].get_size_inches()
    assert (width, height) == (3.33, 2.4)
    exec(table, told)
    rows = [row for row in told["latex"].splitlines() if row.endswith(r"\\")]
    assert "JFA" in rows[0]
    assert not any(re.search(r"(?<!\\)%", row) for row in rows)
    assert len({row.count(" & ") for row in rows}) == 1


def test_every_kind_of_figure_is_named() -> None:
    (said,) = re.findall(r"`draw` is in each module of .*?: (.*?)\. ", PAGE)
    folder = ROOT / "src" / "jagged_ranking" / "figures"
    draw = {path.stem for path in folder.glob("*.py") if "\ndef draw(" in path.read_text("utf-8")}
    assert set(re.findall(r"`(\w+)`", said)) == draw
