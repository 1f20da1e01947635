"""Figures from made-up results: what they say, marks, and the same bytes each time."""

import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
from kept_figures import keep_figures
from left_results import save_run
from made_up_rankers import list_results, next_item_results, quality_results, quality_with_floor
from made_up_results import MANIFEST, attention_results, target_results

from jagged_ranking import results
from jagged_ranking.figures import (
    memory,
    quality,
    redraw,
    speed,
    style,
    tables,
    target,
)

SWEEPS = ("waste", "length", "head_dim")
LATENCY = tuple(f"latency_by_{sweep}" for sweep in SWEEPS)
SPEED = (*LATENCY, "speedup", "throughput", "workloads", "peers")
MEMORY = (*(f"memory_by_{sweep}" for sweep in SWEEPS), "memory_ratio", "memory_workloads")
TARGET = ("latency", "ratios", "skew", "memory")
QUALITY = ("scores", "difference")


class Drawn(NamedTuple):
    """What the studies draw of their results, by file stem."""

    figures: dict[str, Any]
    titles: dict[str, str]
    font_size: float  # of everybody's settings, which was 23 before

    def of(self, study: str) -> dict[str, Any]:
        """Figures of one study."""
        return {k.removeprefix(study): v for k, v in self.figures.items() if k.startswith(study)}


def _draw_all(measured: pd.DataFrame, preset: str) -> None:
    manifest = {**MANIFEST, "preset": preset}
    speed.draw(measured, manifest, Path("nowhere"))
    memory.draw(measured, {**manifest, "id": "02_memory"}, Path("nowhere"))
    target.draw(target_results(), {**manifest, "id": "03"}, Path("nowhere"))
    quality.draw(quality_results(), {**manifest, "id": "04_quality"}, Path("nowhere"))


@pytest.fixture(scope="module")
def all_drawn(measured: pd.DataFrame) -> Drawn:
    """Every figure of the preset `paper`: for who only looks."""
    with pytest.MonkeyPatch.context() as monkeypatch, matplotlib.rc_context():
        kept, titles = keep_figures(monkeypatch)
        matplotlib.rcParams["font.size"] = 23
        _draw_all(measured, "paper")
        return Drawn(kept, titles, matplotlib.rcParams["font.size"])


def _stems(paths: list[Path]) -> list[str]:
    assert all(path.stat().st_size > 1000 for path in paths)
    assert [path.suffix for path in paths[:3]] == [".svg", ".pdf", ".png"]
    return list(dict.fromkeys(path.stem for path in paths))


def _text(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_redraw_gives_the_same_bytes_as_drawing_what_was_measured(
    measured: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One sweep in one mode and one format are enough here, and quicker to draw: a second
    # `jagged figures` writes nothing in any format (test_figures_command).
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    wasteful = [name for name in measured["workload"].unique() if name.startswith("waste")]
    table = results.select(measured, mode="forward", workload=wasteful)
    folder = save_run(tmp_path / "figures" / "01_speed", table, MANIFEST)
    first = speed.draw(table, MANIFEST, folder) + memory.draw(table, MANIFEST, folder)
    bytes_of = {path: path.read_bytes() for path in first}
    times = {path: path.stat().st_mtime_ns for path in first}
    for path in first[::2]:
        path.unlink()
    again = redraw.redraw_all(tmp_path / "figures")
    assert sorted(again) == sorted(first)
    assert {path: path.read_bytes() for path in again} == bytes_of
    untouched = first[1::2]
    assert {path: path.stat().st_mtime_ns for path in untouched} == {
        path: times[path] for path in untouched
    }
    drawn = ("latency_by_waste", "speedup", "throughput", "memory_by_waste", "memory_ratio")
    assert [path.stem for path in first] == [f"01_speed_{name}" for name in drawn]


def test_speed_figures_show_claims_limits_failures_and_device(all_drawn: Drawn) -> None:
    drawn = {name: figure for name, figure in all_drawn.figures.items() if name[:2] == "01"}
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


def test_a_peer_that_is_ahead_of_us_is_below_the_line(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    ahead = measured.copy()
    fast = (ahead["provider"] == "flex") & (ahead["workload"] == "F")
    ahead.loc[fast, ["value", "q25", "q75"]] *= 0.1
    speed.draw(ahead, MANIFEST, Path("nowhere"))
    figure = drawn["01_speed_peers"]
    said = _text(figure)
    for name in ("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "varlen_attn"):
        assert style.look_of(name).label in said
    color = style.look_of("flex").color
    panel = figure.axes[0]
    low, high = panel.get_ylim()
    heights = [
        float(y)
        for line in panel.lines
        if line.get_color() == color and line.get_marker() == "h"
        for y in line.get_ydata()
    ]
    below = [y for y in heights if y < 1]
    assert len(heights) == 8
    assert below == [pytest.approx(0.2, rel=0.1)]  # a tenth of 4.4 over 2.2
    assert low < below[0]
    assert high > max(heights)


def test_target_figures_show_policies_limits_and_peers(
    all_drawn: Drawn, drawn: dict[str, Any]
) -> None:
    shown = all_drawn.of("03_")
    assert tuple(shown) == TARGET
    skew = _text(shown["skew"])
    for said in ("stream-K", "split-K", "one program a row", "FA2", "whale", "131,072 events"):
        assert said in skew
    assert "limit of the device" in _text(shown["latency"])
    assert "64 users x 8" in _text(shown["latency"])
    # Their groups are their own: results of one study draw nothing of the other.
    assert speed.draw(target_results(), MANIFEST, Path("nowhere")) == []
    assert not drawn


def test_memory_figures_show_claims(all_drawn: Drawn) -> None:
    shown = all_drawn.of("02_memory_")
    assert tuple(shown) == MEMORY
    said = _text(shown["memory_ratio"])
    assert "paper: up to 22x" in said
    assert "53%" in said


def test_quality_figures_show_every_seed_and_the_floor(all_drawn: Drawn) -> None:
    shown = all_drawn.of("04_quality_")
    assert tuple(shown) == QUALITY
    auc = shown["scores"].axes[0]
    seeds = [len(line.get_xdata()) for line in auc.lines if line.get_marker() in "so^"]
    assert seeds == [3, 3, 3]
    assert "floor" in _text(shown["scores"])


def test_a_smoke_run_is_marked_on_every_figure(
    measured: pd.DataFrame, all_drawn: Drawn, drawn: dict[str, Any]
) -> None:
    _draw_all(measured, "smoke")
    assert len(drawn) == len(SPEED) + len(MEMORY) + len(QUALITY) + len(TARGET)
    for name, figure in drawn.items():
        assert "smoke run" in _text(figure)
        assert "smoke run" not in _text(all_drawn.figures[name])


def test_drawing_leaves_the_settings_of_others_alone(all_drawn: Drawn) -> None:
    assert all_drawn.font_size == 23


@pytest.mark.parametrize("module", [speed, memory, target, quality])
def test_results_of_something_else_draw_nothing(module: Any, tmp_path: Path) -> None:
    other = results.row(
        op="bmm", provider="p", workload="w", mode="m", metric="x", unit="1", value=1.0
    )
    for table in (results.frame([]), results.frame([other])):
        assert module.draw(table, MANIFEST, tmp_path) == []


def test_a_floor_far_away_does_not_stretch_the_axes(
    all_drawn: Drawn, drawn: dict[str, Any]
) -> None:
    near = all_drawn.of("04_quality_")
    quality.draw(quality_with_floor("ne", 9.09, 8.23), MANIFEST, Path("nowhere"))
    scores, differences = (drawn[f"{MANIFEST['id']}_{name}"] for name in QUALITY)
    assert "floor: counts 9.090 ▸" in _text(scores)
    assert "+8.230 ▸" in _text(differences)
    assert scores.axes[2].get_xlim()[1] < 0.9
    assert differences.axes[2].get_xlim()[1] < 0.1
    # Where it is near, it is drawn among the models.
    assert "floor: 0" not in _text(near["scores"])
    assert "▸" not in _text(near["difference"])


def test_every_figure_says_what_it_shows(all_drawn: Drawn) -> None:
    """Screen readers and pages that link it have no other words for it; files hold them, see
    `test_a_data_set_may_have_any_name`."""
    titles = all_drawn.titles
    assert len(titles) == len(set(titles.values())) > 10
    for stem, title in titles.items():
        assert len(title.split()) > 5
        assert stem not in title


def test_a_sweep_says_what_it_holds_fixed(all_drawn: Drawn) -> None:
    drawn = all_drawn.figures
    for sweep, axis in (("waste", "waste)"), ("length", "longest"), ("head_dim", "head_dim")):
        text = _text(drawn[f"{MANIFEST['id']}_latency_by_{sweep}"])
        (note,) = [line for line in text.splitlines() if line.startswith("held fixed: ")]
        assert axis not in note
        assert "heads" in note
    assert "held fixed" not in _text(drawn[f"{MANIFEST['id']}_workloads"])


def test_memory_from_kilobytes_to_gigabytes_is_read_off(drawn: dict[str, Any]) -> None:
    small = target_results()
    beyond = small["metric"] == memory.BEYOND
    small.loc[beyond, ["value", "q25", "q75"]] *= 1e-4
    target.draw(small, MANIFEST, Path("nowhere"))
    figure = drawn[f"{MANIFEST['id']}_memory"]
    figure.draw_without_rendering()
    said = {label.get_text() for axes in figure.axes for label in axes.get_yticklabels()}
    assert said
    assert all(re.fullmatch(r"[\d.]+ [kMG]?B|", label) for label in said), said


@pytest.mark.parametrize("name", ["a$b$c", "^x_$", "50% & <b> $^$"])
def test_a_data_set_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_format = "&" in name  # the others are nothing special in any format
    if not every_format:
        monkeypatch.setattr(style, "FORMATS", ("svg",))
    written = quality.draw(quality_results().assign(workload=name), MANIFEST, tmp_path)
    if every_format:
        assert len(_stems(written)) == len(QUALITY)
    drawn = [path for path in written if path.suffix == ".svg"]
    assert len(drawn) == len(QUALITY)
    for path in drawn:
        title = style.title_of(path)
        assert name in title
        root = ElementTree.parse(path).getroot()
        assert root[0].tag.endswith("title")
        assert root[0].text == title


def test_a_floor_is_a_line_in_view_or_a_number(drawn: dict[str, Any]) -> None:
    quality.draw(pd.concat([quality_results(), list_results()]), MANIFEST, Path("nowhere"))
    for dataset, floors in (("ml_100k", 1), ("shown", 3)):
        for panel in drawn[f"{MANIFEST['id']}_scores_{dataset}"].axes:
            low, high = panel.get_xlim()
            lines = [line for line in panel.lines if list(line.get_ydata()) == [0, 1]]
            places = [line.get_xdata()[0] for line in lines]
            numbers = sum(
                "floor: " in line for t in panel.texts for line in t.get_text().split("\n")
            )
            assert all(low < place < high for place in places)
            assert len(places) + numbers == floors


def test_lists_are_shown_by_their_metrics(drawn: dict[str, Any]) -> None:
    table = pd.concat([quality_results(), list_results()])
    quality.draw(table, MANIFEST, Path("nowhere"))
    shown = drawn[f"{MANIFEST['id']}_scores_shown"]
    assert [axes.get_title().split(" (")[0] for axes in shown.axes] == [
        "list AUC",
        "MRR",
        "nDCG@10",
    ]
    assert "floor: repeats" in _text(shown)
    rated = drawn[f"{MANIFEST['id']}_scores_ml_100k"]
    assert [axes.get_title().split(" (")[0] for axes in rated.axes] == ["AUC", "gAUC", "NE"]
    (_, single), (_, lists) = tables.quality(table)
    assert set(single["dataset"]) == {"ml_100k"}
    assert "MRR" not in single
    assert lists.set_index(["dataset", "model"]).loc[("shown", "DIN"), "MRR"]
    assert "gAUC" not in lists


def test_published_scores_stand_beside_ours(drawn: dict[str, Any]) -> None:
    """And nowhere else; next items are judged by their own metrics."""
    table = next_item_results()
    quality.draw(table, MANIFEST, Path("nowhere"))
    shown = drawn[f"{MANIFEST['id']}_scores"]
    assert [axes.get_title().split(" (")[0] for axes in shown.axes] == [
        "HR@10",
        "nDCG@10",
        "HR@10 of all items",
    ]
    labels = [label.get_text() for label in shown.axes[0].get_yticklabels()]
    for axes, value in zip(shown.axes, (0.4706, 0.2755, 0.0688), strict=True):
        (mark,) = [line for line in axes.lines if line.get_marker() == "D"]
        assert mark.get_xdata()[0] == value
        assert labels[int(mark.get_ydata()[0])] == "SASRec"
    assert "published: Zhou et al." in _text(shown)
    ((said, words),) = tables.quality(table)
    assert said.startswith("Next items")
    rows = words.set_index("model")["HR@10"]
    assert rows["SASRec, published (Zhou et al., S3-Rec, CIKM 2020)"] == "0.4706"
    assert "±" in rows["SASRec"]
    quality.draw(table.assign(workload="another"), MANIFEST, Path("nowhere"))
    assert "published" not in _text(drawn[f"{MANIFEST['id']}_scores"])


def test_every_provider_and_model_has_a_look_of_its_own() -> None:
    from jagged_ranking.measure.providers import PROVIDERS

    assert set(PROVIDERS) <= set(style.LOOKS)
    looks = [style.LOOKS[name] for name in PROVIDERS]
    assert len({look.color for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({}, "code 01234567"),
        ({"git_dirty": True}, "code 01234567 with changes"),
        ({"code_changed": True}, "code 01234567, changed since"),
        ({"git_sha": None}, "code unknown"),
    ],
)
def test_figures_say_which_code_made_their_results(manifest: dict[str, Any], said: str) -> None:
    assert style.footer({**MANIFEST, **manifest}).split(" · ")[-1] == said


def _dots(panel: Any, name: str) -> list[float]:
    looks = style.look_of(name)
    (line,) = [
        one
        for one in panel.lines
        if (one.get_color(), one.get_marker()) == (looks.color, looks.marker)
    ]
    return [float(y) for y in line.get_ydata()]


def test_ratios_of_few_queries_are_ours_over_the_limit_and_theirs_over_ours(
    drawn: dict[str, Any],
) -> None:
    table = results.select(target_results(), workload=["T1", "T3"], metric="latency")
    table["config"] = table["config"].str.replace(
        r'"limit_ms": [0-9.e-]+', '"limit_ms": 2.0', regex=True
    )
    for provider, ms in (("jagged", 3.0), ("varlen_attn", 12.0)):
        table.loc[table["provider"] == provider, "value"] = ms
    target.draw(table, MANIFEST, Path("nowhere"))
    left, right, *_ = drawn["01_speed_ratios"].axes
    assert _dots(left, "jagged") == [1.5, 1.5]
    assert _dots(right, "varlen_attn") == [4.0, 4.0]


def test_a_skew_is_of_as_many_users_as_its_panel(drawn: dict[str, Any]) -> None:
    table = target_results()
    facts = results.with_config(table, "B", "group")
    many = (facts["group"] == "skew") & (facts["B"] == 64) & (table["provider"] == "jagged")
    few = (facts["group"] == "skew") & (facts["B"] == 16) & (table["provider"] == "jagged")
    table.loc[few, "value"], table.loc[many, "value"] = 1.0, 2.0
    target.draw(table, MANIFEST, Path("nowhere"))
    left, right, *_ = drawn["01_speed_skew"].axes
    assert (left.get_title(), right.get_title()) == ("forward, 16 users", "forward, 64 users")
    assert (set(_dots(left, "jagged")), set(_dots(right, "jagged"))) == ({1.0}, {2.0})


def test_the_circle_is_ours_with_its_schedule(drawn: dict[str, Any]) -> None:
    """2 ms and 0.5 ms of schedule are 1.25 of ours; flex takes 3 of ours."""
    table = results.select(attention_results(), workload="B", mode="forward")
    for (op, provider), ms in {
        ("attention", "jagged"): 2.0, ("schedule", "jagged"): 0.5, ("attention", "flex"): 6.0,
    }.items():  # fmt: skip
        at = results.select(table, op=op, provider=provider, metric="latency").index
        table.loc[at, ["value", "q25", "q75"]] = ms
    speed.draw(table, MANIFEST, Path("nowhere"))
    (panel,) = drawn["01_speed_peers"].axes
    (circle,) = [line for line in panel.lines if line.get_fillstyle() == "none"]
    assert list(circle.get_ydata()) == [1.25]
    assert _dots(panel, "flex") == [3.0]


def test_useful_arithmetic_is_in_the_unit_of_its_axis(drawn: dict[str, Any]) -> None:
    table = results.select(attention_results(), workload=["waste 0%", "waste 50%"])
    rates = table["metric"] == "useful_flops"
    assert rates.any()
    for rate, unit, height in ((5e11, "GFLOP/s", 500.0), (4e12, "TFLOP/s", 4.0)):
        table.loc[rates, ["value", "q25", "q75"]] = rate
        speed.draw(table, MANIFEST, Path("nowhere"))
        panel = drawn["01_speed_throughput"].axes[0]
        assert panel.get_ylabel() == f"useful {unit}"
        assert _dots(panel, "jagged") == pytest.approx([height] * 2)
