"""How many keys the newest query of a user sees, by one head and by all, from the lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor, attention_schedule
from jagged_ranking import results
from jagged_ranking.measure.lineup import ALL_KEYS
from jagged_ranking.measure.sparse.patterns import Pattern, Retrieved, blocks_listed, facts_of

OP = "keys_seen"


def keys_seen(
    patterns: Sequence[Pattern],
    lengths: Sequence[int],
    *,
    heads: int,
    head_dim: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    run_id: str = "",
    run_key: str = "",
) -> pd.DataFrame:
    """The keys that the newest query of users of each length sees.

    Args:
        patterns: rules; of retrieval, the newest query is one of a tile of candidates.
        lengths: of the users.
        heads, head_dim: of the attention.
        device: where lists are built.
        seed: of the numbers that retrieval compares.

    Returns:
        A DataFrame in the form of `jagged_ranking.results`, op "keys_seen": the provider is the
        rule, and "all_keys" causal attention; metrics "one_head" (samples: each head) and
        "all_heads" (by one head or another), in keys.
    """
    rows, common = [], {"run_id": run_id, "run_key": run_key}
    for length in lengths:
        history = _history(length, heads, head_dim, seed, torch.device(device))
        for pattern in patterns:
            seen = _newest(pattern, history)
            by_head = seen.repeat_interleave(heads // len(seen), 0).sum(1).tolist()
            facts = {**facts_of(pattern), "max_len": length, "H": heads, "D": head_dim}
            together = float(seen.any(0).sum())
            for name, values in (("one_head", by_head), ("all_heads", [together])):
                rows.append(_row(pattern.kind, length, name, values, facts, **common))
        facts = {"rule": ALL_KEYS, "max_len": length, "H": heads, "D": head_dim}
        for name in ("one_head", "all_heads"):
            rows.append(_row(ALL_KEYS, length, name, [length], facts, **common))
    return results.frame(rows)


def _history(
    length: int, heads: int, head_dim: int, seed: int, device: torch.device
) -> JaggedTensor:
    """One user, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(length, heads, head_dim, generator=generator, device=device)
    return JaggedTensor(values, torch.tensor([0, length], dtype=torch.int32, device=device))


def _newest(pattern: Pattern, history: JaggedTensor) -> Tensor:
    """[groups, length] bool, of the newest query; by lists, and inside of blocks by the rule."""
    length, block = len(history.values), pattern.block
    causal = not isinstance(pattern, Retrieved)
    queries = history if causal else _candidates(history, min(block, length))
    options: dict[str, Any] = {"causal": causal, "longest": length}
    keys = pattern.keys(queries, history, **options)
    lists = attention_schedule(queries, history, keys=keys, **options).lists
    assert lists is not None
    last = (len(queries.values) - 1) // block
    listed = blocks_listed(lists, 0, range(last, last + 1), -(-length // block))[:, 0]
    seen = listed.repeat_interleave(block, -1)[:, :length]
    if isinstance(pattern, Retrieved):
        return seen
    newest = torch.tensor([length - 1], device=seen.device)
    heads = history.values.shape[1]
    return seen & pattern.visible(newest, length, heads=heads, user=0, causal=True)[:, 0]


def _candidates(history: JaggedTensor, count: int) -> JaggedTensor:
    """A tile of queries."""
    offsets = torch.tensor([0, count], dtype=torch.int32, device=history.device)
    return JaggedTensor(history.values[-count:], offsets)


def _row(
    rule: str,
    length: int,
    metric: str,
    values: Sequence[float],
    facts: Mapping[str, Any],
    **common: Any,
) -> dict[str, Any]:
    return results.row(
        op=OP,
        provider=rule,
        workload=f"length {length}",
        mode="forward",
        metric=metric,
        unit="keys",
        samples=[float(value) for value in values],
        config=facts,
        **common,
    )
