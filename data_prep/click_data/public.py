"""Public data sets that can be prepared, and which of them are on this machine."""

from dataclasses import dataclass
from pathlib import Path

from click_data.schema import is_prepared


@dataclass(frozen=True)
class PublicSet:
    """A data set that its owners publish; `folders` are names it may be found under."""

    name: str
    size: str
    folders: tuple[str, ...]
    licence: str


_NO_COPIES = "research use, no redistribution"
_COPIES = "research use, redistribution under the same terms"

MOVIELENS_ORIGIN = "GroupLens, University of Minnesota: grouplens.org/datasets/movielens"
MOVIELENS = (
    PublicSet("ml-100k", "100 thousand ratings, 943 users", ("ml-100k", "ml_100k"), _NO_COPIES),
    PublicSet("ml-1m", "1 million ratings, 6,040 users", ("ml-1m", "ml_1m"), _NO_COPIES),
    PublicSet("ml-10m", "10 million ratings", ("ml-10m", "ml-10M100K", "ml_10m"), _NO_COPIES),
    PublicSet("ml-20m", "20 million ratings", ("ml-20m", "ml_20m"), _COPIES),
    PublicSet("ml-25m", "25 million ratings", ("ml-25m", "ml_25m"), _COPIES),
    PublicSet("ml-32m", "32 million ratings", ("ml-32m", "ml_32m"), _COPIES),
    PublicSet(
        "ml-latest-small",
        "100 thousand ratings, 610 users",
        ("ml-latest-small", "ml_latest_small"),
        _COPIES,
    ),
)


def find(public: PublicSet, folder: Path) -> Path | None:
    """Where a data set lies in `folder`: as a folder or a zip under one of its names.

    What was prepared from it may lie there under the same name, and is not it.
    """
    for name in public.folders:
        for place in (folder / name, folder / f"{name}.zip"):
            if place.exists() and not is_prepared(place):
                return place
    return None
