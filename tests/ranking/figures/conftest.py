"""Figures as they are drawn, before they are files."""

from typing import Any

import pytest
from kept_figures import keep_figures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by file stem, kept instead of saved."""
    return keep_figures(monkeypatch)[0]
