"""Redraw figures from committed results alone, and say them in README and docs."""

import hashlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from jagged_ranking import paths, provenance
from jagged_ranking.figures import (
    cached_figures,
    goals,
    headlines,
    history_length,
    hstu_figures,
    memory,
    operation_figures,
    quality,
    scaling_figures,
    serving_figures,
    sparse_figures,
    speed,
    streaming_figures,
    style,
    tables,
    target,
    throughput_figures,
)
from jagged_ranking.figures.operation_goals import operations_table
from jagged_ranking.figures.result_folder import has_results, read_results, result_folders
from jagged_ranking.processes import end_worker_with_parent, interrupts_held
from jagged_ranking.provenance import MANIFEST
from jagged_ranking.results import RESULTS

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
OPERATIONS_BEGIN = "<!-- operations:begin -->"
OPERATIONS_END = "<!-- operations:end -->"
GOALS_BEGIN = "<!-- goals:begin -->"
GOALS_END = "<!-- goals:end -->"


def refresh(folder: Path) -> list[Path]:
    """Redraw a folder of results, or every one below a folder; returns the files that changed.

    For the checkout's own figures the blocks of numbers in README.md, docs/results.md and
    docs/performance.md are written anew too.

    Raises:
        ValueError: there is no such folder, or nothing in it to draw from.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    own = paths.has_checkout() and folder.resolve() == paths.FIGURES.resolve()
    docs = paths.ROOT / "docs"
    pages = (paths.ROOT / "README.md", docs / "results.md", docs / "performance.md")
    before = _digests(folder, *pages)
    if has_results(folder):
        redraw(folder)
    elif own or result_folders(folder):  # a checkout without results says so in its README
        redraw_all(folder)
    else:
        raise ValueError(f"{folder}: no {RESULTS} with a {MANIFEST}, here or one folder below")
    if own:
        for page, update in zip(
            pages, (update_readme, update_results, update_performance), strict=True
        ):
            update(page, folder)
    after = _digests(folder, *pages)
    return sorted(path for path in before | after if before.get(path) != after.get(path))


def redraw(folder: Path | str) -> list[Path]:
    """Draw every figure that the results in `folder` allow; returns the files.

    Raises:
        FileNotFoundError, ValueError: no results or manifest there, or not readable; one line.
    """
    folder = Path(folder)
    run = read_results(folder)
    modules = (
        speed, memory, target, operation_figures, quality, history_length, hstu_figures,
        sparse_figures, cached_figures, throughput_figures, streaming_figures,
        serving_figures, scaling_figures,
    )  # fmt: skip
    return [path for module in modules for path in module.draw(run.table, run.manifest, folder)]


def redraw_all(figures_dir: Path | str) -> list[Path]:
    """`redraw` for every folder with results directly below `figures_dir`; many by several
    processes, one a core."""
    folders = result_folders(figures_dir)
    # One takes seconds to start: as long as a folder does.
    workers = min(len(folders) // 2, os.cpu_count() or 1)
    if workers < 2:
        drawn = [redraw(folder) for folder in folders]
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, end_worker_with_parent) as pool:
            with interrupts_held():
                found = pool.map(redraw, folders)
            drawn = list(found)
    return [path for paths_drawn in drawn for path in paths_drawn]


def update_readme(readme: Path | str, figures_dir: Path | str) -> bool:
    """Put `headlines` and the table of operations between their marks of a README; True if that
    changed it.

    Raises:
        ValueError: the README has not exactly one pair of marks for each.
    """
    readme = Path(readme)
    changed = _replace(readme, BEGIN, END, headlines.headlines(figures_dir))
    operations = operations_table(figures_dir)
    return _replace(readme, OPERATIONS_BEGIN, OPERATIONS_END, operations) or changed


def update_results(page: Path | str, figures_dir: Path | str) -> bool:
    """Put every table and picture between the marks of docs/results.md; True if that changed it.

    Raises:
        ValueError: the page has not exactly one pair of marks.
    """
    return _replace(Path(page), BEGIN, END, all_results(figures_dir))


def all_results(figures_dir: Path | str) -> str:
    """Markdown of every table and picture, for a page in a folder beside `figures_dir`."""
    sections = [_section(folder) for folder in result_folders(figures_dir)]
    return "\n\n".join(sections) or headlines.NONE


def update_performance(page: Path | str, figures_dir: Path | str) -> bool:
    """Put the tables of goals between the marks of docs/performance.md; True if that changed it.

    Raises:
        ValueError: the page has not exactly one pair of marks.
    """
    return _replace(Path(page), GOALS_BEGIN, GOALS_END, goals.goal_tables(figures_dir))


def _replace(page: Path, begin: str, end: str, block: str) -> bool:
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page}: needs one {begin} and, after it, one {end}")
    before, after = text[: text.index(begin)], text[text.index(end) + len(end) :]
    block = "\n\n".join([before + begin, block, end + after])
    return style.write_if_changed(page, block.encode())


def _section(folder: Path) -> str:
    """All of a folder, for a page beside the folder above it."""
    found = read_results(folder)
    manifest, table = found.manifest, found.table
    run = f"{manifest['id']}: {manifest.get('device')}, preset `{manifest['preset']}`"
    changes = "".join(f" · `{change}`" for change in provenance.changes_of_preset(manifest))
    parts = [f"## {run}", f"*{style.footer(manifest)}*{changes}"]
    shown = tables.summaries(table)
    if len(claims := tables.claims(table)):
        shown.append(("The paper's claims against this run", claims))
    for caption, rows in shown:
        parts += [f"{caption}:", tables.to_markdown(_trimmed(rows))]
    pictures = sorted(folder.glob("*.svg"))
    for picture in pictures:
        title = style.title_of(picture)
        parts.append(f"![{title}](../{folder.parent.name}/{folder.name}/{picture.name})")
    if not shown and not pictures:
        parts.append("In [performance.md](performance.md), beside its goals.")
    return "\n\n".join(parts)


def _trimmed(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the column that the heading says already."""
    return rows.drop(columns=["device"], errors="ignore")


def _digests(folder: Path, *pages: Path) -> dict[Path, str]:
    files = [*folder.glob("*"), *folder.glob("*/*"), *pages]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}
