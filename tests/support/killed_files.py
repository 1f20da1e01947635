"""What lies in the folder of a command that was killed: whole, temporary, or broken."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from click_data import schema
from click_data.errors import DataError
from jagged_ranking import results
from jagged_ranking.training import checkpoint
from jagged_ranking.training.run_files import CHECKPOINT, MODEL

# As `results.atomic`, `prepare` and `datasets` call what is not whole yet.
_TEMPORARY = re.compile(r"\..+-[a-z0-9_]{8}\.\w+|\..+\.\d+\.(new|old)|.+\.incomplete")
_DIGESTS = re.compile(r"[0-9a-f]{16,}")  # some count what was measured
TIMED = ("s", "ms")  # units of numbers that no run repeats


@dataclass(frozen=True)
class Place:
    """Everything that a command reads and writes, in a folder of its own.

    Its path is short, since a kernel's sockets lie in `temporary`.
    """

    root: Path

    @property
    def home(self) -> Path:
        """The checkout: notebooks, presets, build/."""
        return self.root / "home"

    @property
    def data(self) -> Path:
        """The prepared data set, with the copy that is mapped into memory."""
        return self.root / "data"

    @property
    def out(self) -> Path:
        """--out."""
        return self.root / "out"

    @property
    def temporary(self) -> Path:
        """TMPDIR."""
        return self.root / "t"

    def files(self) -> Iterator[Path]:
        """Those that a command may write, but in `temporary`."""
        for folder in (self.out, self.data, self.home / "build"):
            yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
        yield from self.unfinished(self.root)

    @staticmethod
    def unfinished(folder: Path) -> Iterator[Path]:
        """What lies right in `folder` by a temporary name."""
        return (path for path in sorted(folder.iterdir()) if _TEMPORARY.fullmatch(path.name))

    def being_written(self) -> Iterator[Path]:
        """What has a temporary name now; looked at quickly."""
        results, kept = self.out.glob("*/"), self.home / "build" / "cache"
        copies = (*self.data.glob(".cache/*/"), *self.data.glob(".cache/*/*/*/"))
        for folder in (self.root, self.out, *results, kept, *copies):
            with suppress(OSError):
                yield from self.unfinished(folder)

    def is_temporary(self, path: Path) -> bool:
        """Whether its name, or its folder's, says that it is not whole."""
        return any(_TEMPORARY.fullmatch(part) for part in path.relative_to(self.root).parts)

    def names(self) -> Counter[str]:
        """The files by their names, which another place has too."""
        escaped = re.sub(r"\W", ".", str(self.root))  # in the names of the locks of `datasets`
        return Counter(
            re.sub(escaped, "ROOT", _DIGESTS.sub("DIGEST", str(path.relative_to(self.root))))
            for path in self.files()
        )

    def broken(self) -> list[str]:
        """What is neither whole nor called temporary."""
        return [
            f"{path.relative_to(self.root)} is broken ({why})"
            for path in self.files()
            if not self.is_temporary(path) and (why := _wrong(path))
        ] + _wrong_data(self.data)


def _wrong(path: Path) -> str:
    if (read := _READERS.get(path.suffix)) is None:
        empty = path.suffix in (".lock", ".key") or path.name.startswith("sound-")
        return "" if empty else "a file of no known kind"
    try:
        read(path)
    except Exception as error:  # a broken file of any kind raises of any kind
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _wrong_data(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    try:
        schema.verify(folder, schema.read_info(folder))
    except DataError as error:
        return [f"half a data set ({error})"]
    return []


def _image(path: Path) -> None:
    with Image.open(path) as image:
        image.load()


def _npz(path: Path) -> None:
    with np.load(path, allow_pickle=False) as file:
        for name in file:
            file[name]


def _flat(path: Path) -> None:
    starts = np.fromfile(path.with_name("starts.flat"), np.int64)
    ends = np.append(starts[:-1][starts[1:] == 0], starts[-1])  # of parts, each of which is from 0
    if path.with_name("column item.flat").stat().st_size != 4 * ends.sum():
        raise ValueError("it holds no whole lists")


def _ends(*ends: bytes) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        if not path.read_bytes().rstrip().endswith(ends):
            raise ValueError("its end is missing")

    return read


def _notebook(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))


def _arrow(path: Path) -> None:
    with pa.memory_map(str(path)) as source:
        pa.ipc.open_stream(source).read_all()


_READERS: dict[str, Callable[[Path], object]] = {
    ".parquet": pq.read_table,
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".npz": _npz,
    ".ipynb": _notebook,
    ".pt": checkpoint.load,
    ".arrow": _arrow,
    ".flat": _flat,
    ".svg": ElementTree.parse,
    ".png": _image,
    ".pdf": _ends(b"%%EOF"),
    ".html": _ends(b"</html>"),
}


def quality_and_shapes(place: Place) -> dict[str, Any]:
    """The results of every notebook but what a clock or a machine says: of qualities each number to
    the bit, of measurements their rows, statuses and units, and bytes."""
    found: dict[str, Any] = {}
    for path in sorted(place.out.glob("*/results.parquet")):
        rows = []
        for row in results.read(path).to_dict("records"):
            said = {name: row[name] for name in ("op", "provider", "workload", "mode", "metric")}
            said |= {"unit": row["unit"], "status": row["status"]}
            if row["op"] == "ranking" and row["unit"] not in TIMED:
                said |= {"value": repr(row["value"]), "config": repr(row["config"])}
            rows.append(said)
        found[path.parent.name] = rows
    return found


def weights_and_losses(place: Place) -> dict[str, Any]:
    """Everything in a training's folder but the seconds."""
    state = checkpoint.load(place.out / CHECKPOINT)
    progress = state.content["progress"]
    for row in progress["history"]:
        del row["seconds"]
    best = checkpoint.load(place.out / MODEL)
    kept = {**state.content, "progress": progress, "config": state.config, "digest": state.digest}
    return {"state": _plain(kept), "model": _plain(best.content)}


def _plain(content: Any) -> Any:
    """Tensors by their bytes."""
    if isinstance(content, torch.Tensor):
        return str(content.dtype), tuple(content.shape), content.numpy().tobytes()
    if isinstance(content, dict):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return repr(content)


def prepared_bytes(place: Place) -> dict[str, Any]:
    """The files of a data set."""
    return {path.name: path.read_bytes() for path in place.data.iterdir() if path.is_file()}


def mapped_bytes(place: Place) -> dict[str, Any]:
    """What `open_dataset` maps into memory, in any order."""
    arrow = (path for path in place.files() if path.suffix == ".arrow")
    return {"arrow": sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in arrow)}


def kept_results(place: Place) -> dict[str, Any]:
    """What need not be measured or trained again -> when it was."""
    cache = place.home / "build" / "cache"
    kept: dict[str, Any] = {
        path.name: path.stat().st_mtime_ns
        for path in cache.glob("*")
        if not place.is_temporary(path)
    }
    for path in sorted(place.out.glob("*/run.json")):
        if (record := json.loads(path.read_text(encoding="utf-8")))["status"] == "ok":
            kept[path.parent.name] = record
    return kept


def kept_epochs(place: Place) -> dict[str, Any]:
    """Each epoch of a training that need not be trained again -> its row, with the seconds."""
    path = place.out / CHECKPOINT
    history = checkpoint.load(path).content["progress"]["history"] if path.exists() else []
    return {f"epoch {row['epoch']}": row for row in history}


def kept_data(place: Place) -> dict[str, Any]:
    """Of a data set nothing is kept but the whole."""
    path = place.data / schema.INFO
    return {"data": path.stat().st_mtime_ns} if path.exists() else {}
