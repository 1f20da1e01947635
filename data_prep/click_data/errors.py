"""The one error that bad input raises."""

from pathlib import PurePath


class DataError(ValueError):
    """Input that cannot be used; `str` is one line that names file, column and row where known.

    `row` is a place as a person would look it up: "line 7" of a text file (the header is line 1)
    or "row 6" of a Parquet file (the first row is row 0).
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | PurePath | None = None,
        column: str | None = None,
        row: str | None = None,
    ) -> None:
        place = ", ".join(part for part in (column and f"column {column}", row) if part)
        parts = [str(part) for part in (file, place) if part]
        super().__init__(" ".join(": ".join([*parts, message]).split()))
