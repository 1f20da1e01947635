"""Checkpoints: written whole or not at all, resumed only by the run that wrote them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from jagged_ranking.results import atomic

FORMAT = 3
CONTENTS = ("content", "config", "digest")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Checkpoint:
    """content: tensors and plain values; config and digest: which run on which data wrote them."""

    content: dict[str, Any]
    config: dict[str, Any]
    digest: str


def save(path: Path, content: dict[str, Any], *, config: dict[str, Any], digest: str) -> None:
    """Writes `path` in one step: whoever reads it finds the old file or the new one, whole."""
    with atomic(path) as temporary:
        torch.save(
            {"format": FORMAT, "content": content, "config": config, "digest": digest}, temporary
        )


def load(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    config: dict[str, Any] | None = None,
    digest: str | None = None,
    may_differ: tuple[str, ...] = (),
) -> Checkpoint:
    """Reads a checkpoint, refusing one of other options or other data than those given.

    `may_differ` names the options that need not agree. Nothing in the file is executed. Every
    refusal is a CheckpointError; an error of the device is as torch raises it.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        # to the CPU: what a device lacks is no damage
        saved = torch.load(path, map_location="cpu", weights_only=True)
        version, found = saved["format"], Checkpoint(**{k: saved[k] for k in CONTENTS})
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise CheckpointError(f"{path}: is damaged, or not a checkpoint") from error
    if version != FORMAT:
        raise CheckpointError(f"{path}: has format {version}, this version reads {FORMAT}")
    if digest is not None and found.digest != digest:
        raise CheckpointError(
            f"{path}: belongs to other data (digest {found.digest[:12]}, given {digest[:12]})"
        )
    if config is not None:
        for name in sorted({*config, *found.config} - {*may_differ}):
            was, given = found.config.get(name), config.get(name)
            if was != given:
                raise CheckpointError(f"{path}: was written with {name}={was!r}, not {given!r}")
    content = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), found.content)
    return replace(found, content=content)
