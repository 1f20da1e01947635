"""Redraw figures from committed results alone, and say them in the README."""

from pathlib import Path

import pandas as pd

from jagged_ranking import provenance, results
from jagged_ranking.figures import memory, quality, speed, style, tables

RESULTS = "results.parquet"
MANIFEST = "manifest.json"
BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"


def redraw(folder: Path | str) -> list[Path]:
    """Draw every figure that the results in `folder` allow; returns the files.

    Raises:
        FileNotFoundError, ValueError: no results or manifest there, or not readable; one line.
    """
    folder = Path(folder)
    manifest = provenance.read_manifest(folder / MANIFEST)
    table = results.read(folder / RESULTS)
    return [
        path for module in (speed, memory, quality) for path in module.draw(table, manifest, folder)
    ]


def redraw_all(figures_dir: Path | str) -> list[Path]:
    """`redraw` for every folder with results directly below `figures_dir`."""
    return [path for folder in result_folders(figures_dir) for path in redraw(folder)]


def result_folders(figures_dir: Path | str) -> list[Path]:
    """The folders directly below `figures_dir` that hold results and a manifest, by name."""
    files = sorted(Path(figures_dir).glob(f"*/{RESULTS}"))
    return [file.parent for file in files if (file.parent / MANIFEST).is_file()]


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
    """Put `readme_block` between the marks of a README; True if that changed it.

    Raises:
        ValueError: the README has not exactly one pair of marks.
    """
    readme = Path(readme)
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{readme}: needs one {BEGIN} and, after it, one {END}")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    content = before + readme_block(figures_dir) + after
    return style.write_if_changed(readme, content.encode())


def _section(folder: Path, base: str) -> str:
    manifest = provenance.read_manifest(folder / MANIFEST)
    table = results.read(folder / RESULTS)
    run = f"{manifest['id']}: {manifest.get('device')}, preset `{manifest['preset']}`"
    parts = [f"### {run}", f"*{style.footer(manifest)}*"]
    for caption, rows in (
        ("Latency in ms, forward / forward+backward, medians", tables.speed(table)),
        ("Peak memory beyond the inputs, forward / forward+backward", tables.memory(table)),
        ("Test split, mean ± sd over seeds", tables.quality(table)),
        ("The paper's claims against this run", tables.claims(table)),
    ):
        if len(rows):
            parts += [f"{caption}:", tables.to_markdown(_trimmed(rows))]
    for picture in sorted(folder.glob("*.svg")):
        parts.append(f"![{picture.stem}]({base}/{folder.name}/{picture.name})")
    return "\n\n".join(parts)


def _trimmed(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the column that the heading says already."""
    return rows.drop(columns=["device"], errors="ignore")
