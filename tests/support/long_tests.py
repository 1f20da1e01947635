"""Where tests that take minutes stand among the others.

pytest-xdist gives each process a stretch of all tests to begin with, and whoever is done takes from
the ends of others' stretches. A long test that comes late is waited for by all.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def first(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """With those that are marked `long` at the beginnings of processes' stretches, as `--dist
    worksteal` deals them out; the others' order stays."""
    long = [item for item in items if item.get_closest_marker("long")]
    found = [item for item in items if not item.get_closest_marker("long")]
    starts = stretches(len(items), processes)
    places = sorted(starts[n % processes] + n // processes for n in range(len(long)))
    before = -1
    for place, item in zip(places, long, strict=True):
        before = max(place, before + 1)  # where there are more processes than tests
        found.insert(before, item)
    return found


def stretches(tests: int, processes: int) -> list[int]:
    """Where each begins: a process gets its share of what those before it have left."""
    starts = [0]
    for process in range(processes - 1):
        starts.append(starts[-1] + (tests - starts[-1]) // (processes - process))
    return starts
