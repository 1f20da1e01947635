"""Where a step waits for the device: what cannot be captured, found out before it is tried.

A capture that fails leaves PyTorch's allocator and random numbers in states that nobody puts right;
a step that is taken while its waits are noted is a step like any other.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

# Of PyTorch, and of this package.
_ROOTS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.dirname(__file__))
)
_WAITS = "called a synchronizing CUDA operation"


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Meanwhile, where this thread waits for a GPU: "FILE:LINE" of each, of the innermost call that
    is neither PyTorch's nor this package's.

    PyTorch tells of all threads; others may wait as they like.
    """
    here, found = threading.get_ident(), list[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show: Any = warnings.showwarning

        def note(message: Any, *rest: Any, **options: Any) -> None:
            if not str(message).startswith(_WAITS):
                show(message, *rest, **options)
            elif threading.get_ident() == here:
                found.append(_place(sys._getframe(1)))

        warnings.showwarning = note
        warnings.filterwarnings("always", message=_WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if not file.startswith(_ROOTS) and os.path.basename(file) != "warnings.py":
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "a place that is not known"
