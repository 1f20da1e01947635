"""The options of a model. Its names are here and not with their classes, which need torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL_NAMES = ("mean_pool", "din", "target_attention", "transformer", "sasrec")
HEADS = ("mlp", "dot")
LOSSES = ("pointwise", "listwise", "next_item")


def check_model(name: str) -> str:
    """The name of a model; ValueError for any other."""
    if name not in MODEL_NAMES:
        raise ValueError(f"model must be one of {', '.join(MODEL_NAMES)}, got {name!r}")
    return name


def option(default: Any, meaning: str) -> Any:
    """A field with its one description, which the command line shows too."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What decides a model, its weights apart.

    Raises ValueError for values that make no sense.
    """

    model: str = option("target_attention", f"one of {', '.join(MODEL_NAMES)}")
    dim: int = option(32, "width of a history token and of a target")
    heads: int = option(2, "attention heads")
    layers: int = option(1, "layers of the transformer")
    head: str = option("mlp", f"one of {', '.join(HEADS)}")
    hidden: tuple[int, ...] = option((64,), "widths of the head's hidden layers")
    dropout: float = option(0.2, "dropout inside the model and the head")
    embedding_dropout: float = option(0.3, "dropout on tokens and targets")
    id_dropout: float = option(0.05, "share of item ids shown as unknown in training")
    max_history: int = option(50, "most recent events that a request sees")

    def __post_init__(self) -> None:
        check_model(self.model)
        if self.head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")
        self.check_least(1, "dim", "heads", "layers", "max_history")
        self.check_shares("dropout", "embedding_dropout", "id_dropout")
        if self.dim % self.heads:
            raise ValueError(f"dim must be divisible by heads, got {self.dim} and {self.heads}")
        if any(units < 1 for units in self.hidden):
            raise ValueError(f"hidden must be positive widths, got {self.hidden}")

    def check_least(self, least: int, *names: str) -> None:
        """ValueError for the first of these options that is smaller."""
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def check_shares(self, *names: str) -> None:
        """ValueError for the first of these options that is no share below 1."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
