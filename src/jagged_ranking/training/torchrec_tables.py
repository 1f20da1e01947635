"""Tables of ids that are shared out among the ranks, by TorchRec: for those larger than a GPU.

Each rank holds some rows of each table (or whole tables: TorchRec's planner decides by size and
load), and a batch fetches the distinct rows that it asks for, all tables in one exchange. The model
reads these; what came back to them goes to their owners in the step, where FBGEMM's fused kernel
sums it by row over all ranks and updates the rows by row-wise Adagrad, as `optimisers` does where
the tables are whole.

TorchRec: Ivchenko et al., RecSys 2022; https://github.com/meta-pytorch/torchrec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.first_line import described
from jagged_ranking.layers.id_table import IdTable
from jagged_ranking.training.quiet import quiet

# Rows, or whole tables; never columns, whose optimiser would know a part of each row.
SHARDING = ["row_wise", "table_wise"]
_LOGGERS = ("torchrec", "torch.fx._symbolic_trace")
_SEPARATOR = "/"  # TorchRec's names of tables have no dots, those of modules do


def check_torchrec() -> None:
    """ValueError where TorchRec is missing, or does not fit what is installed."""
    try:
        with quiet(*_LOGGERS):
            import_module("torchrec")
            import_module("torchrec.distributed.model_parallel")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise ValueError(
            "tables torchrec needs the extra torchrec (pip install '.[torchrec]'): "
            f"{described(error)}"
        ) from error


class TorchRecTables:
    """The `tables` of a model, by the names of their modules, in rows of which each rank has some.

    The shards start with the rows that `tables` have, which must be the same on all ranks. Nothing
    is exchanged until the first batch.

    Args:
        tables: whole ones, float32, of a width that 4 divides.
        device: of this rank.
        group: the process group of these devices; None for the default one.
        learning_rate: of `set_rate`'s scale 1.
        epsilon: of Adagrad.
        together: runs what exchanges something with the other ranks.
    """

    def __init__(
        self,
        tables: Mapping[str, IdTable],
        *,
        device: torch.device,
        group: Any,
        learning_rate: float,
        epsilon: float,
        together: Callable[[Callable[[], Any]], Any],
    ) -> None:
        with quiet(*_LOGGERS):
            self._model = _sharded(tables, device=device, group=group, epsilon=epsilon)
        self.names, self.learning_rate = list(tables), learning_rate
        self._device, self._together = device, together
        self._keyed: Any = import_module("torchrec").KeyedJaggedTensor
        self._ids: list[Tensor] = []  # of each table, distinct and ascending
        self._rows: list[Tensor] = []  # leaves [M, D]
        self._fetched: list[Tensor] = []  # the same, as TorchRec's outputs
        with torch.no_grad():
            for name, shards in self._weights().items():
                whole = tables[name].weight
                for shard in shards.local_shards():
                    (row, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    shard.tensor.copy_(whole[row : row + rows])

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchRecTables:
        """A copy of the model reads the same rows."""
        return self

    def bring(self, ids: Sequence[Tensor]) -> None:
        """Fetches the rows of a batch: of each table the ids, int64 [N], in any order, repeated or
        not, perhaps none. All ranks call it at once. Rows that are there already are forgotten."""
        self._ids = [each.unique() for each in ids]
        keys = [name.replace(".", _SEPARATOR) for name in self.names]
        lengths = torch.tensor([len(each) for each in self._ids], device=self._device)
        with quiet(*_LOGGERS):
            asked = self._keyed.from_lengths_sync(
                keys=keys, values=torch.cat(self._ids), lengths=lengths
            )
            answer = self._together(lambda: self._model(asked).wait())
        self._fetched = [answer[key].values() for key in keys]
        learns = torch.is_grad_enabled()
        self._rows = [rows.detach().requires_grad_(learns) for rows in self._fetched]
        if not learns:
            self._fetched = []

    def look_up(self, table: int, ids: Tensor) -> Tensor:
        """Rows [N, D] of a table, by its number, of ids int [N] that `bring` was told."""
        known = self._ids[table]
        ids = ids.to(known.dtype)
        # a GPU would have to be waited for
        if not ids.is_cuda and not torch.isin(ids, known).all():
            raise RuntimeError(f"{self.names[table]}: ids that the batch had not asked for")
        place = torch.searchsorted(known, ids)
        return torch.nn.functional.embedding(place, self._rows[table])

    def set_rate(self, *, scale: float) -> None:
        """Of the next step, as a share of the learning rate. Before `bring`: what the kernels
        update by, in the backward, they are told in the forward."""
        optimiser: Any = self._model.fused_optimizer
        for group in optimiser.param_groups:
            group["lr"] = self.learning_rate * scale
        optimiser.step()  # tells the kernels, and no more

    def step(self) -> None:
        """Updates the rows that were brought last. All ranks call it at once."""
        gradients = [torch.zeros_like(r) if r.grad is None else r.grad for r in self._rows]
        self._together(lambda: torch.autograd.backward(self._fetched, gradients))
        self._ids, self._rows, self._fetched = [], [], []

    def state(self) -> dict[str, Any]:
        """Of each table its rows [V, D] and accumulators [V], as TorchRec's ShardedTensors, whose
        local shards are the memory that is trained."""
        with quiet():
            squares = self._model.fused_optimizer.state_dict()["state"]
        found = {}
        for name, weight in self._weights().items():
            (own,) = squares[self._key(name)].values()
            found |= {f"{name}.weight": weight, f"{name}.squares": own}
        return found

    def _weights(self) -> dict[str, Any]:
        with quiet():
            weights = self._model.state_dict()
        return {name: weights[self._key(name)] for name in self.names}

    def _key(self, name: str) -> str:
        return f"embeddings.{name.replace('.', _SEPARATOR)}.weight"


def _sharded(
    tables: Mapping[str, IdTable], *, device: torch.device, group: Any, epsilon: float
) -> Any:
    """A DistributedModelParallel of an EmbeddingCollection, planned alike on all ranks."""
    rec = import_module("torchrec")
    distributed = import_module("torchrec.distributed.model_parallel")
    planner = import_module("torchrec.distributed.planner")
    types = import_module("torchrec.distributed.types")
    sharders = [import_module("torchrec.distributed.embedding").EmbeddingCollectionSharder()]
    # Sums over ranks, not means: each rank's loss is its share of the whole.
    import_module("torchrec.distributed.comm_ops").set_gradient_division(False)
    configs = [
        rec.EmbeddingConfig(
            name=key,
            num_embeddings=len(table.weight),
            embedding_dim=table.weight.shape[1],
            feature_names=[key],
        )
        for name, table in tables.items()
        for key in [name.replace(".", _SEPARATOR)]
    ]
    collection = rec.EmbeddingCollection(device=torch.device("meta"), tables=configs)
    import_module("torchrec.optim.apply_optimizer_in_backward").apply_optimizer_in_backward(
        rec.optim.RowWiseAdagrad, collection.parameters(), {"lr": 0.0, "eps": epsilon}
    )
    env = types.ShardingEnv.from_process_group(group or torch.distributed.group.WORLD)
    among = planner.Topology(world_size=env.world_size, compute_device=device.type)
    bound = {c.name: planner.ParameterConstraints(sharding_types=SHARDING) for c in configs}
    plan = planner.EmbeddingShardingPlanner(topology=among, constraints=bound).plan(
        collection, sharders
    )
    return distributed.DistributedModelParallel(
        collection, env=env, device=device, plan=plan, sharders=sharders, init_data_parallel=False
    )
