"""A step in a CUDA graph, for tests that replay one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph, and what `step` returned in it, where replays write.

    The step runs once before, in a stream of its own, as PyTorch asks. That stream waits for what
    the step reads: on a busy GPU, tables would be read before they are written.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
