"""Everything that decides a training run, in one frozen record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a model and its training; the defaults are tuned on ml_100k's validation split.

    Model: `model` (a key of MODELS), `dim` (width of a token), `heads`, `layers` (transformer
    only), `hidden` (the head's layers), `dropout` (inside the model and the head),
    `embedding_dropout`, `id_dropout` (share of ids shown as unknown in training),
    `max_history` (most recent events that a sample sees).

    Training: `learning_rate`, `weight_decay` (AdamW's, decoupled) and the embeddings' own,
    `clip_norm`, at most `epochs`. Each time the validation `select` metric has not improved for
    more than `lr_patience` epochs, the learning rate is multiplied by `lr_factor`; after
    `patience` such epochs training ends.
    `checkpoint_steps` > 0 saves inside epochs too, every so many steps.
    """

    model: str = "din"
    dim: int = 32
    heads: int = 2
    layers: int = 1
    hidden: tuple[int, ...] = (64,)
    dropout: float = 0.2
    embedding_dropout: float = 0.1
    id_dropout: float = 0.05
    max_history: int = 100

    seed: int = 0
    epochs: int = 20
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    embedding_weight_decay: float = 0.1
    clip_norm: float = 1.0
    select: str = "log_loss"
    patience: int = 3
    lr_patience: int = 1
    lr_factor: float = 0.3
    checkpoint_steps: int = 0

    def __post_init__(self) -> None:
        from jagged_ranking.models import MODELS

        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.select not in ("log_loss", "auc", "gauc"):
            raise ValueError(f"select must be log_loss, auc or gauc, got {self.select!r}")
        for name in ("dim", "heads", "layers", "max_history", "epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "embedding_dropout", "id_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be divisible by heads, got {self.dim} and {self.heads}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {**asdict(self), "hidden": list(self.hidden)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; an unknown name is a ValueError."""
        known = {spec.name for spec in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(
            **{**values, **({"hidden": tuple(values["hidden"])} if "hidden" in values else {})}
        )
