import math

import pytest

from jagged_ranking.figures.verdicts import NOT_MEASURED, at_least, both, difference, met, number


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0.00123, -0.0004, 0.002), "+0.0012 [-0.0004, +0.0020]"),
        ((-0.00001, -0.00004, 0.00004), "+0.0000 [+0.0000, +0.0000]"),
        ((-0.5, math.nan, math.nan), "-0.5000"),
        ((-0.00001, -0.00004, 0.00004, 5), "-0.00001 [-0.00004, +0.00004]"),
    ],
)
def test_a_difference_has_its_sign_and_its_interval(numbers, said):
    assert difference(*numbers) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.38, "aim"),
        (0.384, "aim"),  # it is shown as 0.38
        (0.386, "must"),
        (0.504, "must"),
        (0.506, "**no**"),
        (math.nan, NOT_MEASURED),
    ],
)
def test_a_goal_is_judged_as_it_is_shown(value: float, said: str) -> None:
    assert met(value, 0.5, 0.38) == said
    assert met(value, math.nan, 0.38) == ""


@pytest.mark.parametrize(
    ("value", "said"), [(3.0, "yes"), (2.996, "yes"), (2.994, "**no**"), (math.nan, NOT_MEASURED)]
)
def test_at_least_is_no_less(value: float, said: str) -> None:
    assert at_least(value, 3.0) == said
    assert at_least(value, math.nan) == ""


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("yes", "**no**", "**no**"),
        (NOT_MEASURED, "**no**", "**no**"),  # whatever the other comes to
        ("yes", NOT_MEASURED, NOT_MEASURED),
        ("yes", "", "yes"),
        ("", "", ""),
    ],
)
def test_of_two_goals_the_worse_counts(one: str, other: str, said: str) -> None:
    assert both(one, other) == both(other, one) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "–"),
        (0.0, "0"),
        (0.00012, "0.0001"),
        (0.01234, "0.0123"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234.0, "1234"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, said: str) -> None:
    assert number(value) == said
