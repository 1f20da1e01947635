"""The batches that are measured: shapes, length distributions, and the one setup function.

`workloads()` are A-G and N, `waste_sweep()` and `length_sweep()` the two sweeps; each has a
small version for a CPU. `setup` turns a workload into tensors, for time and memory alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

DISTRIBUTIONS = ("uniform", "lognormal", "full", "waste", "real")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch of jagged self-attention.

    Args:
        name: what tables and figures call it.
        users: B.
        heads: H.
        head_dim: D.
        max_len: Lmax, the longest history and the length that a dense model pads to.
        distribution: of the lengths, always from a `torch.Generator` of the seed:
            "uniform" is randint from 1 to Lmax, both included;
            "lognormal" is floor(exp(1.2 N(0,1) + ln(Lmax / 16))) clamped to [1, Lmax], with user
            0 set to Lmax;
            "full" is Lmax everywhere;
            "waste" has one user at Lmax and scales the others so that `waste` is met;
            "real" takes `lengths` as they are.
        waste: for "waste": the wanted share of padding in a padded batch, 0 to 1.
        lengths: for "real".
        group: which figure it belongs to: "workloads", "waste" or "length".
    """

    name: str
    users: int
    heads: int
    head_dim: int
    max_len: int
    distribution: str
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    seed: int = 0
    waste: float | None = None
    lengths: tuple[int, ...] | None = field(default=None, repr=False)
    group: str = "workloads"

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            known = ", ".join(DISTRIBUTIONS)
            raise ValueError(f"distribution must be one of {known}, got {self.distribution!r}")
        if (self.distribution == "waste") != (self.waste is not None):
            raise ValueError("`waste` belongs to the distribution 'waste', and only to it")
        if (self.distribution == "real") != (self.lengths is not None):
            raise ValueError("`lengths` belong to the distribution 'real', and only to it")
        if self.lengths is not None and len(self.lengths) != self.users:
            raise ValueError(f"{len(self.lengths)} lengths were given for {self.users} users")

    @classmethod
    def from_lengths(
        cls, name: str, lengths: Sequence[int], *, heads: int, head_dim: int, **options: Any
    ) -> "Workload":
        """A workload of given (real) history lengths."""
        return cls(
            name=name,
            users=len(lengths),
            heads=heads,
            head_dim=head_dim,
            max_len=max(lengths),
            distribution="real",
            lengths=tuple(int(n) for n in lengths),
            **options,
        )

    def draw_lengths(self) -> Tensor:
        """[B] int64 on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.distribution == "uniform":
            return torch.randint(1, self.max_len + 1, (self.users,), generator=generator)
        if self.distribution == "lognormal":
            normal = torch.randn(self.users, generator=generator)
            lengths = torch.exp(1.2 * normal + math.log(self.max_len / 16)).long()
            lengths = lengths.clamp(1, self.max_len)
            lengths[0] = self.max_len
            return lengths
        if self.distribution == "waste":
            assert self.waste is not None
            return _lengths_with_waste(self.users, self.max_len, self.waste, generator)
        if self.lengths is not None:
            return torch.tensor(self.lengths, dtype=torch.int64)
        return torch.full((self.users,), self.max_len, dtype=torch.int64)

    def facts(self) -> dict[str, Any]:
        """What a results row says of the workload: shape, tokens, waste, fewest work.

        `flops_forward` = 4 H D sum(len^2) (half of it when causal), the useful ones, and
        `flops_forward+backward` = 3.5x that; `bytes_*` reads each input and writes each output
        once: q, k, v -> o, and q, k, v, dO -> o, dQ, dK, dV.
        """
        lengths = self.draw_lengths()
        tokens = int(lengths.sum())
        share = 0.5 if self.causal else 1.0
        flops = 4.0 * share * self.heads * self.head_dim * float((lengths.double() ** 2).sum())
        tensor_bytes = tokens * self.heads * self.head_dim * self.dtype.itemsize
        return {
            "B": self.users,
            "H": self.heads,
            "D": self.head_dim,
            "max_len": self.max_len,
            "distribution": self.distribution,
            "waste": 1.0 - tokens / (self.users * self.max_len),
            "tokens": tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": self.causal,
            "seed": self.seed,
            "group": self.group,
            "flops_forward": flops,
            "flops_forward+backward": 3.5 * flops,
            "bytes_forward": 4 * tensor_bytes,
            "bytes_forward+backward": 8 * tensor_bytes,
        }


@dataclass
class Batch:
    """The tensors of one workload. q, k, v, dout: [T, H, D]; offsets: [B + 1] int32."""

    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    offsets: Tensor
    lengths: Tensor  # [B] int64 on the CPU
    _padded: tuple[Tensor, ...] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def positions(self) -> tuple[Tensor, Tensor]:
        """(user [T], position in its history [T]) of every token, on the device."""
        lengths = self.lengths.to(self.device)
        user = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)
        position = torch.arange(self.q.shape[0], device=self.device) - self.offsets[user]
        return user, position

    def padded(self) -> tuple[Tensor, ...]:
        """q, k, v, dout as [B, H, Lmax, D] with zeros behind each history.

        Made once and shared by the dense providers of a batch.
        """
        if self._padded is None:
            where = self.positions()
            self._padded = tuple(self._pad(x, where) for x in (self.q, self.k, self.v, self.dout))
        return self._padded

    def _pad(self, values: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
        w = self.workload
        padded = values.new_zeros(w.users, w.heads, w.max_len, w.head_dim)
        user, position = where
        padded.transpose(1, 2)[user, position] = values
        return padded


def setup(workload: Workload, device: torch.device | str) -> Batch:
    """The batch of a workload, standard normal: the same numbers at every call on one device."""
    device = torch.device(device)
    lengths = workload.draw_lengths()
    offsets = torch.zeros(workload.users + 1, dtype=torch.int32)
    offsets[1:] = lengths.cumsum(0)
    tokens = int(lengths.sum())
    # Drawn where they are used: copying gigabytes from the host would take longer than measuring.
    generator = torch.Generator(device).manual_seed(workload.seed + 1)
    q, k, v, dout = (
        torch.randn(
            tokens,
            workload.heads,
            workload.head_dim,
            generator=generator,
            device=device,
            dtype=torch.float32,
        ).to(workload.dtype)
        for _ in range(4)
    )
    return Batch(workload, q, k, v, dout, offsets.to(device), lengths)


def workloads(*, dtype: torch.dtype = torch.bfloat16) -> list[Workload]:
    """A-G, and N, the shape of the production-like workload in Meta's GDPA post."""
    table = [
        ("A", "uniform", 256, 4, 64, 512),
        ("B", "lognormal", 1024, 4, 64, 1024),
        ("C", "lognormal", 512, 8, 64, 4096),
        ("D", "lognormal", 512, 4, 128, 4096),
        ("E", "lognormal", 2048, 4, 32, 512),
        ("F", "full", 64, 8, 64, 2048),
        ("G", "full", 32, 8, 128, 4096),
        ("N", "uniform", 1152, 4, 128, 2048),
    ]
    return [_from_row(*row, dtype=dtype) for row in table]


def small_workloads(*, dtype: torch.dtype = torch.float32) -> list[Workload]:
    """A-G and N at a size that a CPU measures in seconds: same distributions, fewer users,
    shorter histories, fewer heads. Names end in "-small", since times do not compare."""
    table = [
        ("A-small", "uniform", 32, 2, 32, 128),
        ("B-small", "lognormal", 64, 2, 32, 256),
        ("C-small", "lognormal", 32, 2, 32, 512),
        ("D-small", "lognormal", 32, 1, 64, 512),
        ("E-small", "lognormal", 128, 2, 16, 128),
        ("F-small", "full", 8, 2, 32, 256),
        ("G-small", "full", 4, 2, 64, 512),
        ("N-small", "uniform", 32, 2, 64, 256),
    ]
    return [_from_row(*row, dtype=dtype) for row in table]


def waste_sweep(
    wastes: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95),
    *,
    users: int = 128,
    heads: int = 4,
    head_dim: int = 64,
    max_len: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    seed: int = 0,
) -> list[Workload]:
    """Batches of one padded shape with more and more padding in it.

    A padded batch costs the same at every point; only the useful part shrinks. One user always
    has the longest history, so `waste` can be at most (B - 1) / B (1 - 1 / Lmax).
    """
    return [
        Workload(
            name=f"waste {waste:.0%}",
            users=users,
            heads=heads,
            head_dim=head_dim,
            max_len=max_len,
            distribution="waste",
            waste=waste,
            dtype=dtype,
            causal=causal,
            seed=seed,
            group="waste",
        )
        for waste in wastes
    ]


def length_sweep(
    max_lens: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192),
    *,
    padded_tokens: int = 262_144,
    heads: int = 4,
    head_dim: int = 64,
    distribution: str = "lognormal",
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    seed: int = 0,
) -> list[Workload]:
    """Batches of longer and longer histories, B Lmax = `padded_tokens` at every point."""
    return [
        Workload(
            name=f"length {max_len}",
            users=max(1, padded_tokens // max_len),
            heads=heads,
            head_dim=head_dim,
            max_len=max_len,
            distribution=distribution,
            dtype=dtype,
            causal=causal,
            seed=seed,
            group="length",
        )
        for max_len in max_lens
    ]


def with_options(chosen: Sequence[Workload], **changes: Any) -> list[Workload]:
    """The same workloads with other options, e.g. `causal=True` or another dtype."""
    return [replace(workload, **changes) for workload in chosen]


def _from_row(
    name: str,
    distribution: str,
    users: int,
    heads: int,
    head_dim: int,
    max_len: int,
    **options: Any,
) -> Workload:
    return Workload(
        name=name,
        users=users,
        heads=heads,
        head_dim=head_dim,
        max_len=max_len,
        distribution=distribution,
        **options,
    )


def _lengths_with_waste(
    users: int, max_len: int, waste: float, generator: torch.Generator
) -> Tensor:
    """User 0 at `max_len`; the others uniform around the mean that meets `waste`, as widely as
    [1, max_len] allows, then moved by single tokens until the total is exact."""
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
