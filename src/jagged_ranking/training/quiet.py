"""Libraries that warn their own developers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """In the block no warning is shown, and of these loggers errors alone."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
