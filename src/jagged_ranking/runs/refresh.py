"""`jagged figures`: redraw from results.parquet and manifest.json, and say what changed."""

import hashlib
from pathlib import Path

from jagged_ranking import paths
from jagged_ranking.figures.redraw import (
    redraw,
    redraw_all,
    result_folders,
    update_performance,
    update_readme,
)
from jagged_ranking.runs.errors import RunError
from jagged_ranking.runs.freshness import MANIFEST, RESULTS


def refresh(folder: Path) -> list[Path]:
    """Redraw a folder of results, or every one below a folder; returns the files that changed.

    For the checkout's own figures the blocks of numbers in README.md and docs/performance.md are
    written anew too.

    Raises:
        RunError: there is no such folder, or nothing in it to draw from.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder")
    own = folder.resolve() == paths.FIGURES.resolve()
    readme, page = paths.ROOT / "README.md", paths.ROOT / "docs" / "performance.md"
    before = _digests(folder, readme, page)
    if (folder / RESULTS).is_file():
        redraw(folder)
    elif own or result_folders(folder):  # a checkout without results says so in its README
        redraw_all(folder)
    else:
        raise RunError(f"{folder}: no {RESULTS} with a {MANIFEST}, here or one folder below")
    if own:
        update_readme(readme, folder)
        update_performance(page, folder)
    after = _digests(folder, readme, page)
    return sorted(path for path in before | after if before.get(path) != after.get(path))


def _digests(folder: Path, *pages: Path) -> dict[Path, str]:
    files = [*folder.glob("*"), *folder.glob("*/*"), *pages]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}
