"""How long the histories of a batch are: the distributions that are drawn, from one generator."""

import math

import torch
from torch import Tensor

SKEWS = ("constant", "lognormal", "whale")


def lognormal(users: int, max_len: int, median: float, generator: torch.Generator) -> Tensor:
    """[B] int64: floor(exp(1.2 N(0, 1) + ln(median))) clamped to [1, max_len]; user 0 has most."""
    normal = torch.randn(users, generator=generator)
    lengths = torch.exp(1.2 * normal + math.log(median)).long().clamp(1, max_len)
    lengths[0] = max_len
    return lengths


def with_waste(users: int, max_len: int, waste: float, generator: torch.Generator) -> Tensor:
    """[B] int64: user 0 at `max_len`; the others uniform around the mean that meets `waste`, as
    widely as [1, max_len] allows, then moved by single tokens until the total is exact.

    Raises:
        ValueError: no lengths of one longest user have this waste.
    """
    total = round((1.0 - waste) * users * max_len)
    rest = total - max_len
    others = users - 1
    if not others <= rest <= others * max_len:
        most = others / users * (1 - 1 / max_len) if users else 0.0
        raise ValueError(
            f"waste {waste} cannot be met by {users} users of at most {max_len} tokens, of whom "
            f"one has {max_len}: it must lie between 0 and {most:.4f}"
        )
    mean = rest / max(others, 1)
    spread = min(mean - 1, max_len - mean)
    draw = 2 * torch.rand(others, generator=generator, dtype=torch.float64) - 1
    lengths = (mean + spread * draw).round().long().clamp(1, max_len)
    while (missing := rest - int(lengths.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable = (lengths < max_len) if missing > 0 else (lengths > 1)
        chosen = movable.nonzero().flatten()[: abs(missing)]
        lengths[chosen] += step
    return torch.cat([torch.tensor([max_len]), lengths])


def skewed(kind: str, users: int, tokens: int, generator: torch.Generator) -> Tensor:
    """[B] int64 lengths of exactly `tokens` in all, more and more unequal.

    "constant" is the same for everybody (to one token); "lognormal" is exp(1.2 N(0, 1)), scaled to
    the total; in "whale" user 0 has three quarters of all tokens and the others share the rest.

    Raises:
        ValueError: an unknown kind, or fewer than four tokens a user.
    """
    if kind not in SKEWS:
        raise ValueError(f"skew must be one of {', '.join(SKEWS)}, got {kind!r}")
    if tokens < 4 * users:
        raise ValueError(f"{tokens} tokens are too few for {users} users")
    share = torch.ones(users, dtype=torch.float64)
    if kind == "lognormal":
        share = torch.exp(1.2 * torch.randn(users, generator=generator, dtype=torch.float64))
    elif kind == "whale" and users > 1:
        share[0] = 3.0 * (users - 1)
    lengths = (share / share.sum() * tokens).long().clamp(min=1)
    # What rounding left over goes to the longest (or is taken from it), where it matters least.
    if kind == "constant":
        lengths[: tokens - int(lengths.sum())] += 1
    else:
        lengths[lengths.argmax()] += tokens - int(lengths.sum())
    return lengths
