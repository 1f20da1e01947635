"""What the shorter suite leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import short_suite
from planted_bugs import BUGS, node_id


def made(file: str, test: str, count: int) -> list[Any]:
    path = short_suite.TESTS / file
    return [
        SimpleNamespace(path=path, name=test, originalname=test, case=case) for case in range(count)
    ]


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_suite, "SHORTER", {"test_it.py": {"test_many": 3, "test_long": 0}})


@pytest.mark.usefixtures("shorter")
@pytest.mark.parametrize(
    ("cases", "kept"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (12, [2, 6, 10])]
)
def test_cases_that_stay_are_spread_evenly(cases: int, kept: list[int]) -> None:
    items = [*made("test_it.py", "test_first", 5), *made("test_it.py", "test_many", cases)]
    items += [*made("test_it.py", "test_long", 1), *made("test_other.py", "test_many", 12)]
    out = list(short_suite.left_out(items))
    of_many = [item.case for item in out if item.originalname == "test_many"]
    assert of_many == [case for case in range(cases) if case not in kept]
    assert [item for item in out if item.originalname != "test_many"] == items[-13:-12]


def test_what_is_named_is_there() -> None:
    """By its text: a run of this file alone collects no other."""
    for file, tests in short_suite.SHORTER.items():
        text = (short_suite.TESTS / file).read_text(encoding="utf-8")
        assert not [test for test in tests if f"def {test}(" not in text], file


def test_what_notices_a_planted_bug_stays() -> None:
    for bug in BUGS:
        for test in bug.tests:
            file, _, function = node_id(test).partition("::")
            tests = short_suite.SHORTER.get(file.removeprefix("tests/"), {})
            assert tests.get(function, 1), f"{bug.name}: {test}"
