"""Redraw figures from committed results alone, and say them in README and docs."""

import hashlib
from pathlib import Path

import pandas as pd

from jagged_ranking import paths, provenance
from jagged_ranking.figures import (
    cached_figures,
    goals,
    history_length,
    hstu_figures,
    memory,
    operation_figures,
    quality,
    sparse_figures,
    speed,
    style,
    tables,
    target,
)
from jagged_ranking.figures.operation_goals import operations_table
from jagged_ranking.figures.result_folder import has_results, read_results, result_folders
from jagged_ranking.provenance import MANIFEST
from jagged_ranking.results import RESULTS

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
OPERATIONS_BEGIN = "<!-- operations:begin -->"
OPERATIONS_END = "<!-- operations:end -->"
GOALS_BEGIN = "<!-- goals:begin -->"
GOALS_END = "<!-- goals:end -->"
# Shown by the README itself, before everything else.
FIRST_FIGURE = f"01_speed_{speed.PEERS}"


def refresh(folder: Path) -> list[Path]:
    """Redraw a folder of results, or every one below a folder; returns the files that changed.

    For the checkout's own figures the blocks of numbers in README.md and docs/performance.md are
    written anew too.

    Raises:
        ValueError: there is no such folder, or nothing in it to draw from.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    own = paths.has_checkout() and folder.resolve() == paths.FIGURES.resolve()
    readme, page = paths.ROOT / "README.md", paths.ROOT / "docs" / "performance.md"
    before = _digests(folder, readme, page)
    if has_results(folder):
        redraw(folder)
    elif own or result_folders(folder):  # a checkout without results says so in its README
        redraw_all(folder)
    else:
        raise ValueError(f"{folder}: no {RESULTS} with a {MANIFEST}, here or one folder below")
    if own:
        update_readme(readme, folder)
        update_performance(page, folder)
    after = _digests(folder, readme, page)
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
        sparse_figures, cached_figures,
    )  # fmt: skip
    return [path for module in modules for path in module.draw(run.table, run.manifest, folder)]


def redraw_all(figures_dir: Path | str) -> list[Path]:
    """`redraw` for every folder with results directly below `figures_dir`."""
    return [path for folder in result_folders(figures_dir) for path in redraw(folder)]


def readme_block(figures_dir: Path | str) -> str:
    """Markdown between (and with) the BEGIN and END marks: tables of the committed results.

    Figures are linked relative to the folder above `figures_dir`, where the README is.
    """
    figures_dir = Path(figures_dir)
    parts = [BEGIN]
    for folder in result_folders(figures_dir):
        parts.append(_section(folder, figures_dir.name))
    if len(parts) == 1:
        parts.append("No results are committed yet.")
    return "\n\n".join([*parts, END])


def update_readme(readme: Path | str, figures_dir: Path | str) -> bool:
    """Put `readme_block` and the table of operations between their marks of a README; True if that
    changed it.

    Raises:
        ValueError: the README has not exactly one pair of marks for each.
    """
    readme = Path(readme)
    block = "\n\n".join([OPERATIONS_BEGIN, operations_table(figures_dir), OPERATIONS_END])
    changed = _replace(readme, BEGIN, END, readme_block(figures_dir))
    return _replace(readme, OPERATIONS_BEGIN, OPERATIONS_END, block) or changed


def update_performance(page: Path | str, figures_dir: Path | str) -> bool:
    """Put the tables of goals between the marks of docs/performance.md; True if that changed it.

    Raises:
        ValueError: the page has not exactly one pair of marks.
    """
    block = "\n\n".join([GOALS_BEGIN, goals.goal_tables(figures_dir), GOALS_END])
    return _replace(Path(page), GOALS_BEGIN, GOALS_END, block)


def _replace(page: Path, begin: str, end: str, block: str) -> bool:
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page}: needs one {begin} and, after it, one {end}")
    before, after = text[: text.index(begin)], text[text.index(end) + len(end) :]
    return style.write_if_changed(page, (before + block + after).encode())


def _section(folder: Path, base: str) -> str:
    found = read_results(folder)
    manifest, table = found.manifest, found.table
    run = f"{manifest['id']}: {manifest.get('device')}, preset `{manifest['preset']}`"
    changes = "".join(f" · `{change}`" for change in provenance.changes_of_preset(manifest))
    parts = [f"### {run}", f"*{style.footer(manifest)}*{changes}"]
    shown = tables.summaries(table)
    if len(claims := tables.claims(table)):
        shown.append(("The paper's claims against this run", claims))
    for caption, rows in shown:
        parts += [f"{caption}:", tables.to_markdown(_trimmed(rows))]
    for picture in sorted(folder.glob("*.svg")):
        if picture.stem != FIRST_FIGURE:
            title = style.title_of(picture)
            parts.append(f"![{title}]({base}/{folder.name}/{picture.name})")
    return "\n\n".join(parts)


def _trimmed(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the column that the heading says already."""
    return rows.drop(columns=["device"], errors="ignore")


def _digests(folder: Path, *pages: Path) -> dict[Path, str]:
    files = [*folder.glob("*"), *folder.glob("*/*"), *pages]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}
