"""`fp8_quality.py` scores one ranker by attention in several numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp8_quality import ATTEND, NUMBERS, WHOLE, attending, main, quality

from click_data import prepare
from jagged_kernels import JaggedTensor
from jagged_ranking import provenance, results
from jagged_ranking.figures.fp8_goals import FP8_QUALITY, fp8_quality_rows
from jagged_ranking.layers.attention import attend


def test_attention_is_computed_as_asked_and_put_back() -> None:
    offsets = torch.tensor([0, 3, 3, 40])
    q, k, v = (JaggedTensor(torch.randn(40, 2, 64), offsets) for _ in range(3))
    sink = torch.zeros(2)
    found = {}
    for numbers in NUMBERS:
        with attending(numbers), torch.no_grad():
            found[numbers] = (attend(q, k, v, causal=True), attend(q, k, v, sink=sink))
    for of_call in range(2):
        exact = found[WHOLE][of_call].values
        errors = {n: float((x[of_call].values - exact).norm()) for n, x in found.items()}
        assert errors[WHOLE] == 0 < errors["bfloat16"] < errors["fp8"] < 0.2 * float(exact.norm())
        assert all(x[of_call].values.dtype == torch.float32 for x in found.values())
    again = attend(q, k, v, causal=True).values
    assert torch.equal(again, found[WHOLE][0].values)
    assert list(ATTEND) == list(NUMBERS)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "log"
    return prepare("synthetic", out=folder, users=12, items=30, categories=3, events=600)


def test_each_training_has_its_loss(log: Path) -> None:
    options = {"epochs": 1, "max_history": 16}
    table = quality(
        [log], model="sasrec", seeds=[0, 1], options=options, replicates=20, device="cpu", workers=1
    )
    assert set(table["provider"]) == set(NUMBERS)
    assert set(table["op"]) == {FP8_QUALITY}
    found = results.with_config(table, "seed", "low", "high")
    for seed in (0, 1):
        of_seed = found[found["seed"] == seed].set_index(["provider", "metric"])
        whole = of_seed.loc[(WHOLE, "log_loss"), "value"]
        for numbers in NUMBERS[1:]:
            lost = of_seed.loc[(numbers, "log_loss_difference")]
            mine = of_seed.loc[(numbers, "log_loss"), "value"]
            assert lost["value"] == pytest.approx(mine - whole)
            assert lost["low"] <= lost["value"] <= lost["high"]
        assert (WHOLE, "log_loss_difference") not in of_seed.index
    shown = fp8_quality_rows(table)
    assert [(row["seed"], row["numbers"]) for row in shown] == [
        (seed, numbers) for seed in "01" for numbers in NUMBERS[1:]
    ]
    last = found[(found["seed"] == 1) & (found["provider"] == NUMBERS[-1])].set_index("metric")
    assert shown[-1]["log_loss"] == f"{last.loc['log_loss', 'value']:.4f}"
    lost = last.loc["log_loss_difference", "value"]
    assert shown[-1]["log_loss, difference"].startswith(f"{lost:+.5f} (")


def test_it_leaves_a_result(log: Path, tmp_path: Path) -> None:
    options = '{"epochs": 1, "max_history": 16}'
    words = [str(log), "--seeds", "0", "--options", options, "--replicates", "5", "-n", "1"]
    assert main([*words, "--out", str(tmp_path / "left")]) == 0
    assert set(results.read(tmp_path / "left" / results.RESULTS)["provider"]) == set(NUMBERS)
    manifest = json.loads((tmp_path / "left" / provenance.MANIFEST).read_text(encoding="utf-8"))
    assert manifest["parameters"]["options"] == json.loads(options)


def test_a_folder_that_is_not_there_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err
