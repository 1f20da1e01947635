"""The data set that the notebooks of a run read: the one given, some users of it, or a made-up one.

What is made lies in build/data, and is made once.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.code_roots import DATA, code_hash
from jagged_ranking.reproduce.click_logs import data_digest, describe_data
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import digest
from jagged_ranking.reproduce.synthetic_log import SOURCE, is_made, synthetic_folder, synthetic_log

SAMPLE = "sample"
ENTRIES = (SOURCE, SAMPLE)  # of a preset, beside its notebooks


@dataclass(frozen=True)
class RunData:
    """A data set that is there or can be made.

    Attributes:
        folder: where it is or will be.
        title: what people are told that it is.
        is_there: whether there is nothing to be made.
        make: makes it.
    """

    folder: Path
    title: str
    is_there: Callable[[], bool]
    make: Callable[[], None]


def find_run_data(preset: str, entries: dict[str, dict[str, Any]], data: Path | None) -> RunData:
    """What a preset's notebooks read.

    Args:
        preset: its name.
        entries: what its file says: of the synthetic log, which stands in where no data is given,
            and of the sample that is taken of a larger data set (options of `sample_users`).
        data: a prepared data set, or none.

    Raises:
        RunError: `data` is no prepared data set, or the preset does not say what to sample.
    """
    if data is None:
        options, name = entries.get(SOURCE, {}), f"{SOURCE}-{preset}"
        folder = synthetic_folder(options, name=name)
        there = partial(is_made, options, name=name)
        return RunData(folder, paths.shown(folder), there, partial(_synthesise, options, name))
    data_digest(data)
    sample = entries.get(SAMPLE)
    if sample and set(sample) != {"requests", "longest"}:
        raise RunError(f"preset {preset}: `{SAMPLE}` needs requests and longest, and nothing else")
    if sample and _is_larger(data, sample["requests"]):
        key = digest([sample, data_digest(data), code_hash(roots=DATA)])
        folder = paths.BUILD / "data" / f"{SAMPLE}-{key[:16]}"
        title = f"{paths.shown(folder)}, a sample of the users of {paths.shown(data)}"
        return RunData(
            folder, title, partial(_is_prepared, folder), partial(_sample, data, folder, sample)
        )
    return RunData(data, paths.shown(data), lambda: True, lambda: None)


def _is_larger(data: Path, requests: int) -> bool:
    counts = describe_data(data).get("counts", {}).get("requests", {})
    return sum(counts.values()) > requests


def _is_prepared(folder: Path) -> bool:
    try:
        return data_digest(folder) is not None
    except RunError:
        return False


def _synthesise(options: dict[str, Any], name: str) -> None:
    synthetic_log(options, name=name)
    # polars has SIGINT go on with what it finds: waiting for a notebook would go on to its end.
    signal.siginterrupt(signal.SIGINT, True)


def _sample(data: Path, folder: Path, options: dict[str, Any]) -> None:
    from click_data.sampling import sample_users  # pyarrow: only where data is made

    folder.parent.mkdir(parents=True, exist_ok=True)
    sample_users(data, out=folder, **options)
