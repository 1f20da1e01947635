"""What providers may do to the process that runs them; named, for another process finds them."""

import os
import time

import torch

from jagged_ranking.measure.providers.base import Prepared, Unavailable
from jagged_ranking.measure.workloads import Batch


def _prepared(batch: Batch, forward) -> Prepared:
    return Prepared(
        forward=forward,
        inputs=(batch.q, batch.k, batch.v),
        grad_output=batch.dout,
        to_tokens=lambda batch, values: values,
    )


def works(batch: Batch) -> Prepared:
    return _prepared(batch, lambda: batch.q * 2)


def is_missing(batch: Batch) -> Prepared:
    raise Unavailable("missing", "no such package")


def raises(batch: Batch) -> Prepared:
    def forward() -> torch.Tensor:
        raise RuntimeError("out of place")

    return _prepared(batch, forward)


def raises_in_training(batch: Batch) -> Prepared:
    def forward() -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("out of place")
        return batch.q * 2

    return _prepared(batch, forward)


def ends_its_process(batch: Batch) -> Prepared:
    return _prepared(batch, lambda: os._exit(3))


def never_returns(batch: Batch) -> Prepared:
    return _prepared(batch, lambda: time.sleep(1000))


def breaks_the_device(batch: Batch) -> Prepared:
    """As CUDA does, the device from then on refuses everything."""
    from jagged_ranking.measure import trial

    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    trial.wait = refuse
    return _prepared(batch, lambda: batch.q * 2)
