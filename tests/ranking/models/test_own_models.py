"""A model of the user's own: one file, by its dotted name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker

from click_data import ClickDataset
from jagged_ranking.models.model_config import MODEL_NAMES, ModelConfig, encoder_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that one stands in, and a package there that is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine").mkdir()
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_documented_model_is_one(toy: ClickDataset, folder: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [text for text in examples if "ENCODER" in text]
    assert len(example.splitlines()) <= 40
    (folder / "likeness.py").write_text(example)
    made, rows = ranker(toy, "mine.likeness"), mixed_rows(toy)
    batch = batch_of(toy, rows)
    logits = made(batch)
    assert logits.isfinite().all()
    alone = [made(batch_of(toy, rows[i : i + 1])) for i in range(len(rows))]
    torch.testing.assert_close(logits, torch.cat(alone))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in made.encoder.parameters())


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ("history.values.sum(0)", r"\[16\]"),
        ("candidates.values[:, :3]", r"\[\d+, 3\]"),
        ("candidates.values[:1]", r"\[1, 16\]"),
        ("candidates", "JaggedTensor"),
        ("None", "NoneType"),
    ],
)
def test_an_answer_of_another_shape_is_one_line(
    toy: ClickDataset, folder: Path, answer: str, got: str
) -> None:
    (folder / "wrong.py").write_text(
        "from torch import nn\n"
        "class ENCODER(nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "    def forward(self, history, candidates, batch):\n"
        f"        return {answer}\n"
    )
    made, batch = ranker(toy, "mine.wrong"), batch_of(toy, mixed_rows(toy))
    said = r"^model mine\.wrong: its encoder must answer with a tensor \[C, dim\], here "
    for call in (made, made.answers):
        with pytest.raises(ValueError, match=rf"{said}\[\d+, 16\], got {got}$"):
            call(batch)


def test_the_document_lists_every_model() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(MODEL_NAMES) <= set(listed)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_name_is_a_file(name: str) -> None:
    assert encoder_of(name).__module__ == f"jagged_ranking.models.encoders.{name}"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("dnn", None, "got 'dnn'$"),
        ("mine..dnn", None, r"got 'mine\.\.dnn'$"),
        ("mine.gone", None, r"ModuleNotFoundError: No module named 'mine\.gone'$"),
        ("mine.wrong", "1 / 0", "ZeroDivisionError: division by zero$"),
        ("mine.empty", "", r"empty\.py has no class ENCODER$"),
        ("mine.number", "ENCODER = 3", r"number\.py has no class ENCODER$"),
    ],
)
def test_another_name_is_refused(folder: Path, name: str, text: str | None, reason: str) -> None:
    if text is not None:
        (folder / f"{name.rpartition('.')[2]}.py").write_text(text)
    with pytest.raises(
        ValueError, match=f"^model must be one of {', '.join(MODEL_NAMES)}, or"
    ) as e:
        ModelConfig(model=name)
    assert re.search(reason, str(e.value))
    assert len(str(e.value).splitlines()) == 1
