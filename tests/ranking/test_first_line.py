"""What went wrong, in one line."""

from __future__ import annotations

import pytest

from jagged_ranking.first_line import described, first_line


@pytest.mark.parametrize(
    ("error", "line", "whole"),
    [
        (ValueError("too long\nby far"), "too long", "ValueError: too long"),
        (OSError(2, "no such file"), "[Errno 2] no such file", None),
        (RuntimeError("\n  CUDA error: x \n"), "CUDA error: x", "RuntimeError: CUDA error: x"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (RuntimeError(" \n"), "RuntimeError", "RuntimeError"),
    ],
    ids=repr,
)
def test_an_error_in_one_line(error: BaseException, line: str, whole: str | None) -> None:
    assert first_line(error) == line
    assert described(error) == (whole or f"{type(error).__name__}: {line}")
