"""The HTML report: one self-contained page with what every notebook showed, or why it failed."""

import html
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from jagged_ranking import paths, provenance, results
from jagged_ranking.figures import style, tables
from jagged_ranking.figures.redraw import redraw
from jagged_ranking.figures.result_folder import read_results
from jagged_ranking.first_line import described
from jagged_ranking.reproduce.freshness import drawing_key
from jagged_ranking.reproduce.notebook_files import notebook_ids
from jagged_ranking.reproduce.run_record import RunRecord, read_record
from jagged_ranking.reproduce.settings import Settings

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")

# <?xml?>, doctype and metadata are of no use inside a page.
_BEFORE_SVG = re.compile(r"\A.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SVG_ID = re.compile(r"""(\bid="|url\(#|\bhref="#)""")


@dataclass
class Section:
    """What the report says of one notebook.

    Attributes:
        folder: of the executed notebook, its results and figures.
    """

    id: str
    record: RunRecord | None
    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    table: pd.DataFrame | None = None
    figures: list[Path] = field(default_factory=list)

    @property
    def status(self) -> str:
        """ok, failed, or not run."""
        return self.record.status if self.record else "not run"


def write_report(settings: Settings) -> None:
    """Write the report of what lies in `settings.out` to `settings.report`."""
    sections = [_read_section(settings.out, name) for name in notebook_ids(paths.NOTEBOOKS)]
    page = render(sections, preset=settings.preset, base=settings.report.parent)
    with results.atomic(settings.report) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _read_section(out: Path, notebook: str) -> Section:
    """The results of a notebook whose last run succeeded; of another, only how it went.

    Code that draws does not make a run stale, so figures are drawn anew here where it has changed.
    """
    folder = out / notebook
    record = read_record(folder)
    section = Section(notebook, record, folder)
    if record is None or record.status != "ok":
        return section
    try:
        if (drawing := drawing_key(folder)) != record.drawing:
            redraw(folder)
            replace(record, drawing=drawing).write(folder)
        found = read_results(folder)
        section.manifest, section.table = dict(found.manifest), found.table
        section.figures = sorted(folder.glob(f"{notebook}*.svg"))
    except Exception as error:  # whatever is wrong with one folder, it hides no other
        failed = replace(record, status="failed", error=described(error))
        return Section(notebook, failed, folder)
    return section


_NOTEBOOKS = ("", "notebook", "took", "device", "tests of the kernels", "finished")


def render(sections: Sequence[Section], *, preset: str, base: Path) -> str:
    """The whole page. `base` is the folder that it will lie in, for links to the notebooks."""
    parts = [
        "<header><h1>Jagged Flash Attention, reproduced</h1>",
        f"<p>{_headline(sections, preset)}</p></header>",
        _smoke_notice(preset),
        "<section><h2>Notebooks</h2>",
        _table(_NOTEBOOKS, map(_row, sections), stacked=True),
        "</section>",
        _claims(sections),
        *(_section(section, base) for section in sections),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Jagged Flash Attention, reproduced: {html.escape(preset)}</title>\n"
        f"<style>\n{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _headline(sections: Sequence[Section], preset: str) -> str:
    good = sum(section.status == "ok" for section in sections)
    devices = {str(s.manifest["device"]) for s in sections if s.manifest.get("device")}
    code = {style.code_of(s.manifest) for s in sections if s.manifest}
    said = [
        f"Preset <b>{html.escape(preset)}</b>",
        f"{good} of {len(sections)} notebooks good",
        *(html.escape(device) for device in sorted(devices)),
        *(html.escape(version) for version in sorted(code)),
    ]
    return " · ".join(said)


def _smoke_notice(preset: str) -> str:
    if preset != "smoke":
        return ""
    return (
        '<p class="notice">A smoke run: small shapes, short training. It shows that everything '
        "works, not how fast or how good anything is.</p>"
    )


def _row(section: Section) -> list[str]:
    record, manifest = section.record, section.manifest
    name = f'<a href="#{section.id}">{html.escape(section.id)}</a>'
    if record is not None and record.error:
        name += f'<br><span class="error">{html.escape(record.error)}</span>'
    return [
        f'<span class="status {section.status.replace(" ", "-")}">{section.status}</span>',
        name,
        record.took if record else "",
        html.escape(manifest.get("device", "")),
        html.escape(str(manifest.get("tests", {}).get("outcome", ""))),
        html.escape(manifest.get("finished", record.started if record else "")),
    ]


def _claims(sections: Sequence[Section]) -> str:
    found = [s.table for s in sections if s.table is not None]
    if not found:
        return ""
    claims = tables.claims(pd.concat(found, ignore_index=True))
    # The device is in the list of notebooks already.
    shown = frame_html(claims.drop(columns="device"), stacked=True)
    return f"<section><h2>The paper's claims against these results</h2>{shown}</section>"


def _section(section: Section, base: Path) -> str:
    parts = [f'<section id="{section.id}"><h2>{html.escape(section.id)}</h2>']
    if section.record is None:
        parts.append("<p>Not run.</p>")
    elif section.status != "ok":
        parts.append(f'<p class="error">Failed: {html.escape(section.record.error)}</p>')
    files = {
        "executed notebook": section.folder / f"{section.id}.ipynb",
        "results": section.folder / results.RESULTS,
        "manifest": section.folder / provenance.MANIFEST,
    }
    if section.table is None:
        files = {"executed notebook": files["executed notebook"]}
    parts.append(_links(files, base))
    for number, path in enumerate(section.figures):
        picture = inline_svg(path, prefix=f"{section.id}-{number}-")
        caption = html.escape(style.title_of(path))
        formats = {kind.upper(): path.with_suffix(f".{kind}") for kind in style.FORMATS}
        links = _links(formats, base)
        below = f"<figcaption>{caption}{links}</figcaption>"
        # To be reached by the keyboard, and scrolled, where it is wider than the screen.
        parts.append(f'<figure tabindex="0">{picture}{below}</figure>')
    if section.table is not None:
        for title, rows in tables.summaries(section.table):
            parts.append(f"<h3>{title}</h3>{frame_html(rows)}")
        parts.append(
            _details(f"Results ({len(section.table)} rows)", frame_html(_readable(section.table)))
        )
        manifest = html.escape(json.dumps(section.manifest, indent=2, sort_keys=True))
        parts.append(_details("Manifest", f"<pre>{manifest}</pre>"))
    return "\n".join([*parts, "</section>"])


def _links(files: Mapping[str, Path], base: Path) -> str:
    """Of those files that are there, relative to `base`."""
    links = [
        f'<a href="{quote(Path(os.path.relpath(path, base)).as_posix())}">{html.escape(name)}</a>'
        for name, path in files.items()
        if path.is_file()
    ]
    return f'<p class="files">{" · ".join(links)}</p>' if links else ""


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of a results table that are for people, without repetitions."""
    columns = ["op", "workload", "provider", "mode", "metric", "value", "unit", "q25", "q75"]
    shown = table[[*columns, "status", "message"]]
    return pd.DataFrame(shown.mask(shown == "")).dropna(axis="columns", how="all")


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def inline_svg(path: Path, *, prefix: str) -> str:
    """An SVG file as an element of a page, its ids made unique there by a prefix."""
    text = _METADATA.sub("", _BEFORE_SVG.sub("", path.read_text(encoding="utf-8")))
    text = text.replace("<svg ", '<svg role="img" ', 1)
    return _SVG_ID.sub(lambda found: found.group(1) + prefix, text)


def frame_html(frame: pd.DataFrame, *, stacked: bool = False) -> str:
    """A table of plain values; numbers to four significant digits, absent ones empty."""
    rows = ([_cell(value) for value in row] for row in frame.itertuples(index=False))
    return _table([html.escape(str(column)) for column in frame.columns], rows, stacked=stacked)


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return html.escape(str(value))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, stacked: bool = False) -> str:
    """A table of cells that are HTML already; `stacked` for one to be read, not compared, whose
    rows become a list on a narrow screen."""
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>"]
    for row in rows:
        cells = zip(header, row, strict=True)
        lines.append(
            "<tr>" + "".join(f'<td data-of="{of}">{cell}</td>' for of, cell in cells) + "</tr>"
        )
    kind = "stacked" if stacked else "wide"
    reached = "" if stacked else ' tabindex="0"'  # by the keyboard, to be scrolled
    return f'<div class="{kind}"{reached}><table>\n' + "\n".join(lines) + "\n</table></div>"
