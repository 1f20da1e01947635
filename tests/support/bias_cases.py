"""Attention with biases and dropout: the formulas once more, and every backend's gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from attention_cases import DEVICE, RESULTS, TILE, Inputs, Terms, assert_no_worse, run, users
from torch import Tensor

from jagged_kernels import ALiBi, RelativePositionBias, RelativeTimeBias
from jagged_kernels.attention.scores.bias import Bias
from jagged_kernels.attention.scores.dropout import keep_mask


@dataclass(frozen=True)
class Biases:
    """Which biases a test adds up, with learned numbers drawn from a seed."""

    position: int = 0  # buckets
    time: int = 0  # buckets
    alibi: bool = False
    scores: bool = False
    max_distance: int = 20
    bidirectional: bool = True
    unit: float = 1.0
    base: float = 2.0

    def leaves(self, inputs: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(17)
        heads = inputs.q.shape[1]
        scores = int((inputs.q_offsets.diff() * inputs.k_offsets.diff()).sum())
        shapes: dict[str, tuple[int, ...]] = {}
        if self.position:
            shapes["position"] = (self.position, heads)
        if self.time:
            shapes["time"] = (self.time, heads)
        if self.alibi:
            shapes["alibi"] = (heads,)
        if self.scores:
            shapes["scores"] = (scores, heads)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if self.alibi:
            # As in the paper, positive and below 1.
            drawn["alibi"] = drawn["alibi"].sigmoid() / 2
        dtype = dtype or inputs.q.dtype
        return {name: leaf.to(DEVICE, dtype).requires_grad_() for name, leaf in drawn.items()}

    def times(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(of queries, of keys): neither sorted nor in a common range."""
        generator = torch.Generator().manual_seed(23)
        count = inputs.q.shape[0] + inputs.k.shape[0]
        times = (10 ** (4 * torch.rand(count, generator=generator))).long().to(DEVICE)
        return times[: inputs.q.shape[0]], times[inputs.q.shape[0] :]

    def values(self, inputs: Inputs, leaves: dict[str, Tensor]) -> tuple[Bias, ...]:
        """What a user passes to `jagged_attention`."""
        values: list[Bias] = []
        if self.position:
            values.append(
                RelativePositionBias(
                    leaves["position"],
                    max_distance=self.max_distance,
                    bidirectional=self.bidirectional,
                )
            )
        if self.time:
            q_times, k_times = self.times(inputs)
            values.append(
                RelativeTimeBias(
                    leaves["time"],
                    k_times,
                    query_times=q_times,
                    unit=self.unit,
                    base=self.base,
                )
            )
        if self.alibi:
            values.append(ALiBi(leaves["alibi"]))
        if self.scores:
            values.append(leaves["scores"])
        return tuple(values)

    def of_user(
        self, inputs: Inputs, leaves: dict[str, Tensor], q: slice, k: slice, first_score: int
    ) -> Tensor:
        """[H, n, m], from the formulas in floating point."""
        n, m = q.stop - q.start, k.stop - k.start
        i, j = torch.arange(n)[:, None], torch.arange(m)
        distance = j - i - (m - n)
        total = torch.zeros(n, m, inputs.q.shape[1], dtype=inputs.q.dtype, device=DEVICE)
        if self.position:
            bucket = t5_bucket(distance, self.position, self.max_distance, self.bidirectional)
            total = total + leaves["position"][bucket.to(DEVICE)]
        if self.time:
            q_times, k_times = self.times(inputs)
            elapsed = (q_times[q, None] - k_times[k]).abs()
            bucket = time_bucket(elapsed, self.time, self.unit, self.base)
            total = total + leaves["time"][bucket]
        if self.alibi:
            total = total - leaves["alibi"] * distance.abs()[..., None].to(DEVICE)
        if self.scores:
            scores = leaves["scores"][first_score : first_score + n * m]
            total = total + scores.view(n, m, inputs.q.shape[1])
        return total.movedim(2, 0).to(inputs.q.dtype)


def t5_bucket(distance: Tensor, buckets: int, limit: int, bidirectional: bool) -> Tensor:
    """T5's own lines (`_relative_position_bucket`), in float64."""
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    ratio = (distance.clamp(min=1).double() / exact).log() / math.log(limit / exact)
    # A hair more, for distances at which the quotient of logarithms is a whole number.
    large = exact + (ratio * (buckets - exact) + 1e-9).floor().long()
    return offset + torch.where(distance < exact, distance, large.clamp(max=buckets - 1))


def time_bucket(elapsed: Tensor, buckets: int, unit: float, base: float) -> Tensor:
    steps = (1 + elapsed.double() / unit).log() / math.log(base)
    return (steps + 1e-9).floor().long().clamp(max=buckets - 1)


class Formulas(NamedTuple):
    """What the formulas give."""

    results: dict[str, Tensor]
    summands: dict[str, Tensor]  # of each gradient of a bias: sums of scores' absolute gradients
    terms: dict[str, Tensor]  # see `Terms`; of float64 alone


def plain(
    inputs: Inputs,
    biases: Biases,
    leaves: dict[str, Tensor],
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    fused: bool = False,
) -> Formulas:
    """One user after another in the precision of the inputs, gradients by autograd.

    With `fused` by PyTorch's SDPA, which has no gradient for a bias and no dropout of ours.
    """
    learned = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    scale = scale or 1 / math.sqrt(inputs.q.shape[2])
    o, lse = torch.zeros_like(inputs.d_o), torch.full_like(inputs.d_lse, -math.inf)
    loss = inputs.d_lse.new_zeros(())
    first_scores = (inputs.q_offsets.diff() * inputs.k_offsets.diff()).cumsum(0).tolist()
    found = Terms(inputs) if inputs.q.dtype == torch.float64 else None
    d_scores: list[tuple[Tensor, Tensor]] = []
    for user in users(inputs, learned, causal=causal, window=window):
        first = first_scores[user.index - 1] if user.index else 0
        added = biases.of_user(inputs, leaves, user.q_part, user.keys, first)
        some = user.queries - user.q_part.start
        if added.requires_grad:
            added.retain_grad()
        masked = added[:, some].masked_fill(~user.seen, -math.inf)
        scores = scale * user.q @ user.k.mT + masked
        p = kept = scores.softmax(-1)
        if dropout_p:
            assert seed is not None
            axes = (torch.arange(size, device=DEVICE) for size in added.shape)
            head, row, column = axes
            keep = keep_mask(seed, user.index, head[:, None, None], row[:, None], column, dropout_p)
            kept = p * keep[:, some] / (1 - dropout_p)
        if fused:
            out = torch.nn.functional.scaled_dot_product_attention(
                user.q[None], user.k[None], user.v[None], attn_mask=masked[None], scale=scale
            )[0].transpose(0, 1)
        else:
            out = (kept @ user.v).transpose(0, 1)
        user_lse = scores.to(lse.dtype).logsumexp(-1).t()
        o[user.queries], lse[user.queries] = out.detach(), user_lse.detach()
        loss = loss + (out * inputs.d_o[user.queries]).sum()
        loss = loss + (user_lse * inputs.d_lse[user.queries]).sum()
        sizes = torch.zeros_like(added)
        if found:
            sizes[:, some] = found.add(user, scale, p.detach(), kept.detach())
        d_scores.append((added, sizes))
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    grads = dict(zip(("dq", "dk", "dv"), map(_grad, learned), strict=True))
    summands = _spread([(a, a.grad.abs()) for a, _ in d_scores if a.grad is not None], leaves)
    terms = found.results if found else {}
    if found:
        terms |= _spread([pair for pair in d_scores if pair[0].requires_grad], leaves)
    return Formulas({"o": o, "lse": lse, **grads, **_bias_grads(leaves)}, summands, terms)


def run_biased(
    backend: str,
    inputs: Inputs,
    biases: Biases,
    *,
    leaf_dtype: torch.dtype | None = None,
    tile: int | None = TILE,
    **options: object,
) -> dict[str, Tensor]:
    """`attention_cases.run`, and the gradients of what the biases learn."""
    leaves = biases.leaves(inputs, leaf_dtype)
    bias = biases.values(inputs, leaves)
    results = run(backend, inputs, tile=tile, bias=bias, **options)
    return {**results, **_bias_grads(leaves)}


def assert_as_exact_as_pytorch(
    inputs: Inputs,
    biases: Biases,
    backends: Sequence[str] = ("native", "triton"),
    *,
    tile: int | None = TILE,
    leaf_dtype: torch.dtype | None = None,
    torch_seed: int = 0,
    split: str | None = None,
    **options: object,
) -> None:
    """The rule of `Standard`; `reference` is itself held against the formulas. `split`: as
    `attention_cases.queries_of` has it."""

    def formulas(x: Inputs, dtype: torch.dtype | None, fused: bool = False) -> Formulas:
        seed = drawn_seed(torch_seed) if options.get("dropout_p") else None
        leaves = biases.leaves(x, dtype)
        if fused:
            leaves = {name: leaf.detach() for name, leaf in leaves.items()}
        return plain(x, biases, leaves, seed=seed, fused=fused, **options)  # pyright: ignore

    def seeded(backend: str, x: Inputs, dtype: torch.dtype | None) -> dict[str, Tensor]:
        torch.manual_seed(torch_seed)
        chosen = None if backend == "reference" else tile
        given = {"leaf_dtype": dtype, "tile": chosen, "split": split, **options}
        return run_biased(backend, x, biases, **given)  # pyright: ignore[reportArgumentType]

    exact = formulas(inputs.double(), None)
    reference = seeded("reference", inputs.double(), None)
    for name, result in exact.results.items():
        torch.testing.assert_close(reference[name], result, rtol=1e-10, atol=1e-10, msg=name)
    peer = formulas(inputs, leaf_dtype).results
    if not options.get("dropout_p"):
        sdpa = formulas(inputs, leaf_dtype, fused=True).results
        peer |= {name: sdpa[name] for name in RESULTS}
    for backend in backends:
        ours = seeded(backend, inputs, leaf_dtype)
        # Gradients of scores are made from o, which has the inputs' precision.
        sums = {"summands": exact.summands, "rounded_to": inputs.q.dtype}
        assert_no_worse(ours, peer, exact.results, name=backend, terms=exact.terms, **sums)


def drawn_seed(torch_seed: int) -> Tensor:
    """What `jagged_attention` draws for dropout after `torch.manual_seed`."""
    torch.manual_seed(torch_seed)
    return torch.randint(2**31, (), device=DEVICE)


def _spread(
    of_scores: Sequence[tuple[Tensor, Tensor]], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Numbers of scores, each with the bias that was added to these, as sums for what it learns."""
    sums = {f"d_{name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for added, numbers in of_scores:
        parts = torch.autograd.grad(added, list(leaves.values()), numbers, retain_graph=True)
        for total, part in zip(sums.values(), parts, strict=True):
            total += part.abs()
    return sums


def _bias_grads(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"d_{name}": _grad(leaf) for name, leaf in leaves.items()}


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
