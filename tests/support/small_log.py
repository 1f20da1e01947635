"""A small prepared data set, and what lies in its folder."""

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {"users": 40, "items": 60, "categories": 6, "events": 800}
FILES = ["dataset.json", "histories.parquet", "items.parquet", "requests.parquet"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
