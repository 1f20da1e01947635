"""The few tables of the README, from made-up results."""

from pathlib import Path
from typing import Any

import pandas as pd
from left_results import save_run
from made_up_cached import cached_results
from made_up_rankers import (
    history_results,
    next_item_results,
    quality_results,
    serving_results,
    throughput_results,
)
from made_up_results import (
    MANIFEST,
    attention_results,
    hstu_results,
    sparse_results,
    target_results,
)
from made_up_scaling import scaling_results

from jagged_ranking import results
from jagged_ranking.figures import headline_tables, headlines, redraw, speed, tables


def committed(figures: Path, **tables: pd.DataFrame) -> Path:
    for name, table in tables.items():
        save_run(figures / name, table, {**MANIFEST, "id": name, "preset": "paper"})
    return figures


def score(dataset: str, model: str, metric: str, value: float, **config: Any) -> dict[str, Any]:
    return results.row(
        op="ranking", provider=model, workload=dataset, mode="test", metric=metric, value=value,
        unit="1", config=config,
    )  # fmt: skip


def test_sections_are_of_the_results_that_are_there(tmp_path: Path) -> None:
    assert headlines.headlines(tmp_path) == "No results are committed yet."
    figures = committed(
        tmp_path / "figures",
        **{
            "01_speed": attention_results(),
            "03_target_attention": target_results(),
            "04_quality": quality_results(),
            "06_history_length": history_results(),
            "07_hstu": hstu_results(),
            "08_sparse_attention": sparse_results(),
            "09_history_cache": cached_results(),
            "10_training_throughput": throughput_results(),
            "11_serving": serving_results(),
            "12_scaling": scaling_results(),
        },
    )
    for name in ("01_speed_speedup", f"01_speed_{speed.PEERS}"):
        (figures / "01_speed" / f"{name}.svg").write_text("<svg/>")
    text = headlines.headlines(figures)
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("#")]
    assert titles == [section.title for section in headlines.SECTIONS]
    assert text.count("*01_speed, preset paper · Imaginary GPU") == 2
    assert "![01_speed_speedup](figures/01_speed/01_speed_speedup.svg)" in text
    # What the README shows at its top, and the pictures of the page of all results.
    assert text.count("![") == 1


def test_claims_are_those_of_the_paper() -> None:
    found = headline_tables.paper_claims(pd.concat([attention_results(), quality_results()]))
    assert (found["paper"] != "").all()
    assert {"faster than dense attention", "faster than dense flash attention"} <= set(
        found["claim"]
    )
    assert set(found["holds"]) <= {"yes", "no", "in part", "not measured"}


def test_attention_is_held_against_its_best_peer() -> None:
    table = attention_results()
    rows = headline_tables.self_attention(table).set_index("workload")
    latency = results.select(table, op="attention", metric="latency", status="ok")
    for workload, row in rows.iterrows():
        mine = latency[latency["workload"] == workload]
        for place, mode in enumerate(("forward", "forward+backward")):
            times = mine[mine["mode"] == mode].set_index("provider")["value"]
            ours, others = times["jagged"], times[~times.index.str.startswith("jagged")]
            assert row["jagged (ours), ms"].split(" / ")[place] == tables.number(float(str(ours)))
            assert row["it takes"].split(" / ")[place] == f"{others.min() / ours:.2f}x"
            if "dense_flash" in times:
                dense = row["dense flash takes"].split(" / ")[place]
                assert dense == f"{times['dense_flash'] / ours:.1f}x"
    assert len(rows)
    lost = (table["workload"] == "A") & (table["provider"] == "dense_flash")
    without = headline_tables.self_attention(table.loc[~lost, :]).set_index("workload")
    assert without.loc["A", "dense flash takes"] == "– / –"
    assert without.loc["B"].equals(rows.loc["B"])
    assert not headline_tables.target_attention(target_results()).empty
    assert headline_tables.self_attention(quality_results()).empty
    assert headline_tables.target_attention(quality_results()).empty


def test_rankers_have_a_column_a_data_set() -> None:
    rows = [
        score("clicks", model, metric, value, seed=seed)
        for model, value in (("mean_pool", 0.6), ("din", 0.7), ("sasrec", 0.5), ("bst", 0.6))
        for metric in ("auc", "gauc", "ne")
        for seed in (0, 1)
    ]
    rows += [score("clicks", "counts", "gauc", 0.55), score("clicks", "repeats", "gauc", 0.5)]
    for model, low, high in (("din", 0.05, 0.15), ("sasrec", -0.2, -0.1), ("bst", -0.1, 0.1)):
        rows.append(score("clicks", model, "gauc_difference", 0.0, low=low, high=high))
    rows += [score("lists", "din", metric, 0.4) for metric in ("list_auc", "mrr", "ndcg@10")]
    rows.insert(0, score("synthetic", "din", "gauc", 0.9))
    found = headline_tables.rankers(results.frame(rows)).set_index("model")
    assert list(found) == ["clicks: gAUC", "lists: list AUC", "synthetic: gAUC"]
    assert found["clicks: gAUC"].to_dict() == {
        "mean-pool": "0.6000",
        "DIN": "0.7000 ▲",
        "SASRec": "0.5000 ▼",
        "BST": "0.6000",
        "best floor": "0.5500 (counts)",
    }
    assert found["lists: list AUC"].to_dict()["DIN"] == "0.4000"
    assert set(found["lists: list AUC"].drop("DIN")) == {""}
    assert headline_tables.rankers(attention_results()).empty


def test_columns_of_all_modes_stand_in_one_row() -> None:
    def rows_of(_: pd.DataFrame) -> list[dict[str, str]]:
        return [
            {"users": users, "mode": mode, "with": "", "ms": ms, "times": ms and f"{ms}x"}
            for mode, of_users in (("forward", ("1", "2")), ("backward", ("3", "")))
            for users, ms in zip(("8", "64"), of_users, strict=True)
        ]

    table = headline_tables.some_columns(rows_of, "users", "with", by_mode=("times",))
    assert table(pd.DataFrame()).to_dict("list") == {
        "users": ["8", "64"], "with": ["–", "–"], "times": ["1x / 3x", "2x / –"],
    }  # fmt: skip
    assert headline_tables.some_columns(rows_of, "ms")(pd.DataFrame())["ms"].tolist() == [
        "1", "2", "3", "",
    ]  # fmt: skip


def test_compressed_rankers_are_those_of_the_paper() -> None:
    found = headline_tables.compressed(cached_results())
    assert set(found["compression"]) == {"1x", "5x"}
    assert headline_tables.compressed(attention_results()).empty


def test_what_others_published_stands_below() -> None:
    found = headline_tables.rankers(next_item_results()).set_index("model")["lastfm_s3rec: HR@10"]
    assert found["published"].startswith("0.4706 (SASRec)")
    # A count of the test items themselves is no floor.
    assert "leak" not in found["best floor"]


def test_the_marks_of_a_readme_stay(tmp_path: Path) -> None:
    figures, readme = tmp_path / "figures", tmp_path / "README.md"
    figures.mkdir()
    operations = f"{redraw.OPERATIONS_BEGIN}\n{redraw.OPERATIONS_END}\n"
    readme.write_text(f"# Title\n\n{redraw.BEGIN}\nold\n{redraw.END}\n\n{operations}after\n")
    assert redraw.update_readme(readme, figures)
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{redraw.BEGIN}\n\n{headlines.NONE}\n\n{redraw.END}\n")
    assert "| `jagged_sum` | sum pooling" in text
    assert text.endswith(f"{redraw.OPERATIONS_END}\nafter\n")
    assert not redraw.update_readme(readme, figures)


def test_data_sets_stand_as_they_were_measured_the_made_up_last() -> None:
    names = ("synthetic", "zeta", "alpha", "synthetic_far")
    rows = [score(name, "din", "gauc", 0.9) for name in names]
    assert list(headline_tables.rankers(results.frame(rows)))[1:] == [
        "zeta: gAUC", "alpha: gAUC", "synthetic: gAUC", "synthetic_far: gAUC"
    ]  # fmt: skip


def test_the_best_floor_has_not_seen_the_test_items() -> None:
    rows = [score("log", "din", "gauc", 0.7), score("log", "popularity_leak", "gauc", 0.9)]
    rows += [score("log", "popularity", "gauc", 0.4), score("log", "counts", "gauc", 0.6)]
    found = headline_tables.rankers(results.frame(rows)).set_index("model")
    assert found["log: gAUC"].to_dict() == {"DIN": "0.7000", "best floor": "0.6000 (counts)"}


def test_target_attention_is_held_against_limit_and_best_peer() -> None:
    """T3's limit is 1 ms here, ours 1.5 and 3, the best peer's 3 and 3."""
    table = results.select(target_results(), workload="T3", metric="latency").copy()
    table["config"] = table["config"].str.replace(
        r'"limit_ms": [0-9.e-]+', '"limit_ms": 1.0', regex=True
    )
    for (mode, provider), ms in {
        ("forward", "jagged"): 1.5,
        ("forward+backward", "jagged"): 3.0,
        ("forward", "varlen_attn"): 3.0,
        ("forward+backward", "varlen_attn"): 3.0,
    }.items():
        table.loc[results.select(table, mode=mode, provider=provider).index, "value"] = ms
    (row,) = headline_tables.target_attention(table).to_dict("records")
    assert row["jagged (ours), ms"] == "1.50 / 3.00"
    assert row["over the limit"] == "1.50x / 3.00x"
    assert (row["best peer"], row["it takes"]) == ("varlen_attn (FA2)", "2.00x / 1.00x")


def test_a_workload_on_which_ours_failed_is_a_row_that_says_so() -> None:
    whole = attention_results()
    expected = headline_tables.self_attention(whole).set_index("workload")
    table = whole.copy()
    for workload, mode, status in (
        ("A", "forward", "out_of_memory"),
        ("A", "forward+backward", "error"),
        ("B", "forward+backward", "out_of_memory"),
    ):
        lost = results.select(table, workload=workload, mode=mode, provider="jagged").index
        table.loc[lost, ["status", "value"]] = status, float("nan")
    found = headline_tables.self_attention(table).set_index("workload")
    assert list(found.index) == list(expected.index)
    a, b = found.loc["A"], found.loc["B"]
    assert (a["jagged (ours), ms"], a["best peer"], a["it takes"]) == ("OOM / error", "–", "– / –")
    forward = expected.loc["B", "jagged (ours), ms"].split(" / ")[0]
    assert b["jagged (ours), ms"] == f"{forward} / OOM"
    assert b["it takes"] == expected.loc["B", "it takes"].split(" / ")[0] + " / –"
    assert found.drop(["A", "B"]).equals(expected.drop(["A", "B"]))


def test_a_section_names_each_run_that_it_is_of(tmp_path: Path) -> None:
    claims = headlines.SECTIONS[0]
    assert claims.notebooks == ("01_speed", "02_memory")
    said = headlines.headlines(
        committed(tmp_path, **{name: attention_results() for name in claims.notebooks})
    )
    section = said.split("### ")[1]
    for name in claims.notebooks:
        assert section.count(f"*{name}, preset paper · Imaginary GPU") == 1
