"""What becomes of the paper's claims, from made-up results."""

import json

import pandas as pd
import pytest
from made_up_rankers import quality_results

from jagged_ranking import results
from jagged_ranking.devices import device_name
from jagged_ranking.figures import tables


def _claims_if_slow(measured: pd.DataFrame, *, but: str = "") -> pd.DataFrame:
    """Claims by name and mode, were ours 1000 times as slow on every workload but one."""
    slow = measured.copy()
    ours = (slow["provider"] == "jagged") & (slow["metric"] == "latency")
    ours &= slow["workload"] != but
    slow.loc[ours, ["value", "q25", "q75"]] *= 1000
    return tables.claims(slow).set_index(["claim", "mode"])


def test_claims_say_what_holds_and_where(measured: pd.DataFrame) -> None:
    table = tables.claims(measured).set_index(["claim", "mode"])
    assert len(table) == 8
    faster = table.loc[("faster than dense attention", "forward")]
    assert faster["holds"] == "yes"
    assert faster["paper"] == "up to 9x"
    assert "on all with 75% waste or more" in faster["where"]
    assert "runs out of memory on C, D, N" in faster["where"]
    table = _claims_if_slow(measured)
    faster = table.loc[("faster than dense flash attention", "forward")]
    assert faster["holds"] == "no"
    assert "3x or more on none of 27 batches" in faster["where"]


def test_where_a_claim_holds_is_said_in_the_percent_that_batches_are_said_in(
    measured: pd.DataFrame,
) -> None:
    """Nowhere "9x or more on all with 89%" beside "7x at 89%": both 88.5%, to one figure more."""
    wastes = {"waste 85%": 0.8851, "waste 90%": 0.8854}  # which all said with 89%
    near = measured.copy()
    near["config"] = [
        json.dumps({**json.loads(text), "waste": wastes[name]}) if name in wastes else text
        for text, name in zip(near["config"], near["workload"], strict=True)
    ]
    ours = (near["provider"] == "jagged") & (near["metric"] == "latency")
    near.loc[ours & (near["workload"] == "waste 85%"), ["value", "q25", "q75"]] *= 1000
    where = (
        tables.claims(near)
        .set_index(["claim", "mode"])
        .loc[("faster than dense attention", "forward"), "where"]
    )
    assert "on all with 95% waste or more" in where


def test_a_claim_that_few_batches_reach_holds_in_part(measured: pd.DataFrame) -> None:
    table = _claims_if_slow(measured, but="B")
    faster = table.loc[("faster than dense attention", "forward")]
    assert faster["holds"] == "in part"
    assert "9x or more on 1 of 24 batches" in faster["where"]


def test_batches_that_ours_fails_on_reach_nothing(measured: pd.DataFrame) -> None:
    """And are not left out of those that a claim is judged by."""
    failed = measured.copy()
    ours = (failed["provider"] == "jagged") & (failed["metric"] == "latency")
    kept = failed["workload"].isin(["A", "B", "E"])
    failed.loc[ours & ~kept, ["value", "status"]] = [float("nan"), "error"]
    table = tables.claims(failed).set_index(["claim", "mode"])
    faster = table.loc[("faster than dense attention", "forward")]
    assert "9x or more on 2 of 3 batches" in faster["where"]
    assert "ours fails on C, D, F, G, N, waste 0%" in faster["where"]
    assert faster["holds"] == "in part"


def test_claims_about_gpus_are_not_judged_on_a_cpu(measured: pd.DataFrame) -> None:
    elsewhere = measured.copy()
    named = device_name("cpu")
    elsewhere["config"] = [
        json.dumps({**json.loads(text), "device": named}) for text in elsewhere["config"]
    ]
    assert set(tables.claims(elsewhere)["holds"]) == {"n/a: not on a GPU"}
    assert tables.claims(quality_results())["holds"].tolist() == ["yes", "yes"]


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


@pytest.mark.parametrize(
    ("bounds", "holds", "where"),
    [
        ((0.1, 0.2), "yes", "toy, other"),
        ((-0.2, -0.1), "in part", "toy"),
        ((-1, 1), "in part", "toy"),
    ],
)
def test_a_model_has_one_claim_of_all_data_sets(
    bounds: tuple[float, float], holds: str, where: str
) -> None:
    one = quality_results().assign(workload="toy")
    low, high = bounds
    changed = [
        json.dumps({**json.loads(text), "low": low, "high": high}) if "low" in text else text
        for text in one["config"]
    ]
    table = tables.claims(pd.concat([one, one.assign(workload="other", config=changed)]))
    assert table["holds"].tolist() == [holds, holds]
    assert table["where"].tolist() == [where, where]
    assert table["this run"].str.contains(r"\(toy\); .* \(other\)$").all()


def test_claims_of_lists_are_judged_by_lists() -> None:
    of_users = quality_results()
    of_lists = of_users.assign(metric=of_users["metric"].str.replace("gauc", "list_auc"))
    of_lists["value"] += 0.5
    table = tables.claims(pd.concat([of_users, of_lists]))
    assert set(table["mode"]) == {"test list AUC"}
    assert len(table) == len(tables.claims(of_users)) == 2
    assert table["this run"].str.startswith("+0.5").all()


@pytest.mark.parametrize(
    ("ms", "holds", "where"),
    [
        ((9.0, 9.1, 8.9), "yes", "9x or more on 2 of 3 batches"),
        ((9.0, 9.1, 8.9, 8.9), "in part", "9x or more on 2 of 4 batches"),
        ((8.9, 8.9), "no", "9x or more on none of 2 batches"),
    ],
)
def test_a_claim_holds_on_most_batches(ms: tuple[float, ...], holds: str, where: str) -> None:
    """Half of them are not most; a batch that just reaches it reaches it. Ours takes 1 ms."""
    config = {"group": "workloads", "waste": 0.5, "device": "Imaginary GPU 80GB"}
    rows = [
        results.row(
            op="attention",
            provider=provider,
            workload=f"w{place}",
            mode="forward",
            metric="latency",
            unit="ms",
            value=value,
            config=config,
        )
        for place, one in enumerate(ms)
        for provider, value in (("jagged", 1.0), ("dense_eager", one))
    ]
    (claim,) = tables.claims(results.frame(rows)).to_dict("records")
    assert claim["holds"] == holds
    assert claim["where"].startswith(where)


def test_a_model_that_ranks_worse_is_said_to() -> None:
    worse = quality_results()
    worse["config"] = [
        json.dumps({**json.loads(text), "low": -0.2, "high": -0.1}) if "low" in text else text
        for text in worse["config"]
    ]
    assert tables.claims(worse)["holds"].tolist() == ["no", "no"]


def test_memory_is_claimed_with_the_inputs() -> None:
    """22 times of it, where it is 30 times beyond the inputs."""
    config = {"group": "workloads", "waste": 0.5, "device": "Imaginary GPU 80GB"}
    rows = [
        results.row(
            op="attention",
            provider=provider,
            workload="w",
            mode="forward",
            metric=metric,
            unit="bytes",
            value=value,
            config=config,
        )
        for metric, most in (("peak_memory", 22.0), ("peak_memory_minus_inputs", 30.0))
        for provider, value in (("jagged", 1.0), ("dense_eager", most))
    ]
    (claim,) = tables.claims(results.frame(rows)).to_dict("records")
    assert claim["claim"] == "less memory than dense attention, with inputs"
    assert (claim["paper"], claim["holds"]) == ("up to 22x", "yes")
    assert claim["this run"].startswith("22x at 50% waste (w)")
