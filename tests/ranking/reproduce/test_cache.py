"""Expensive calls are kept under everything that they depend on."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from jagged_ranking import paths, results
from jagged_ranking.code_roots import code_digests
from jagged_ranking.measure.lineup import NOT_TRIED
from jagged_ranking.measure.providers import PROVIDERS
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.trial import Trials
from jagged_ranking.measure.workload_sets import small_workloads
from jagged_ranking.reproduce import cache
from jagged_ranking.reproduce.cache import cached

# Of one who is asked in a process of its own; this one's device is as good as it was.
BROKE_APART = "in a process of its own, on D, it broke the device: AcceleratorError: CUDA error: no"


@dataclass(frozen=True)
class Shape:
    users: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Square(Shape):
    """Of the same fields."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(tmp_path))
    return tmp_path


CALLS: list[tuple[object, ...]] = []


def measure(*args: object, **options: object) -> pd.DataFrame:
    CALLS.append(args)
    row = results.row(
        op="o", provider="p", workload="w", mode="m", metric="x", unit="1", samples=[1.0, 2.0]
    )
    return results.frame([row])


@pytest.fixture
def ran(home: Path):
    """Whether a call did the work, rather than reading it back."""

    def call(*args: object, **options: object) -> bool:
        before = len(CALLS)
        table = cached(measure, *args, **options)
        assert table["value"].tolist() == [1.5]
        assert list(table["samples"].iloc[0]) == [1.0, 2.0]
        return len(CALLS) > before

    return call


def test_the_same_call_is_done_once(ran, capsys):
    assert ran([Shape(1)], names=["a"], progress=True)
    assert not ran([Shape(1)], names=["a"], progress=False)
    assert "kept from" in capsys.readouterr().out


def test_any_other_argument_is_another_call(ran):
    calls = [
        ((), {}),
        (([Shape(1)],), {}),
        (([Shape(2)],), {}),
        (([Shape(1, torch.bfloat16)],), {}),
        (([Square(1)],), {}),
        (([Shape(1)],), {"seed": 0}),
        (([Shape(1)],), {"seed": None}),
        (([Shape(1)],), {"effort": Effort(rounds=1)}),
        (([Shape(1)],), {"effort": Effort(rounds=2)}),
        (("1",), {}),
        ((1,), {}),
    ]
    assert all(ran(*args, **options) for args, options in calls)
    assert not any(ran(*args, **options) for args, options in calls)


def test_other_code_is_another_call(ran, home):
    assert ran(1)
    (home / "src" / "new.py").write_text("x = 1\n")
    assert ran(1)


def test_code_that_was_changed_under_a_process_is_not_what_it_runs(ran, home, monkeypatch, capsys):
    """As while a notebook stands open, or in the middle of a long run."""
    code = home / "src" / "code.py"

    def begin_a_process(name: str) -> None:
        monkeypatch.setattr(cache, "_imported", (paths.ROOT, code_digests()))
        monkeypatch.setattr(cache, "_PROCESS", name)
        monkeypatch.setattr(cache, "_told", False)

    code.write_text("x = 1\n")
    begin_a_process("one")
    assert ran(1)
    code.write_text("x = 2\n")
    capsys.readouterr()
    assert ran(1)
    assert not ran(1)
    assert ran(2)
    assert capsys.readouterr().out.count("src/code.py has changed since it was imported") == 1

    begin_a_process("two")
    assert ran(1)  # what the first measured is of x = 1
    code.unlink()
    assert ran(1)
    assert "src/code.py has changed" in capsys.readouterr().out
    code.write_text("x = 1\n")
    begin_a_process("three")
    assert not ran(1)
    assert ran(2)


def test_code_that_a_call_does_not_depend_on_does_not_count(ran, home, monkeypatch):
    monkeypatch.setattr(measure, "__module__", "jagged_ranking.measure.benchmark")
    assert ran(1)
    for room, again in (("figures", False), ("training", False), ("measure/providers", True)):
        new = home / "src" / "jagged_ranking" / room / "new.py"
        new.parent.mkdir(parents=True)
        new.write_text("x = 1\n")
        assert ran(1) == again, room


def test_other_software_is_another_call(ran, monkeypatch):
    assert ran(1)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert ran(1)


def test_another_device_is_another_call(ran, monkeypatch):
    assert ran(1)
    monkeypatch.setattr(cache, "device_name", lambda device: "another")
    assert ran(1)


def test_a_manifest_can_say_what_was_kept(ran, monkeypatch):
    monkeypatch.setattr(cache, "_kept", [])
    assert ran(1)
    assert cache.kept_tables() is None
    assert not ran(1)
    kept = cache.kept_tables()
    assert kept is not None
    assert kept["tables"] == 1
    assert kept["first"] == kept["last"]


def test_a_manifest_says_from_when_to_when(ran, home, monkeypatch):
    monkeypatch.setattr(cache, "_kept", [])
    for day in (2, 1, 3):
        assert ran(day)
        (made,) = [path for path in home.rglob("*.parquet") if path.stat().st_mtime > 10 * 86_400]
        os.utime(made, (day * 86_400, day * 86_400))
    for day in (2, 1, 3):
        assert not ran(day)
    assert cache.kept_tables() == {
        "tables": 3,
        "first": "1970-01-02T00:00:00Z",
        "last": "1970-01-04T00:00:00Z",
    }


def test_the_order_of_a_mapping_is_no_other_call(ran):
    assert ran({"dim": 16, "heads": 2}, seed=1, rounds=2)
    assert not ran({"heads": 2, "dim": 16}, rounds=2, seed=1)


def test_data_counts_by_its_digest(ran, home):
    for name, digest in (("a", "1"), ("b", "1"), ("c", "2")):
        (home / name).mkdir()
        (home / name / "dataset.json").write_text(json.dumps({"name": "x", "digest": digest}))
    assert ran(str(home / "a"))
    assert not ran(home / "b")
    assert ran(home / "c")


def test_data_of_another_name_is_another_call(ran, home):
    for name in ("a", "b"):
        (home / name).mkdir()
        (home / name / "dataset.json").write_text(json.dumps({"name": name, "digest": "1"}))
    assert ran(home / "a")
    assert ran(home / "b")  # a table says what its data is called


@pytest.mark.parametrize("content", [b"", b"PAR1", b"half"])
def test_a_damaged_file_is_made_again(ran, home, capsys, content):
    assert ran(1)
    (path,) = home.rglob("*.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    assert ran(1)
    assert f"made again, since {path}" in capsys.readouterr().out
    assert path.read_bytes() == whole
    assert not ran(1)


def test_what_is_kept_lies_beside_the_results_where_a_checkout_is_only_read(
    ran, home, tmp_path, monkeypatch
):
    monkeypatch.setenv(paths.BUILD_VARIABLE, "")
    out = tmp_path / "out"
    out.mkdir()
    paths.settle_build(out)
    assert home / "build" == paths.BUILD  # it can be written
    paths.BUILD.rmdir()
    paths.BUILD.touch()  # no folder can be made there, whoever asks
    paths.settle_build(out)
    assert ran(1)
    assert not ran(1)
    assert list((out / "build" / "cache").glob("*.parquet"))


def test_a_folder_that_can_only_be_read_is_found_before_the_work(home, tmp_path, monkeypatch):
    monkeypatch.setenv(paths.BUILD_VARIABLE, "")
    (home / "build").mkdir()

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(paths.tempfile, "TemporaryFile", refuse)
    paths.settle_build(tmp_path / "out")
    assert tmp_path / "out" / "build" == paths.BUILD


def test_a_full_disk_is_named_where_results_are_kept(home, monkeypatch):
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{paths.CACHE}/measure-"):
        cached(measure, 1)
    assert not list(paths.CACHE.iterdir())


def test_what_has_no_stable_form_is_refused(ran):
    with pytest.raises(TypeError):
        ran(object())


@pytest.mark.parametrize(
    ("provider", "message", "kept"),
    [
        ("padded", "wrong: relative error 0.02, allowed is 0.008", True),
        ("padded", "AcceleratorError: CUDA error: an illegal memory access", False),
        ("hstu_triton", BROKE_APART, True),
        ("hstu_triton", f"{NOT_TRIED}{BROKE_APART}", True),
        ("jagged", "wrong: relative error 0.02, allowed is 0.008", False),
        ("jagged_cached", "wrong: rel_error 0.02, allowed is 0.008", False),
        ("from_disk", "prepare: [Errno 28] No space left on device", False),
        ("by_tokens", "rank 1 of 2: the processes cannot meet", False),
    ],
)
def test_what_may_pass_is_tried_again(home: Path, provider: str, message: str, kept: bool) -> None:
    made: list[dict[str, Any]] = []

    def one_is_wrong() -> pd.DataFrame:
        names: dict[str, Any] = dict.fromkeys(("op", "workload", "mode", "metric", "unit"), "o")
        made.append(results.row(**names, provider="native", value=1.0))
        wrong = results.row(**names, provider=provider, status="error", message=message)
        return results.frame([made[-1], wrong])

    for _ in range(2):
        assert cached(one_is_wrong)["message"].tolist() == ["", message]
    assert len(made) == (1 if kept else 2)


def test_who_breaks_a_process_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words by which what it was measured beside is kept."""
    trials, (batch, *_) = Trials(), small_workloads()
    broke = (("error", "AcceleratorError: CUDA error: no"), "broke the device")
    monkeypatch.setattr(trials, "_ask", lambda *asked: broke)
    failure = trials.failure(PROVIDERS["flex"], batch, "forward", torch.device("cpu"))
    assert failure is not None
    assert failure[1] == BROKE_APART.replace(" D,", f" {batch.name},")


def test_a_call_that_fails_leaves_nothing(home):
    def fail() -> pd.DataFrame:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached(fail)
    assert not list(home.rglob("*.parquet"))


def test_a_model_of_the_users_own_counts_by_its_code(ran, monkeypatch):
    code = {"mine.one": "abc"}
    monkeypatch.setattr(cache, "own_code", lambda models: {n: code[n] for n in models if n in code})
    assert ran(models=["din"])
    assert ran(models=["din", "mine.one"])
    assert not ran(models=["din", "mine.one"])
    code["mine.one"] = "def"
    assert ran(models=["din", "mine.one"])
    assert not ran(models=["din"])
