"""What layers read of a model's options; `ModelConfig`, of a room that knows this one, has them."""

from __future__ import annotations

from typing import Protocol


class LayerOptions(Protocol):
    """Width, heads, number of layers, dropout, and what computes attention (see `attend`)."""

    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention(self) -> str: ...
