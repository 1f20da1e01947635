"""What is imported by a file does not import it, also not later, inside of a function."""

from __future__ import annotations

import ast
from collections import deque
from importlib.util import find_spec
from pathlib import Path

import pytest

import jagged_kernels
from jagged_kernels.schedule import rows, triton_rows
from jagged_kernels.schedule import spans as partition
from jagged_kernels.schedule import triton_spans as triton_partition
from jagged_kernels.tensors import collate, jagged, jagged2


def _imports(module: str) -> set[str]:
    """The modules of the package that a module names in an import, wherever it stands."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    named: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            named.add(node.module)
            named.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
    ours = (name for name in named if name.startswith(f"{jagged_kernels.__name__}."))
    return {name for name in ours if _is_module(name)}


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a name in a module, not a module in a package
        return False


@pytest.mark.parametrize(
    "start",
    [rows, triton_rows, partition, triton_partition, jagged, jagged2, collate],
    ids=lambda x: x.__name__,
)
def test_tables_of_a_schedule_and_containers_are_in_no_circle(start):
    seen: set[str] = set()
    waiting = deque([start.__name__])
    while waiting:
        for name in _imports(waiting.popleft()) - seen:
            seen.add(name)
            waiting.append(name)
    assert seen, "an import was found"
    assert start.__name__ not in seen
