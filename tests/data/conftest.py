"""What the data tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from grouplens import LAYOUTS

from jagged_ranking.cli import main


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Writes the ratings above into a folder in one of GroupLens' layouts."""
    return LAYOUTS[request.param]


@pytest.fixture
def prepare_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `jagged prepare` with the arguments given: exit code, stdout, stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        code = main(["prepare", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command
