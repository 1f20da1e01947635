"""No model pads: what it makes is by events, by candidates or by pairs of them, never by requests
times the longest history. And which operations do that."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jagged_kernels
from click_data import ClickDataset
from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import ItemTable
from jagged_ranking.layers import peer_attention
from jagged_ranking.layers.attention import POINTWISE
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of

REQUESTS, LONGEST, DIM, HEADS = 211, 500, 16, 2
# What every model has, and what it is made of besides.
SHARED = {"jagged_embedding", "jagged_sum"}
OPERATIONS = {
    "mean_pool": {"jagged_mean"},
    "din": {"jagged_index_select", "target_interaction", "jagged_weighted_sum"},
    "target_attention": {"jagged_attention"},
    "transformer": {"jagged_attention"},
    "sasrec": {"jagged_attention", "jagged_last_k"},
    "pma": {"jagged_linear", "jagged_softmax", "jagged_weighted_sum"},
    "pyramid": {
        *("jagged_linear", "jagged_softmax", "jagged_weighted_sum"),
        *("jagged_recent", "jagged_attention"),
    },
    "sim": {
        *("jagged_index_select", "jagged_dense_bmm", "jagged_top_k", "jagged_recent"),
        "jagged_attention",
    },
    "hstu": {"jagged_layer_norm", "jagged_attention"},
    "bst": {
        *("jagged_index_select", "jagged_cat", "jagged_last_k", "jagged_mean"),
        "jagged_attention",
    },
    "transact": {
        *("jagged_index_select", "jagged_add", "jagged_last_k", "jagged_max"),
        "jagged_attention",
    },
}


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, forward or backward.

    Attention is one operation: what it has inside while it runs is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.by_requests = 0, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                # A view may be expanded; what it stands on is what is there.
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
                if x.dim() > 1 and x.shape[0] >= REQUESTS and max(x.shape[1:]) >= LONGEST:
                    self.by_requests.append((func, tuple(x.shape)))
        return made


def skewed(dataset: ClickDataset) -> JaggedBatch:
    """One request with a long history, the others with an event or none; up to two candidates."""
    shape, generator = DataShape.of(dataset), np.random.default_rng(0)
    torch.manual_seed(0)
    events = np.ones(REQUESTS, np.int64)
    events[5], events[6:20] = LONGEST, 0
    asked = generator.integers(1, 3, REQUESTS)

    def jagged(lengths: np.ndarray, values: Tensor) -> JaggedTensor:
        return JaggedTensor.from_lengths(values, torch.from_numpy(lengths))

    tokens, candidates = int(events.sum()), int(asked.sum())
    item = jagged(events, torch.randint(shape.num_items, (tokens,)).int())
    candidate = jagged(asked, torch.randint(shape.num_items, (candidates,)).int())
    recency = np.concatenate([np.arange(n)[::-1] for n in events])
    return JaggedBatch(
        item=item,
        categories=item.with_values(torch.ones(tokens, len(shape.categories)).int()),
        item_dense=item.with_values(torch.zeros(tokens, len(shape.item_dense))),
        age=item.with_values(torch.from_numpy(recency * 60)),
        recency=item.with_values(torch.from_numpy(recency.astype(np.int32))),
        signals=item.with_values(torch.rand(tokens, len(shape.signals))),
        candidate=candidate,
        candidate_categories=candidate.with_values(
            torch.ones(candidates, len(shape.categories)).int()
        ),
        candidate_dense=candidate.with_values(torch.zeros(candidates, len(shape.item_dense))),
        features=candidate.with_values(torch.rand(candidates, len(shape.features))),
        label=candidate.with_values(torch.zeros(candidates, len(shape.tasks))),
        user=torch.arange(REQUESTS).int(),
        context=torch.zeros(REQUESTS, 0).int(),
        context_dense=torch.zeros(REQUESTS, 0),
        request=torch.from_numpy(np.repeat(np.arange(REQUESTS), asked)),
        index=torch.arange(candidates),
        items=ItemTable.from_dataset(dataset),
        events=events,
        asked=asked,
    )


def largest(dataset: ClickDataset, model: str, **options: Any) -> Largest:
    made, batch = (
        ranker(dataset, model, max_history=LONGEST, heads=HEADS, **options),
        skewed(dataset),
    )
    with Largest() as seen:
        made(batch).square().sum().backward()
    return seen


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_no_model_pads(toy: ClickDataset, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("padded")

    for module in (
        jagged_kernels,
        JaggedTensor,
        peer_attention,
    ):
        monkeypatch.setattr(module, "to_padded", refuse)
    seen = largest(toy, model)
    assert not seen.by_requests
    # What it would have padded; a CPU has users in tiles of 32 tokens, which is some of that.
    padded = REQUESTS * LONGEST * DIM
    assert seen.numbers < padded / 4


def test_padding_would_be_seen(toy: ClickDataset) -> None:
    seen = largest(toy, "target_attention", attention="padded_sdpa")
    assert seen.by_requests
    assert seen.numbers >= REQUESTS * LONGEST * DIM


@pytest.mark.parametrize("attention", ["jagged", "padded_dense", "padded_sdpa", "padded_flash"])
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_the_host_knows_every_size(toy: ClickDataset, model: str, attention: str) -> None:
    """On "meta" there are no contents that a size could be read from, and so waited for."""
    if model == "hstu" and attention not in POINTWISE:
        pytest.skip("hstu's layers have no softmax")
    made = ranker(toy, model, layers=2, attention=attention).to("meta")
    batch = batch_of(toy, mixed_rows(toy))
    logits = made(batch.to("meta"))
    assert logits.shape == batch.label.values.shape
    logits.sum().backward()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the public operations that are called, wherever they were imported to."""
    names: set[str] = set()

    def spy(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            names.add(name)
            return function(*args, **options)

        return call

    for model in MODEL_NAMES:  # imported, so that their modules are there
        encoder_of(model)
    operations = {n: getattr(jagged_kernels, n) for n in jagged_kernels.__all__}
    operations = {n: f for n, f in operations.items() if callable(f) and not isinstance(f, type)}
    for path, module in list(sys.modules.items()):
        if path.startswith(("jagged_ranking.", "jagged_kernels.modules")):
            for name, function in operations.items():
                if getattr(module, name, None) is function:
                    monkeypatch.setattr(module, name, spy(name, function))
    return names


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_model_is_made_of_jagged_operations(
    toy: ClickDataset, model: str, called: set[str]
) -> None:
    ranker(toy, model)(batch_of(toy, mixed_rows(toy)))
    assert called == SHARED | OPERATIONS[model]
