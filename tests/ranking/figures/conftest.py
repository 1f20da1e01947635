"""Figures as they are drawn, before they are files."""

from pathlib import Path
from typing import Any

import pytest

from jagged_ranking.figures import style


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by file stem, kept instead of saved."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, out: Path, stem: str, title: str) -> list[Path]:
        kept[stem] = figure
        return []

    monkeypatch.setattr(style, "save", keep)
    return kept
