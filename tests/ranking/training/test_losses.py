"""Losses against loops over requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.training.losses import loss_of


def answering(logit: Tensor) -> Callable[[JaggedBatch], Tensor]:
    """A model that answers every batch so."""
    return lambda batch: logit


@pytest.fixture
def batch(toy: ClickDataset) -> JaggedBatch:
    """Requests of one and of several candidates, and labels of two tasks."""
    train = toy.requests("train")
    asked = np.diff(train.offsets)
    rows = np.concatenate([np.flatnonzero(asked == n)[:8] for n in np.unique(asked)])
    made = make_batch(
        HistoryStore.from_dataset(toy), RequestTable.from_columns(train), rows, max_history=5
    )
    label = made.label.values
    other = (torch.arange(len(label)) % 3 == 0).float()[:, None]
    return dataclasses.replace(made, label=made.label.with_values(torch.cat([label, other], dim=1)))


def test_pointwise_is_the_mean_over_candidates_and_tasks(batch: JaggedBatch) -> None:
    label = batch.label.values
    logit = torch.randn(label.shape, generator=torch.Generator().manual_seed(0))
    p = logit.sigmoid()
    expected = -(label * p.log() + (1 - label) * (1 - p).log()).mean()
    torch.testing.assert_close(loss_of("pointwise", answering(logit), batch), expected)


@pytest.mark.parametrize("scale", [1.0, 300.0])  # far beyond what exp can hold
def test_listwise_is_a_softmax_over_each_request(batch: JaggedBatch, scale: float) -> None:
    label = batch.label
    logit = scale * torch.randn(label.values.shape, generator=torch.Generator().manual_seed(0))
    losses = []
    for scores, positive in zip(label.with_values(logit).unbind(), label.unbind(), strict=True):
        log_p = scores.double().log_softmax(0)
        for task in range(2):
            mine = positive[:, task] > 0
            if mine.any():
                losses.append(-log_p[mine, task].mean())
    assert 0 < len(losses) < 2 * len(batch)  # some requests have no positive
    found = loss_of("listwise", answering(logit), batch)
    torch.testing.assert_close(found.double(), torch.stack(losses).mean())


def test_listwise_gradients_are_those_of_softmax(batch: JaggedBatch) -> None:
    logit = torch.randn(batch.label.values.shape, requires_grad=True)
    loss_of("listwise", answering(logit), batch).backward()
    assert logit.grad is not None
    positive = batch.label.unbind()
    asked = sum(int((one > 0).any(0).sum()) for one in positive)
    for scores, labels, found in zip(
        batch.label.with_values(logit.detach()).unbind(),
        positive,
        batch.label.with_values(logit.grad).unbind(),
        strict=True,
    ):
        count = labels.sum(0)
        expected = (scores.softmax(0) - labels / count.clamp(min=1)) * (count > 0) / asked
        torch.testing.assert_close(found, expected)


def test_without_a_positive_there_is_nothing_to_learn(batch: JaggedBatch) -> None:
    none = dataclasses.replace(
        batch, label=batch.label.with_values(torch.zeros_like(batch.label.values))
    )
    logit = torch.randn(batch.label.values.shape, requires_grad=True)
    loss = loss_of("listwise", answering(logit), none)
    loss.backward()
    assert loss.item() == 0
    assert logit.grad is not None
    assert (logit.grad == 0).all()


def test_an_unknown_loss_is_answered_by_the_known_ones(batch: JaggedBatch) -> None:
    known = "loss must be one of pointwise, listwise, next_item, got 'hinge'"
    with pytest.raises(ValueError, match=known):
        loss_of("hinge", answering(batch.label.values), batch)
