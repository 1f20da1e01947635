"""`jagged doctor` and `jagged cache`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jagged_kernels
from jagged_ranking import paths, provenance
from jagged_ranking.cli import main
from jagged_ranking.provenance import PEERS
from jagged_ranking.reproduce import doctor


def test_the_doctor_finds_kernels_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "attention is as its specification" in out
    assert f"torch {torch.__version__}" in out
    assert all(peer in out for peer in PEERS)
    assert str(paths.ROOT) in out


def test_the_doctor_says_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(paths.DATA_VARIABLE, str(tmp_path))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "none of them" in out
    assert "left out of preset paper, since not there: ml1m_ge4, globo_clicks" in out


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda right: right.with_values(right.values * 1.2), "float32: off by 0.44"),
        (lambda right: right.with_values(right.values * torch.nan), "bfloat16: off by nan"),
        (lambda right: 1 / 0, "float32: ZeroDivisionError: division by zero"),
    ],
)
def test_the_doctor_says_what_is_wrong(
    fault, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = jagged_kernels.jagged_attention

    def wrong(*arguments, backend, **options):
        found = right(*arguments, backend=backend, **options)
        return found if backend == "reference" else fault(found)

    monkeypatch.setattr(jagged_kernels, "jagged_attention", wrong)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "click logs" in out  # the rest is said all the same


def test_the_doctor_names_the_driver_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "default_device", lambda: "cuda")
    monkeypatch.setattr(doctor, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(doctor, "versions", lambda: {**provenance.versions(), "driver": "580.1"})
    monkeypatch.setattr(doctor, "check_kernels", lambda device: [])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "device     NVIDIA H200, driver 580.1\n" in out
    assert "need a GPU" not in out


def test_the_cache_is_counted_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path))
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith("0 results, 0.0 MB")
    (tmp_path / "cache").mkdir()
    for name in ("a.parquet", "b.npz"):
        (tmp_path / "cache" / name).write_bytes(b"x" * 600_000)
    (tmp_path / "test-status.json").write_text("{}")
    assert main(["cache"]) == 0
    assert (
        capsys.readouterr().out
        == f"2 results, 1.2 MB in {tmp_path / 'cache'}; --clear deletes them\n"
    )
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("deleted 2 results")
    assert not list((tmp_path / "cache").iterdir())
    assert (tmp_path / "test-status.json").exists()
