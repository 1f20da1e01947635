"""Where click logs come from: one module each, and the registry of them."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from click_data.events import EventLog
from click_data.sources import movielens


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
