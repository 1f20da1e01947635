"""The options of a model, and its name. Nothing here needs torch but the model itself."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jagged_ranking.first_line import described

_ENCODERS = "encoders"
MODEL_NAMES = tuple(
    sorted(found.name for found in pkgutil.iter_modules([str(Path(__file__).with_name(_ENCODERS))]))
)
_KNOWN = f"one of {', '.join(MODEL_NAMES)}, or package.module of a file with an ENCODER"
HEADS = ("mlp", "dcn_v2", "dhen", "dot")
ATTENTIONS = ("jagged", "padded_dense", "padded_sdpa", "padded_flash", "nested")
EVENT_TIMES = ("request", "arrival")
LOSSES = ("pointwise", "listwise", "next_item")
# Trained on which of a list comes first, so that their probabilities say nothing.
LOSSES_OF_ORDER = ("listwise", "next_item")
PRECISIONS = ("bfloat16", "float32")


def check_model(name: str) -> str:
    """The name of a model; ValueError for any other. Only a user's own file is imported."""
    if name not in MODEL_NAMES:
        encoder_of(name)
    return name


def encoder_of(name: str) -> Callable[[ModelConfig], Any]:
    """The class behind a name: `ENCODER` of the file in `encoders`, or of a user's own module
    package.module, which Python finds as any other, or below the current folder.

    Raises ValueError for a name that is none, and for a module that does not work.
    """
    if name in MODEL_NAMES:
        module = importlib.import_module(f"{__package__}.{_ENCODERS}.{name}")
        return module.ENCODER
    refused = f"model must be {_KNOWN}, got {name!r}"
    if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
        raise ValueError(refused)
    if (here := os.getcwd()) not in sys.path:  # a console script has its own folder there instead
        sys.path.append(here)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a user's own code
        raise ValueError(f"{refused}: {described(error)}") from error
    if not callable(encoder := getattr(module, "ENCODER", None)):
        raise ValueError(f"{refused}: {module.__file__} has no class ENCODER")
    return encoder


def has_self_attention(name: str) -> bool:
    """Whether events of a model attend to one another: then it has layers, and what a request costs
    grows with its tokens squared. ValueError as `encoder_of`."""
    return bool(getattr(encoder_of(name), "self_attention", False))


def option(default: Any, meaning: str) -> Any:
    """A field with its one description, which the command line shows too."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What decides a model, its weights apart.

    Raises ValueError for values that make no sense.
    """

    model: str = option("target_attention", _KNOWN)
    dim: int = option(32, "width of a history token and of a target")
    heads: int = option(2, "attention heads")
    layers: int = option(1, "layers of what encodes a history before it is pooled")
    attention: str = option("jagged", f"what computes attention: {', '.join(ATTENTIONS)}")
    head: str = option("mlp", f"what makes logits: {', '.join(HEADS)}")
    experts: int = option(
        0, "MLPs that a gate of each task mixes (MMoE), with the head mlp; 0 = no"
    )
    hidden: tuple[int, ...] = option((64,), "widths of the head's hidden layers")
    dropout: float = option(0.2, "dropout inside the model and the head")
    embedding_dropout: float = option(0.3, "dropout on tokens and targets")
    id_dropout: float = option(0.05, "share of item ids shown as unknown in training")
    top_k: int = option(16, "events that a search for the candidate keeps (sim)")
    max_history: int = option(50, "most recent events that a request sees")
    event_time: str = option(
        "request",
        "what an event's place and age are told from: the request, or the event's own arrival, "
        "after which they stay, so that its keys and values can be cached",
    )
    precision: str = option(
        "bfloat16", f"of products on a GPU, the head's apart: {', '.join(PRECISIONS)}"
    )

    def __post_init__(self) -> None:
        check_model(self.model)
        self.check_least(1, "dim", "heads", "layers", "top_k", "max_history")
        self.check_shares("dropout", "embedding_dropout", "id_dropout")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim must be divisible by heads, got {self.dim} and {self.heads}")
        for name, known in (
            ("head", HEADS),
            ("attention", ATTENTIONS),
            ("event_time", EVENT_TIMES),
        ):
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {got!r}")
        if self.experts < 0:
            raise ValueError(f"experts must not be negative, got {self.experts}")
        if self.experts and (self.head != "mlp" or not self.hidden):
            raise ValueError(
                "experts need the head mlp and hidden layers, "
                f"got {self.head!r} and hidden {self.hidden}"
            )
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
