"""A folder of results, put in its place whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from click_data import schema
from click_data.errors import DataError
from click_data.holding import abandoned, delete, held, unfinished

_CACHE = ".cache"  # where `open_dataset` keeps its copy
_MOUNTED = (errno.EBUSY, errno.EXDEV)  # of renaming a mount point, or into another file system
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def refuse_foreign(folder: Path) -> None:
    """Raise before any work if `folder` holds something that is not ours to replace.

    What processes were making there that were killed is not, and is deleted; a data set that one
    of them had moved away is put back.
    """
    try:
        place = folder.resolve()
    except (OSError, RuntimeError) as error:  # a link that leads to itself
        raise DataError(f"cannot be written ({error})", file=folder) from error
    _sweep(place)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError("exists and is not a folder", file=folder)
    if any(folder.iterdir()) and not schema.is_prepared(folder):
        raise DataError(
            "not empty and not a prepared data set; give an empty or new folder as --out",
            file=folder,
        )


def write_whole(folder: Path, force: bool, write: Callable[[Path], dict[str, Any]]) -> None:
    """Let `write` fill a new folder beside `folder`, then put it in its place.

    Where the folder itself cannot be exchanged (a mount point, the working directory, a parent
    that cannot be written) the new files are made inside of it, and then moved one by one.
    """
    place = folder.resolve()
    new = place
    try:
        new = _make_new(place)
        with held(new):
            info = write(new)
            if not schema.is_prepared(place):
                _install(new, place)
            elif not _identical(place, info):
                if not force:
                    raise DataError(
                        "holds another prepared data set; --force replaces it, or choose another "
                        "--out",
                        file=folder,
                    )
                _refuse_others(folder, new)
                _install(new, place)
    except OSError as error:
        raise DataError(f"cannot be written ({error})", file=folder) from error
    finally:
        if new != place:
            shutil.rmtree(new, ignore_errors=True)


def _sweep(place: Path) -> None:
    for old in abandoned(place.parent, place.name, "old"):
        if place.exists():
            delete(old)
        else:
            old.replace(place)
    for folder in (place.parent, place):
        for new in abandoned(folder, place.name, "new"):
            delete(new)


def _make_new(place: Path) -> Path:
    beside = unfinished(place, "new")
    inside = place / beside.name
    if place.is_dir() and (os.path.ismount(place) or Path.cwd().is_relative_to(place)):
        inside.mkdir()
        return inside
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        if error.errno not in _UNWRITABLE or not place.is_dir():
            raise
        inside.mkdir()
        return inside
    return beside


def _install(new: Path, place: Path) -> None:
    """Put the folder `new` where `place` is, or its files into it; on failure all is as it was."""
    if new.parent != place:
        try:
            _exchange(new, place)
            return
        except OSError as error:
            if error.errno not in _MOUNTED:
                raise
        inside = place / new.name
        try:
            shutil.copytree(new, inside)
            _move_files(inside, place)
        finally:
            shutil.rmtree(inside, ignore_errors=True)
    else:
        _move_files(new, place)


def _exchange(new: Path, place: Path) -> None:
    if not schema.is_prepared(place):
        new.replace(place)
        return
    old = unfinished(place, "old")
    with held(place):
        place.replace(old)
        try:
            new.replace(place)
        except OSError:
            old.replace(place)
            raise
        shutil.rmtree(old)


def _move_files(new: Path, place: Path) -> None:
    """Move the files of `new` over those of `place`, in which it lies.

    dataset.json goes first and comes last: a folder in between is no data set to anybody.
    """
    old = new / "old"
    old.mkdir()
    try:
        for name in (schema.INFO, *schema.TABLES, *schema.FORMER):
            if (place / name).exists():
                (place / name).replace(old / name)
        for name in (*schema.TABLES, schema.INFO):
            (new / name).replace(place / name)
    except BaseException:
        for name in (*schema.TABLES, *schema.FORMER, schema.INFO):
            with suppress(OSError):
                (place / name).unlink(missing_ok=True)
                if (old / name).exists():
                    (old / name).replace(place / name)
        raise
    shutil.rmtree(place / _CACHE, ignore_errors=True)


def _refuse_others(folder: Path, new: Path) -> None:
    """Raise if something lies in `folder` that would be deleted with the data set."""
    ours = {schema.INFO, *schema.TABLES, *schema.FORMER, _CACHE, new.name}
    others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if others:
        more = ", ..." if len(others) > 3 else ""
        raise DataError(
            f"holds other files than a prepared data set's, which --force would delete: "
            f"{', '.join(others[:3])}{more}; move them away, or choose another --out",
            file=folder,
        )


def _identical(folder: Path, info: dict[str, Any]) -> bool:
    """Whether a folder holds what was just made. An older release may have told less of it."""
    try:
        found = schema.read_info(folder)
        schema.verify(folder, found)
    except DataError:
        return False
    return found == {key: value for key, value in info.items() if key in found}
