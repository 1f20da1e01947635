"""Sets that are published as two folders: what to train on, and what to tell how good it is."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from click_data.errors import DataError
from click_data.plain import refuse_absent

_LATER = ("dev", "validation", "valid")


def folders(path: Path, file: str) -> list[tuple[str, Path]]:
    """The folders that hold `file`, as ("train" or "later", folder): two, or but one of them.

    A folder inside `path` is known by what its name ends in, as MINDsmall_dev is; `path` itself is
    of "train".
    """
    refuse_absent(path)
    if (path / file).is_file():
        return [("train", path)]
    inner = sorted(path.iterdir()) if path.is_dir() else []
    found: list[tuple[str, Path]] = []
    for role, names in (("train", ("train",)), ("later", _LATER)):
        mine = [f for f in inner if f.name.lower().endswith(names) and (f / file).is_file()]
        if len(mine) > 1:
            raise DataError(f"several folders of one kind: {', '.join(map(str, mine))}", file=path)
        found += [(role, folder) for folder in mine]
    if not found:
        known = ", ".join(("train", *_LATER))
        raise DataError(f"no {file} in this folder, nor in one inside it named {known}", file=path)
    return found


def official_split(roles: Sequence[str], rows: Sequence[int], time: pl.Series) -> pl.Series | None:
    """The split of each row: train, and the later folder halved by time; None without two folders.

    rows: how many are of each folder. Requests of one time are of one half, the test.
    """
    if len(roles) < 2:
        return None
    role = pl.concat(
        [pl.Series([r]).new_from_index(0, n) for r, n in zip(roles, rows, strict=True)]
    )
    later = role == "later"
    middle = time.filter(later).sort()[int(later.sum()) // 2]
    frame = pl.DataFrame({"later": later, "test": time >= middle})
    split = pl.when("later").then(pl.when("test").then(pl.lit("test")).otherwise(pl.lit("valid")))
    return frame.select(split.otherwise(pl.lit("train"))).to_series()
