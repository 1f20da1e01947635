"""A batch of requests as `StepGraphs` takes it, and the padded one that a captured step sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.store import ItemTable

# Of a request and of a candidate; the request of a candidate follows from offsets.
_OF_REQUESTS = ("user", "context", "context_dense", "cut", "cut_age")
_INDEX = "index"


def inputs_of(batch: JaggedBatch) -> dict[str, JaggedTensor | Tensor]:
    """What of a batch differs from that of others, by name."""
    inputs: dict[str, JaggedTensor | Tensor] = {
        name: value for name in _OF_REQUESTS if (value := getattr(batch, name)) is not None
    }
    for spec in fields(batch):
        if spec.init and isinstance(value := getattr(batch, spec.name), JaggedTensor):
            inputs[spec.name] = value
    inputs[_INDEX] = batch.candidate.with_values(batch.index)
    return inputs


@dataclass(frozen=True)
class BucketForm:
    """What a graph has of its first batch, and all batches must share.

    items: of all of them. longest: the most candidates and the most events that a request will
    have.
    """

    items: ItemTable
    longest: tuple[int, int]

    def inputs(self, batch: JaggedBatch) -> dict[str, JaggedTensor | Tensor]:
        """`inputs_of` the batch; ValueError where its items are others, or its requests longer."""
        same = batch.items is self.items
        if not same or any(map(int.__gt__, batch.longest, self.longest)):
            raise ValueError(
                f"a graph is of its first batch's items, and of {self.longest[0]} candidates and "
                f"{self.longest[1]} events of a request at most; got {'these' if same else 'other'}"
                f" items, {batch.longest[0]} and {batch.longest[1]}"
            )
        return inputs_of(batch)

    def padded(self, inputs: Mapping[str, JaggedTensor | Tensor]) -> BucketBatch:
        """From `inputs`, brought to the size of a bucket, where no request is longer than all of
        them together: a single one is padded to the bucket's size, and not to that of any other."""
        given: dict[str, Any] = dict(inputs)
        size = given["candidate"].values.shape[0], given["item"].values.shape[0]
        longest = min(self.longest[0], size[0]), min(self.longest[1], size[1])
        return BucketBatch.of(inputs, self.items, longest)


@dataclass(frozen=True, kw_only=True)
class BucketBatch(JaggedBatch):
    """A batch of the size of a bucket: behind its requests there are such as nobody made.

    Nothing is known of its lengths but what holds for all batches of the bucket: `events` and
    `asked` have no numbers, and models that ask for what depends on them have no graph.

    most: `longest` of all batches of the bucket, or more.
    """

    most: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", self.most)

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, JaggedTensor | Tensor],
        items: ItemTable,
        most: tuple[int, int],
    ) -> BucketBatch:
        """From `inputs_of`, brought to the size of a bucket; does not wait for the device."""
        given: dict[str, Any] = dict(inputs)
        candidate, index = given["candidate"], given.pop(_INDEX)
        request = torch.repeat_interleave(
            torch.arange(len(candidate), device=candidate.device),
            candidate.lengths,
            output_size=len(candidate.values),
        )
        nobody = np.zeros(0, np.int64)
        return cls(
            **given,
            request=request,
            index=index.values,
            items=items,
            events=nobody,
            asked=nobody,
            most=most,
        )

    @property
    def pairs(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises NotImplementedError: as many as one batch has."""
        raise NotImplementedError(
            "the model has numbers for each pair of a candidate and an event, and how many pairs "
            "there are changes from batch to batch: a captured graph has room for those of one"
        )

    def latest(self, k: int, *, each_candidate: bool = False) -> int:
        """Raises NotImplementedError: as many as one batch has."""
        raise NotImplementedError(
            f"the model cuts out the {k} latest events of each history, and how many these are "
            "changes from batch to batch: a captured graph has room for those of one"
        )
