"""Where long tests stand."""

from __future__ import annotations

import re
from typing import Any

import long_tests
import pytest

pytest_plugins = ["pytester"]


class _Item:
    def __init__(self, name: str) -> None:
        self.name = name

    def get_closest_marker(self, name: str) -> Any:
        assert name == "long"
        return self.name.isupper() or None


@pytest.mark.parametrize(
    ("before", "processes", "after"),
    [
        ("", 3, ""),
        ("abc", 2, "abc"),
        ("aBcD", 1, "BDac"),
        ("AB", 1, "AB"),
        ("AB", 4, "AB"),
        ("abcdeFG", 2, "FabGcde"),  # 3 and 4 tests
        ("aBcDefghI", 3, "BacDefIgh"),
        ("aBcDefghI", 2, "BDacIefgh"),
        ("abcdEfghij", 4, "Eabcdfghij"),
    ],
)
def test_long_tests_come_first_in_each_process(before: str, processes: int, after: str) -> None:
    items: list[Any] = [_Item(name) for name in before]
    found: list[Any] = long_tests.first(items, processes)
    assert "".join(item.name for item in found) == after


def test_stretches_are_those_of_xdist(pytester: pytest.Pytester) -> None:
    """By what each process ends first."""
    pytester.makepyfile(
        """
        import time
        import pytest

        @pytest.mark.parametrize("n", range(11))
        def test_one(n):
            time.sleep(0.1)
        """
    )
    run = pytester.runpytest_subprocess("-n", "3", "--dist", "worksteal", "-v")
    ended = re.findall(r"\[(gw\d)\].* PASSED .*\[(\d+)\]", run.stdout.str())
    firsts = dict(reversed(ended))
    assert sorted(map(int, firsts.values())) == long_tests.stretches(11, 3) == [0, 3, 7]
