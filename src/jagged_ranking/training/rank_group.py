"""The ranks of a training as processes of `torch.distributed`: gloo on CPUs, NCCL on GPUs.

Sums are plain `all_reduce`s of flattened gradients rather than DistributedDataParallel. That would
take the mean over ranks, each with as much weight as any other, whatever it has of a batch; it
wants a forward and a backward of every rank, also of one without a request; it sees one `forward`,
where the loss of next items asks `states` and `items`; and it knows nothing of tables that are
trained by row. Here each rank's loss is weighed by the terms that it is a mean of, so that the sum
over ranks is the loss, and the gradient, of one process that has the whole batch.

What the host knows (who touched which parameters, how many rows) goes through gloo on all devices,
once a step: no rank waits for its GPU, and one that is gone is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.shares import share_out
from jagged_ranking.first_line import first_line
from jagged_ranking.layers.id_table import IdTable, RowGradient, sum_by_row
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.determinism import seed_of
from jagged_ranking.training.losses import loss_of, terms_of
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_progress import TrainingError
from jagged_ranking.training.torchrec_tables import TorchRecTables

T = TypeVar("T")


class RankLostError(ValueError):
    """Another process of the training has ended, or does not answer."""


class RankGroup(Ranks):
    """This process among those of the default process group, which must be gloo's.

    `on_device` is the process group that sums tensors of `own_device`; None: the default one.
    """

    def __init__(self, own_device: torch.device, on_device: Any) -> None:
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self.own_device, self._on_device = own_device, on_device
        # Ranks draw differently for dropout; the items that a step draws must be the same.
        self._draws = torch.Generator(own_device)

    def lead(self, do: Callable[[], T]) -> T:
        said: list[Any] = [None, None]
        failed: Exception | None = None
        if self.leads:
            try:
                said[0] = do()
            except (ValueError, OSError) as error:
                failed, said[1] = error, str(error)
        with self._all_answer():
            dist.broadcast_object_list(said)
        if failed is not None:
            raise failed
        if said[1] is not None:
            raise ValueError(said[1])
        return said[0]

    def each(self, do: Callable[[], T]) -> T:
        done: list[T] = []
        failed: Exception | None = None
        try:
            done.append(do())
        except (ValueError, OSError) as error:
            failed = error
        for rank, error in enumerate(self._gather(None if failed is None else str(failed))):
            if error is not None:
                raise ValueError(f"rank {rank}: {error}" if rank else error) from failed
        return done[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        first, *others = self._gather(dict(facts))
        for rank, theirs in enumerate(others, start=1):
            for name in first | theirs:
                here, there = first.get(name), theirs.get(name)
                if here != there:
                    raise ValueError(
                        f"ranks differ in {name}: {_shown(here)} on rank 0, {_shown(there)} on "
                        f"rank {rank}"
                    )

    def together(self, do: Callable[[], T]) -> T:
        with self._all_answer():
            return do()

    def device(self, given: Callable[[], torch.device]) -> torch.device:
        return self.own_device

    def share(self, *, squared: bool) -> Callable[[np.ndarray], np.ndarray]:
        def mine(tokens: np.ndarray) -> np.ndarray:
            cost = tokens**2 if squared else tokens
            return np.flatnonzero(share_out(cost, ranks=self.count) == self.number)

        return mine

    def share_rows(
        self, tables: Mapping[str, IdTable], *, learning_rate: float, epsilon: float
    ) -> TorchRecTables | None:
        return TorchRecTables(
            tables,
            device=self.own_device,
            group=self._on_device,
            learning_rate=learning_rate,
            epsilon=epsilon,
            together=self.together,
        )

    def begin_step(self, seed: int, step: int) -> int:
        alike = seed_of(seed, step)
        self._draws.manual_seed(alike)
        return seed_of(seed, step, self.number) if self.number else alike

    def loss(self, config: TrainConfig, model: Ranker, batch: JaggedBatch) -> Tensor | None:
        drawn = None
        if config.negatives:
            drawn = torch.randint(
                1,
                model.num_items,
                (config.negatives,),
                generator=self._draws,
                device=self.own_device,
            )
        model.bring(batch, drawn)
        terms = torch.zeros((), dtype=torch.int64, device=self.own_device)
        if len(batch):
            terms += terms_of(config.loss, batch, num_items=model.num_items)
        share = terms.double() / self._sum(terms.clone()).clamp(min=1)
        if not len(batch):
            return None
        loss = loss_of(config.loss, model, batch, negatives=config.negatives, drawn=drawn)
        return loss * share.to(loss.dtype)

    def total_loss(self, parts: list[Tensor]) -> Tensor:
        # one dtype, whatever a rank without requests knows of those of others
        own = torch.zeros((), dtype=torch.float64, device=self.own_device)
        for part in parts:
            own += part
        return self._sum(own)

    def total_gradients(
        self,
        parameters: list[nn.Parameter],
        by_row: dict[str, RowGradient],
        tables: Mapping[str, IdTable],
    ) -> dict[str, RowGradient]:
        """A parameter that no rank has touched goes on having no gradient."""
        rows = [len(by_row[name].rows) if name in by_row else 0 for name in tables]
        known = np.array(self._exchange([*(p.grad is not None for p in parameters), *rows]))
        touched, lengths = np.split(known, [len(parameters)], axis=1)
        anywhere = np.any(touched, axis=0).tolist()
        self._sum_gradients([p for p, yes in zip(parameters, anywhere, strict=True) if yes])
        return {
            name: self._total_rows(table, by_row.get(name), lengths[:, column].tolist())
            for column, (name, table) in enumerate(tables.items())
            if lengths[:, column].any()
        }

    def whole(self, found: np.ndarray, index: np.ndarray) -> np.ndarray:
        parts = self._gather((found, index))
        whole = np.empty(sum(len(part) for part, _ in parts), found.dtype)
        for part, places in parts:
            whole[places] = part
        return whole

    def copy(self, module: nn.Module) -> None:
        with self._all_answer():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0, group=self._on_device)

    def check_alike(self, module: nn.Module, *, epoch: int) -> None:
        # the bits of all numbers of a parameter, summed: exact on every device
        sums = [
            p.detach().reshape(-1).view(torch.int16).sum(dtype=torch.int64)
            for p in module.parameters()
        ]
        first, *others = self._exchange(torch.stack(sums).tolist())
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise TrainingError(
                    f"the weights of rank {rank} are not those of rank 0 behind epoch {epoch}"
                )

    @torch.no_grad()
    def _sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            alike = [p for p in parameters if p.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
            flat = self._sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            parts = flat.split([p.numel() for p in alike])
            for p, part in zip(alike, parts, strict=True):
                p.grad = part.view_as(p)

    def _total_rows(
        self, table: IdTable, mine: RowGradient | None, lengths: list[int]
    ) -> RowGradient:
        """The gradients of all ranks, of which each has so many rows, summed by row."""
        longest, dim = max(lengths), table.weight.shape[1]
        ids = torch.zeros(longest, dtype=torch.int64, device=self.own_device)
        sums = table.weight.new_zeros(longest, dim)
        if mine is not None:
            # rows that are repeated have sums of 0, which add nothing once more
            ids[: len(mine.rows)], sums[: len(mine.rows)] = mine.rows, mine.sums
        of_ranks = []
        for own in (ids, sums):
            parts = [torch.empty_like(own) for _ in lengths]
            with self._all_answer():
                dist.all_gather(parts, own, group=self._on_device)
            cut = zip(parts, lengths, strict=True)
            of_ranks.append(torch.cat([part[:length] for part, length in cut]))
        return sum_by_row(*of_ranks, rows=len(table.weight))

    def _sum(self, own: Tensor) -> Tensor:
        """In place, over all ranks."""
        with self._all_answer():
            dist.all_reduce(own, group=self._on_device)
        return own

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of each rank, as many on all; on the host."""
        own = torch.tensor(numbers, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        with self._all_answer():
            dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def _gather(self, value: T) -> list[T]:
        """Of each rank; by pickle, between processes of one run."""
        parts: list[Any] = [None] * self.count
        with self._all_answer():
            dist.all_gather_object(parts, value)
        return parts

    @contextmanager
    def _all_answer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.number}: another process of this run has ended or does not answer "
                f"({first_line(error)}); --resume goes on from the last "
                "checkpoint"
            ) from error


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
