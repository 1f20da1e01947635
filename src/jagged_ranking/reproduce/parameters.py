"""The parameters of a notebook: read from its tagged cell, checked before anything runs.

papermill only warns at an unknown name and passes a list given on the command line as a string,
so a typing error would cost a whole run with the defaults. Here the cell tagged `parameters` is
parsed, never executed: each line is `name = literal` or `name: type = literal`, with a comment
behind it as its description. The type is the annotation, else what the default value is. What is
None by default may always be None: papermill takes a name whose annotation has a `|` for unknown.
"""

import ast
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jagged_ranking.reproduce.errors import RunError

TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """One parameter: its type as written, its default value and what it means."""

    name: str
    type: str
    default: Any
    description: str


class _MismatchError(Exception):
    """A value is not of a type."""


def read_cells(notebook: Path) -> list[Any]:
    """The cells of a stored notebook; RunError when it is none."""
    import nbformat  # a second, and the kernel of a notebook reads none

    try:
        return nbformat.read(notebook, as_version=4).cells
    except Exception as error:  # nbformat raises whatever it stumbles over
        reason = str(error).partition("\n")[0]
        raise RunError(f"{notebook}: not a notebook ({reason})") from error


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook by name, in order; RunError when its cell is not readable."""
    return parameters_in(read_cells(notebook), notebook)


def parameters_in(cells: Iterable[Mapping[str, Any]], notebook: Path) -> dict[str, Parameter]:
    """Likewise, of cells that are read already: a source is text, or its lines as JSON has them."""
    tagged = [
        "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and TAG in cell["metadata"].get("tags", [])
    ]
    if len(tagged) != 1:
        raise RunError(f"{notebook}: {len(tagged)} code cells tagged `{TAG}`, need exactly one")
    try:
        return parse_parameters(tagged[0])
    except (SyntaxError, ValueError) as error:
        raise RunError(f"{notebook}: parameters cell: {error}") from error


def parse_parameters(source: str) -> dict[str, Parameter]:
    """The parameters that the source of a parameters cell sets; ValueError for anything else."""
    lines = source.splitlines()
    found: dict[str, Parameter] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr()):
                declared = annotation
            case ast.Assign(targets=[ast.Name(id=name)]):
                declared = None
            case _:
                raise ValueError(f"line {statement.lineno} is not `name = value`")
        assert statement.value is not None
        try:
            default = ast.literal_eval(statement.value)
        except ValueError as error:
            raise ValueError(f"the default of `{name}` is not a literal") from error
        kind = ast.unparse(declared) if declared else _type_of(default)
        if declared and default is None and not kind.endswith(" | None"):
            kind = f"{kind} | None"
        if declared:
            try:
                _accept(default, _parse_type(kind))
            except _MismatchError as error:
                raise ValueError(f"the default of `{name}` is not {kind}") from error
        end_line, end_column = statement.end_lineno, statement.end_col_offset
        assert end_line is not None
        assert end_column is not None
        # Offsets count bytes of UTF-8.
        rest = lines[end_line - 1].encode()[end_column:].decode()
        found[name] = Parameter(name, kind, default, rest.strip().lstrip("#").strip())
    return found


def _type_of(value: Any) -> str:
    """The type that a default value stands for."""
    match value:
        case None:
            return "Any"
        case bool() | int() | float() | str():
            return type(value).__name__
        case list() | tuple():
            kinds = sorted({_type_of(item) for item in value})
            if kinds == ["float", "int"]:
                kinds = ["float"]
            return f"list[{' | '.join(kinds)}]" if kinds else "list"
        case dict():
            return "dict"
    raise ValueError(f"no parameter can be a {type(value).__name__}")


def _parse_type(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _accept(value: Any, kind: ast.expr) -> Any:
    """`value` as a value of the type, or _MismatchError."""
    match kind:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            try:
                return _accept(value, left)
            except _MismatchError:
                return _accept(value, right)
        case ast.Constant(value=None):
            fits = value is None
        case ast.Name(id="Any"):
            fits = _is_plain(value)
        case ast.Name(id="bool"):
            fits = isinstance(value, bool)
        case ast.Name(id="int"):
            fits = isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id="float"):
            return _accept_float(value)
        case ast.Name(id="str"):
            fits = isinstance(value, str)
        case ast.Name(id="list"):
            fits = isinstance(value, list) and _is_plain(value)
        case ast.Name(id="dict"):
            fits = isinstance(value, dict) and _is_plain(value)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            if not isinstance(value, list | tuple):
                raise _MismatchError
            return [_accept(entry, item) for entry in value]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, item])):
            if not isinstance(value, dict):
                raise _MismatchError
            return {_accept(k, key): _accept(v, item) for k, v in value.items()}
        case _:
            raise ValueError(f"`{ast.unparse(kind)}` is not a type that a parameter can have")
    if not fits:
        raise _MismatchError
    return value


def _is_plain(value: Any) -> bool:
    """Whether manifests and keys can hold it: YAML knows dates, too, and keys of several types."""
    try:
        json.dumps(value, sort_keys=True)
    except TypeError:
        return False
    return True


def _accept_float(value: Any) -> float:
    # YAML reads 1e-3 (no dot) as text.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _MismatchError
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _MismatchError from None
    if not math.isfinite(number):  # no number of anything here
        raise _MismatchError
    return number


def _unknown(name: str, known: Iterable[str], where: str) -> RunError:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else "."
    return RunError(f"{where} has no parameter `{name}`{hint} It knows {', '.join(known)}")


def check_values(
    values: Mapping[str, Any], known: Mapping[str, Parameter], where: str
) -> dict[str, Any]:
    """`values` as the types of their parameters; RunError at an unknown name or a wrong type."""
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise _unknown(name, known, where)
        try:
            checked[name] = _accept(value, _parse_type(known[name].type))
        except _MismatchError:
            raise RunError(
                f"{where}: parameter `{name}` is {known[name].type}, not {value!r}"
            ) from None
    return checked


def parse_assignments(
    assignments: Iterable[str], known: Mapping[str, Parameter], where: str
) -> dict[str, Any]:
    """The values of `name=value` texts, read as YAML and checked.

    A list may be written with or without brackets (`128,256`), and a value that YAML would take
    for a number is kept as text where the parameter is text.
    """
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise RunError(f"`{assignment}`: write a parameter as name=value")
        if name not in known:
            raise _unknown(name, known, where)
        values[name] = _parse_value(text.strip(), known[name], where)
    return values


def _parse_value(text: str, parameter: Parameter, where: str) -> Any:
    kind = _parse_type(parameter.type)
    if text.lower() == "none":
        text = "null"
    for source in (text, f"[{text}]"):
        try:
            return _accept(yaml.safe_load(source), kind)
        except (_MismatchError, yaml.YAMLError):
            continue
    try:
        return _accept(text, kind)
    except _MismatchError:
        raise RunError(
            f"{where}: parameter `{parameter.name}` is {parameter.type}, not `{text}`"
        ) from None


def read_preset(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The preset `folder/name.yaml`: parameters by notebook id (and `run_data.ENTRIES`)."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise RunError(f"no preset `{name}`; there is {', '.join(known) or 'none'}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise RunError(f"{path}: need a mapping of notebook ids to their parameters")
    return content
