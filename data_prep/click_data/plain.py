"""Text as a plain UTF-8 file, however it is packed and encoded; how much is unpacked at most."""

import codecs
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from click_data.errors import DataError

LARGEST = 2 * 2**30  # bytes that are unpacked from one file; those of ml-32m are 0.9e9
UTF8 = "utf-8-sig"
_PIECE = 2**20
_MARKS = {  # the longer first: UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_UNREADABLE = (EOFError, OSError, UnicodeError, zlib.error)

# What an encoding does not have becomes a byte that UTF-8 does not have either, so that all
# encodings have one kind of bad line.
_GARBLED = "click_data.garbled"
codecs.register_error(_GARBLED, lambda error: ("\udcff", error.end))  # pyright: ignore[reportAttributeAccessIssue]


def refuse_absent(path: Path) -> None:
    """Raise unless there is a file or folder; what is read but once, such as a pipe, is none."""
    if not path.exists():
        raise DataError("no such file or folder", file=path)
    if not (path.is_file() or path.is_dir()):
        raise DataError("neither a file nor a folder; write what it gives to a file", file=path)


def check_encoding(name: str) -> None:
    """Raise unless Python can read text in this encoding."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=name).read()
    except (LookupError, ValueError) as error:
        message = f"--encoding {name}: not an encoding of text that Python knows, as cp1252 is"
        raise DataError(message) from error


def find_encoding(path: Path, shown: str, given: str | None) -> str:
    """The encoding `given`, else that of the file's byte order mark, else UTF-8."""
    if given is not None:
        return UTF8 if codecs.lookup(given).name == "utf-8" else given
    start = first_bytes(path, shown)
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), UTF8)


def first_bytes(path: Path, shown: str, number: int = 8) -> bytes:
    """The first bytes of a file, unpacked."""
    try:
        with _open(path) as file:
            return file.read(number)
    except _UNREADABLE as error:
        raise DataError(f"cannot be read ({error})", file=shown) from error


def open_text(path: Path, encoding: str) -> IO[str]:
    """A text file, unpacked; `garbled` text has bytes that are not of its encoding."""
    opened = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", newline="", encoding=encoding, errors=_GARBLED)


def garbled(text: str) -> bool:
    """Whether some bytes were not of the encoding."""
    return "\udcff" in text


@contextmanager
def as_utf8(path: Path, encoding: str, shown: str) -> Iterator[Path]:
    """A file of the text in UTF-8, unpacked: the file itself if it is that."""
    packed = path.suffix == ".gz"
    if not packed and encoding == UTF8:
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if packed:
                path = _unpack(path, Path(scratch) / "unpacked", shown)
            if encoding != UTF8:
                path = _recode(path, encoding, Path(scratch) / "recoded")
        except _UNREADABLE as error:
            raise DataError(f"cannot be read ({error})", file=shown) from error
        yield path


def too_large(kind: str, what: str, shown: str | Path) -> DataError:
    """The error about a packed file (its `kind`) of which `what` is to be given unpacked."""
    return DataError(
        f"unpacks to more than {LARGEST / 1e9:.1f} GB, which is not read from a {kind}: unpack it "
        f"and give the {what}",
        file=shown,
    )


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _unpack(path: Path, plain: Path, shown: str) -> Path:
    """The length that a gzip file states is modulo 4 GB, so what comes out is counted."""
    size = 0
    with _open(path) as packed, plain.open("wb") as file:
        while piece := packed.read(_PIECE):
            size += len(piece)
            if size > LARGEST:
                raise too_large("gz", "file", shown)
            file.write(piece)
    return plain


def _recode(path: Path, encoding: str, plain: Path) -> Path:
    with (
        open_text(path, encoding) as file,
        plain.open("w", encoding="utf-8", errors="surrogateescape", newline="") as out,
    ):
        shutil.copyfileobj(file, out, _PIECE)
    return plain
