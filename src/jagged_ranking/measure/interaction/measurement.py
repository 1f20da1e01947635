"""`measure_interaction`: every peer of an operation checked, timed and weighed, as one table."""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
from tqdm import tqdm

from jagged_ranking import results
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.contest import known
from jagged_ranking.measure.gathering import gathering
from jagged_ranking.measure.interaction import elementwise, products, shapes
from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.interaction.layout import Layout
from jagged_ranking.measure.interaction.problem import Problem
from jagged_ranking.measure.interaction.problem_contest import ProblemContest
from jagged_ranking.measure.providers import MODES
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workloads import Workload

# What each operation of the catalogue computes on a batch.
PROBLEMS: dict[str, Callable[[Layout], Problem]] = {
    **products.PROBLEMS,
    **elementwise.PROBLEMS,
    **shapes.PROBLEMS,
}
# What a workload says of attention, and an operation says of itself.
_ATTENTION = ("H", "queries", "causal")


def measure_interaction(
    operations: Sequence[str],
    workloads: Sequence[Workload],
    *,
    weighed: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    device: torch.device | str = "cpu",
    effort: Effort | None = None,
    ceilings: Ceilings | None = None,
    run_id: str = "",
    run_key: str = "",
    cpu_threads: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure interaction operations beside their peers.

    Args:
        operations: names in `OPERATIONS`.
        workloads: batches; `head_dim` is the number of columns D.
        weighed: names of the workloads on which memory is measured too.
        modes: "forward" (without autograd) and "forward+backward" (gradients of all inputs).
        device: "cpu" or a CUDA device.
        effort: rounds, repetitions and the budget in seconds.
        ceilings: of the device in the dtype of the workloads, to state limits; measured when None.
        run_id: for the column `id`.
        run_key: for the column `run_key`.
        cpu_threads: on a CPU; see `measure_attention`.
        progress: show a bar.

    Returns:
        A DataFrame in the form of `jagged_ranking.results`. `op` is the operation; the provider
        "jagged" is ours, "padded" PyTorch on padded tensors (padding and unpadding are not
        timed), "flat" PyTorch on the flat tokens, "njt" nested tensors, "segment_reduce",
        "embedding_bag" and "fbgemm_sll" where they have the operation. Metrics "latency" (ms; on
        a GPU the device's time), "host_time" (ms; on a GPU only), "peak_memory" and
        "peak_memory_minus_inputs" (bytes), "max_abs_error" and "rel_error" against float32. Those
        of op "ceiling" are of the device.

    Raises:
        ValueError: an unknown operation or mode.
    """
    device = torch.device(device)
    known("operation", operations, OPERATIONS)
    known("mode", modes, MODES)
    if not workloads:
        return results.frame([])
    with gathering(
        device,
        workloads[0].dtype,
        effort=effort,
        ceilings=ceilings,
        run_id=run_id,
        run_key=run_key,
        cpu_threads=cpu_threads,
    ) as gathered:
        bar = tqdm(total=len(operations) * len(workloads), disable=not progress, unit="batch")
        for operation in (OPERATIONS[name] for name in operations):
            for workload in workloads:
                layout = partial(Layout, workload, device)
                one = ProblemContest(
                    lambda op=operation, layout=layout: PROBLEMS[op.name](layout()),
                    dtype=workload.dtype,
                    backward=operation.backward,
                    op=operation.name,
                    workload=workload.name,
                    facts={k: v for k, v in workload.facts().items() if k not in _ATTENTION},
                    device_name=gathered.device_name,
                    tell=lambda said, op=operation: bar.set_postfix_str(f"{op.name}, {said}"),
                    **gathered.options,
                )
                one.check_and_time(modes)
                if workload.name in weighed:
                    one.weigh_all(modes)
                gathered.rows.extend(one.rows)
                bar.update()
            timing.release(device)
        bar.close()
    return gathered.table()
