"""The batches on which the interaction operations are measured, and measuring them."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.interaction.measurement import measure_interaction
from jagged_ranking.measure.workload_sets import token_sweep, waste_sweep, with_options
from jagged_ranking.measure.workloads import Workload
from jagged_ranking.reproduce.attention_study import measured_in_parts, real_batches, some


def interaction_batches(
    *,
    users: Sequence[int],
    max_len: int,
    wastes: Sequence[float],
    waste_users: int,
    float32_users: Sequence[int],
    columns: int,
    data: str | None,
    histories: Sequence[str],
    data_users: int,
    device: str,
    seed: int,
) -> list[Workload]:
    """A sweep over tokens, one over padding waste, and real histories.

    bf16 on a GPU, with some points of the first sweep in float32 too; float32 on a CPU.

    Args:
        users: at each point of the first sweep, with lognormal histories.
        max_len: the longest history in both sweeps.
        wastes: padding waste at each point of the second sweep, 0 to 1.
        waste_users: users in each of its batches.
        float32_users: points of the first sweep that are measured in float32 too.
        columns: D of all tokens.
        data: a prepared dataset, whose histories make one batch more; None for none.
        histories: data sets whose histories make a batch each, see `find_histories`; one that is
            not at hand is left out, and that is said.
        data_users: users in each of those batches, drawn at random.
        device: "cuda" or "cpu".
        seed: of all lengths.

    Raises:
        ValueError: no batch at all.
    """
    cuda = device.startswith("cuda")
    options = {"dtype": torch.bfloat16 if cuda else torch.float32, "seed": seed}
    swept = token_sweep(users, max_len=max_len, columns=columns, **options)
    shape = {"heads": 1, "head_dim": columns, **options}
    chosen = swept + waste_sweep(wastes, users=waste_users, max_len=max_len, **shape)
    chosen += real_batches(data, histories, data_users, group="real", **shape)
    if cuda:
        again = [batch for batch in swept if batch.users in float32_users]
        chosen += with_options(again, dtype=torch.float32)
    return some(chosen, "users, wastes, histories, data")


def measured_interaction(
    batches: Sequence[Workload], *, operations: Sequence[str] | None = None, **options: Any
) -> pd.DataFrame:
    """`measure_interaction` an operation and dtype at a time, see `measured_in_parts`."""
    names = list(OPERATIONS) if operations is None else list(operations)
    tables = []
    for dtype in dict.fromkeys(batch.dtype for batch in batches):
        mine = [batch for batch in batches if batch.dtype == dtype]
        parts = [(name, ([name], mine)) for name in names]
        tables.append(measured_in_parts(measure_interaction, parts, dtype=dtype, **options))
    return pd.concat(tables, ignore_index=True)
