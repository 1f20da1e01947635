"""How weights are updated: AdamW, and for tables of ids, on request, row-wise Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_ranking.layers.id_table import IdTable, RowGradient
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.torchrec_tables import TorchRecTables

EPSILON = 1e-8


class RowwiseAdagrad:
    """Adagrad (Duchi et al., JMLR 2011) with one accumulator a row instead of one a number.

    As FBGEMM's EXACT_ROWWISE_ADAGRAD: a row's accumulator adds up the mean square of its gradient,
    and its step is the gradient times rate / (sqrt(accumulator) + `EPSILON`). A row without a
    gradient does not change, nor is it read: a step costs as much as the batch has ids. No weight
    decay, which would concern all rows.
    """

    def __init__(self, tables: dict[str, IdTable], *, learning_rate: float) -> None:
        self.tables, self.learning_rate = tables, learning_rate
        self._squares = {
            name: torch.zeros(len(table.weight), device=table.weight.device)
            for name, table in tables.items()
        }

    def gradients(self) -> dict[str, RowGradient]:
        """Of each table that was looked up."""
        found = {name: table.take_gradient() for name, table in self.tables.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    @torch.no_grad()
    def step(self, gradients: dict[str, RowGradient], *, scale: Tensor) -> None:
        """Updates the rows in place, at `scale` [] times the learning rate."""
        for name, gradient in gradients.items():
            weight, squares, rows = self.tables[name].weight, self._squares[name], gradient.rows
            # A row that is repeated is written again with the same number.
            sums = gradient.sums[gradient.place]
            total = squares[rows] + sums.square().mean(1)
            squares[rows] = total
            step = self.learning_rate * scale / (total.sqrt() + EPSILON)
            weight[rows] = weight[rows] - step[:, None] * sums

    def rows_apart(self) -> dict[str, Tensor]:
        """Of the tables that are saved apart, rows NAME.weight and accumulators NAME.squares."""
        found = {}
        for name, table in self.tables.items():
            if table.saved_apart:
                found[f"{name}.weight"] = table.weight.detach()
                found[f"{name}.squares"] = self._squares[name]
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The accumulators of the others, float32 [V] a table."""
        return {n: own for n, own in self._squares.items() if not self.tables[n].saved_apart}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        for name, squares in self.state_dict().items():
            squares.copy_(state[name])


def share_rows(model: Ranker, config: TrainConfig, ranks: Ranks) -> TorchRecTables | None:
    """Leaves each rank its part of the rows of the embedding's tables, if `config.tables` says so.

    Before the model goes to a device, which need not be able to hold them all.
    """
    if config.tables != "torchrec":
        return None
    tables = {f"embedding.{name}": table for name, table in model.embedding.id_tables.items()}
    for table in tables.values():
        table.saved_apart = True
    rows = ranks.share_rows(tables, learning_rate=config.table_rate, epsilon=EPSILON)
    if rows is not None:
        model.embedding.move_rows(rows)
    return rows


class Optimisers:
    """All that updates a model's weights in a step, behind one clipping of the whole gradient.

    But for the rows that ranks share out (`shared`): they are updated as their gradients are
    summed, before the norm could be known, and neither count in it nor are clipped. Adagrad divides
    by what a row's gradients have been so far, so that no step of a row is a long one anyway.

    Learning rates are tensors, which a CUDA graph of a step reads anew in each replay.
    """

    def __init__(
        self,
        model: Ranker,
        config: TrainConfig,
        ranks: Ranks | None = None,
        shared: TorchRecTables | None = None,
    ) -> None:
        self.ranks, self.shared = ranks or Ranks(), shared
        self.clip_norm = config.clip_norm
        tables: dict[str, IdTable] = {}
        if config.table_optimizer == "rowwise_adagrad":
            of_ids = ((n, m) for n, m in model.named_modules() if isinstance(m, IdTable))
            tables = {name: table for name, table in of_ids if table.elsewhere is None}
            for table in tables.values():
                table.train_by_row()
        self.by_row = RowwiseAdagrad(tables, learning_rate=config.table_rate)
        dense, ids = model.parameter_groups(
            weight_decay=config.weight_decay,
            embedding_weight_decay=config.embedding_weight_decay,
        )
        device = next(model.parameters()).device
        groups = [{**dense, "lr": torch.tensor(config.learning_rate, device=device)}]
        if config.table_optimizer == "adamw":
            groups.append({**ids, "lr": torch.tensor(config.table_rate, device=device)})
        self.adamw = torch.optim.AdamW(groups, fused=True, capturable=device.type == "cuda")
        self._dense = [p for group in groups for p in group["params"]]
        self._rates = [group["lr"] for group in groups]
        self._begun = [rate.clone() for rate in self._rates]
        self._scale = torch.ones((), device=device)
        self._scaled_by = 1.0

    def set_scale(self, scale: float) -> None:
        """The share of the learning rates that the next steps take; before the forward, where ranks
        share out rows."""
        if scale != self._scaled_by:
            self._scale.fill_(scale)
            for rate, begun in zip(self._rates, self._begun, strict=True):
                torch.mul(begun, self._scale, out=rate)
            self._scaled_by = scale
        if self.shared is not None:
            self.shared.set_rate(scale=scale)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """Sums gradients over all ranks, clips, updates the weights, and returns the norm [] that
        the gradient had. Does not wait for the device."""
        tables = self.by_row.tables
        by_row = self.ranks.total_gradients(self._dense, self.by_row.gradients(), tables)
        gradients = [p.grad for p in self._dense if p.grad is not None]
        gradients += [gradient.sums for gradient in by_row.values()]
        norm = torch.nn.utils.get_total_norm(gradients)
        share = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        multiply: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
        multiply(gradients, share)
        self.adamw.step()
        self.by_row.step(by_row, scale=self._scale)
        if self.shared is not None:
            self.shared.step()
        return norm

    def rows_apart(self) -> dict[str, Any]:
        """Rows [V, D] and accumulators [V] of the tables that are saved apart, or this rank's
        shards of them: the memory that is trained."""
        return self.by_row.rows_apart() if self.shared is None else self.shared.state()

    def state_dict(self) -> dict[str, Any]:
        """Of both, without `rows_apart`."""
        return {"adamw": self.adamw.state_dict(), "by_row": self.by_row.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.adamw.load_state_dict(state["adamw"])
        for group, rate in zip(self.adamw.param_groups, self._rates, strict=True):
            group["lr"] = rate  # of whoever goes on: the tensor that `set_scale` writes to
        self.by_row.load_state_dict(state["by_row"])
