"""What every provider is checked against before it is timed: plain float32 attention.

Softmax attention, or HSTU's where the workload says so.

Independent of the kernels that are measured, differentiated by autograd. A user's result depends
on nobody else, so users of about the same length are padded together under an explicit mask, and
a group is never larger than needs be: thousands of short histories take a few dozen calls.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

from jagged_ranking.measure.pointwise import added, position_buckets, time_buckets, visible_pairs
from jagged_ranking.measure.workloads import Batch

# Scores, or numbers of the padded keys, of one group: 0.5 GB. A single user may need more.
GROUP_NUMBERS = 2**27
# A float32 provider may use the tf32 mode of the matrix units.
LEAST_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Reference:
    """Output and gradients in the layout of the batch, float32; last those of the tables of
    biases, where there are any."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    tables: tuple[Tensor, ...] = field(default=(), kw_only=True)

    def parts(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.out, self.dq, self.dk, self.dv, *self.tables)


def reference(batch: Batch, *, padding_attends: bool = False, softmax: bool = False) -> Reference:
    """softmax(q k^T / sqrt(D)) v within each user, and its gradients for `batch.dout`; or HSTU's
    attention, where the workload has it.

    Args:
        batch: the inputs; used in float32 whatever their dtype.
        padding_attends: what a padded model without a mask computes. Each of the Lmax - n zero
            keys behind a history of n then takes part with logit 0 and value 0, which is one
            further column of logit log(Lmax - n) and value 0.
        softmax: the same pairs and biases, but a softmax, whatever the workload has.
    """
    like = (batch.q, batch.q, batch.k, batch.v)
    outputs = [torch.zeros_like(x, dtype=torch.float32) for x in like]
    tables = [torch.zeros_like(table) for table in _tables(batch)]
    options = {"padding_attends": padding_attends, "softmax": softmax}
    for users in _groups(batch):
        parts = _attend(batch, users, dtype=torch.float32, **options)
        for output, (where, values) in zip(outputs, parts[: len(outputs)], strict=True):
            output[where] = values
        for table, (_, values) in zip(tables, parts[len(outputs) :], strict=True):
            table += values
    return Reference(*outputs, tables=tuple(tables))


def _tables(batch: Batch) -> tuple[Tensor, ...]:
    return () if batch.biases is None else (batch.biases.position, batch.biases.time)


def _groups(batch: Batch) -> Iterator[list[int]]:
    """Users who are padded together, by at most a fifth of the longest, or by 16 tokens."""
    lengths = batch.lengths.tolist()
    w = batch.workload
    group: list[int] = []
    for user in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[user] == 0:
            break
        if group:
            longest = lengths[group[0]]
            widest = max(w.queries or longest, w.head_dim)  # of scores, or of keys and values
            numbers = (len(group) + 1) * w.heads * longest * widest
            if lengths[user] < min(0.8 * longest, longest - 16) or numbers > GROUP_NUMBERS:
                yield group
                group = []
        group.append(user)
    if group:
        yield group


def _attend(
    batch: Batch,
    users: Sequence[int],
    *,
    padding_attends: bool = False,
    softmax: bool = False,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """(index into the batch's tensor, values) of out, dq, dk and dv of some users, and behind them
    what these users add to the gradients of the tables of biases."""
    device, w = batch.device, batch.workload
    chosen = torch.tensor(users, device=device)
    lengths = batch.lengths.to(device)[chosen]
    place = torch.arange(int(lengths.max()), device=device)
    real = place < lengths[:, None]  # [b, L]
    token = torch.where(real, batch.offsets[:-1].long()[chosen][:, None] + place, 0)

    def padded(values: Tensor) -> Tensor:
        """[b, H, L, D], zeros behind each history; dense queries [b, H, N, D]."""
        if values.dim() == 4:
            return values[chosen].to(dtype).transpose(1, 2)
        rows = values[token].to(dtype).masked_fill(~real[..., None, None], 0)
        return rows.transpose(1, 2)

    dout = padded(batch.dout)
    with torch.enable_grad():
        q, k, v = (padded(x).detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
        tables = [table.detach().requires_grad_() for table in _tables(batch)]
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if batch.biases is not None:
            at = position_buckets(place), time_buckets(batch.biases.times[token])
            logits = logits + added(tables, at).to(dtype)
        hidden = ~real[:, None, None, :]
        if w.hstu is not None:
            seen = visible_pairs(place, lengths, w.hstu.targets_of(lengths))
            # A place behind its history sees itself: a softmax of nothing would spoil gradients.
            hidden = (hidden | ~seen[:, None]) & (place != place[:, None])
        elif w.causal:
            hidden = hidden | (place > place[:, None])
        if w.hstu is not None and not softmax:
            weights = (silu(logits) / w.max_len).masked_fill(hidden, 0)
        else:
            logits = logits.masked_fill(hidden, -math.inf)
            if padding_attends and not w.causal:
                column = (w.max_len - lengths).to(dtype).log()[:, None, None, None]
                logits = torch.cat([logits, column.expand(*logits.shape[:3], 1)], dim=-1)
            weights = logits.softmax(-1)[..., : len(place)]
        out = weights @ v
        grads = torch.autograd.grad(out, (q, k, v, *tables), dout)

    parts = []
    for like, result in zip((batch.q, batch.q, batch.k, batch.v), (out, *grads[:3]), strict=True):
        rows = result.detach().transpose(1, 2)
        parts.append((chosen, rows) if like.dim() == 4 else (token[real], rows[real]))
    return parts + [(chosen, gradient) for gradient in grads[3:]]


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
    """The relative error beyond which a provider is wrong rather than imprecise: see
    `tolerance_of`."""
    return tolerance_of(
        batch, lambda user, dtype: [part for _, part in _attend(batch, [user], dtype=dtype)], users
    )


def tolerance_of(
    batch: Batch, attend: Callable[[int, torch.dtype], list[Tensor]], users: int = 4
) -> float:
    """Five times the error that eager PyTorch makes in the dtype of the batch against float32, on
    the longest and a few more users, and at least `LEAST_TOLERANCE`.

    Args:
        attend: (user, dtype) -> output and gradients of one user, computed in this dtype.
    """
    longest = int(batch.lengths.argmax())
    step = max(1, len(batch.lengths) // users)
    worst = 0.0
    for user in {longest, *range(0, len(batch.lengths), step)}:
        if int(batch.lengths[user]) == 0:
            continue
        same, exact = (attend(user, dtype) for dtype in (batch.k.dtype, torch.float32))
        worst = max(worst, compare(list(zip(same, exact, strict=True))).relative)
    return max(5 * worst, LEAST_TOLERANCE)
