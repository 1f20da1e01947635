"""Everything that decides a training run, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SELECT = ("log_loss", "auc", "gauc")


def _option(default: Any, meaning: str) -> Any:
    """A field with its one description, which the command line shows too."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a model and of its training.

    The defaults were chosen on ml_100k's validation split, with the same options for all models.
    Raises ValueError for values that make no sense.
    """

    model: str = _option("din", "a key of jagged_ranking.models.MODELS")
    dim: int = _option(32, "width of a history token and of a target")
    heads: int = _option(2, "attention heads")
    layers: int = _option(1, "layers of the transformer")
    hidden: tuple[int, ...] = _option((64,), "widths of the head's hidden layers")
    dropout: float = _option(0.2, "dropout inside the model and the head")
    embedding_dropout: float = _option(0.3, "dropout on tokens and targets")
    id_dropout: float = _option(0.05, "share of item ids shown as unknown in training")
    max_history: int = _option(50, "most recent events that a sample sees")

    seed: int = _option(0, "decides initial weights, order and dropout")
    epochs: int = _option(10, "at most so many")
    batch_size: int = _option(512, "samples in a step")
    learning_rate: float = _option(3e-3, "AdamW's, at the start")
    weight_decay: float = _option(0.1, "AdamW's, decoupled")
    embedding_weight_decay: float = _option(0.1, "the same for the tables of ids")
    clip_norm: float = _option(1.0, "largest norm of a step's gradient")
    average_decay: float = _option(
        0.99, "of the moving average of the weights, which is what is validated and kept; 0 = none"
    )
    select: str = _option("log_loss", f"validation metric to stop on: {', '.join(SELECT)}")
    patience: int = _option(2, "stop after so many epochs without a better one")
    lr_patience: int = _option(
        0, "lower the learning rate after more than so many without a better one"
    )
    lr_factor: float = _option(0.3, "by this factor")
    checkpoint_steps: int = _option(0, "save inside epochs too, every so many steps; 0 = no")

    def __post_init__(self) -> None:
        from jagged_ranking.models import MODELS  # the models need torch, this record does not

        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.select not in SELECT:
            raise ValueError(f"select must be one of {', '.join(SELECT)}, got {self.select!r}")
        for name in ("dim", "heads", "layers", "max_history", "epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "embedding_dropout", "id_dropout", "average_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            "weight_decay",
            "embedding_weight_decay",
            "lr_patience",
            "checkpoint_steps",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")
        if not 0 < self.lr_factor < 1:
            raise ValueError(f"lr_factor must lie in (0, 1), got {self.lr_factor}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be divisible by heads, got {self.dim} and {self.heads}")
        if any(units < 1 for units in self.hidden):
            raise ValueError(f"hidden must be positive widths, got {self.hidden}")

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
