"""The batches on which HSTU's attention is measured; `attention_study.measured` measures them."""

from collections.abc import Sequence

from jagged_ranking.measure.lineup import HSTU_OPS
from jagged_ranking.measure.pointwise import HSTU
from jagged_ranking.measure.workload_sets import waste_sweep, with_options
from jagged_ranking.measure.workloads import Workload
from jagged_ranking.reproduce.attention_study import named_batches, precision, some


def hstu_batches(
    *,
    names: Sequence[str],
    size: str,
    wastes: Sequence[float],
    waste_users: int,
    waste_max_len: int,
    heads: int,
    head_dim: int,
    attentions: Sequence[str],
    targets: int,
    device: str,
    seed: int,
) -> list[Workload]:
    """Named workloads and a sweep over padding waste, each under each kind of HSTU's attention.

    bf16 on a GPU, as models are trained there; float32 on a CPU.

    Args:
        names: of the workloads A-G and N (see `jagged_ranking.measure.workload_sets`).
        size: "full", or "small" for the same distributions at a size for a CPU.
        wastes: padding waste at each point of the sweep, 0 to 1.
        waste_users: users in each of its batches.
        waste_max_len: the longest history in each of them.
        heads: heads there.
        head_dim: head_dim there.
        attentions: of `HSTU_OPS`.
        targets: candidates at the end of each history, where there are some.
        device: "cuda" or "cpu".
        seed: of all lengths and values.

    Raises:
        ValueError: a name, size or kind of attention that there is not, less than one candidate, or
            no batch at all.
    """
    if targets < 1:
        raise ValueError(f"targets must be at least 1, got {targets}")
    if unknown := [name for name in attentions if name not in HSTU_OPS]:
        raise ValueError(f"no attention {', '.join(unknown)}; there is {', '.join(HSTU_OPS)}")
    batches = named_batches(names, size, device=device, seed=seed)
    shape = {"heads": heads, "head_dim": head_dim, "seed": seed, **precision(device)}
    batches += waste_sweep(wastes, users=waste_users, max_len=waste_max_len, **shape)
    kinds = [HSTU(), HSTU(targets=targets), HSTU(biased=True), HSTU(targets=targets, biased=True)]
    of_op: dict[str, HSTU] = dict(zip(HSTU_OPS, kinds, strict=True))
    chosen = [
        batch
        for name in attentions
        for batch in with_options(batches, causal=True, hstu=of_op[name])
    ]
    return some(chosen, "workloads, wastes, attentions")
