"""Figures as they are drawn, before they are files; and the page of goals."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from left_results import save_run

from jagged_ranking.figures import goals, style


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


def goals_before_and_after(
    table: pd.DataFrame, made_by: dict[str, Any], title: str, folder: Path
) -> tuple[str, str]:
    """What the page of goals says from a title on, without results and with this table."""

    def said() -> str:
        return goals.goal_tables(folder).partition(f"### {title}")[2]

    before = said()
    save_run(folder / made_by["id"], table, {**made_by, "preset": "paper"})
    return before, said()
