"""Curves of a run for TensorBoard, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"  # in a run's folder


class Board:
    """Writes scalars below `folder`; without one, nothing.

    Raises ValueError where the package is missing.
    """

    def __init__(self, folder: Path | None, *, step: int = 0) -> None:
        self._writer: Any = None
        if folder is None:
            return
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        # what a run wrote behind the checkpoint that it goes on from is not shown
        self._writer = SummaryWriter(str(folder), purge_step=step)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers by name, behind `step` steps."""
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is not written yet."""
        if self._writer is not None:
            self._writer.close()


def check_tensorboard() -> None:
    """ValueError where the package is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--tensorboard needs the package tensorboard: "
            "pip install 'jagged-flash-attention[tensorboard]'"
        ) from error
