"""Figures as they are drawn, before they are files."""

from typing import Any

import pandas as pd
import pytest
from kept_figures import keep_figures
from made_up_results import attention_results


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by file stem, kept instead of saved."""
    return keep_figures(monkeypatch)[0]


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """Made-up results of self-attention."""
    return attention_results()
