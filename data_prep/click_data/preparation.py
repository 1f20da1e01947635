"""`prepare`: from a source to a folder in the common form, whole or not at all."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from click_data import schema
from click_data.errors import DataError
from click_data.events import build
from click_data.output import refuse_foreign, write_whole
from click_data.sources import SOURCES, Source
from click_data.sources.published import check_counts
from click_data.split import check_fractions


def prepare(
    source: str,
    *,
    out: str | Path,
    from_path: str | Path | None = None,
    seed: int = 0,
    split: Sequence[float] = (0.8, 0.1, 0.1),
    min_history: int = 0,
    name: str | None = None,
    force: bool = False,
    **options: Any,
) -> Path:
    """Prepare a click log and return `out`.

    source: a name in SOURCES; from_path: its input (none for "synthetic").
    seed: of what a source draws (a synthetic log, negatives); the rest is not random.
    split: shares of all events (or of the requests that a log brings), in time order, for train,
        valid and test.
    min_history: leave out requests that may see fewer events.
    name: what to call the data set (default: the source's choice). What is called as a published
        set is must have its counts.
    force: replace a different prepared data set in `out`. An identical one is always kept.
    options: the source's own, see the option classes in `click_data.sources`.

    Raises DataError for input that cannot be used, and then leaves `out` as it was.
    """
    if source not in SOURCES:
        raise DataError(f"no source {source!r}; there are: {', '.join(SOURCES)}")
    chosen = SOURCES[source]
    settings = _settings(chosen, options)
    fractions = check_fractions(split)
    if min_history < 0:
        raise DataError(f"min_history must not be negative, not {min_history}")
    if seed < 0:
        raise DataError(f"seed must not be negative, not {seed}")
    if chosen.needs_path and from_path is None:
        raise DataError(f"source {source} needs --from PATH")
    if from_path is not None and not chosen.needs_path:
        raise DataError(f"source {source} is made here; it takes no --from")
    folder = Path(out)
    refuse_foreign(folder)

    try:
        log = chosen.load(None if from_path is None else Path(from_path), settings, seed)
        if from_path is not None:
            check_counts(name or log.name, log.counted, Path(from_path))
        drawn = log.negatives > 0 or not chosen.needs_path
        description = {
            "name": name or log.name,
            "source": source,
            "inputs": list(log.inputs),
            "options": {
                "split": list(fractions),
                "min_history": min_history,
                **asdict(settings),
                **log.options,
                **({"seed": seed} if drawn else {}),
            },
        }
        # `build` lets go of rows that it is done with, if nobody else holds them.
        held = [log]
        del log
        prepared = build(held.pop(), split=fractions, min_history=min_history, seed=seed)
    except MemoryError as error:
        raise DataError(f"does not fit into memory ({error})", file=from_path) from error
    write_whole(folder, force, lambda new: schema.write(prepared, new, description))
    return folder


def _settings(source: Source, options: dict[str, Any]) -> Any:
    for option in options:
        if option not in source.option_names:
            known = ", ".join(source.option_names)
            raise DataError(f"source {source.name} has no option {option!r}; it has: {known}")
    return source.options(**options)
