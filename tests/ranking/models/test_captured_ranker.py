"""A ranker that answers by CUDA graphs gives the logits of one that does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers import attention
from jagged_ranking.models.captured_ranker import CapturedRanker
from jagged_ranking.reproduce.graphed_step import STEPS_TO_A_REPLAY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS = ("target_attention", "transformer", "sasrec", "hstu", "pma")


@pytest.fixture(scope="module")
def batches(toy: ClickDataset) -> list[JaggedBatch]:
    """Of one request and of several, with and without a history."""
    rows = mixed_rows(toy)
    parts = [rows, *np.split(rows, len(rows))[:4], rows[2:5]]
    found = [batch_of(toy, part).to(DEVICE) for part in parts]
    return [dataclasses.replace(one, items=found[0].items) for one in found]


def longest_of(batches: list[JaggedBatch]) -> tuple[int, int]:
    asked, seen = (max(numbers) for numbers in zip(*(b.longest for b in batches), strict=True))
    return asked, seen


@pytest.mark.parametrize("kind", ["jagged", "padded_dense"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_without_graphs(
    toy: ClickDataset, batches: list[JaggedBatch], model: str, kind: str
) -> None:
    one = ranker(toy, model, layers=2, attention=kind, precision="float32").to(DEVICE)
    captured = CapturedRanker(one, longest=longest_of(batches))
    answers = [[captured(batch) for batch in batches] for _ in range(STEPS_TO_A_REPLAY)][-1]
    with torch.no_grad():
        for batch, found in zip(batches, answers, strict=True):
            torch.testing.assert_close(found, one(batch), atol=1e-4, rtol=1e-4)
    if DEVICE.type == "cuda":
        assert captured.graphs.replayed >= len(batches)


def test_weights_are_read_anew(toy: ClickDataset, batches: list[JaggedBatch]) -> None:
    one = ranker(toy, "transformer", precision="float32").to(DEVICE)
    captured = CapturedRanker(one, longest=longest_of(batches))
    before = [captured(batches[0]) for _ in range(STEPS_TO_A_REPLAY)][-1]
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(1.1)
        expected = one(batches[0])
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(captured(batches[0]), expected, atol=1e-4, rtol=1e-4)


def test_a_single_request_is_padded_to_its_own_size(
    toy: ClickDataset, batches: list[JaggedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to that of the longest there may be."""
    lengths, padded = [], attention.padded_attention

    def watched(*given, **options):
        lengths.append(options["longest"])
        return padded(*given, **options)

    monkeypatch.setattr(attention, "padded_attention", watched)
    one = ranker(toy, "target_attention", attention="padded_dense", precision="float32").to(DEVICE)
    captured = CapturedRanker(one, longest=(100, 10_000))
    for batch in batches:
        lengths.clear()
        captured(batch)
        most = max(16, 2 * batch.item.values.shape[0])
        assert all(seen <= most for _, seen in lengths)
        assert lengths or captured.graphs.replayed  # a replay calls no Python


def test_longer_requests_than_were_said(toy: ClickDataset, batches: list[JaggedBatch]) -> None:
    captured = CapturedRanker(ranker(toy, "transformer").to(DEVICE), longest=(100, 3))
    with pytest.raises(ValueError, match="of 100 candidates and 3 events of a request at most"):
        captured(batches[0])


def test_dropout_is_off(toy: ClickDataset, batches: list[JaggedBatch]) -> None:
    one = ranker(toy, "transformer", dropout=0.5, precision="float32").to(DEVICE).train()
    captured = CapturedRanker(one, longest=longest_of(batches))
    first, second = captured(batches[0]), captured(batches[0])
    assert torch.equal(first, second)
    assert not one.training
