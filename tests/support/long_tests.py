"""Where tests that take minutes stand among the others.

pytest-xdist gives each process a stretch of all tests to begin with, and whoever is done takes from
the ends of others' stretches. A long test that comes late is waited for by all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def apart(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """With those that are marked `long` spread evenly, the first in front; the others' order
    stays."""
    long = [item for item in items if item.get_closest_marker("long")]
    found = [item for item in items if not item.get_closest_marker("long")]
    for number, item in enumerate(long):
        found.insert(number * len(items) // len(long), item)
    return found
