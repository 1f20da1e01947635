"""Steps over padded batches, on a GPU captured and replayed, against steps over batches as they
are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged_ranking.reproduce.graphed_step import STEPS_TO_A_REPLAY, GraphedStep
from jagged_ranking.reproduce.request_batches import BatchLengths, RequestBatches
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training.config import TrainConfig

LENGTHS = BatchLengths(
    name="some", group="waste", cap=20,
    batches=((3, 0, 8, 20), (1, 8, 2), (0, 1, 1, 0, 17, 9, 12), (4,), (7, 3, 20, 2), (0, 0, 1)),
)  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS = ("hstu", "sasrec", "target_attention", "transformer", "mean_pool", "pma")


def batches_of(lengths: BatchLengths = LENGTHS, device: torch.device = DEVICE) -> RequestBatches:
    return RequestBatches(lengths, items=40, candidates=2, device=device)


def config_of(model: str, **options: Any) -> TrainConfig:
    """Without dropout, which draws other numbers for batches of another size."""
    given: dict[str, Any] = {"dim": 8, "hidden": [8], "max_history": LENGTHS.cap, "layers": 2}
    given |= {"dropout": 0.0, "embedding_dropout": 0.0, "id_dropout": 0.0, "precision": "float32"}
    return TrainConfig.from_dict({**given, "model": model, **options})


def pair_of(config: TrainConfig, made: RequestBatches) -> tuple[TrainingStep, GraphedStep]:
    return (
        TrainingStep(config, made.shape, made.device),
        GraphedStep(config, made.shape, made.device, per_octave=4),
    )


def gradients_of(step: TrainingStep, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Where a step leaves its gradients, in place of an update."""
    found: dict[str, Tensor] = {}

    def keep() -> Tensor:
        for name, p in step.model.named_parameters():
            if p.grad is not None:
                found[name] = p.grad.clone()
        for name, gradient in step.optimisers.by_row.gradients().items():
            weight = step.optimisers.by_row.tables[name].weight
            rows = torch.zeros_like(weight)
            rows[gradient.rows] = gradient.sums[gradient.place]
            found[name] = rows
        return torch.zeros(())

    monkeypatch.setattr(step.optimisers, "step", keep)
    return found


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"loss": "listwise", "table_optimizer": "rowwise_adagrad"},
    {"attention": "padded_dense"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_without_padding(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = batches_of()
    plain, graphed = pair_of(config_of(model, **options), made)
    expected, found = (gradients_of(step, monkeypatch) for step in (plain, graphed))
    for batch in made.each():
        plain(batch)
        graphed(batch)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert graphed.steps == len(LENGTHS.batches)


@pytest.mark.parametrize("negatives", [0, 5])
def test_the_next_item_is_asked_of_real_events_alone(
    negatives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = batches_of()
    config = config_of("sasrec", loss="next_item", head="dot", negatives=negatives)
    plain, graphed = pair_of(config, made)
    expected, found = (gradients_of(step, monkeypatch) for step in (plain, graphed))
    for number, batch in enumerate(made.each()):
        for step in (plain, graphed):
            torch.manual_seed(number)  # of the negatives
            step(batch)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_logits_and_losses_are_those_without_padding(model: str) -> None:
    made = batches_of()
    batches = made.each()
    plain, graphed = pair_of(config_of(model), made)
    for batch in batches:
        torch.testing.assert_close(graphed.logits(batch), plain.logits(batch), rtol=1e-4, atol=1e-5)
    first, *_ = batches
    expected = plain.loss_after_a_step(first)
    torch.testing.assert_close(graphed.loss_after_a_step(first), expected, rtol=1e-4, atol=1e-5)
    if DEVICE.type == "cuda":
        assert graphed.graphs.replayed == 1


@pytest.mark.parametrize("model", ["bst", "din", "transact", "sim", "pyramid"])
def test_what_is_as_large_as_one_batch_says_has_no_graph(model: str) -> None:
    made = batches_of()
    step = GraphedStep(config_of(model), made.shape, made.device)
    with pytest.raises(NotImplementedError, match="changes from batch to batch"):
        step(made.each()[0])


def test_a_graph_is_of_one_table_of_items_and_so_many_candidates() -> None:
    made = batches_of()
    step = GraphedStep(config_of("mean_pool"), made.shape, made.device)
    step(made.each()[0])
    with pytest.raises(ValueError, match="got other items, 2 and 20"):
        step(batches_of().each()[0])


TWO_SIZES = BatchLengths(
    name="two sizes", group="waste", cap=60,
    batches=tuple(
        tuple((7 * user + number) % (60 if number % 2 else 9) for user in range(40 + number % 3))
        for number in range(20)
    ),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_training_by_graphs_is_training(model: str, options: dict[str, Any]) -> None:
    """Within rounding: sums over events are of other lengths with padding, and what AdamW divides
    by may be next to nothing."""
    made = RequestBatches(TWO_SIZES, items=40, candidates=2, device=DEVICE)
    config = config_of(model, max_history=TWO_SIZES.cap, learning_rate=1e-3, **options)
    plain, graphed = pair_of(config, made)
    losses: list[tuple[Tensor, Tensor]] = []
    for batch in made.each():
        plain(batch)
        graphed(batch)
        with torch.no_grad():
            losses.append((plain._loss(batch), graphed._loss(batch)))
    assert graphed.graphs.replayed > 0
    assert graphed.graphs.graphs >= 2
    for expected, found in losses:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["hstu", "sasrec", "target_attention"])
def test_replays_do_not_wait(model: str, precision: str) -> None:
    """With dropout, which is drawn anew in each."""
    made = batches_of()
    config = config_of(model, dropout=0.2, embedding_dropout=0.3, id_dropout=0.05, dim=64,
                       precision=precision)  # fmt: skip
    step = GraphedStep(config, made.shape, made.device)
    batches = made.each()
    step.capture(batches)
    replayed = step.graphs.replayed
    assert replayed >= len(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.graphs.replayed == replayed + len(batches)
    assert step.steps == (STEPS_TO_A_REPLAY + 1) * len(batches)
    weights = itertools.chain(step.model.parameters(), step.average.model.parameters())
    assert all(weight.isfinite().all() for weight in weights)
