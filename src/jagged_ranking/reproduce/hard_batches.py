"""K, L and W, beside the batches of `attention_study`."""

from collections.abc import Sequence

from jagged_ranking.measure.hard_workloads import hard_workloads, small_hard_workloads
from jagged_ranking.measure.workloads import Workload
from jagged_ranking.reproduce.attention_study import named_batches


def hard_batches(names: Sequence[str], size: str, *, device: str, seed: int) -> list[Workload]:
    """Those that are named, of the given size.

    Args:
        names: of K, L and W (see `jagged_ranking.measure.hard_workloads`).
        size: "full", or "small" for the same distributions at a size for a CPU.
        device: "cuda" or "cpu"; bf16 on the former, float32 on the latter.
        seed: of all lengths but W's, and of the values.

    Raises:
        ValueError: a name or size that there is not.
    """
    sets = (hard_workloads, small_hard_workloads)
    return named_batches(names, size, sets=sets, device=device, seed=seed)
