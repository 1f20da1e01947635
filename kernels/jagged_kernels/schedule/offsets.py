"""The offsets that a schedule is of: are those of queries and keys the same, what do they hold, and
have they changed since?"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.contents import can_be_read, demand_equal, equal_offsets
from jagged_kernels.tensors.jagged import JaggedTensor

# (name, offsets, their version when a schedule was built).
Versions = tuple[tuple[str, Tensor, int], ...]
# name -> offsets that a device has compared with a schedule's, and their version then.
Compared = dict[str, tuple[Tensor, int | None]]


def find_versions(q_offsets: Tensor, k_offsets: Tensor) -> Versions:
    """Of those offsets that count their changes; none in a CUDA graph, whose replay builds the
    schedule for what they hold then."""
    sides = [("k", k_offsets)] if q_offsets is k_offsets else [("q", q_offsets), ("k", k_offsets)]
    return tuple(
        (name, offsets, offsets._version)
        for name, offsets in sides
        if can_be_read(offsets) and not offsets.is_inference()
    )


def check_versions(versions: Versions) -> None:
    """Raises ValueError where offsets have changed in place since."""
    for name, offsets, version in versions:
        if offsets._version != version:
            raise ValueError(stale(f"the offsets of {name}"))


def stale(what: str) -> str:
    return f"{what} changed in place after the schedule was built: build it again"


def find_shared(q: JaggedTensor | Tensor, k: JaggedTensor, told: bool | None) -> Tensor | None:
    """[B + 1], the offsets of queries and keys alike; None where they differ, or may.

    Args:
        told: `attention_schedule`'s `shared_offsets`.

    Raises:
        ValueError: told that they are, and they are seen not to be.
    """
    if not isinstance(q, JaggedTensor):
        if told:
            raise ValueError("shared_offsets=True, but dense queries have offsets of their own")
        return None
    if q.offsets is not k.offsets and not _alike(q, k, told):
        return None
    # Attention saves them for its backward, which takes no inference tensor.
    if not torch.compiler.is_compiling() and q.offsets.is_inference():
        return q.offsets.clone()
    return q.offsets


def _alike(q: JaggedTensor, k: JaggedTensor, told: bool | None) -> bool:
    tokens, k_tokens = q.values.shape[0], k.values.shape[0]
    if told is None:
        # In a trace nobody asks whether q and k have as many tokens: it would bind the graph.
        as_many = can_be_read(q.offsets) and tokens == k_tokens
        return as_many and equal_offsets(q.offsets, k.offsets)
    if told:
        if tokens != k_tokens:
            raise ValueError(f"shared_offsets=True, but q has {tokens} tokens and k {k_tokens}")
        demand_equal(q.offsets, k.offsets, "shared_offsets=True, but they differ", ("q", "k"))
    return told


def compare_offsets(
    name: str, built: Tensor, given: Tensor, compared: Compared, builder: str = "the schedule"
) -> None:
    """The offsets of a call must be those that its schedule, or another `builder`, was built for.

    Offsets on a GPU that are other tensors are compared there, once each: what was is noted in
    `compared`.

    Raises:
        ValueError: they are of another number of users, or seen to differ.
    """
    if built is given:
        return
    if built.shape != given.shape:
        raise ValueError(
            f"{builder} was built for {built.shape[0] - 1} users of {name}, and the call has "
            f"{given.shape[0] - 1}"
        )
    version = None if given.is_inference() else given._version
    before, version_before = compared.get(name, (None, None))
    if before is given and version_before == version:
        return
    what = f"{builder} was built for other offsets of {name}"
    if demand_equal(built, given, what, (builder, "the call")):
        compared[name] = (given, version)


def check_contents(**sides: JaggedTensor) -> None:
    """Reads offsets that were trusted when their `JaggedTensor` was made.

    Raises:
        ValueError: they are not offsets of its values.
    """
    for name, x in sides.items():
        if can_be_read(x.offsets):
            try:
                JaggedTensor(x.values, x.offsets)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
