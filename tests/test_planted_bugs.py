"""The bugs of `make planted` fit the code: each piece stands once, and each test is there."""

import pytest
from planted_bugs import BUGS, Bug, check


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Bug) -> None:
    check(bug)


def test_a_bug_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SystemExit, match="nowhere to be found"):
        check(Bug("gone", BUGS[0].module, "nowhere to be found", "", BUGS[0].tests))
