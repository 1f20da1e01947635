"""`fp8_quality.py` scores one ranker by attention as it was trained and in FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp8_quality import ATTEND, attending, main, quality

from click_data import prepare
from jagged_kernels import JaggedTensor
from jagged_ranking import provenance, results
from jagged_ranking.figures.fp8_goals import FP8_QUALITY, SERVED, TRAINED, fp8_quality_rows
from jagged_ranking.figures.verdicts import difference
from jagged_ranking.layers.attention import attend


def test_attention_is_computed_as_asked_and_put_back() -> None:
    offsets = torch.tensor([0, 3, 3, 40])
    q, k, v = (JaggedTensor(torch.randn(40, 2, 64), offsets) for _ in range(3))
    sink = torch.zeros(2)
    found = {}
    for numbers in ATTEND:
        with attending(numbers), torch.no_grad():
            found[numbers] = (attend(q, k, v, causal=True), attend(q, k, v, sink=sink))
    for of_call in range(2):
        exact = found[TRAINED][of_call].values
        error = (found[SERVED][of_call].values - exact).norm()
        assert 0 < error < 0.2 * exact.norm()
        assert all(x[of_call].values.dtype == torch.float32 for x in found.values())
    again = attend(q, k, v, causal=True).values
    assert torch.equal(again, found[TRAINED][0].values)
    assert list(ATTEND) == [TRAINED, SERVED]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "log"
    return prepare("synthetic", out=folder, users=12, items=30, categories=3, events=600)


def test_each_training_has_its_loss(log: Path) -> None:
    options = {"epochs": 1, "max_history": 16}
    table = quality(
        [log], model="sasrec", seeds=[0, 1], options=options, replicates=20, device="cpu", workers=1
    )
    assert set(table["provider"]) == {TRAINED, SERVED}
    assert set(table["op"]) == {FP8_QUALITY}
    found = results.with_config(table, "seed", "low", "high")
    for seed in (0, 1):
        of_seed = found[found["seed"] == seed].set_index(["provider", "metric"])
        before, after = (of_seed.loc[(who, "log_loss"), "value"] for who in ATTEND)
        lost = of_seed.loc[(SERVED, "log_loss_difference")]
        assert lost["value"] == pytest.approx(after - before)
        assert lost["low"] <= lost["value"] <= lost["high"]
        assert (TRAINED, "log_loss_difference") not in of_seed.index
        shown = fp8_quality_rows(table)[seed]
        assert (shown["seed"], shown["log_loss, as trained"]) == (str(seed), f"{before:.4f}")
        said = difference(lost["value"], lost["low"], lost["high"], 5)
        assert shown["log_loss, FP8's difference"] == said


def test_it_leaves_a_result(log: Path, tmp_path: Path) -> None:
    options = '{"epochs": 1, "max_history": 16}'
    words = [str(log), "--seeds", "0", "--options", options, "--replicates", "5", "-n", "1"]
    assert main([*words, "--out", str(tmp_path / "left")]) == 0
    assert set(results.read(tmp_path / "left" / results.RESULTS)["provider"]) == set(ATTEND)
    manifest = json.loads((tmp_path / "left" / provenance.MANIFEST).read_text(encoding="utf-8"))
    assert manifest["parameters"]["options"] == json.loads(options)


def test_a_folder_that_is_not_there_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err
