"""Histories that each row repeats, put together."""

import numpy as np
import pytest

from click_data.sources.windows import put_together


@pytest.mark.parametrize(
    ("histories", "events", "ends"),
    [
        (["", "a", "ab", "abc"], "abc", [0, 1, 2, 3]),
        (["ab", "a", "ab"], "ab", [2, 1, 2]),
        (["abc", "bcd", "cde"], "abcde", [3, 4, 5]),
        (["abc", "xyz"], "abcxyz", [3, 6]),
        (["abcde", "cde", "bcd"], "abcde", [5, 5, 4]),
        (["aaa", "aaa", "aab"], "aaab", [3, 3, 4]),
    ],
)
def test_each_history_is_found_in_one_sequence(
    histories: list[str], events: str, ends: list[int]
) -> None:
    assert put_together(histories, ordered=True) == (list(events), ends)


def test_a_history_of_before_is_refused() -> None:
    with pytest.raises(ValueError, match="1"):
        put_together(["bcd", "abc"], ordered=True)


def test_where_rows_have_no_order_a_gap_is_refused() -> None:
    with pytest.raises(ValueError, match="1"):
        put_together(["abc", "xyz"], ordered=False)
    assert put_together(["abc", "bcd"], ordered=False) == (list("abcd"), [3, 4])


def test_windows_of_a_random_sequence_end_where_they_were_cut() -> None:
    rng = np.random.default_rng(0)
    events = rng.permutation(200).tolist()
    ends = np.sort(rng.integers(0, 200, 80))
    made, found = put_together([events[max(0, end - 30) : end] for end in ends], ordered=True)
    assert made == events[: ends[-1]]
    assert found == ends.tolist()
