"""Figures and tables from made-up results: what they say, marks, and the same bytes each time."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up_results import MANIFEST, attention_results, quality_results

from jagged_ranking import provenance, results
from jagged_ranking.figures import memory, quality, redraw, speed, style, tables
from jagged_ranking.figures.data import ratios

SPEED = ("latency_by_waste", "latency_by_length", "speedup", "workloads")
MEMORY = ("memory_by_waste", "memory_by_length", "memory_ratio", "memory_workloads")
QUALITY = ("scores", "difference")


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return attention_results()


def _stems(paths: list[Path]) -> list[str]:
    assert all(path.stat().st_size > 1000 for path in paths)
    assert [path.suffix for path in paths[:3]] == [".svg", ".pdf", ".png"]
    return list(dict.fromkeys(path.stem for path in paths))


def _save(folder: Path, table: pd.DataFrame, **manifest: Any) -> Path:
    results.write(table, folder / redraw.RESULTS)
    provenance.write_manifest({**MANIFEST, **manifest}, folder / redraw.MANIFEST)
    return folder


def _text(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by file stem, kept instead of saved."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, out: Path, stem: str) -> list[Path]:
        kept[stem] = figure
        return []

    monkeypatch.setattr(style, "save", keep)
    return kept


def test_redraw_gives_the_same_bytes_as_drawing_what_was_measured(
    measured: pd.DataFrame, tmp_path: Path
) -> None:
    # One sweep in one mode is enough here, and quicker to draw.
    wasteful = [name for name in measured["workload"].unique() if name.startswith("waste")]
    table = results.select(measured, mode="forward", workload=wasteful)
    folder = _save(tmp_path / "figures" / "01_speed", table)
    first = speed.draw(table, MANIFEST, folder) + memory.draw(table, MANIFEST, folder)
    bytes_of = {path: path.read_bytes() for path in first}
    times = {path: path.stat().st_mtime_ns for path in first}
    for path in first[::3]:
        path.unlink()
    again = redraw.redraw_all(tmp_path / "figures")
    assert sorted(again) == sorted(first)
    assert {path: path.read_bytes() for path in again} == bytes_of
    untouched = [path for number, path in enumerate(first) if number % 3]
    assert {path: path.stat().st_mtime_ns for path in untouched} == {
        path: times[path] for path in untouched
    }
    drawn = ("latency_by_waste", "speedup", "memory_by_waste", "memory_ratio")
    assert _stems(first) == [f"01_speed_{name}" for name in drawn]


def test_speed_figures_show_claims_limits_failures_and_device(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    speed.draw(measured, MANIFEST, Path("nowhere"))
    assert list(drawn) == [f"01_speed_{name}" for name in SPEED]
    for figure in drawn.values():
        said = _text(figure)
        assert "Imaginary GPU 80GB · bfloat16 · torch 2.11.0 · Triton 3.6.0" in said
        assert "smoke" not in said.lower()
    assert "paper: up to 9x" in _text(drawn["01_speed_speedup"])
    assert "paper: up to 3x" in _text(drawn["01_speed_speedup"])
    assert "limit of the device" in _text(drawn["01_speed_latency_by_waste"])
    assert "out of memory" in _text(drawn["01_speed_workloads"])
    assert "flash-attn 4" not in _text(drawn["01_speed_workloads"])  # it is missing there


def test_memory_figures_show_claims(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    memory.draw(measured, {**MANIFEST, "id": "02_memory"}, Path("nowhere"))
    assert list(drawn) == [f"02_memory_{name}" for name in MEMORY]
    said = _text(drawn["02_memory_memory_ratio"])
    assert "paper: up to 22x" in said
    assert "53%" in said


def test_quality_figures_show_every_seed_and_the_floor(drawn: dict[str, Any]) -> None:
    quality.draw(quality_results(), {**MANIFEST, "id": "04_quality"}, Path("nowhere"))
    assert list(drawn) == [f"04_quality_{name}" for name in QUALITY]
    auc = drawn["04_quality_scores"].axes[0]
    shown = [len(line.get_xdata()) for line in auc.lines if line.get_marker() in "so^"]
    assert shown == [3, 3, 3]
    assert "floor" in _text(drawn["04_quality_scores"])


@pytest.mark.parametrize("preset", ["smoke", "paper"])
def test_a_smoke_run_is_marked_on_every_figure(
    measured: pd.DataFrame, drawn: dict[str, Any], preset: str
) -> None:
    manifest = {**MANIFEST, "preset": preset}
    speed.draw(measured, manifest, Path("nowhere"))
    memory.draw(measured, manifest, Path("nowhere"))
    quality.draw(quality_results(), manifest, Path("nowhere"))
    assert len(drawn) == len(SPEED) + len(MEMORY) + len(QUALITY)
    for figure in drawn.values():
        assert ("smoke run" in _text(figure)) == (preset == "smoke")


def test_drawing_leaves_the_settings_of_others_alone(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    matplotlib.rcParams["font.size"] = 23
    speed.draw(measured, MANIFEST, Path("nowhere"))
    assert matplotlib.rcParams["font.size"] == 23
    matplotlib.rcParams.update(before)


@pytest.mark.parametrize("module", [speed, memory, quality])
def test_results_of_something_else_draw_nothing(module: Any, tmp_path: Path) -> None:
    other = results.row(
        op="bmm", provider="p", workload="w", mode="m", metric="x", unit="1", value=1.0
    )
    for table in (results.frame([]), results.frame([other])):
        assert module.draw(table, MANIFEST, tmp_path) == []


def test_ratios_count_the_schedule_and_keep_failures(measured: pd.DataFrame) -> None:
    table = ratios(measured, "latency", "dense_flash").set_index(["workload", "mode"])
    one = results.select(measured, op="attention", metric="latency", workload="A", mode="forward")
    ms = one.set_index("provider")["value"]
    expected = ms["dense_flash"] / (ms["jagged"] + 0.031)
    row = table.loc[("A", "forward")]
    assert row["ratio"] == pytest.approx(expected)
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    lost = ratios(measured, "latency", "dense_eager").set_index(["workload", "mode"])
    assert lost.loc[("C", "forward"), "baseline_status"] == "out_of_memory"
    assert pd.isna(lost.loc[("C", "forward"), "ratio"])


def test_claims_say_what_holds_and_where(measured: pd.DataFrame) -> None:
    table = tables.claims(measured).set_index(["claim", "mode"])
    assert len(table) == 8
    faster = table.loc[("faster than dense attention", "forward")]
    assert faster["holds"] == "yes"
    assert faster["paper"] == "up to 9x"
    assert "on all with 75% waste or more" in faster["where"]
    assert "runs out of memory on C, D, N" in faster["where"]
    slow = measured.copy()
    ours = (slow["provider"] == "jagged") & (slow["metric"] == "latency")
    slow.loc[ours, ["value", "q25", "q75"]] *= 1000
    table = tables.claims(slow).set_index(["claim", "mode"])
    faster = table.loc[("faster than dense flash attention", "forward")]
    assert faster["holds"] == "no"
    assert "3x or more on none of 22 batches" in faster["where"]


def test_claims_of_quality_need_an_interval_above_zero() -> None:
    table = tables.claims(quality_results())
    assert table["holds"].tolist() == ["yes", "yes"]
    unsure = quality_results()
    unsure["config"] = [
        json.dumps({**json.loads(text), "low": -0.1}) if "low" in text else text
        for text in unsure["config"]
    ]
    assert tables.claims(unsure)["holds"].tolist() == ["undecided", "undecided"]
    assert tables.claims(results.frame([])).empty


def test_tables_of_workloads(measured: pd.DataFrame) -> None:
    table = tables.speed(measured).set_index("workload")
    assert list(table.index) == ["A", "B", "C", "D", "E", "F", "G", "N"]
    assert table.loc["C", "dense, eager"] == "OOM"
    assert table.loc["A", "schedule"] == "0.0310"
    assert " / " in table.loc["A", "jagged (ours)"]
    assert "flash-attn 4" not in table.columns
    assert tables.memory(measured)["unit"].unique().tolist() == ["GB"]
    html = tables.to_html(tables.speed(measured), title="Speed")
    assert html == tables.to_html(tables.speed(measured), title="Speed")
    assert "dense flash (SDPA)" in html
    lines = tables.to_markdown(tables.speed(measured)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 10


def test_table_of_quality() -> None:
    table = tables.quality(quality_results()).set_index("model")
    assert table.loc["transformer", "seeds"] == "3"
    assert "±" in table.loc["DIN", "gAUC"]
    assert table.loc["count floor", "AUC"] == "0.7460"


def test_readme_block(tmp_path: Path, measured: pd.DataFrame) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{redraw.BEGIN}\nold\n{redraw.END}\n\nafter\n")
    assert redraw.update_readme(readme, figures)
    assert "No results are committed yet." in readme.read_text()
    _save(figures / "04_quality", quality_results(), id="04_quality")
    _save(figures / "01_speed", measured)
    (figures / "01_speed" / "01_speed_speedup.svg").write_text("<svg/>")
    (figures / "runs" / "smoke" / "01_speed").mkdir(parents=True)
    assert redraw.update_readme(readme, figures)
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nafter\n")
    assert "\nold\n" not in text
    assert text.index("01_speed: Imaginary GPU") < text.index("04_quality: Imaginary GPU")
    assert "![01_speed_speedup](figures/01_speed/01_speed_speedup.svg)" in text
    assert not redraw.update_readme(readme, figures)
    readme.write_text("no marks")
    with pytest.raises(ValueError, match=r"README\.md: needs one"):
        redraw.update_readme(readme, figures)


def test_every_provider_and_model_has_a_look_of_its_own() -> None:
    from jagged_ranking.measure import PROVIDERS

    assert set(PROVIDERS) <= set(style.LOOKS)
    looks = [style.LOOKS[name] for name in PROVIDERS]
    assert len({look.color for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)
