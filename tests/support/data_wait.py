"""What share of a training step its device waits for the batch.

    python tests/support/data_wait.py --data DIR [--steps 200] [--one-stream] [model=din ...]

On a GPU by events: from the end of a step to where the next batch is there. `--one-stream` makes
batches in the stream of the steps, to compare. On a CPU it is the time that making batches takes.
`--from-disk` leaves events in their files whatever the log.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from click_data import open_dataset
from jagged_ranking.data import loader
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.batch_clock import BatchClock
from jagged_ranking.devices import default_device, device_name
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import _Run

WARM_UP = 10  # steps, which compile


def endless(run: _Run) -> Iterator[JaggedBatch]:
    """Batches of one epoch behind another."""
    epoch = 0
    while True:
        yield from run.loader.batches(epoch)
        epoch += 1


def measure(run: _Run, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds that each step took with its batch, and that its batch was waited for."""
    clock = BatchClock(run.device)
    batches = clock(endless(run))
    run.model.train()
    for _ in range(WARM_UP + steps + 1):
        run._step(batches)
    run.read_numbers()
    wholes, waits, _ = clock.steps(WARM_UP)
    return wholes, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one-stream", action="store_true")
    parser.add_argument("--from-disk", action="store_true", default=None)
    parser.add_argument("options", nargs="*", help="of TrainConfig, such as model=din")
    args = parser.parse_args()
    defaults = TrainConfig().to_dict()
    given = dict(option.split("=", 1) for option in args.options)
    config = TrainConfig.from_dict({k: type(defaults[k])(v) for k, v in given.items()})
    device = torch.device(default_device())
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    data = open_dataset(args.data)
    run = _Run(config, data, device=device, out=None, from_disk=args.from_disk)
    one_stream = patch.object(loader, "beside_the_step", lambda batches, device: batches)
    with one_stream if args.one_stream else nullcontext():
        wholes, waits = measure(run, args.steps)
    print(
        f"{device_name(device)}, {config.model}: a step takes {median(wholes):.2f} ms, its batch "
        f"{median(waits):.2f} ms of them; of all the time {sum(waits) / sum(wholes):.1%}"
    )


if __name__ == "__main__":
    main()
