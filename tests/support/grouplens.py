"""Ratings in GroupLens' published layouts, small enough to work out by hand."""

import zipfile
from collections.abc import Callable
from pathlib import Path

# user, movie, stars, time; in no time order, as GroupLens publishes.
RATINGS = [
    (7, 30, 5, 1000),
    (2, 10, 4, 1010),
    (2, 20, 3, 1000),
    (7, 10, 2, 1000),
    (7, 20, 4, 1020),
    (2, 30, 1, 1030),
    (9, 10, 5, 1030),
    (9, 40, 4, 1040),
    (2, 40, 2, 1050),
    (7, 50, 3, 1060),
]
MOVIES = {10: "Comedy|Drama", 20: "Drama", 30: "Horror", 40: "Comedy", 50: "War|Western"}
TITLE = "Séance: the Return (1990)"
GENRES_100K = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery"),
    *("Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def ratings_csv(folder: Path) -> Path:
    lines = ["userId,movieId,rating,timestamp", *(f"{u},{i},{r}.0,{t}" for u, i, r, t in RATINGS)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = ["movieId,title,genres", *(f'{i},"{TITLE}, ""x""",{g}' for i, g in MOVIES.items())]
    (folder / "movies.csv").write_text("\n".join(movies) + "\n", encoding="utf-8")
    return folder / "ratings.csv"


def ratings_dat(folder: Path) -> Path:
    lines = ("::".join(map(str, row)) for row in RATINGS)
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    movies = (f"{i}::{TITLE}::{g}" for i, g in MOVIES.items())
    (folder / "movies.dat").write_text("\n".join(movies) + "\n", encoding="latin-1")
    return folder / "ratings.dat"


def u_data(folder: Path) -> Path:
    lines = ("\t".join(map(str, row)) for row in RATINGS)
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    movies = []
    for movie, genres in MOVIES.items():
        flags = "|".join(str(int(name in genres.split("|"))) for name in GENRES_100K)
        movies.append(f"{movie}|{TITLE}|01-Jan-1990||http://example.invalid/?{TITLE}|{flags}")
    (folder / "u.item").write_text("\n".join(movies) + "\n", encoding="latin-1")
    return folder / "u.data"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "csv": ratings_csv,
    "dat": ratings_dat,
    "u.data": u_data,
}


def zipped(folder: Path, path: Path) -> Path:
    """The files of a folder as GroupLens zips them: inside a folder of the zip's name."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{path.stem}/{file.name}")
            archive.writestr(f"__MACOSX/{path.stem}/._{file.name}", b"junk")
    return path
