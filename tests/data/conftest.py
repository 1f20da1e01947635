"""What the data tests share."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from grouplens import LAYOUTS

from click_data import cli


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Writes the ratings above into a folder in one of GroupLens' layouts."""
    return LAYOUTS[request.param]


@pytest.fixture
def prepare_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `jagged prepare` with the arguments given: exit code, stdout, stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        code = cli.run(parser.parse_args([str(argument) for argument in arguments]))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command
