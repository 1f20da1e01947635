"""A prepared data set, opened as memory-mapped columns."""

import glob
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from click_data import schema
from click_data.errors import DataError
from click_data.split import SPLITS


@dataclass(frozen=True)
class HistoryColumns:
    """All histories, flat: events offsets[u] to offsets[u+1] are user u's, oldest first.

    offsets int64 [U+1]; item, category int32 [T]; time int64 [T]; label int8 [T];
    signals: float32 [T] by name. Read-only.
    """

    offsets: NDArray[np.int64]
    item: NDArray[np.int32]
    category: NDArray[np.int32]
    time: NDArray[np.int64]
    label: NDArray[np.int8]
    signals: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class SampleColumns:
    """Samples of one split, [N] each: user, prefix, item, category int32, label int8, time int64.

    Sample i may see events offsets[user[i]] to offsets[user[i]] + prefix[i]. Read-only.
    """

    user: NDArray[np.int32]
    prefix: NDArray[np.int32]
    item: NDArray[np.int32]
    category: NDArray[np.int32]
    label: NDArray[np.int8]
    time: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user)


class ClickDataset:
    """A prepared data set. `info` is dataset.json; columns are mapped when first asked for."""

    def __init__(self, folder: Path, cache: Path, info: dict[str, Any]) -> None:
        self.folder = folder
        self.info = info
        self._cache = cache

    @property
    def name(self) -> str:
        return self.info["name"]

    @property
    def digest(self) -> str:
        """sha256 of the Parquet files: the data's identity."""
        return self.info["digest"]

    @property
    def num_users(self) -> int:
        return self.info["counts"]["users"]

    @property
    def num_items(self) -> int:
        """Size of the item vocabulary, the unknown item 0 included."""
        return self.info["num_items"]

    @property
    def num_categories(self) -> int:
        """Size of the category vocabulary, the unknown category 0 included."""
        return self.info["num_categories"]

    @cached_property
    def histories(self) -> HistoryColumns:
        table = self._open(schema.HISTORIES)
        signals = tuple(self.info["signals"])
        lists = {name: _whole(table, name) for name in ("item", "category", "time", "label")}
        signal_lists = {name: _whole(table, name) for name in signals}
        offsets = lists["item"].offsets.to_numpy().astype(np.int64)
        return HistoryColumns(
            offsets=offsets,
            **{name: column.values.to_numpy() for name, column in lists.items()},
            signals={name: column.values.to_numpy() for name, column in signal_lists.items()},
        )

    @cached_property
    def items(self) -> pa.Table:
        """The item vocabulary as an Arrow table; row i describes item id i."""
        return self._open(schema.ITEMS)

    def samples(self, split: str) -> SampleColumns:
        """Samples of "train", "valid" or "test", in time order."""
        if split not in SPLITS:
            raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
        counts = self.info["counts"]["samples"]
        start = sum(counts[name] for name in SPLITS[: SPLITS.index(split)])
        rows = slice(start, start + counts[split])
        return SampleColumns(**{name: values[rows] for name, values in self._samples.items()})

    @cached_property
    def _samples(self) -> dict[str, NDArray[Any]]:
        table = self._open(schema.SAMPLES)
        return {name: _whole(table, name).to_numpy() for name in schema.SAMPLE_COLUMNS}

    def _open(self, name: str) -> pa.Table:
        import datasets  # slow to import, and only reading needs it
        from datasets.exceptions import DatasetsError

        path = self.folder / name
        # One chunk for a whole column, so that it can be handed out without a copy.
        one_piece = 2**31 - 1
        quiet = not datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            dataset = datasets.load_dataset(
                "parquet",
                data_files=glob.escape(str(path)),
                split="train",
                cache_dir=str(self._cache),
                writer_batch_size=one_piece,
            )
        except (pa.ArrowException, OSError, DatasetsError) as error:
            raise DataError(f"not a readable Parquet file ({error})", file=path) from error
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        return dataset.data.table  # pyright: ignore[reportAttributeAccessIssue]


def open_dataset(folder: str | Path, *, cache: str | Path | None = None) -> ClickDataset:
    """Open a folder that `prepare` wrote.

    `datasets` maps an uncompressed copy of the Parquet files into memory; that copy is kept in
    `cache`: by default FOLDER/.cache, or a temporary folder where FOLDER cannot be written.
    Raises DataError if the folder is not a whole prepared data set, or if its tables are not those
    that were written: all of them are read for that, a GB or so a second.
    """
    info = schema.read_info(Path(folder))
    schema.verify(Path(folder), info)
    folder = Path(folder).absolute()  # columns are mapped later, perhaps from another directory
    return ClickDataset(folder, Path(cache) if cache else _cache_in(folder, info["digest"]), info)


def _cache_in(folder: Path, digest: str) -> Path:
    cache = folder / ".cache"
    try:
        cache.mkdir(exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"click_data-{digest[:16]}"
    return cache


def _whole(table: pa.Table, name: str) -> Any:
    """One column as one Arrow array (a view where it is stored in one piece, as written)."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
