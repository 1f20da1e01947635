"""Which module of the three packages imports which: read from the source, lazy imports and those
for types included.

A module is an arrow's end by its own name: `from a.b import c` points at `a.b.c` where that is a
module, else at `a.b`. That Python runs the `__init__` of every package above is not counted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "jagged_kernels": ROOT / "kernels" / "jagged_kernels",
    "jagged_ranking": ROOT / "src" / "jagged_ranking",
    "click_data": ROOT / "data_prep" / "click_data",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the three packages by its dotted name; a package is its `__init__`."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """(from where, what, as what) of every import at any depth; `import a.b` has an empty what."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            for alias in node.names:
                yield node.module or "", alias.name, alias.asname or alias.name


def target(source: str, name: str) -> str:
    """The module that an import points at: a submodule if the name is one."""
    return f"{source}.{name}" if name and f"{source}.{name}" in modules() else source


def origin(source: str, name: str) -> str:
    """`target`, past the `__init__` of `jagged_kernels`, which names what its rooms have."""
    if source == "jagged_kernels" and f"{source}.{name}" not in modules():
        return next((target(s, n) for s, n, known in imports(source) if known == name), source)
    return target(source, name)


@cache
def arrows(package: str) -> dict[str, frozenset[str]]:
    """module -> the modules of the same package that it imports."""
    own = {name for name in modules() if name.split(".")[0] == package}
    return {
        module: frozenset({target(s, n) for s, n, _ in imports(module)} & own - {module})
        for module in own
    }
