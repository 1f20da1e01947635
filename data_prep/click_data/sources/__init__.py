"""Where click logs come from: one module each, and the registry of them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from click_data.events import EventLog
from click_data.sources import log, movielens, synthetic


@dataclass(frozen=True)
class Source:
    """A way to get a log.

    options: a dataclass of what can be chosen. load(path, options, seed) gives the checked log;
    path is None exactly if not needs_path.
    """

    name: str
    summary: str
    origin: str
    licence: str
    needs_path: bool
    options: type[Any]
    load: Callable[[Path | None, Any, int], EventLog]

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.options))


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="synthetic",
            summary="a small made-up click log with planted interests, the default everywhere",
            origin="made here from a seed; nothing to download",
            licence="none needed: it holds no real data",
            needs_path=False,
            options=synthetic.SyntheticOptions,
            load=synthetic.load,
        ),
        Source(
            name="log",
            summary="your own click log: user_id, item_id, timestamp, optionally label, category",
            origin="a .parquet, .csv or .tsv file, or a folder of Parquet files",
            licence="whatever yours is",
            needs_path=True,
            options=log.LogOptions,
            load=log.load,
        ),
        Source(
            name="movielens",
            summary="MovieLens ratings; a positive is a rating of at least --threshold",
            origin="a folder, zip or ratings file of GroupLens, or the same as Parquet",
            licence="research use; most sets may not be redistributed: read each set's README",
            needs_path=True,
            options=movielens.MovieLensOptions,
            load=movielens.load,
        ),
    )
}
