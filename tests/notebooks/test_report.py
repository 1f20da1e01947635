"""The report: what it links is there, and its figures say in words what they show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from left_results import save_run
from made_up_rankers import quality_results
from made_up_results import MANIFEST, sparse_results

from jagged_ranking import provenance, results
from jagged_ranking.figures.redraw import redraw
from jagged_ranking.figures.style import title_of
from jagged_ranking.reproduce.report import STYLE, Section, render, write_report
from jagged_ranking.reproduce.run_record import RunRecord
from jagged_ranking.reproduce.settings import Settings

ID = "04_quality"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report."""
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def section(base: Path) -> Section:
    """A notebook that ran into a folder whose name needs quoting."""
    folder = base / "runs of #1" / ID
    table, manifest = quality_results(), {**MANIFEST, "id": ID}
    save_run(folder, table, manifest)
    (folder / f"{ID}.ipynb").write_text("{}")
    redraw(folder)
    figures = sorted(folder.glob("*.svg"))
    return Section(ID, RunRecord(ID, "ok", "key"), folder, manifest, table, figures)


def test_it_links_the_notebook_the_data_and_every_format(section: Section, base: Path) -> None:
    page = render([section], preset="small", base=base)
    links = [unquote(link) for link in re.findall(r'<a href="([^#"][^"]*)"', page)]
    names = {Path(link).name for link in links}
    assert {f"{ID}.ipynb", results.RESULTS, provenance.MANIFEST} <= names
    for figure in section.figures:
        assert {figure.with_suffix(f".{kind}").name for kind in ("svg", "pdf", "png")} <= names
    assert all((base / link).is_file() for link in links)


def test_a_notebook_that_failed_links_only_itself(section: Section, base: Path) -> None:
    record = RunRecord(ID, "failed", "key", error="cell 3: no")
    failed = Section(ID, record, section.folder)
    page = render([failed], preset="small", base=base)
    assert re.findall(r'<a href="([^#"][^"]*)"', page) == [f"runs%20of%20%231/{ID}/{ID}.ipynb"]


def test_a_run_in_parts_says_what_all_of_them_took(section: Section, base: Path) -> None:
    def page(earlier: float) -> str:
        record = RunRecord(ID, "ok", "key", seconds=62.4, earlier_seconds=earlier)
        return render([replace(section, record=record)], preset="small", base=base)

    assert '<td data-of="took">102 s in parts, 62 s the last</td>' in page(40.0)
    assert '<td data-of="took">62 s</td>' in page(0.0)


def test_a_manifest_without_a_device_hides_nothing(section: Section, base: Path) -> None:
    mine = Section(ID, section.record, section.folder, {"id": ID, "preset": "mine"}, section.table)
    page = render([mine, section], preset="small", base=base)
    assert f"2 of 2 notebooks good · {MANIFEST['device']}" in page


def test_only_what_ran_to_its_end_is_good(section: Section, base: Path) -> None:
    failed = Section("01_speed", RunRecord("01_speed", "failed", "key"), base)
    page = render([section, failed, Section("02_memory", None, base)], preset="small", base=base)
    assert "1 of 3 notebooks good" in page
    for status in ("ok", "failed", "not run"):
        assert f">{status}</span>" in page
    assert "<p>Not run.</p>" in page


def test_results_that_cannot_be_drawn_hide_no_others(tmp_path: Path) -> None:
    """As of another version of a notebook, whose batches say less of themselves."""
    unknown = sparse_results().assign(config="{}")
    for name, table in ((ID, quality_results()), ("08_sparse_attention", unknown)):
        folder = save_run(tmp_path / name, table, {**MANIFEST, "id": name})
        RunRecord(name, "ok", "key").write(folder)
    settings = Settings("smoke", given=None, out=tmp_path, report=tmp_path / "report.html")
    write_report(settings)
    page = settings.report.read_text()
    assert page.count(">ok</span>") == 1
    assert page.count('<figure tabindex="0">') == 2
    assert "TypeError: int() argument must be" in page


def test_it_says_what_code_the_results_are_of(section: Section, base: Path) -> None:
    manifest = {**section.manifest, "git_sha": "0123456789ab", "code_changed": True}
    page = render([replace(section, manifest=manifest)], preset="small", base=base)
    head = page.partition("</header>")[0]
    assert "code 01234567, changed since" in head


def test_what_went_wrong_is_text(section: Section, base: Path) -> None:
    record = RunRecord(ID, "failed", "key", error="cell 3, `a<b`: no & never")
    page = render([Section(ID, record, section.folder)], preset="<p>", base=base)
    assert page.count("`a&lt;b`: no &amp; never") == 2
    assert "a<b" not in page
    assert "<b>&lt;p&gt;</b>" in page


def test_every_figure_has_its_words(section: Section, base: Path) -> None:
    page = render([section], preset="small", base=base)
    assert page.count('<figure tabindex="0">') == len(section.figures) == 2
    assert page.count('<svg role="img"') == 2
    for figure in section.figures:
        title = title_of(figure)
        assert f"<title>{title}</title>" in page
        assert f"<figcaption>{title}" in page


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, section 1.4.3."""

    def luminance(color: str) -> float:
        digits = color.lstrip("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_is_legible_on_its_ground_light_and_dark() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    for rules in (light, dark):
        ground = re.search(r"body \{[^}]*background: (#[0-9a-f]+)", rules)
        assert ground is not None
        colors = re.findall(r"(?<![-\w])color: (#[0-9a-f]+)", rules)
        assert len(colors) > 4
        for color in colors:
            assert _contrast(color, ground[1]) >= 4.5, color
