"""Figures as they are drawn, before they are files."""

from pathlib import Path
from typing import Any

import pytest

from jagged_ranking.figures import style


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, str]]:
    """From now on figures are kept instead of saved: these and their titles by file stem."""
    figures: dict[str, Any] = {}
    titles: dict[str, str] = {}

    def save(figure: Any, out: Path, stem: str, title: str) -> list[Path]:
        figures[stem] = figure
        titles[stem] = title
        return []

    monkeypatch.setattr(style, "save", save)
    return figures, titles
