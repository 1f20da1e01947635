"""What training makes small."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from jagged_kernels import JaggedTensor, jagged_max, jagged_sum
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.evaluation.evaluate import autocast
from jagged_ranking.models.model_config import LOSSES


def loss_of(name: str, model: Callable[[JaggedBatch], Tensor], batch: JaggedBatch) -> Tensor:
    """The mean loss of a model's logits [C, tasks] for a batch, float32; one of `LOSSES`.

    pointwise: binary cross-entropy of every candidate and task. listwise: of each request and task
    with a positive candidate, the cross-entropy of the softmax over the request's candidates, its
    positives sharing the target evenly.
    """
    with autocast(batch.label.values.device):
        logit = model(batch)
    if name == "pointwise":
        return binary_cross_entropy_with_logits(logit, batch.label.values)
    if name == "listwise":
        return _listwise(batch.label.with_values(logit), batch)
    raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {name!r}")


def _listwise(logit: JaggedTensor, batch: JaggedBatch) -> Tensor:
    shift = jagged_max(logit.detach())[batch.request]
    exponential = logit.with_values((logit.values - shift).exp())
    log_sum = jagged_sum(exponential).log()[batch.request] + shift
    positive = (batch.label.values > 0).to(logit.values.dtype)
    positives = jagged_sum(batch.label.with_values(positive))
    share = positive / positives.clamp(min=1)[batch.request]
    return (share * (log_sum - logit.values)).sum() / (positives > 0).sum().clamp(min=1)
