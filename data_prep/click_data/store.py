"""A prepared data set, opened as memory-mapped columns."""

import glob
import os
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
from click_data.flat import FlatTable, flat_table
from click_data.split import SPLITS


@dataclass(frozen=True)
class HistoryColumns:
    """All histories, flat: events offsets[u] to offsets[u+1] are user u's, oldest first.

    offsets int64 [U+1]; item int32 [T]; time int64 [T]; signals: float32 [T] by name. Read-only.
    """

    offsets: NDArray[np.int64]
    item: NDArray[np.int32]
    time: NDArray[np.int64]
    signals: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class RequestColumns:
    """Requests of one split: user, prefix int32, time int64 [R], and their candidates, flat.

    Request i may see events offsets[user[i]] to offsets[user[i]] + prefix[i] of the histories, and
    asks about the candidates `offsets[i]` to `offsets[i+1]` of these: offsets int64 [R+1], from 0;
    item int32 [C]; labels int8 [C] by task; features float32 [C] by name. context: int32 (codes)
    or float32 [R] by name. Read-only.
    """

    user: NDArray[np.int32]
    prefix: NDArray[np.int32]
    time: NDArray[np.int64]
    offsets: NDArray[np.int64]
    item: NDArray[np.int32]
    labels: dict[str, NDArray[np.int8]]
    features: dict[str, NDArray[np.float32]]
    context: dict[str, NDArray[Any]]

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
        """Size of the training vocabulary of items, the unknown item 0 included."""
        return self.info["num_items"]

    @property
    def item_rows(self) -> int:
        """Number of item ids: num_items, and the new items behind."""
        return self.info["item_rows"]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the labels; the first one is what is ranked by."""
        return tuple(self.info["tasks"])

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(self.info["signals"])

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the candidates' features."""
        return tuple(self.info["features"])

    @property
    def context(self) -> dict[str, int | None]:
        """Number of codes (0, unknown, included) of each context, None of a dense one."""
        return dict(self.info["context"])

    @property
    def item_features(self) -> dict[str, int]:
        """Number of codes (0, unknown, included) of each categorical feature of items."""
        return dict(self.info["item_features"])

    @cached_property
    def histories(self) -> HistoryColumns:
        table = self._histories
        values = {name: table.lists(name, 0) for name in table.values}
        return HistoryColumns(
            offsets=table.offsets[0],
            item=values["item"],
            time=values["time"],
            signals={name: values[name] for name in self.signals},
        )

    @cached_property
    def items(self) -> pa.Table:
        """All items as an Arrow table; row i describes item id i."""
        return self._open(schema.ITEMS)

    @cached_property
    def item_categories(self) -> dict[str, NDArray[np.int32]]:
        """The code of each item, int32 [item_rows], by categorical feature."""
        return {name: _whole(self.items, name).to_numpy() for name in self.info["item_features"]}

    @cached_property
    def item_dense(self) -> dict[str, NDArray[np.float32]]:
        """The value of each item, float32 [item_rows], by dense feature."""
        return {name: _whole(self.items, name).to_numpy() for name in self.info["item_dense"]}

    def requests(self, split: str) -> RequestColumns:
        """Requests of "train", "valid" or "test", in time order."""
        if split not in SPLITS:
            raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
        part, table = SPLITS.index(split), self._requests
        return RequestColumns(
            user=table.plain("user", part),
            prefix=table.plain("prefix", part),
            time=table.plain("time", part),
            offsets=table.offsets[part],
            item=table.lists("item", part),
            labels={task: table.lists(schema.label_column(task), part) for task in self.tasks},
            features={
                name: table.lists(schema.feature_column(name), part) for name in self.features
            },
            context={name: table.plain(schema.context_column(name), part) for name in self.context},
        )

    @cached_property
    def _histories(self) -> FlatTable:
        names = ("item", "time", *self.signals)
        return self._flat(schema.HISTORIES, lists=names, plain=(), parts=[self.num_users])

    @cached_property
    def _requests(self) -> FlatTable:
        """Those of all splits."""
        counts = self.info["counts"]["requests"]
        return self._flat(
            schema.REQUESTS,
            lists=[
                "item",
                *map(schema.label_column, self.tasks),
                *map(schema.feature_column, self.features),
            ],
            plain=["user", "prefix", "time", *map(schema.context_column, self.context)],
            parts=[counts[split] for split in SPLITS],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all histories and requests, as they are mapped."""
        return sum(table.nbytes for table in (self._histories, self._requests))

    def scratch(self, count: int, dtype: Any) -> NDArray[Any]:
        """A flat array for what is made of long columns, in a file without a name in the cache: no
        memory that the system could not take back. It goes with the array."""
        if count == 0:
            return np.empty(0, dtype)
        place = self._cache if os.access(self._cache, os.W_OK) else None
        with tempfile.TemporaryFile(dir=place) as file:
            return np.asarray(np.memmap(file, dtype, "w+", shape=(count,)))

    def _flat(self, name: str, **columns: Any) -> FlatTable:
        cache = self._cache / self.digest[:16]
        return flat_table(self.folder / name, cache=cache, **columns)

    def _open(self, name: str) -> pa.Table:
        import datasets  # slow to import, and only reading needs it
        from datasets.exceptions import DatasetsError

        path = self.folder / name
        # One chunk for a whole column, so that it can be handed out without a copy.
        one_piece = 2**31 - 1
        quiet = not datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            # `load_dataset` would tell the hub that a packaged reader of files is used.
            dataset = datasets.Dataset.from_parquet(
                glob.escape(str(path)), cache_dir=str(self._cache), writer_batch_size=one_piece
            )
        except (pa.ArrowException, OSError, DatasetsError) as error:
            raise DataError(f"not a readable Parquet file ({error})", file=path) from error
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        return dataset.data.table


def _whole(table: pa.Table, name: str) -> Any:
    """One column as one Arrow array (a view where it is stored in one piece, as written)."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
