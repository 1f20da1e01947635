"""Where long tests stand."""

from __future__ import annotations

from typing import Any

import long_tests
import pytest


class _Item:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_closest_marker(self, name: str) -> Any:
        assert name == "long"
        return self.name.isupper() or None


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("abc", "abc"), ("AB", "AB"), ("abcdeFG", "FabGcde"), ("aBcDefghI", "BacDefIgh")],
)
def test_long_tests_are_spread_and_the_others_keep_their_order(before: str, after: str) -> None:
    items: list[Any] = [_Item(name) for name in before]
    found: list[Any] = long_tests.apart(items)
    assert "".join(item.name for item in found) == after
