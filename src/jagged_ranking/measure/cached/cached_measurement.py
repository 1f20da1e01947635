"""`measure_cached`: every peer of an operation on cached or shared keys, as one table."""

from collections.abc import Callable, Sequence

import pandas as pd
import torch
from tqdm import tqdm

from jagged_ranking import results
from jagged_ranking.measure import timing
from jagged_ranking.measure.cached.cached_ops import APPEND, DECODE, PREFIX, SCORING
from jagged_ranking.measure.cached.cases import Case
from jagged_ranking.measure.cached.decoding import appending, decoding
from jagged_ranking.measure.cached.prefix import prefixing
from jagged_ranking.measure.cached.scoring import scoring
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.gathering import gathering
from jagged_ranking.measure.interaction.problem import Problem
from jagged_ranking.measure.interaction.problem_contest import ProblemContest
from jagged_ranking.measure.providers import MODES
from jagged_ranking.measure.timing import Effort

PROBLEMS: dict[str, Callable[[Case, torch.device], Problem]] = {
    DECODE: decoding,
    APPEND: appending,
    PREFIX: prefixing,
    SCORING: scoring,
}
# Serving has no gradients.
_BACKWARD = (PREFIX,)
# Whose memory is what it is about.
_WEIGHED = (PREFIX,)


def measure_cached(
    cases: Sequence[Case],
    *,
    device: torch.device | str = "cpu",
    effort: Effort | None = None,
    ceilings: Ceilings | None = None,
    run_id: str = "",
    run_key: str = "",
    cpu_threads: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure cached and shared keys beside peers.

    Args:
        cases: see `jagged_ranking.measure.cached.cases`.
        device: "cpu" or a CUDA device.
        effort: rounds, repetitions and the budget in seconds.
        ceilings: of the device in the dtype of the cases, to state limits; measured when None.
        run_id: for the column `id`.
        run_key: for the column `run_key`.
        cpu_threads: on a CPU; see `measure_attention`.
        progress: show a bar.

    Returns:
        A DataFrame in the form of `jagged_ranking.results`; `op` is that of the case. The provider
        "jagged" is ours. Of "cached_attention": "varlen_paged" and "varlen_gathered", PyTorch's
        FlashAttention-2 with a table of pages and over a copy, "flashinfer" over the cache's own
        pages, and "dense_sdpa", SDPA over padded keys; of "cache_append": "padded", indexing into
        padded keys, and "cat", a copy of all; of "prefixed_attention": "cat", the prefix copied in
        front of every user; of "key_statistics": "dense_scores", PyTorch on all scores at once.
        Metrics as those of `measure_interaction`; memory and the backward of "prefixed_attention"
        alone.
    """
    device = torch.device(device)
    if not cases:
        return results.frame([])
    with gathering(
        device,
        cases[0].dtype,
        effort=effort,
        ceilings=ceilings,
        run_id=run_id,
        run_key=run_key,
        cpu_threads=cpu_threads,
    ) as gathered:
        bar = tqdm(cases, disable=not progress, unit="batch")
        for case in bar:
            one = ProblemContest(
                lambda case=case: PROBLEMS[case.op](case, device),
                dtype=case.dtype,
                backward=case.op in _BACKWARD,
                op=case.op,
                workload=case.name,
                facts=case.facts(),
                device_name=gathered.device_name,
                tell=lambda said, op=case.op: bar.set_postfix_str(f"{op}, {said}"),
                **gathered.options,
            )
            one.check_and_time(MODES)
            if case.op in _WEIGHED:
                one.weigh_all(MODES)
            gathered.rows.extend(one.rows)
            timing.release(device)
    return gathered.table()
