import math

import pytest

from jagged_ranking.figures.verdicts import difference


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
