"""What every provider is checked against before it is timed: float32 attention, user by user.

Independent of the kernels that are measured, plain PyTorch, differentiated by autograd. A user's
result depends on nobody else, so it runs one user at a time and needs little memory.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_ranking.measure.workloads import Batch


@dataclass(frozen=True)
class Reference:
    """Output and gradients, all [T, H, D] float32."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reference(batch: Batch, *, padding_attends: bool = False) -> Reference:
    """softmax(q k^T / sqrt(D)) v within each user, and its gradients for `batch.dout`.

    Args:
        batch: the inputs; used in float32 whatever their dtype.
        padding_attends: what a padded model without a mask computes. Each of the Lmax - n zero
            keys behind a history of n then takes part with logit 0 and value 0, which is one
            further column of logit log(Lmax - n) and value 0.
    """
    outputs = [torch.zeros_like(batch.q, dtype=torch.float32) for _ in range(4)]
    start = 0
    for length in batch.lengths.tolist():
        rows = slice(start, start + length)
        start += length
        if length == 0:
            continue
        padding = batch.workload.max_len - length if padding_attends else 0
        parts = _one_user(batch, rows, padding, torch.float32)
        for output, part in zip(outputs, parts, strict=True):
            output[rows] = part
    return Reference(*outputs)


def _one_user(batch: Batch, rows: slice, padding: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    # [H, n, D] leaves, so that the gradients are this user's alone.
    q, k, v, dout = (
        x[rows].to(dtype).transpose(0, 1) for x in (batch.q, batch.k, batch.v, batch.dout)
    )
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if batch.workload.causal:
            n = logits.shape[-1]
            hidden = torch.ones(n, n, dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)
        elif padding:
            column = logits.new_full((*logits.shape[:2], 1), math.log(padding))
            logits = torch.cat([logits, column], dim=-1)
        weights = logits.softmax(-1)[..., : v.shape[1]]
        out = weights @ v
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return tuple(x.detach().transpose(0, 1) for x in (out, *grads))


@dataclass(frozen=True)
class Errors:
    """How far a provider is from the reference.

    max_abs: largest absolute difference, over output and (if compared) gradients.
    relative: largest ||x - ref|| / ||ref|| among output and gradients; NaN if any x has NaN.
    """

    max_abs: float
    relative: float


def compare(pairs: list[tuple[Tensor, Tensor]]) -> Errors:
    """Errors over (result, reference) pairs of one shape each; results may have any dtype."""
    max_abs = relative = 0.0
    for result, expected in pairs:
        difference = result.detach().float() - expected
        size = float(torch.linalg.vector_norm(expected))
        error = float(torch.linalg.vector_norm(difference)) / max(size, 1e-30)
        if not math.isfinite(error):
            return Errors(math.nan, math.nan)
        relative = max(relative, error)
        if difference.numel():
            max_abs = max(max_abs, float(difference.abs().max()))
    return Errors(max_abs, relative)


def tolerance(batch: Batch, users: int = 4) -> float:
    """The relative error beyond which a provider is wrong rather than imprecise.

    Five times the error that eager PyTorch makes in the dtype of the batch against float32, on
    the longest and a few more users, and at least 1e-3, so that a float32 provider may use the
    tf32 mode of the matrix units.
    """
    starts = batch.offsets.tolist()
    longest = int(batch.lengths.argmax())
    step = max(1, len(batch.lengths) // users)
    worst = 0.0
    for user in {longest, *range(0, len(batch.lengths), step)}:
        rows = slice(starts[user], starts[user + 1])
        if rows.start == rows.stop:
            continue
        same = _one_user(batch, rows, 0, batch.q.dtype)
        exact = _one_user(batch, rows, 0, torch.float32)
        worst = max(worst, compare(list(zip(same, exact, strict=True))).relative)
    return max(5 * worst, 1e-3)
