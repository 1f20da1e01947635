"""What is measured: a batch's shape and lengths, what it costs at least, and its tensors.

A `Workload` says everything in a few numbers; `setup` turns it into a `Batch` of tensors, for time
and memory alike. The workloads that the studies measure are in `workload_sets.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure import length_distributions as draw
from jagged_ranking.measure.pointwise import HSTU, Biases

DRAWN = ("uniform", "lognormal", "full", "waste")
GIVEN = ("real", "constant", "whale")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One batch of attention over jagged histories.

    Args:
        name: what tables and figures call it.
        users: B.
        heads: H.
        head_dim: D.
        max_len: Lmax, the longest history and the length that a dense model pads to.
        distribution: of the lengths, drawn from a `torch.Generator` of the seed unless `lengths`
            has them:
            "uniform" is randint from 1 to Lmax, both included;
            "lognormal" is floor(exp(1.2 N(0,1) + ln(median))) clamped to [1, Lmax], with user 0
            set to Lmax;
            "full" is Lmax everywhere;
            "waste" has one user at Lmax and scales the others so that `waste` is met;
            "real", "constant" and "whale" (see `length_distributions.skewed`) come with `lengths`.
        queries: None for self-attention, every event a query; N for target attention, where N
            dense candidates a user look at its whole history.
        hstu: HSTU's pointwise attention in place of softmax attention; causal self-attention.
        waste: for "waste": the wanted share of padding in a padded batch, 0 to 1.
        median: for "lognormal"; Lmax / 16 when None.
        lengths: the lengths themselves.
        group: which figure it belongs to: "workloads", "waste", "length", "head_dim" for
            self-attention, "target" and "skew" for target attention.
    """

    name: str
    users: int
    heads: int
    head_dim: int
    max_len: int
    distribution: str
    queries: int | None = None
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    hstu: HSTU | None = None
    seed: int = 0
    waste: float | None = None
    median: float | None = None
    lengths: tuple[int, ...] | None = field(default=None, repr=False)
    group: str = "workloads"

    def __post_init__(self) -> None:
        if self.distribution not in DRAWN + GIVEN:
            known = ", ".join(DRAWN + GIVEN)
            raise ValueError(f"distribution must be one of {known}, got {self.distribution!r}")
        if (self.distribution == "waste") != (self.waste is not None):
            raise ValueError("`waste` belongs to the distribution 'waste', and only to it")
        if self.median is not None and self.distribution != "lognormal":
            raise ValueError("`median` belongs to the distribution 'lognormal', and only to it")
        if self.distribution in GIVEN and self.lengths is None:
            raise ValueError(f"the distribution {self.distribution!r} needs `lengths`")
        if self.lengths is not None and self.distribution not in (*GIVEN, "lognormal"):
            raise ValueError(f"the distribution {self.distribution!r} draws its lengths")
        if self.lengths is not None and len(self.lengths) != self.users:
            raise ValueError(f"{len(self.lengths)} lengths were given for {self.users} users")
        if self.queries is not None and (self.queries < 1 or self.causal):
            raise ValueError("target attention has at least one query a user, and is not causal")
        if self.hstu is not None and (self.queries is not None or not self.causal):
            raise ValueError("HSTU's attention is of a history to itself, and causal")

    @property
    def op(self) -> str:
        """What results call the attention of this batch."""
        return "attention" if self.hstu is None else self.hstu.op

    @classmethod
    def from_lengths(
        cls, name: str, lengths: Sequence[int], *, heads: int, head_dim: int, **options: Any
    ) -> "Workload":
        """A workload of given history lengths, "real" ones unless `distribution` says otherwise."""
        return cls(
            name=name,
            users=len(lengths),
            heads=heads,
            head_dim=head_dim,
            max_len=max(lengths),
            lengths=tuple(int(n) for n in lengths),
            **{"distribution": "real", **options},
        )

    def draw_lengths(self) -> Tensor:
        """[B] int64 on the CPU."""
        if self.lengths is not None:
            return torch.tensor(self.lengths, dtype=torch.int64)
        generator = torch.Generator().manual_seed(self.seed)
        if self.distribution == "uniform":
            return torch.randint(1, self.max_len + 1, (self.users,), generator=generator)
        if self.distribution == "lognormal":
            median = self.max_len / 16 if self.median is None else self.median
            return draw.lognormal(self.users, self.max_len, median, generator)
        if self.waste is not None:
            return draw.with_waste(self.users, self.max_len, self.waste, generator)
        return torch.full((self.users,), self.max_len, dtype=torch.int64)

    def facts(self) -> dict[str, Any]:
        """What a results row says of the workload: shape, tokens, waste, fewest work.

        `flops_forward` counts two matrix products over the visible (query, key) pairs, 4 H D each:
        4 H D sum(len^2) for self-attention (half of it when causal; of HSTU's, pairs are counted
        one by one), 4 N H D sum(len) for target attention; `flops_forward+backward` is 3.5x that.
        `bytes_*` reads each input and writes each output once: q, k, v -> o, and q, k, v, dO -> o,
        dQ, dK, dV; where a history is read once for all candidates of its user.
        """
        lengths = self.draw_lengths()
        tokens, own = int(lengths.sum()), {}
        share = 0.5 if self.causal else 1.0
        if self.queries is None:
            queries, pairs = tokens, share * float((lengths.double() ** 2).sum())
        else:
            queries, pairs = self.users * self.queries, float(self.queries * tokens)
        if self.hstu is not None:
            pairs = self.hstu.pairs(lengths)
            own = {"targets": self.hstu.targets, "biased": self.hstu.biased}
        flops = 4.0 * self.heads * self.head_dim * pairs
        once = (queries + tokens) * self.heads * self.head_dim * self.dtype.itemsize
        return {
            "B": self.users,
            "H": self.heads,
            "D": self.head_dim,
            "queries": self.queries,
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
            "bytes_forward": 2 * once,
            "bytes_forward+backward": 4 * once,
            **own,
        }


@dataclass
class Batch:
    """The tensors of one workload.

    k, v: [T, H, D]. q, dout: [T, H, D] for self-attention, [B, N, H, D] for target attention.
    offsets: [B + 1] int32, of the histories. biases: of HSTU's attention, where it has some.
    """

    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    offsets: Tensor
    lengths: Tensor  # [B] int64 on the CPU
    biases: Biases | None = None
    _padded: tuple[Tensor, ...] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def positions(self) -> tuple[Tensor, Tensor]:
        """(user [T], position in its history [T]) of every token, on the device."""
        lengths = self.lengths.to(self.device)
        user = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), lengths)
        position = torch.arange(self.k.shape[0], device=self.device) - self.offsets[user]
        return user, position

    def targets(self) -> Tensor | None:
        """[B] int32 on the device, how many of each history's tokens are candidates; None where
        HSTU's attention has none."""
        hstu = self.workload.hstu
        if hstu is None or hstu.targets == 0:
            return None
        return hstu.targets_of(self.lengths).to(self.device, torch.int32)

    def padded(self) -> tuple[Tensor, ...]:
        """q, k, v, dout as [B, H, Lmax, D] with zeros behind each history; dense queries and
        their gradients as [B, H, N, D].

        Made once and shared by the dense providers of a batch.
        """
        if self._padded is None:
            where = self.positions()
            self._padded = tuple(self._pad(x, where) for x in (self.q, self.k, self.v, self.dout))
        return self._padded

    def _pad(self, values: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
        if values.dim() == 4:
            return values.transpose(1, 2).contiguous()
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
    keys = (int(lengths.sum()),)
    queries = keys if workload.queries is None else (workload.users, workload.queries)
    # Drawn where they are used: copying gigabytes from the host would take longer than measuring.
    generator = torch.Generator(device).manual_seed(workload.seed + 1)
    q, k, v, dout = (
        torch.randn(
            *rows,
            workload.heads,
            workload.head_dim,
            generator=generator,
            device=device,
            dtype=torch.float32,
        ).to(workload.dtype)
        for rows in (queries, keys, keys, queries)
    )
    biases = None
    if workload.hstu is not None and workload.hstu.biased:
        biases = Biases.draw(keys[0], workload.heads, generator)
    return Batch(workload, q, k, v, dout, offsets.to(device), lengths, biases)
