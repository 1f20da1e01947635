"""What training makes small."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from jagged_kernels import JaggedTensor, jagged_max, jagged_sum
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.model_config import LOSSES

if TYPE_CHECKING:
    from jagged_ranking.models.ranker import Ranker

NO_ITEM = -100  # a target that is not known; cross_entropy's own mark


def loss_of(
    name: str,
    model: Callable[[JaggedBatch], Tensor],
    batch: JaggedBatch,
    *,
    negatives: int = 0,
    drawn: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """The mean loss of a model for a batch, float32; one of `LOSSES`.

    pointwise: binary cross-entropy of every candidate and task. listwise: of each request and task
    with a positive candidate, the cross-entropy of the softmax over the request's candidates, its
    positives sharing the target evenly. next_item: of each event of the histories, the
    cross-entropy of the item that comes next, told from `negatives` drawn items, or from all; for
    a `Ranker` that follows sequences. `drawn`: these items, int64 [negatives], where they were
    drawn before. `real`: bool [C], the candidates that count, where a batch is padded: labels and
    items of others are 0, so that only a mean over all candidates has to know.
    """
    if name == "next_item":
        return _next_item(cast("Ranker", model), batch, negatives, drawn)
    logit = model(batch)
    if name == "pointwise":
        return _pointwise(logit, batch.label.values, real)
    if name == "listwise":
        return _listwise(batch.label.with_values(logit), batch)
    raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {name!r}")


def terms_of(name: str, batch: JaggedBatch, *, num_items: int) -> Tensor:
    """How many terms `loss_of` is the mean of, int64 []: may be 0."""
    label = batch.label.values
    if name == "next_item":
        return (following(batch, num_items=num_items) != NO_ITEM).sum()
    if name == "listwise":
        return (_positives(batch) > 0).sum()
    return torch.full((), label.numel(), device=label.device)


def _pointwise(logit: Tensor, label: Tensor, real: Tensor | None) -> Tensor:
    if real is None:
        return binary_cross_entropy_with_logits(logit, label)
    each = binary_cross_entropy_with_logits(logit, label, reduction="none")
    return torch.where(real[:, None], each, 0.0).sum() / (real.sum() * label.shape[1])


def _positives(batch: JaggedBatch) -> Tensor:
    """Positive candidates of each request and task, float [R, tasks]."""
    label = batch.label
    return jagged_sum(label.with_values((label.values > 0).to(label.values.dtype)))


def _listwise(logit: JaggedTensor, batch: JaggedBatch) -> Tensor:
    shift = jagged_max(logit.detach())[batch.request]
    exponential = logit.with_values((logit.values - shift).exp())
    log_sum = jagged_sum(exponential).log()[batch.request] + shift
    positive = (batch.label.values > 0).to(logit.values.dtype)
    positives = _positives(batch)
    share = positive / positives.clamp(min=1)[batch.request]
    return (share * (log_sum - logit.values)).sum() / (positives > 0).sum().clamp(min=1)


def _next_item(model: Ranker, batch: JaggedBatch, negatives: int, drawn: Tensor | None) -> Tensor:
    """Where the next item is not of the training vocabulary, nothing is asked.

    Items are drawn uniformly, the same for all events of a batch; one that is the next item is not
    told from itself.
    """
    state, items = model.states(batch).values, batch.items
    target = following(batch, num_items=model.num_items)
    if negatives == 0:
        vectors, bias = model.items(torch.arange(model.num_items, device=state.device), items)
        logit = state @ vectors.T + bias
    else:
        if drawn is None:
            drawn = torch.randint(1, model.num_items, (negatives,), device=state.device)
        # one look-up of both, so that a table that is trained by row collects once
        vectors, bias = model.items(torch.cat([target.clamp(min=0), drawn]), items)
        own = (state * vectors[: len(target)]).sum(1) + bias[: len(target)]
        others = state @ vectors[len(target) :].T + bias[len(target) :]
        others = others.masked_fill(drawn == target[:, None], -torch.inf)
        logit = torch.cat([own[:, None], others], dim=1)
        target = torch.where(target == NO_ITEM, NO_ITEM, 0)
    count = (target != NO_ITEM).sum().clamp(min=1)
    return cross_entropy(logit, target, ignore_index=NO_ITEM, reduction="sum") / count


def following(batch: JaggedBatch, *, num_items: int) -> Tensor:
    """The item that comes after each event of the histories, int64 [T].

    After a request's last event it is the first candidate, if that is positive. `NO_ITEM` where it
    is none of the `num_items` that training knows.
    """
    item, candidate = batch.item, batch.candidate
    after = item.values.roll(-1).long()
    asked = candidate.lengths > 0
    # of a request without candidates any row will do, since `asked` masks it
    first = candidate.offsets[:-1].clamp(max=max(len(candidate.values) - 1, 0))
    wanted = asked & (batch.label.values[first, 0] > 0)
    answer = torch.where(wanted, candidate.values[first].long(), 0)
    ends = item.offsets[1:] - 1
    # a request without history has no last event: its write goes to a place of its own, behind
    place = torch.where(item.lengths > 0, ends, len(after))
    after = torch.cat([after, after.new_zeros(1)]).index_copy(0, place, answer)[:-1]
    return torch.where((after > 0) & (after < num_items), after, NO_ITEM)
