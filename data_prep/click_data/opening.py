"""`open_dataset`: a prepared folder, once it is known to be whole and sound."""

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path

from click_data import schema
from click_data.soundness import refuse_unsound
from click_data.store import ClickDataset


def open_dataset(folder: str | Path, *, cache: str | Path | None = None) -> ClickDataset:
    """Open a folder that `prepare` wrote.

    An uncompressed copy of the Parquet files is mapped into memory (see `flat`; of items, by
    `datasets`); that copy is kept in `cache`: by default FOLDER/.cache, or a temporary folder where
    FOLDER cannot be written.
    Raises DataError if the folder is not a whole prepared data set, if its tables are not those
    that were written (all of them are read for that, a GB or so a second), or if they hold what
    cannot be (see `soundness`; looked at once, and then said so in the cache).
    """
    info = schema.read_info(Path(folder))
    schema.verify(Path(folder), info)
    folder = Path(folder).absolute()  # columns are mapped later, perhaps from another directory
    kept = Path(cache) if cache else _cache_in(folder, info["digest"])
    dataset = ClickDataset(folder, kept, info)
    seen = kept / f"sound-{hashlib.sha256(json.dumps(info).encode()).hexdigest()[:16]}"
    if not seen.exists():
        refuse_unsound(dataset)
        with suppress(OSError):
            seen.touch()
    return dataset


def _cache_in(folder: Path, digest: str) -> Path:
    cache = folder / ".cache"
    try:
        cache.mkdir(exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"click_data-{digest[:16]}"
    return cache
