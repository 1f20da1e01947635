"""MovieLens ratings, in each of the forms in which GroupLens publishes them.

ratings.csv + movies.csv (ml-latest*, ml-20m, ml-25m, ml-32m), ratings.dat + movies.dat (ml-1m,
ml-10m; fields separated by "::", Latin-1), u.data + u.item (ml-100k), and Parquet:
interactions.parquet with user_id, item_id, timestamp, rating and optionally category_id.
"""

import csv
import json
import lzma
import math
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import polars as pl

from click_data import columns, plain
from click_data.checks import note_duplicates
from click_data.errors import DataError
from click_data.events import ClickLog, label_column, signal_column
from click_data.schema import file_digest
from click_data.table import Table, read_parquet
from click_data.text import read_text, records, refuse_other

RATINGS = ("ratings.csv", "ratings.dat", "u.data", "interactions.parquet")
_MOVIES = {"ratings.csv": "movies.csv", "ratings.dat": "movies.dat", "u.data": "u.item"}
_NAMES = ("userId", "movieId", "rating", "timestamp")
_MOVIE_NAMES = ["movieId", "title", "genres"]
_PARQUET_NAMES = ("user_id", "item_id", "rating", "timestamp")
_BEFORE_GENRES = 5  # number, title, two dates and address in u.item
# The genre flags behind them, in their order (file u.genre).
_GENRES_100K = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery"),
    *("Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


@dataclass(frozen=True)
class MovieLensOptions:
    """threshold: the least rating, in stars, that is a positive label."""

    threshold: float = 4.0


@dataclass(frozen=True)
class _Input:
    """A ratings file and the movies file beside it, with the names to show for them."""

    name: str
    ratings: Path
    movies: Path | None
    ratings_shown: str
    movies_shown: str


def load(path: Path | None, options: MovieLensOptions, seed: int) -> ClickLog:
    """Read ratings as a log: label = rating >= threshold, category = the movie's first genre.

    The rating itself is an extra signal. GroupLens' files are in no time order, so any order is
    taken; ratings of one user in the same second are ordered by movie id.
    """
    del seed  # nothing here is random
    assert path is not None
    if not math.isfinite(options.threshold):
        raise DataError(f"--threshold {options.threshold}: not a number of stars")
    with _find(path) as source:
        if source.ratings.suffix == ".parquet":
            table, names = _read_parquet(source)
        else:
            table, names = _read_ratings(source), _NAMES
        user, item, rating, timestamp = names
        stars = columns.numbers(table, rating)
        events = pl.DataFrame(
            {
                "user_id": columns.ids(table, user),
                # The list of movies has integers, which no other id would be found among.
                "item_id": columns.ids(table, item, integers=source.movies is not None),
                "time": columns.times(table, timestamp),
                label_column("label"): (stars >= options.threshold).cast(pl.Int8),
                signal_column("rating"): stars.cast(pl.Float32),
            }
        ).with_row_index("row")
        note_duplicates(table, events)
        table.refuse()
        events = _with_category(events.drop("row"), table, source).sort("item_id")
        label = events[label_column("label")]
        if label.n_unique() == 1:
            raise DataError(
                f"every rating is {'at least' if label[0] else 'below'} "
                f"{options.threshold:g}, so there is nothing to tell apart; rank likes against "
                "drawn items instead: jagged prepare log --from FILE --negatives 1 --out DIR",
                file=source.ratings_shown,
                column=rating,
            )
        files = [(source.ratings, source.ratings_shown)]
        if source.movies:
            files.append((source.movies, source.movies_shown))
        inputs = tuple({"file": Path(s).name, "sha256": file_digest(f)} for f, s in files)
    return ClickLog(name=source.name, events=events, inputs=inputs)


@contextmanager
def _find(path: Path) -> Iterator[_Input]:
    """Locate the ratings in what a user would name: a folder, a zip, or the ratings file."""
    plain.refuse_absent(path)
    if path.is_dir():
        yield _in_folder(path)
    elif zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory() as scratch:
            yield _in_zip(path, Path(scratch))
    elif path.suffix == ".zip":
        raise DataError("not a readable zip file, truncated?", file=path)
    elif path.name in RATINGS or path.suffix == ".parquet":
        yield _beside(path, name=path.resolve().parent.name)
    else:
        known = ", ".join(RATINGS)
        raise DataError(f"not a MovieLens ratings file ({known}), folder or zip", file=path)


def _in_folder(folder: Path) -> _Input:
    inner = sorted(child for child in folder.iterdir() if child.is_dir())
    # An unpacked zip may have left its folder inside another one.
    for place in (folder, *(inner if len(inner) == 1 else ())):
        for ratings in RATINGS:
            if (place / ratings).is_file():
                return _beside(place / ratings, name=folder.resolve().name)
    known = ", ".join(RATINGS)
    raise DataError(f"no MovieLens ratings in this folder; one of {known} is needed", file=folder)


def _beside(ratings: Path, *, name: str) -> _Input:
    movies = ratings.with_name(_MOVIES.get(ratings.name, "none"))
    found = movies if movies.is_file() else None
    return _Input(name, ratings, found, str(ratings), str(movies))


def _in_zip(path: Path, scratch: Path) -> _Input:
    """Unpack the two files that matter into `scratch`, under flat names of our own."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in sorted(archive.namelist()) if not name.endswith("/")]
            members: dict[str, list[str]] = {}
            for name in names:
                if not name.startswith("__MACOSX/"):
                    members.setdefault(PurePosixPath(name).name, []).append(name)
            ratings = next((name for name in RATINGS if name in members), None)
            if ratings is None:
                known = ", ".join(RATINGS)
                raise DataError(f"no MovieLens ratings in this zip ({known})", file=path)
            movies = _MOVIES.get(ratings, "none")
            wanted = {name: members[name][0] for name in (ratings, movies) if name in members}
            for name in wanted:
                if len(members[name]) > 1:
                    raise DataError(
                        f"holds several files {name}: {', '.join(members[name])}; unpack it and "
                        "give the folder of one",
                        file=path,
                    )
            _refuse_members(path, [archive.getinfo(name) for name in wanted.values()])
            for name, member in wanted.items():
                with archive.open(member) as packed, (scratch / name).open("wb") as file:
                    shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"not a readable zip file, truncated? ({error})", file=path) from error
    except (NotImplementedError, RuntimeError, OSError) as error:
        raise DataError(
            f"cannot be unpacked ({error}); unpack it and give the folder", file=path
        ) from error
    return _Input(
        name=path.stem,
        ratings=scratch / ratings,
        movies=scratch / movies if movies in wanted else None,
        ratings_shown=f"{path}/{wanted[ratings]}",
        movies_shown=f"{path}/{wanted.get(movies, movies)}",
    )


def _refuse_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise before anything is unpacked that could not be, or would fill the disk."""
    for member in members:
        if member.flag_bits & 1:
            raise DataError(
                "is encrypted; unpack it and give the folder", file=f"{path}/{member.filename}"
            )
    if sum(member.file_size for member in members) > plain.LARGEST:
        raise plain.too_large("zip", "folder", path)


def _read_ratings(source: _Input) -> Table:
    shown = source.ratings_shown
    if source.ratings.name == "ratings.csv":
        table = read_text(source.ratings, wanted=_NAMES, shown=shown)
    elif source.ratings.name == "u.data":
        table = read_text(source.ratings, wanted=_NAMES, separator="\t", names=_NAMES, shown=shown)
    else:
        # polars splits at single bytes: "1::2" has an empty column between its two fields.
        names = [part for name in _NAMES for part in (name, f"after {name}")][:-1]
        table = read_text(source.ratings, wanted=_NAMES, separator=":", names=names, shown=shown)
    table.require(*_NAMES, hint="; another layout can be read with: jagged prepare log")
    return table


def _read_parquet(source: _Input) -> tuple[Table, tuple[str, ...]]:
    table = read_parquet(
        source.ratings, wanted=(*_PARQUET_NAMES, "category_id"), shown=source.ratings_shown
    )
    table.require(*_PARQUET_NAMES, hint="; another layout can be read with: jagged prepare log")
    return table, _PARQUET_NAMES


def _with_category(events: pl.DataFrame, table: Table, source: _Input) -> pl.DataFrame:
    """Add the first genre, where there is a list of movies."""
    if source.ratings.suffix == ".parquet":
        if "category_id" not in table.columns:
            return events
        category = columns.ids(table, "category_id", optional=True)
        table.refuse()
        names = _category_names(table)
        if names:
            category = category.replace_strict(range(len(names)), names, default=None)
        return events.with_columns(category.alias("item category"))
    if source.movies is None:
        return events
    genres = _first_genres(source.movies, source.movies_shown)
    movies = pl.DataFrame(
        {"item_id": list(genres), "item category": list(genres.values())},
        schema={"item_id": events["item_id"].dtype, "item category": pl.String},
    )
    return events.join(movies, on="item_id", how="left", maintain_order="left")


def _category_names(table: Table) -> list[str]:
    """What the numbers in `category_id` mean, if a Parquet file says so."""
    text = table.metadata.get("category_names", "[]")
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        table.fail("its metadata `category_names` is not a JSON list of names")
    return names


def _first_genres(path: Path, shown: str) -> dict[int, str]:
    """Movie id -> its first genre, from movies.csv, movies.dat or u.item."""
    genres: dict[int, str] = {}
    try:
        for number, fields in _movie_records(path, shown):
            try:
                if path.suffix == ".item":
                    flags = fields[_BEFORE_GENRES:]
                    if len(flags) != len(_GENRES_100K):
                        raise IndexError
                    listed = _GENRES_100K[flags.index("1")]
                else:
                    listed = fields[2]
                genres[int(fields[0])] = listed.split("|")[0]
            except (ValueError, IndexError) as error:
                message = "not a movie with genres"
                raise DataError(message, file=shown, row=f"line {number}") from error
    except (csv.Error, OSError) as error:
        raise DataError(f"not readable ({error})", file=shown) from error
    return genres


def _movie_records(path: Path, shown: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each movie; of a .csv id, title, genres."""
    if path.suffix == ".csv":
        encoding = plain.find_encoding(path, shown, None)
        refuse_other(path, shown, encoding)
        rows = records(path, ",", encoding=encoding)
        _, header = next(rows, (1, []))
        if header != _MOVIE_NAMES:
            message = f"the header is not {','.join(_MOVIE_NAMES)}"
            raise DataError(message, file=shown, row="line 1")
        for number, fields in rows:
            if any(map(plain.garbled, fields)):
                raise DataError("bytes that are not UTF-8", file=shown, row=f"line {number}")
            yield number, fields
    else:
        separator = "::" if path.suffix == ".dat" else "|"
        with path.open(encoding="latin-1") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\n").split(separator)
