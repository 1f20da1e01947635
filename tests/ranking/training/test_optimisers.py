"""Optimisers: tables row by row against a dense gradient, and what a step touches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.layers.id_table import IdTable
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.optimisers import EPSILON, Optimisers
from jagged_ranking.training.trainer import _Run, train

CONFIG = TrainConfig(
    dim=8, heads=2, hidden=(8,), max_history=10, batch_size=256, epochs=2, learning_rate=0.01,
    table_optimizer="rowwise_adagrad", table_learning_rate=0.05,
)  # fmt: skip


def run_on(dataset: ClickDataset, config: TrainConfig = CONFIG) -> tuple[_Run, JaggedBatch]:
    run = _Run(config, dataset, device=torch.device("cpu"), out=None)
    return run, next(run.loader.batches())


@pytest.mark.parametrize("rows", [5, 300])  # fewer and more than there are lookups
def test_a_row_gets_what_its_lookups_got(rows: int) -> None:
    torch.manual_seed(0)
    table = IdTable(rows, 3)
    table.train_by_row()
    wanted = torch.zeros(rows, 3)
    for count in (40, 20):
        ids, gradient = torch.randint(0, rows, (count,)), torch.randn(count, 3)
        (table(ids) * gradient).sum().backward()
        wanted.index_add_(0, ids, gradient)
    table(torch.zeros(4, dtype=torch.long))  # looked up, and not used
    found = table.take_gradient()
    assert found is not None
    assert table.weight.grad is None
    dense = torch.zeros(rows, 3)
    dense[found.rows] = found.sums[found.place]
    torch.testing.assert_close(dense, wanted)
    torch.testing.assert_close(found.sums.norm(), wanted.norm())
    # where rows are repeated, all are as often as any other: writes to one row wait for each other
    times = found.rows.unique(return_counts=True)[1]
    assert times.max() - times.min() <= 1
    assert table.take_gradient() is None
    assert not table.eval()(ids).requires_grad


@pytest.mark.parametrize("clip_norm", [0.01, 100.0])
def test_steps_are_those_of_a_dense_gradient(toy: ClickDataset, clip_norm: float) -> None:
    run, batch = run_on(toy, dataclasses.replace(CONFIG, clip_norm=clip_norm))
    weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.model.train()
    tables = {n: m for n, m in run.model.named_modules() if isinstance(m, IdTable)}
    assert len(tables) == 3
    torch.manual_seed(5)
    dense = Ranker(CONFIG, DataShape.of(toy))
    dense.load_state_dict(run.model.state_dict())
    squares = {name: torch.zeros(len(table.weight)) for name, table in tables.items()}
    rate = CONFIG.table_learning_rate * 0.5
    for seed in range(3):
        for model in (run.model, dense):
            torch.manual_seed(seed)
            loss_of("pointwise", model, batch).backward()
        norm = nn.utils.clip_grad_norm_(dense.parameters(), clip_norm)
        run.optimisers.set_scale(0.5)
        torch.testing.assert_close(run.optimisers.step(), norm)
        run.optimisers.zero_grad()
        with torch.no_grad():
            for name in tables:
                weight = dense.get_submodule(name).weight
                assert isinstance(weight, nn.Parameter)
                assert weight.grad is not None
                squares[name] += weight.grad.square().mean(1)
                kept = run.optimisers.by_row.state_dict()[name]
                torch.testing.assert_close(kept, squares[name], rtol=1e-3, atol=1e-12)
                weight -= rate * weight.grad / (squares[name].sqrt() + EPSILON)[:, None]
            dense_state = dense.state_dict()
            for name, value in run.model.state_dict().items():
                if name.removesuffix(".weight") in tables:
                    torch.testing.assert_close(value, dense_state[name], rtol=1e-4, atol=1e-6)
        dense.load_state_dict(run.model.state_dict())
        dense.zero_grad()
    bias = run.model.head.item_bias.weight
    untouched = torch.ones(len(bias), dtype=torch.bool)
    untouched[batch.candidate.values.long().clamp(max=len(bias) - 1)] = False
    untouched[0] = False
    assert torch.equal(bias[untouched], weights["head.item_bias.weight"][untouched])


def test_a_step_makes_nothing_as_large_as_a_table(toy: ClickDataset) -> None:
    """Whatever it makes is of the batch: the vocabulary is a prime number of rows."""
    rows = 100_003

    class Sizes(TorchDispatchMode):
        made: set[Any] = set()  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, list | tuple) else [out]:
                # in place, it is the table itself that comes back
                alone = "_" not in func.__name__.split(".")[0][-1]
                if isinstance(one, torch.Tensor) and rows in one.shape and alone:
                    self.made.add(func)
            return out

    run, batch = run_on(toy)
    shape = dataclasses.replace(run.shape, num_items=rows)
    model = Ranker(CONFIG, shape).train()
    optimisers = Optimisers(model, CONFIG)
    with Sizes() as sizes:
        loss_of("pointwise", model, batch).backward()
        optimisers.step()
    views = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
    assert sizes.made <= views
    assert all(p.grad is None for t in (model.embedding, model.head) for p in t.tables)


def test_row_by_row_resumes_to_the_bit(toy: ClickDataset, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def stop(step: int) -> None:
        if step == 5:
            raise Interrupted

    config = dataclasses.replace(CONFIG, model="din", checkpoint_steps=2)
    options: dict[str, Any] = {"progress": False, "device": "cpu"}
    whole = train(config, toy, **options)
    with pytest.raises(Interrupted):
        train(config, toy, out=tmp_path, after_step=stop, **options)
    resumed = train(config, toy, out=tmp_path, resume=True, **options)
    assert resumed.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert whole.losses[-1] < whole.losses[0]


def test_what_is_validated_has_the_latest_rows(toy: ClickDataset) -> None:
    run, batch = run_on(toy)
    run.model.train()
    for _ in range(3):
        run._step(iter([batch]))
    average = run.average.model
    assert isinstance(average, Ranker)
    for table, kept in zip(run.model.embedding.tables, average.embedding.tables, strict=True):
        assert table is kept
    own = dict(run.average.model.named_parameters())
    latest = dict(run.model.named_parameters())
    assert not torch.equal(own["head.linear.weight"], latest["head.linear.weight"])
    assert not own.keys() - dict(run.model.named_parameters()).keys()
    assert run.average.state_dict().keys().isdisjoint({"head.item_bias.weight"})


def test_an_unknown_table_optimizer_is_answered_by_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="table_optimizer must be one of adamw, rowwise_adagrad, got 'sgd'"
    ):
        TrainConfig(table_optimizer="sgd")
