"""Each training is kept as soon as it is done, and counts by what decides it."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_log import SMALL

from click_data import ClickDataset, open_dataset, prepare
from jagged_ranking import paths, results
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.lab import compared
from jagged_ranking.reproduce.quality_study import Trainings
from jagged_ranking.training import experiment, runs
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome

TINY = TrainConfig(dim=8, hidden=(8,), max_history=10, batch_size=512, epochs=1)


@pytest.fixture
def trained(
    tmp_path: Path, toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> list[TrainConfig]:
    """What has been trained so far, in a checkout of its own."""
    home = tmp_path / "home"
    (home / "notebooks").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(home))
    monkeypatch.setattr(runs, "usable_cores", lambda: 1)  # in this process
    found: list[TrainConfig] = []
    train = runs._train_one

    def note(dataset, config, splits, device, *, progress, score):
        if config.seed == 13:
            raise InterruptedError("cut off")
        found.append(config)
        return train(dataset, config, splits, device, progress=False, score=score)

    monkeypatch.setattr(runs, "_train_one", note)
    return found


def compare(
    data: Path,
    *,
    models: Sequence[str] = ("mean_pool",),
    seeds: tuple[int, ...] = (0, 1),
    config: TrainConfig = TINY,
    **more: Any,
):
    return compared(
        str(data),
        models=models,
        seeds=seeds,
        options=config.to_dict(),
        replicates=20,
        device="cpu",
        **more,
    )


def test_only_what_is_missing_is_trained(trained, toy, capsys):
    with pytest.raises(InterruptedError):
        compare(toy.folder, seeds=(0, 1, 13))
    assert [config.seed for config in trained] == [0, 1]
    table = compare(toy.folder)
    assert len(trained) == 2
    assert "mean_pool seed 1: kept from" in capsys.readouterr().out
    shutil.rmtree(paths.CACHE)
    fresh = compare(toy.folder)
    assert len(trained) == 4
    numbers = [t.query("metric != 'seconds'").reset_index(drop=True) for t in (table, fresh)]
    pd.testing.assert_frame_equal(numbers[0], numbers[1])
    assert compare(toy.folder, seeds=(0, 1, 2))["workload"].notna().all()
    assert [config.seed for config in trained[4:]] == [2]
    compare(toy.folder, config=TrainConfig.from_dict({**TINY.to_dict(), "dropout": 0.1}))
    assert len(trained) == 7


@pytest.mark.usefixtures("trained")
def test_a_training_is_of_its_data(toy, tmp_path):
    """Not what its options alone name: several data sets share them."""
    other = prepare("synthetic", out=tmp_path / "other", **SMALL)
    mine, others = (Trainings(data, experiment.__name__, "cpu") for data in (toy.folder, other))
    none = np.zeros(0)
    mine.put(Outcome(TINY, [Evaluation("test", none, none, none, none, {"auc": 0.7})], 0, 1.0))
    found = mine.get(TINY, ("test",))
    assert found is not None
    assert found.evaluations[0].metrics == {"auc": 0.7}
    assert others.get(TINY, ("test",)) is None
    assert mine.get(TINY, ("valid", "test")) is None


def test_rows_name_the_data_set_that_is_given(trained, toy, tmp_path):
    assert set(compare(toy.folder)["workload"]) == {toy.name}
    again = tmp_path / "again"
    shutil.copytree(toy.folder, again)
    described = json.loads((again / "dataset.json").read_text())
    (again / "dataset.json").write_text(json.dumps({**described, "name": "renamed"}))
    assert set(compare(again)["workload"]) == {"renamed"}
    assert len(trained) == 2  # of the first


def test_several_data_sets_with_options_of_their_own(trained, toy, tmp_path, monkeypatch, capsys):
    other = prepare("synthetic", out=tmp_path / "logs" / "other", **SMALL)
    monkeypatch.setenv("CLICK_DATA_DIR", str(tmp_path / "logs"))
    table = compare(
        toy.folder,
        seeds=(0,),
        datasets=["other", "absent", str(toy.folder)],
        own={"synthetic": {"options": {"dim": 4}, "models": ["din"]}},
    )
    assert list(dict.fromkeys(table["workload"])) == [toy.name, "synthetic"]
    assert [(config.model, config.dim) for config in trained] == [("mean_pool", 8), ("din", 4)]
    assert f"no prepared absent in {tmp_path / 'logs'}: left out" in capsys.readouterr().out
    assert open_dataset(other).digest in table["config"].iloc[-1]
    with pytest.raises(RunError, match="nowhere does not exist"):
        compare(toy.folder, datasets=[str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="unknown option 'depth'"):
        compare(toy.folder, own={toy.name: {"options": {"depth": 3}}})
    for mine, said in (
        ({"epochs": 3}, "unknown 'epochs'; known: models, seeds, options, search"),
        ({"seeds": 3}, "seeds must be a list, got 3"),
        ({"models": "din"}, "models must be a list, got 'din'"),
        ({"options": ["dim"]}, r"options must be a mapping, got \['dim'\]"),
        (["din"], r"must be a mapping, got \['din'\]"),
    ):
        with pytest.raises(ValueError, match=f"own of {toy.name}: {said}"):
            compare(toy.folder, own={toy.name: mine})


def test_a_data_set_may_have_a_search_of_its_own(trained, toy):
    space = {"dim": [4, 16]}
    own = {toy.name: {"search": {"trials": 3}}}
    table = compare(toy.folder, seeds=(5,), search={"trials": 1, "space": space}, own=own)
    assert [config.seed for config in trained] == [0, 0, 0, 5]
    assert {config.dim for config in trained[:3]} == {4, 8, 16}
    assert (table["mode"] == "trial").sum() == 3
    compare(toy.folder, seeds=(5,), search={"trials": 3, "space": space})
    assert len(trained) == 4  # all of it was kept
    with pytest.raises(ValueError, match="search needs space"):
        compare(toy.folder, search={"trials": 3})
    with pytest.raises(ValueError, match="search has no 'tries'"):
        compare(toy.folder, search={"tries": 3})


def test_a_damaged_training_is_done_again(trained, toy, capsys):
    compare(toy.folder, seeds=(0,))
    (path,) = paths.CACHE.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-50])
    compare(toy.folder, seeds=(0,))
    assert len(trained) == 2
    assert f"mean_pool seed 0: made again, since {path}: is damaged" in capsys.readouterr().out


OWN_MODEL = """
from jagged_ranking.models.encoders.mean_pool import ENCODER as MeanPool
from mine.parts import FACTOR

class Scaled(MeanPool):
    def forward(self, history, candidates, batch):
        return FACTOR * super().forward(history, candidates, batch)

ENCODER = Scaled
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package with a model of the user's own, `mine.scaled`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "scaled.py").write_text(OWN_MODEL)
    (folder / "parts.py").write_text("FACTOR = 1.0\n")
    yield folder
    forget_mine()


def forget_mine() -> None:
    """As in a process that has not imported it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def own_scores(data: Path) -> list[float]:
    table = compare(data, seeds=(0,), models=["mine.scaled"])
    return results.select(table, provider="mine.scaled", mode="test", metric="auc")[
        "value"
    ].tolist()


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [("scaled.py", "FACTOR *", "-FACTOR *"), ("parts.py", "1.0", "-1.0")],
)
def test_another_model_of_the_users_own_is_trained_again(trained, toy, mine, file, before, after):
    first = own_scores(toy.folder)
    forget_mine()
    assert own_scores(toy.folder) == first
    assert len(trained) == 1
    (mine / file).write_text((mine / file).read_text().replace(before, after))
    with pytest.raises(RunError, match=r"model mine\.scaled: .* changed since it was imported"):
        own_scores(toy.folder)
    forget_mine()
    assert own_scores(toy.folder) != first
    assert len(trained) == 2
