"""Results of expensive calls, kept as Parquet under a key of everything that they depend on.

papermill cannot resume a notebook. With its expensive calls cached, running it again after an
error in a later cell, or with another figure at its end, costs only what is new.
"""

import dataclasses
import functools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from click_data.schema import INFO
from jagged_ranking import paths, provenance, results
from jagged_ranking.code_roots import code_digests, code_hash, roots_of
from jagged_ranking.devices import default_device, device_name
from jagged_ranking.figures.scaling_points import BALANCES
from jagged_ranking.figures.streaming_points import FROM_DISK
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.processes import among_others
from jagged_ranking.reproduce.click_logs import describe_data
from jagged_ranking.reproduce.freshness import digest
from jagged_ranking.reproduce.own_models import own_code

T = TypeVar("T")

# Options that say how a call is watched, not what it returns.
NOT_COUNTED = ("progress",)
# Whole processes of ours, which a full disk or a busy GPU may end.
_OUR_TRAINING = (FROM_DISK, *BALANCES)
_APART = "in a process of its own, "  # how `measure.trial` says that the device broke there
_PROCESS = uuid.uuid4().hex  # part of the keys of what no other process may take
_imported = (paths.ROOT, code_digests())  # this module is imported with the others
_told = False
_kept: list[float] = []  # when each table was made that this process did not make


def cached(function: Callable[..., pd.DataFrame], /, *args: Any, **options: Any) -> pd.DataFrame:
    """`function(*args, **options)`, a table of results, or what it was when nothing differed.

    The key is the function's name, its arguments, the code that it depends on (see `code_roots`),
    versions and the device. A folder that holds a prepared dataset counts by its name and digest,
    and of the option `models` a user's own also by their code.
    Prints where the result comes from. A table that says that our own kernels failed, or that the
    device broke, is returned but not kept.
    Delete the folder `build/cache` to forget everything.

    Raises:
        TypeError: an argument that has no stable form (only plain values, dataclasses, paths
            and collections of them can be part of a key).
    """
    name = f"{function.__module__}.{function.__qualname__}"
    counted = {key: value for key, value in options.items() if key not in NOT_COUNTED}
    key = digest(
        {
            "function": name,
            "arguments": [_stable(value) for value in args],
            "options": _stable(counted),
            **circumstances(function.__module__, default_device(), options.get("models") or ()),
        }
    )
    path = paths.CACHE / f"{function.__name__}-{key[:20]}.parquet"
    if (kept := read_kept(path, results.read, what=function.__name__)) is not None:
        return kept
    started = time.monotonic()
    table = function(*args, **options)
    print(f"{function.__name__}: took {time.monotonic() - started:.0f} s")
    if _failed(table):
        return table  # try again the next time
    with paths.naming(path), among_others(path.parent):
        results.write(table, path)
    return results.read(path)  # what the next call will return


def circumstances(module: str, device: str, models: Iterable[str] = ()) -> dict[str, Any]:
    """What a result of a module depends on besides its arguments: code, that of a user's own
    `models` too, versions, the device; and the process, where its code is not that of the files."""
    found = {
        "code": code_hash(roots=roots_of(module)),
        "versions": provenance.versions(),
        "device": device_name(device),
    }
    if _has_changed_here(module):
        found["process"] = _PROCESS
    of_models = own_code(models)
    return {**found, "models": of_models} if of_models else found


def _has_changed_here(module: str) -> bool:
    """Whether code was changed under this process, as while a notebook stood open: what it runs is
    what it imported, and would be kept under what the files say now. Said once."""
    global _told
    root, imported = _imported
    if root != paths.ROOT:  # of another checkout nothing was imported
        return False
    roots = roots_of(module)
    before = {name: digest for name, digest in imported.items() if _is_in(name, roots)}
    now = code_digests(root, roots)
    if before == now:
        return False
    if not _told:
        name = min(name for name, _ in before.items() ^ now.items())
        print(
            f"{name} has changed since it was imported: what is measured from here on is not "
            "kept for others; restart Python (in a notebook: the kernel)"
        )
        _told = True
    return True


def _is_in(name: str, roots: Iterable[str]) -> bool:
    return any(name == root or name.startswith(f"{root}/") for root in roots)


def read_kept(path: Path, read: Callable[[Path], T], *, what: str) -> T | None:
    """What lies at `path`, saying when it was made; None where there is nothing to be read.

    A damaged file (a disk that was full, a copy that was cut off) is made again, and that is said.
    """
    if not path.is_file():
        return None
    try:
        found = read(path)
    except (ValueError, OSError) as error:
        print(f"{what}: made again, since {error}")
        return None
    _kept.append(path.stat().st_mtime)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_kept[-1]))
    print(f"{what}: kept from {when} ({path.name})")
    return found


def kept_tables() -> dict[str, Any] | None:
    """How many tables of this process were made by an earlier one, and when: for the manifest."""
    if not _kept:
        return None
    first, last = (provenance.utc(pick(_kept)) for pick in (min, max))
    return {"tables": len(_kept), "first": first, "last": last}


def _failed(table: pd.DataFrame) -> bool:
    """Not where a peer is wrong or raises, or broke a process made for that: it will, the next time
    too."""
    # as `jagged_cached` is
    ours = table["provider"].str.startswith(OURS) | table["provider"].isin(_OUR_TRAINING)
    broke = table["message"].str.contains("CUDA error|CUDA driver error", regex=True)
    broke &= ~table["message"].str.contains(_APART, regex=False)
    return bool(((table["status"] == "error") & (ours | broke)).any())


@functools.singledispatch
def _stable(value: Any) -> Any:
    """A value as JSON that is the same wherever the value is the same."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return [type(value).__qualname__, _stable(fields)]
    if isinstance(value, Mapping):
        return {str(key): _stable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_stable(entry) for entry in value]
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    json.dumps(value)  # TypeError: no stable form
    return value


@_stable.register
def _(value: str) -> Any:
    is_folder = os.sep in value and (Path(value) / INFO).is_file()
    return _stable(Path(value)) if is_folder else value


@_stable.register
def _(value: Path) -> Any:
    if not (value / INFO).is_file():
        return str(value)
    described = describe_data(value)  # tables name their data set
    return ["data", described["name"], described["digest"]]
