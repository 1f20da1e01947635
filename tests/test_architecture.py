"""Which module may import which."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from import_graph import PACKAGES, ROOT, arrows, imports, modules, target, tree

MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
# jagged_kernels <- jagged_ranking -> click_data
MAY_IMPORT = {
    "jagged_kernels": set(),
    "jagged_ranking": {"jagged_kernels", "click_data"},
    "click_data": set(),
}
OF_THE_KERNELS = {"torch", "triton"}
# Each may import from those before it, and from no other.
ROOMS = {
    "jagged_kernels": (
        *("core", "tensors", "device", "schedule", "ops", "attention", "cache", "modules"),
        "graphs",
    ),
    "jagged_ranking": (
        *("data", "layers", "models", "evaluation", "training", "measure", "figures"),
        "reproduce",
    ),
}

EACH_PACKAGE = pytest.mark.parametrize("package", PACKAGES)


def room(module: str) -> str:
    """The package that a module lies in; a package lies in itself."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@EACH_PACKAGE
def test_no_modules_import_in_a_circle(package: str) -> None:
    assert not circle({name: set(to) for name, to in arrows(package).items()})


@EACH_PACKAGE
def test_no_rooms_import_in_a_circle(package: str) -> None:
    """In every package, among its modules and sub-packages as wholes: all arrows point down."""
    for parent in {room(name) for name in arrows(package)}:
        inside = f"{parent}."

        def child(name: str, inside: str = inside, parent: str = parent) -> str:
            """The module or sub-package directly in the parent that a module belongs to."""
            return inside + name.removeprefix(inside).split(".")[0] if name != parent else parent

        graph: dict[str, set[str]] = {}
        for module, others in arrows(package).items():
            if module == parent or module.startswith(inside):
                here = {child(to) for to in others if to == parent or to.startswith(inside)}
                graph.setdefault(child(module), set()).update(here - {child(module)})
        assert not circle(graph), f"in {parent}"


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_stand_in_order(package: str) -> None:
    for module, others in arrows(package).items():
        here = _room_number(module)
        for to in others:
            assert _room_number(to) <= here or module == package, f"{module} imports {to}"


def _room_number(module: str) -> int:
    """-1 for a module beside the rooms; `cli` names what it calls by text, and imports nothing."""
    package, *names = module.split(".")
    is_room = bool(names) and (PACKAGES[package] / names[0]).is_dir()
    return ROOMS[package].index(names[0]) if is_room else -1


@pytest.mark.parametrize("package", ROOMS)
def test_the_pictures_show_the_rooms(package: str) -> None:
    """docs/architecture.md: an arrow for each import between rooms that no longer way says."""
    graph: dict[str, set[str]] = {name: set() for name in ROOMS[package]}
    for module, others in arrows(package).items():
        for to in others:
            here, there = (name.split(".")[1:2] for name in (module, to))
            if here != there and {*here, *there} <= set(graph) and here and there:
                graph[here[0]].add(there[0])
    needed = set()
    for here, others in graph.items():
        farther = set().union(*(_reached(graph, to) for to in others))
        needed |= {(here, to) for to in others - farther}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    pictures = [re.findall(r"(\w+) --> (\w+)", part) for part in re.findall(MERMAID, text)]
    drawn = next(set(p) for p in pictures if {name for edge in p for name in edge} <= set(graph))
    assert drawn == needed


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    return graph[start].union(*(_reached(graph, to) for to in graph[start]))


@EACH_PACKAGE
def test_private_names_stay_in_their_room(package: str) -> None:
    broken = []
    for module in arrows(package):
        bound: dict[str, str] = {}
        for source, name, alias in imports(module):
            to = target(source, name)
            if to not in modules():
                continue
            if name and to == source and _private(name) and room(to) != room(module):
                broken.append(f"{module} imports {name} from {source}")
            if not name or to != source:
                bound[alias] = to
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Attribute) and _private(node.attr):
                to = bound.get(ast.unparse(node.value))
                if to is not None and room(to) != room(module):
                    broken.append(f"{module} uses {to}.{node.attr}")
    assert not broken


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("package", ["jagged_ranking", "click_data"])
def test_no_file_is_named_like_another(package: str) -> None:
    names = Counter(name.rpartition(".")[2] for name in arrows(package))
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_depend_one_way(package: str) -> None:
    for module in arrows(package):
        others = {source.split(".")[0] for source, _, _ in imports(module)} & set(PACKAGES)
        assert others - {package} <= MAY_IMPORT[package], module


def test_the_kernels_need_torch_and_triton_only() -> None:
    for module in arrows("jagged_kernels"):
        used = {source.split(".")[0] for source, _, _ in imports(module)}
        outside = used - set(sys.stdlib_module_names) - {"jagged_kernels"}
        assert outside <= OF_THE_KERNELS, module


def test_no_package_beside_the_three() -> None:
    """A stray __init__.py would make an importable `kernels`, `src` or `data_prep`."""
    assert not [
        root for root in ("kernels", "src", "data_prep") if (ROOT / root / "__init__.py").exists()
    ]
