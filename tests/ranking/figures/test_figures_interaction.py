"""Figures, tables and goals of the interaction operations, from made-up results."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from left_results import save_run
from made_up_results import MANIFEST, interaction_results
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import goals, operation_figures, redraw, style, tables
from jagged_ranking.figures.operation_goals import interaction_rows, operations_table
from jagged_ranking.figures.operation_points import NOTEBOOK, against_limit, largest, operations
from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.interaction.layout import Layout
from jagged_ranking.measure.interaction.measurement import PROBLEMS

FIGURES = ("limit", "peers", "tokens_forward", "tokens_training")
FIGURES = (*FIGURES, "waste_forward", "waste_training", "memory")
HERE = {**MANIFEST, "id": NOTEBOOK}
FEW = ["jagged_sum", "jagged_dense_bmm", "jagged_unique"]


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return interaction_results()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by file stem, kept instead of saved."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, out: Path, stem: str, title: str) -> list[Path]:
        kept[stem.removeprefix(f"{NOTEBOOK}_")] = figure
        return []

    monkeypatch.setattr(style, "save", keep)
    return kept


def text_of(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def save(folder: Path, table: pd.DataFrame) -> Path:
    return save_run(folder, table, HERE)


def test_figures_show_every_operation_the_limit_and_the_goal(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    operation_figures.draw(measured, HERE, Path("nowhere"))
    assert tuple(drawn) == FIGURES
    for name, figure in drawn.items():
        said = text_of(figure)
        assert "Imaginary GPU 80GB · bfloat16" in said
        missing = {"jagged_unique"} if name.endswith("training") else set()
        assert set(OPERATIONS) - missing <= set(said.splitlines())
        assert "FBGEMM sll" not in said  # it is missing there
        assert "smoke run" not in said
    for name in ("limit", "tokens_training", "waste_forward"):
        assert "goal: 1.5 x limit" in text_of(drawn[name])
    assert "ours, float32" in text_of(drawn["limit"])
    assert "1,012,058 tokens" in text_of(drawn["peers"])


def test_dots_stand_where_the_ratios_are(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    table = results.select(measured, op=["jagged_mean", "jagged_sum"]).copy()
    fast = (table["op"] == "jagged_mean") & (table["provider"] == "padded")
    table.loc[fast, ["value", "q25", "q75"]] *= 0.01
    operation_figures.draw(table, HERE, Path("nowhere"))
    panel = drawn["peers"].axes[0]
    names = [label.get_text() for label in panel.get_yticklabels()]
    color = style.look_of("padded").color
    (dots,) = [line for line in panel.lines if line.get_color() == color]
    ratio = dict(zip([names[int(y)] for y in dots.get_ydata()], dots.get_xdata(), strict=True))
    assert ratio["jagged_mean"] < 1 < ratio["jagged_sum"]
    assert ratio["jagged_sum"] == pytest.approx(100 * ratio["jagged_mean"])
    low, high = panel.get_xlim()
    assert low < ratio["jagged_mean"] < ratio["jagged_sum"] < high


def test_redraw_gives_the_same_bytes(
    measured: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    table = results.select(measured, op=FEW)
    folder = save(tmp_path / "figures" / NOTEBOOK, table)
    first = operation_figures.draw(table, HERE, folder)
    assert [p.stem for p in first] == [f"{NOTEBOOK}_{name}" for name in FIGURES]
    bytes_of = {path: path.read_bytes() for path in first}
    for path in first:
        path.unlink()
    assert redraw.redraw(folder) == first
    assert {path: path.read_bytes() for path in first} == bytes_of


def test_a_smoke_run_is_marked(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    table = results.select(measured, op=FEW)
    operation_figures.draw(table, {**HERE, "preset": "smoke"}, Path("nowhere"))
    assert tuple(drawn) == FIGURES
    for figure in drawn.values():
        assert "smoke run" in text_of(figure)


def test_results_of_something_else_draw_nothing(tmp_path: Path) -> None:
    other = results.row(
        op="bmm", provider="p", workload="w", mode="m", metric="x", unit="1", value=1.0
    )
    for table in (results.frame([]), results.frame([other])):
        assert operation_figures.draw(table, HERE, tmp_path) == []
        assert tables.interaction(table).empty


def test_table_of_numbers(measured: pd.DataFrame) -> None:
    table = tables.interaction(measured).set_index("operation")
    row = table.loc["jagged_sum"]
    assert list(table.index) == list(OPERATIONS)
    assert row["tokens"] == "1,012,058"
    assert row["dtype"] == "bfloat16"
    # 2 and 5 times 1,012,058 x 64 bf16 at 3 TB/s; ours 1.2 and 1.4 of it, and 0.005.
    assert row["limit"] == "0.0864 / 0.216"
    assert row["ours / limit"] == "1.26 / 1.42"
    assert row["best peer"] == "padded PyTorch"
    assert table.loc["jagged_unique", "ours / limit"] == "1.26"


def test_a_peer_that_is_missing_in_one_mode_is_a_dash_there(measured: pd.DataFrame) -> None:
    training = (measured["mode"] == "forward+backward") & (measured["provider"] != "jagged")
    of_sum = (measured["op"] == "jagged_sum") & (measured["metric"] == "latency")
    left = measured.loc[~(training & of_sum), :]
    row = tables.interaction(left).set_index("operation").loc["jagged_sum"]
    assert row["its ms"].endswith(" / –")
    assert row["ours / best"].endswith(" / –")


def goal_of(table: pd.DataFrame, name: str, dtype: str) -> dict[str, str]:
    rows = {(row["operation"], row["dtype"]): row for row in interaction_rows(table)}
    return rows[name, dtype]


def test_goals(measured: pd.DataFrame) -> None:
    assert len(interaction_rows(measured)) == 2 * len(OPERATIONS)
    row = goal_of(measured, "jagged_sum", "bfloat16")
    assert row["forward: ours / limit"] == "1.26"
    assert row["at most"] == "1.50"
    assert row["slower than a peer on"] == "0 of 10"
    assert row["met"] == "yes"
    measured = results.select(measured, op=FEW)
    slow = measured.copy()
    ours = (slow["provider"] == "jagged") & (slow["op"] == "jagged_sum")
    training = ours & (slow["mode"] != "forward") & (slow["workload"] == "users 8192")
    slow.loc[training, "value"] *= 1.2
    row = {(r["operation"], r["dtype"]): r for r in interaction_rows(slow)}[
        "jagged_sum", "bfloat16"
    ]
    assert row["met"] == "**no**"
    slow = measured.copy()
    slow.loc[ours & (slow["workload"] == "waste 0%"), "value"] *= 10
    row = {(r["operation"], r["dtype"]): r for r in interaction_rows(slow)}[
        "jagged_sum", "bfloat16"
    ]
    assert row["slower than a peer on"] == "2 of 10"
    assert "padded PyTorch; waste 0%" in row["worst: ours / peer"]
    assert row["met"] == "**no**"
    small = measured.loc[measured["workload"] != "users 8192", :]
    row = interaction_rows(small)[0]
    assert row["forward: ours / limit"] == "not measured"
    assert row["met"] == "not measured"


def test_a_failure_of_ours_does_not_meet_the_goal(measured: pd.DataFrame) -> None:
    failed = measured.copy()
    ours = (failed["provider"] == "jagged") & (failed["op"] == "jagged_sum")
    wrong = ours & (failed["workload"] == "users 8192") & (failed["metric"] == "latency")
    failed.loc[wrong, ["value", "q25", "q75"]] = float("nan")
    failed.loc[wrong, "status"] = "error"
    assert goal_of(failed, "jagged_sum", "bfloat16")["met"] == "not measured"
    assert tables.interaction(failed).set_index("operation").loc["jagged_sum", "best peer"]


def test_the_readme_lists_all_operations(tmp_path: Path, measured: pd.DataFrame) -> None:
    before = operations_table(tmp_path)
    assert before.count("not measured") == len(OPERATIONS) + 1
    for operation in OPERATIONS.values():
        assert f"| `{operation.function}`" in before
        assert operation.purpose in before
    save(tmp_path / NOTEBOOK, measured)
    after = operations_table(tmp_path)
    assert "not measured" not in after
    assert "1.26 / 1.42" in after
    assert "Imaginary GPU 80GB" in after
    assert "Interaction operations" in goals.goal_tables(tmp_path)


def test_every_peer_has_a_look_of_its_own() -> None:
    batch = _small()
    peers = {name for problem in PROBLEMS.values() for name in problem(batch).peers}
    looks = [style.LOOKS[name] for name in sorted(peers | {"jagged"})]
    assert len({look.color for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)


def _small() -> Layout:
    import torch

    from jagged_ranking.measure.workloads import Workload

    batch = Workload.from_lengths("w", [3, 1, 2], heads=1, head_dim=4, dtype=torch.float32)
    return Layout(batch, torch.device("cpu"))


def test_nobody_knows_the_worst_where_ours_failed(measured: pd.DataFrame) -> None:
    """On one batch, where a peer has a number."""
    table = results.select(measured, op=["jagged_sum"]).copy()
    (before, *_) = interaction_rows(table)
    assert before["slower than a peer on"].startswith("0 of ")
    where = {"provider": "jagged", "metric": "latency", "mode": "forward"}
    small = results.with_config(results.select(table, **where), "tokens", "dtype")
    at = small.loc[small["dtype"] == "bfloat16", "tokens"].idxmin()
    table.loc[at, ["value", "status"]] = [float("nan"), "error"]
    (row, *_) = interaction_rows(table)
    assert (before["met"], row["met"]) == ("yes", "not measured")


def test_a_batch_is_slower_by_what_is_shown(measured: pd.DataFrame) -> None:
    """1.004 times a peer's time is 1.00 of it."""
    where = {"op": "jagged_sum", "workload": "waste 0%", "metric": "latency", "mode": "forward"}
    for times, slower in ((1.004, "0 of 10"), (1.006, "1 of 10")):
        table = results.select(measured, op="jagged_sum").copy()
        peer = results.select(table, provider="padded", **where)["value"].iloc[0]
        table.loc[results.select(table, provider="jagged", **where).index, "value"] = times * peer
        row = goal_of(table, "jagged_sum", "bfloat16")
        assert row["slower than a peer on"] == slower
        assert row["worst: ours / peer"].startswith(f"{times:.2f} (padded PyTorch; waste 0%")


def test_a_million_tokens_are_enough_for_the_limit_and_fewer_are_not(
    measured: pd.DataFrame,
) -> None:
    table = results.select(measured, op="jagged_sum")
    for tokens, met in ((1_000_000, "yes"), (999_999, "not measured")):
        config = table["config"].str.replace('"tokens": 1012058', f'"tokens": {tokens}')
        assert (config != table["config"]).any()
        assert goal_of(table.assign(config=config), "jagged_sum", "bfloat16")["met"] == met


def test_who_failed_is_no_peer(measured: pd.DataFrame) -> None:
    table = results.select(measured, op="jagged_sum").copy()
    padded = table["provider"] == "padded"
    table.loc[padded, ["value", "status"]] = [float("nan"), "error"]
    row = goal_of(table, "jagged_sum", "bfloat16")
    assert (row["slower than a peer on"], row["worst: ours / peer"]) == ("no peer", "")
    assert row["met"] == "yes"  # of the limit


def test_a_goal_of_both_modes_is_open_where_one_failed(measured: pd.DataFrame) -> None:
    table = results.select(measured, op="jagged_sum", provider="jagged").copy()
    where = {"mode": "forward+backward", "workload": "users 8192", "metric": "latency"}
    failed = results.select(table, **where).index
    table.loc[failed, ["value", "status"]] = [float("nan"), "out_of_memory"]
    row = goal_of(table, "jagged_sum", "bfloat16")
    assert row["forward: ours / limit"] == "1.26"
    assert row["forward+backward: ours / limit"] == row["met"] == "not measured"


def test_quartiles_are_over_the_limit_too(measured: pd.DataFrame) -> None:
    table = results.select(operations(measured, "latency"), op="jagged_sum", provider="jagged")
    scaled = against_limit(table.assign(value=6.0, q25=4.0, q75=8.0, limit_ms=2.0))
    assert scaled[["value", "q25", "q75"]].drop_duplicates().to_numpy().tolist() == [[3, 2, 4]]


def test_each_dtype_has_dots_of_its_own_beside_the_goal(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    table = results.select(measured, op="jagged_sum").copy()
    where = {"provider": "jagged", "metric": "latency"}
    ours = results.with_config(results.select(table, **where), "dtype", "limit_ms")
    for dtype, times in (("bfloat16", 1.2), ("float32", 1.4)):
        mine = ours.loc[ours["dtype"] == dtype, :]
        table.loc[mine.index, "value"] = times * mine["limit_ms"].astype(float)
    operation_figures.draw(table, HERE, Path("nowhere"))
    panel = drawn["limit"].axes[0]
    dots = {
        style.MODE_LOOKS[look].color: times
        for look, times in (("forward", 1.2), ("forward+backward", 1.4))
    }
    shown = {
        line.get_color(): list(line.get_xdata()) for line in panel.lines if line.get_color() in dots
    }
    assert shown == {color: [pytest.approx(times)] for color, times in dots.items()}
    (goal,) = [line for line in panel.lines if line.get_color() == style.PAPER_COLOR]
    assert set(goal.get_xdata()) == {1.5}


def test_peaks_are_in_the_unit_of_their_axis(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    table = results.select(measured, op="jagged_sum").copy()
    table.loc[table["metric"] == "peak_memory_minus_inputs", "value"] = 7e6
    operation_figures.draw(table, HERE, Path("nowhere"))
    panel = drawn["memory"].axes[0]
    assert panel.get_xlabel().startswith("peak beyond inputs (MB), ")
    colors = [style.look_of(name).color for name in ("jagged", "padded")]
    dots = [list(line.get_xdata()) for line in panel.lines if line.get_color() in colors]
    assert dots == [[7.0], [7.0]]


def test_the_largest_batch_is_one_of_the_sweep_over_tokens(measured: pd.DataFrame) -> None:
    """However many tokens one of another sweep has."""
    table = operations(results.select(measured, op="jagged_sum"), "latency")
    table.loc[table["workload"] == "waste 0%", "tokens"] = 2_000_000
    assert set(largest(table)["workload"]) == {"users 8192"}
