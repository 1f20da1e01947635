"""A prepared data set, opened as memory-mapped columns."""

import glob
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
        table = self._open(schema.HISTORIES)
        lists = {name: _whole(table, name) for name in ("item", "time", *self.signals)}
        values = {name: _values(column) for name, column in lists.items()}
        return HistoryColumns(
            offsets=_offsets(lists["item"]),
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
        counts = self.info["counts"]["requests"]
        start = sum(counts[name] for name in SPLITS[: SPLITS.index(split)])
        table = self._requests.slice(start, counts[split])
        labels = {task: schema.label_column(task) for task in self.tasks}
        features = {name: schema.feature_column(name) for name in self.features}
        context = {name: schema.context_column(name) for name in self.context}
        item = _whole(table, "item")
        user, prefix, time = (_whole(table, of).to_numpy() for of in ("user", "prefix", "time"))
        return RequestColumns(
            user=user,
            prefix=prefix,
            time=time,
            offsets=_offsets(item),
            item=_values(item),
            labels={task: _values(_whole(table, of)) for task, of in labels.items()},
            features={name: _values(_whole(table, of)) for name, of in features.items()},
            context={name: _whole(table, of).to_numpy() for name, of in context.items()},
        )

    @cached_property
    def _requests(self) -> pa.Table:
        """Those of all splits."""
        return self._open(schema.REQUESTS)

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


def _offsets(lists: Any) -> NDArray[np.int64]:
    """Where each list of a column begins, int64, from 0."""
    offsets = lists.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    offsets.flags.writeable = False
    return offsets


def _values(lists: Any) -> NDArray[Any]:
    """What the lists of a column hold, one behind the other, without a copy."""
    return lists.flatten().to_numpy()


def _whole(table: pa.Table, name: str) -> Any:
    """One column as one Arrow array (a view where it is stored in one piece, as written)."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
