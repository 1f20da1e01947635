"""What kernels are compiled for, seen without a GPU; and which kernels the package launches."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

import jagged_kernels

Key = tuple[Any, ...]
# How many tokens a result has is read on the host.
_SIZES = ("_cut_users_kernel",)
# Rows of a schedule, of which partitions of lists look up users in PyTorch.
ROWS = ("_count_kernel", "_place_kernel", "_fill_kernel")


def record_launches(monkeypatch: pytest.MonkeyPatch, run: tuple[str, ...] = ()) -> list[Key]:
    """What each launch from now on compiles a kernel for, where it is not compiled yet: the key of
    `launch._COMPILED`. Nothing runs but `_SIZES` and `run`, kernels or whole files of them: what
    others would write stays as allocated."""
    launch = importlib.import_module("jagged_kernels.core.launch")
    real, keys = launch.launch, list[Key]()

    def record(
        kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: Any, **options: int
    ) -> None:
        kinds: list[Any] = []
        for argument in arguments:
            if type(argument) is int:
                kinds.append(-(2**31) <= argument < 2**31)
            else:
                launch._look(argument, kinds)
        values = tuple(map(str, constants.values()))
        keys.append((kernel.fn.__qualname__, kernel.fn.__module__, *values, *options, *kinds))
        name, room = kernel.fn.__name__, kernel.fn.__module__.rpartition(".")[2]
        if {name, room} & {*_SIZES, *run}:
            real(kernel, grid, arguments, constants, **options)

    _take_launches(monkeypatch, record)
    return keys


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """(name, module) of the kernel of each launch from now on. They run."""
    real, keys = importlib.import_module("jagged_kernels.core.launch").launch, list[Key]()

    def watched(kernel: Any, *arguments: Any, **options: int) -> None:
        keys.append((kernel.fn.__qualname__, kernel.fn.__module__))
        real(kernel, *arguments, **options)

    _take_launches(monkeypatch, watched)
    return keys


def launched_shapes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`AttentionShape` of each launch of an attention kernel from now on. They run."""
    real, shapes = importlib.import_module("jagged_kernels.core.launch").launch, list[Any]()

    def watched(
        kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: Any, **options: int
    ) -> None:
        if "S" in constants:
            shapes.append(constants["S"])
        real(kernel, grid, arguments, constants, **options)

    _take_launches(monkeypatch, watched)
    return shapes


@cache
def launched_kernels() -> set[tuple[str, str]]:
    """(name, module) of all kernels that the package's source passes to `launch`.

    Raises:
        AssertionError: it passes what is no kernel by name, or starts one in another way.
    """
    found = set()
    for module, call in _calls():
        where = f"{module.__name__}, line {call.lineno}"
        if isinstance(call.func, ast.Subscript):  # kernel[grid](...)
            started = _named(module, call.func.value)
            assert not hasattr(started, "fn"), f"{where}: not by launch"
        elif isinstance(call.func, ast.Name) and call.func.id == "launch":
            kernel = _named(module, call.args[0])
            assert hasattr(kernel, "fn"), f"{where}: no kernel of the module"
            found.add((kernel.fn.__qualname__, kernel.fn.__module__))
    return found


def named_kernels() -> set[tuple[str, str]]:
    """(name, module) of what is compiled by Triton or Gluon and by its name a kernel, which other
    functions of theirs are not."""
    functions = [vars(module).items() for module in _modules()]
    return {
        (function.fn.__qualname__, function.fn.__module__)
        for name, function in (pair for some in functions for pair in some)
        if name.endswith("_kernel") and hasattr(function, "fn")
    }


def _calls() -> Iterator[tuple[ModuleType, ast.Call]]:
    for module in _modules():
        # `launch` itself starts what it is given.
        if module.__name__ != "jagged_kernels.core.launch":
            for node in ast.walk(ast.parse(inspect.getsource(module))):
                if isinstance(node, ast.Call):
                    yield module, node


def _named(module: ModuleType, node: ast.expr) -> Any:
    """What the module has by this name, None where it is none."""
    return vars(module).get(node.id) if isinstance(node, ast.Name) else None


def _modules() -> list[ModuleType]:
    names = pkgutil.walk_packages(jagged_kernels.__path__, "jagged_kernels.")
    return [importlib.import_module(module.name) for module in names]


def _take_launches(monkeypatch: pytest.MonkeyPatch, take: Any) -> None:
    _modules()
    real = importlib.import_module("jagged_kernels.core.launch").launch
    for name, module in list(sys.modules.items()):
        if name.startswith("jagged_kernels.") and getattr(module, "launch", None) is real:
            monkeypatch.setattr(module, "launch", take)


def batches(count: int) -> list[list[int]]:
    """Lengths of the users of so many batches; no two have the same number of tokens."""
    generator = torch.Generator().manual_seed(0)
    # The first ones bring every rule that depends on how long users are.
    found: list[list[int]] = [[1], [2], [5, 0, 1], [40] * 60, [200, 100], [1500, 700]]
    longest = [2, 30, 80, 400]
    while len(found) < count:
        users = int(torch.randint(1, 30, (), generator=generator))
        most = longest[len(found) % len(longest)]
        lengths = torch.randint(0, most + 1, (users,), generator=generator).tolist()
        if sum(lengths) not in [0, *map(sum, found)]:
            found.append(lengths)
    return found
