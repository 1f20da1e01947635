"""The batches on which the interaction operations are measured."""

from collections.abc import Sequence
from typing import Any

from jagged_ranking.measure.workloads import Workload


def token_sweep(
    users: Sequence[int] = (128, 1024, 4096, 8192),
    *,
    max_len: int = 1024,
    columns: int = 64,
    **options: Any,
) -> list[Workload]:
    """More and more tokens at about the same waste: lognormal histories of more and more users.

    The default has from 17 thousand to 1.1 million tokens; 1024 users have those of workload B.
    """
    return [
        Workload(
            name=f"users {count}",
            users=count,
            heads=1,
            head_dim=columns,
            max_len=max_len,
            distribution="lognormal",
            group="tokens",
            **options,
        )
        for count in users
    ]
