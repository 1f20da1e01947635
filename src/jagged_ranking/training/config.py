"""Everything that decides a training run, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from jagged_ranking.models.model_config import LOSSES, LOSSES_OF_ORDER, ModelConfig, option

TABLE_OPTIMIZERS = ("adamw", "rowwise_adagrad")
TABLES = ("replicated", "torchrec")
# What an epoch is chosen by where nothing is said, for each of `LOSSES`. Of next items it is the
# first that the data have, and until these are known it stays `AUTO`.
AUTO = "auto"
_SELECT_FOR = {"pointwise": "log_loss", "listwise": "list_auc"}
SELECT_FOR_NEXT_ITEMS = ("ndcg@10", "all_ndcg@10")
SELECT_AMONG_ALL = ("all_ndcg@10", "all_hr@10")  # ranks among all items
_OF_ORDER = ("auc", "gauc", "list_auc", "mrr", "ndcg@10")
SELECT = (AUTO, "log_loss", *_OF_ORDER, *SELECT_AMONG_ALL)
SCHEDULES = ("constant", "cosine")
OFF, CUDA_GRAPHS = "off", "cuda_graphs"
# The others are backends of torch.compile.
COMPILERS = (OFF, "inductor", "aot_eager", "eager", CUDA_GRAPHS)
# What an option may be, where it is a word.
CHOICES = {
    "select": SELECT,
    "loss": LOSSES,
    "tables": TABLES,
    "table_optimizer": TABLE_OPTIMIZERS,
    "schedule": SCHEDULES,
    "compile": COMPILERS,
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelConfig):
    """Options of a model and of its training.

    The defaults were chosen on ml_100k's validation split, with the same options for all models.
    Raises ValueError for values that make no sense.
    """

    seed: int = option(0, "decides initial weights, order and dropout")
    epochs: int = option(10, "at most so many")
    batch_size: int = option(512, "requests in a batch")
    batch_tokens: int = option(
        0, "instead: events and candidates in a batch, about; 0 = by requests"
    )
    accumulate: int = option(1, "batches in a step, which takes the mean of their gradients")
    loss: str = option("pointwise", f"what is trained: {', '.join(LOSSES)}")
    negatives: int = option(
        0, "items drawn a step, for the loss next_item, which each next item is told from; 0 = all"
    )
    learning_rate: float = option(3e-3, "AdamW's, at the start")
    weight_decay: float = option(0.1, "AdamW's, decoupled")
    embedding_weight_decay: float = option(0.1, "the same for the tables of ids")
    tables: str = option(
        "replicated",
        "where rows of ids are: replicated on all ranks, or shared out among them by torchrec, for "
        "tables larger than a GPU; of the item's own bias, a number an item, always the former",
    )
    table_optimizer: str = option(
        "adamw",
        f"of the tables of ids: {', '.join(TABLE_OPTIMIZERS)}, whose steps do not depend on the "
        "number of ids, without decay and average",
    )
    table_learning_rate: float = option(0.0, "of the tables of ids; 0 = learning_rate")
    clip_norm: float = option(1.0, "largest norm of a step's gradient")
    average_decay: float = option(
        0.99, "of the moving average of the weights, which is what is validated and kept; 0 = none"
    )
    select: str = option(
        AUTO,
        f"validation metric to stop on: {', '.join(SELECT)}, by the loss: "
        + ", ".join(f"{metric} of {loss}" for loss, metric in _SELECT_FOR.items())
        + ", {} of next_item or, without lists of candidates, {}".format(*SELECT_FOR_NEXT_ITEMS),
    )
    patience: int = option(2, "stop after so many epochs without a better one")
    schedule: str = option(
        "constant",
        "of the learning rates: constant, but for plateaus (lr_patience, lr_factor); or cosine, to "
        "0 over all epochs, whatever plateaus there are",
    )
    warmup_steps: int = option(0, "over which learning rates rise from 0, with either schedule")
    lr_patience: int = option(
        0, "lower the learning rate after more than so many without a better one"
    )
    lr_factor: float = option(0.3, "by this factor")
    compile: str = option(
        OFF,
        f"{OFF}; torch.compile of the model, by {', '.join(COMPILERS[1:-1])}; or {CUDA_GRAPHS}, "
        "which captures whole steps: faster where the GPU waits for the host, as in small models",
    )
    checkpoint_steps: int = option(0, "save inside epochs too, every so many steps; 0 = no")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.select == AUTO:
            object.__setattr__(self, "select", _SELECT_FOR.get(self.loss, AUTO))
        of_order = _OF_ORDER + (SELECT_AMONG_ALL if self.loss == "next_item" else ())
        if self.loss in LOSSES_OF_ORDER and self.select == "log_loss":
            raise ValueError(
                f"select {self.select} says nothing of what the loss {self.loss} trains, which is "
                f"an order; choose one of {', '.join(of_order)}"
            )
        if self.select in SELECT_AMONG_ALL and self.loss != "next_item":
            raise ValueError(
                f"select {self.select} ranks among all items, which needs loss next_item with head "
                f"dot, got loss {self.loss}"
            )
        if self.loss == "next_item" and self.head != "dot":
            raise ValueError(f"loss next_item needs head dot, got head {self.head}")
        self.check_least(1, "epochs", "batch_size", "accumulate", "patience")
        self.check_shares("average_decay")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "weight_decay",
            "embedding_weight_decay",
            "table_learning_rate",
            "batch_tokens",
            "warmup_steps",
            "lr_patience",
            "checkpoint_steps",
            "negatives",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.tables == "torchrec":
            self._check_torchrec()
        if self.captured and self.accumulate != 1:
            raise ValueError(f"compile {CUDA_GRAPHS} needs accumulate 1, got {self.accumulate}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")
        if not 0 < self.lr_factor < 1:
            raise ValueError(f"lr_factor must lie in (0, 1), got {self.lr_factor}")

    @property
    def table_rate(self) -> float:
        """The learning rate of the tables of ids, at the start."""
        return self.table_learning_rate or self.learning_rate

    @property
    def captured(self) -> bool:
        """Whether steps are captured in CUDA graphs."""
        return self.compile == CUDA_GRAPHS

    @property
    def backend(self) -> str | None:
        """Of torch.compile; None: the model is not compiled."""
        return None if self.compile in (OFF, CUDA_GRAPHS) else self.compile

    def _check_torchrec(self) -> None:
        needed = {"table_optimizer": "rowwise_adagrad", "accumulate": 1, "compile": OFF}
        for name, value in needed.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(f"tables torchrec needs {name} {value}, got {got}")
        if self.dim % 4:
            raise ValueError(f"tables torchrec needs a dim that 4 divides, got {self.dim}")
        if self.loss == "next_item" and not self.negatives:
            raise ValueError(
                "tables torchrec needs negatives, which the loss next_item tells items from: of "
                "all items no rank has the rows"
            )
        if self.select in SELECT_AMONG_ALL:
            raise ValueError(
                f"tables torchrec cannot select {self.select}: of all items no rank has the rows"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {**asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; names left out keep their defaults."""
        known = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        made = dict(values)
        if "hidden" in made:
            made["hidden"] = tuple(made["hidden"])
        return cls(**made)
