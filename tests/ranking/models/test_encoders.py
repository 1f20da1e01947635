"""Each encoder is what its source says: written out for one request and one candidate at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from click_data import ClickDataset
from jagged_kernels import JaggedTensor
from jagged_ranking.layers.embeddings import BUCKETS, log_bucket
from jagged_ranking.layers.learned_pooling import LearnedPooling
from jagged_ranking.layers.self_attention import TransformerLayer, TransformerLayers
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.encoders import pyramid, sim, transact
from jagged_ranking.models.encoders.hstu import HSTULayer
from jagged_ranking.models.model_config import ModelConfig

HEADS, DIM, LAYERS = 2, 16, 2


def by_head(x: Tensor) -> Tensor:
    """[n, D] -> [H, n, D / H]"""
    return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
    """[m, D], [n, D], [n, D] -> [m, D]"""
    scores = by_head(q) @ by_head(k).mT / (DIM // HEADS) ** 0.5
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(q), 1)], dim=2)
        v = torch.cat([v, torch.zeros_like(v[:1])]) if len(v) else v.new_zeros(1, DIM)
    return (scores.softmax(2) @ by_head(v)).transpose(0, 1).flatten(1)


def encoded(layers: TransformerLayers, x: Tensor) -> Tensor:
    """By layers of attention in both directions; [n, D] -> [n, D]."""
    if not len(x):
        return x
    for layer in cast("list[TransformerLayer]", list(layers)):
        q, k, v = layer.query_key_value(layer.attention_norm(x)).chunk(3, dim=1)
        x = x + layer.out(softmax_attention(q, k, v))
        x = x + layer.narrow(nn.functional.gelu(layer.widen(layer.forward_norm(x))))
    return x


def asked(pool: TargetPooling, tokens: Tensor, candidate: Tensor) -> Tensor:
    key, value = pool.key_value(tokens).chunk(2, dim=1)
    return pool.out(softmax_attention(pool.query(candidate[None]), key, value, pool.sink))[0]


def pooled(pool: LearnedPooling, tokens: Tensor, kind: int = 0) -> Tensor:
    """PMA as the paper writes it, with keys and values of every token."""
    seeds = pool.seeds[kind]
    found = torch.zeros_like(seeds)
    if len(tokens):
        found = softmax_attention(seeds, pool.key(tokens), pool.value(tokens))
    hidden = pool.attention_norm(seeds + pool.out(found))
    return pool.forward_norm(hidden + pool.feed(hidden))


def bst(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    found = encoded(encoder.layers, torch.cat([tokens, (candidate + encoder.mark)[None]]))
    return encoder.out(torch.cat([found[-1], found.mean(0)]))


def transact_(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    weight = torch.cat([encoder.event.weight, encoder.candidate.weight], dim=1)
    both = torch.cat([tokens, candidate.expand_as(tokens)], dim=1)
    found = encoded(encoder.layers, both @ weight.T + encoder.event.bias)
    latest = found[-transact.LATEST :]
    latest = pad(latest, (0, 0, transact.LATEST - len(latest), 0))
    largest = found.amax(0) if len(found) else torch.zeros(DIM)
    return encoder.out(torch.cat([latest.flatten(), largest]))


def pma(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    return encoder.out(pooled(encoder.pool, tokens).flatten())


def pyramid_(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    slices = [tokens, *(tokens[-length:] for length in pyramid.RECENT)]
    stages = [pooled(encoder.stages, part, kind) for kind, part in enumerate(slices)]
    return asked(encoder.pool, torch.cat(stages), candidate)


def sim_(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    query = encoder.query(candidate[None])
    key, value = encoder.key_value(tokens).chunk(2, dim=1)
    best = (key @ query[0]).argsort(descending=True)[: encoder.top_k]
    latest = torch.arange(len(tokens))[-sim.RECENT :]
    parts = [
        softmax_attention(query, key[which], value[which], encoder.sink)[0]
        for which in (best, latest)
    ]
    return encoder.out(torch.cat(parts))


def hstu(encoder: Any, tokens: Tensor, candidate: Tensor, age: Tensor) -> Tensor:
    place = torch.arange(len(tokens))
    for layer in encoder.layers:
        assert isinstance(layer, HSTULayer)
        normed = nn.functional.layer_norm(tokens, (DIM,), layer.norm.weight, layer.norm.bias)
        u, q, k, v = silu(layer.project(normed)).chunk(4, dim=1)
        distance = (place[:, None] - place).clamp(min=0)
        gap = log_bucket(age - age[:, None])
        bias = layer.position[distance] + layer.time[gap]
        weight = (
            silu(by_head(q) @ by_head(k).mT + bias.permute(2, 0, 1)).tril()
            / layer.attention.divide_by
        )
        summed = (weight @ by_head(v)).transpose(0, 1).flatten(1)
        norm = layer.attended_norm
        gated = nn.functional.layer_norm(summed, (DIM,), norm.weight, norm.bias) * u
        tokens = tokens + layer.out(gated)
    return asked(encoder.pool, tokens, candidate)


@pytest.mark.parametrize("written_out", [bst, transact_, pma, pyramid_, sim_, hstu])
def test_an_encoder_is_its_formula(toy: ClickDataset, written_out: Callable[..., Tensor]) -> None:
    name = written_out.__name__.rstrip("_")
    made = ranker(toy, name, layers=LAYERS, heads=HEADS, top_k=3)
    long = np.flatnonzero(toy.requests("train").prefix >= 20)[:2]
    batch = batch_of(toy, np.append(mixed_rows(toy), long))
    assert batch.events.max() > max(transact.LATEST, *pyramid.RECENT, sim.RECENT)
    history, candidates = made.embedding(batch)
    found = made.encoder(history, candidates, batch)
    expected = [
        written_out(made.encoder, tokens, candidate, age)
        for tokens, asking, age in zip(history, candidates, batch.age, strict=True)
        for candidate in asking
    ]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hstus_gradients_are_those_of_its_formula(toy: ClickDataset, dtype: torch.dtype) -> None:
    """In the model every parameter counts, those of biases too."""
    made = ranker(toy, "hstu", layers=LAYERS, heads=HEADS)
    encoder: Any = made.encoder.to(dtype)
    batch = batch_of(toy, mixed_rows(toy))
    history, candidates = (x.with_values(x.values.to(dtype)) for x in made.embedding(batch))
    found = encoder(history, candidates, batch)
    users = zip(history, candidates, batch.age, strict=True)
    written = torch.stack(
        [hstu(encoder, x, asking, age) for x, of_user, age in users for asking in of_user]
    )
    torch.testing.assert_close(found, written)
    parameters = dict(encoder.named_parameters())
    d_out = torch.randn_like(found)
    gradients = [
        torch.autograd.grad(out, list(parameters.values()), d_out, retain_graph=True)
        for out in (found, written)
    ]
    for name, ours, theirs in zip(parameters, *gradients, strict=True):
        largest = float(theirs.abs().max())
        assert largest > 0, name
        assert (ours - theirs).abs().max() < 100 * torch.finfo(dtype).eps * largest, name


def test_hstus_biases_are_of_distance_and_time(toy: ClickDataset) -> None:
    """Every bucket that a batch has gets a gradient, and no other."""
    made = ranker(toy, "hstu")
    batch = batch_of(toy, mixed_rows(toy))
    history, candidates = made.embedding(batch)
    made.encoder(history, candidates, batch).square().sum().backward()
    (layer,) = made.encoder.layers  # type: ignore[union-attr]
    gaps = {
        int(bucket)
        for age in batch.age
        for query in range(len(age))
        for bucket in log_bucket(age[: query + 1] - age[query])
    }
    assert {i for i in range(BUCKETS) if layer.time.grad[i].any()} == gaps
    longest = int(batch.events.max())
    assert layer.position.grad.any(1).tolist() == [
        distance < longest for distance in range(len(layer.position))
    ]


def test_a_search_of_everything_is_target_attention(toy: ClickDataset) -> None:
    """With `top_k` beyond the history, the half that is searched is that of all events."""
    made = ranker(toy, "sim", top_k=100)
    batch = batch_of(toy, mixed_rows(toy))
    history, candidates = made.embedding(batch)
    whole = TargetPooling(ModelConfig(dim=DIM, heads=HEADS, dropout=0.0))
    encoder: Any = made.encoder
    mine = {name: value for name, value in encoder.state_dict().items() if "out" not in name}
    whole.load_state_dict({**mine, "out.weight": torch.eye(DIM), "out.bias": torch.zeros(DIM)})
    kept: list[Tensor] = []
    encoder.out.register_forward_pre_hook(lambda _, given: kept.append(given[0][:, :DIM]))
    encoder(history, candidates, batch)
    torch.testing.assert_close(kept[0], whole(history, candidates))


def test_a_pool_has_its_kinds(toy: ClickDataset) -> None:
    """Sets of one kind alike, of another otherwise; an empty one as its seeds say."""
    torch.manual_seed(0)
    pool = LearnedPooling(DIM, heads=HEADS, queries=3, kinds=2)
    tokens = torch.randn(4, DIM)
    x = JaggedTensor(tokens.repeat(2, 1), torch.tensor([0, 4, 8, 8]))
    found = pool(x, torch.tensor([0, 1, 0]))
    for answer, kind, part in zip(found, (0, 1, 0), x, strict=True):
        torch.testing.assert_close(answer, pooled(pool, part, kind))
    assert not torch.allclose(found[0], found[1])
