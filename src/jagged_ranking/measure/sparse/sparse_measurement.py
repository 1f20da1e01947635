"""`measure_sparse`: attention to some of the keys beside attention to all, as one table.

As `measure_attention`: one setup, every provider compared with a float32 reference before it is
timed, in interleaved rounds; then each alone for its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from jagged_kernels import KeyLists
from jagged_ranking import results
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.contest import Contest, Run, known
from jagged_ranking.measure.gathering import gathering
from jagged_ranking.measure.lineup import (
    BY_LENGTH,
    JAGGED_LENGTHS,
    OURS,
    SPARSE_GROUPS,
    sparse_providers,
)
from jagged_ranking.measure.providers import FORWARD, MODES, TRAINING, Prepared
from jagged_ranking.measure.providers.jagged import packed_queries
from jagged_ranking.measure.reference import Errors, Reference
from jagged_ranking.measure.sparse.patterns import Retrieved
from jagged_ranking.measure.sparse.sampled_reference import (
    Sample,
    errors_of,
    for_the_check,
    reference,
    regret_of,
    sample_of,
    tolerance,
)
from jagged_ranking.measure.sparse.sparse_providers import LISTS, SPARSE_PROVIDERS, histories_of
from jagged_ranking.measure.sparse.sparse_workloads import SparseWorkload
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workloads import Batch, setup

OP = "sparse_attention"
# Of blocks retrieved: means in half precision may exchange blocks that fit almost as well.
MOST_REGRET = 0.02


def measure_sparse(
    workloads: Sequence[SparseWorkload],
    *,
    providers: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    weighed: Sequence[str] = (BY_LENGTH, JAGGED_LENGTHS),
    device: torch.device | str = "cpu",
    effort: Effort | None = None,
    ceilings: Ceilings | None = None,
    run_id: str = "",
    run_key: str = "",
    cpu_threads: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure attention to some of the keys beside attention to all of them.

    Args:
        workloads: see `jagged_ranking.measure.sparse.sparse_workloads`.
        providers: names in `SPARSE_PROVIDERS`; by default those that make sense on the device and
            for the workload (see `sparse_providers`).
        modes: "forward" (without autograd) and "forward+backward" (gradients of q, k and v).
        weighed: groups of the workloads on which memory is measured too.
        device, effort, ceilings, run_id, run_key, cpu_threads, progress: see `measure_attention`.

    Returns:
        A DataFrame in the form of `jagged_ranking.results`:

        op "sparse_attention": metrics "latency" (ms; on a GPU the device's time), "host_time",
        "peak_memory" and "peak_memory_minus_inputs" (bytes), "max_abs_error" and "rel_error";
        op "lists" (the schedule and its lists, once a batch: of a rule with their transpose, of
        retrieval without), "lists_with_transpose" (of retrieval: all that a backward needs, the
        lists among it), "block_means" (of retrieval, and part of its lists), "schedule" (of all
        keys): "latency" of building them; of retrieved lists also "regret" (see `regret_of`);
        op "ceiling": of the device.
        `config` has the facts of `SparseWorkload`.

    Raises:
        ValueError: an unknown provider, mode or group.
    """
    device = torch.device(device)
    known("provider", providers or (), SPARSE_PROVIDERS)
    known("mode", modes, MODES)
    known("group", weighed, SPARSE_GROUPS)
    if not workloads:
        return results.frame([])
    with gathering(
        device,
        workloads[0].batch.dtype,
        effort=effort,
        ceilings=ceilings,
        run_id=run_id,
        run_key=run_key,
        cpu_threads=cpu_threads,
    ) as gathered:
        bar = tqdm(total=len(workloads), disable=not progress, unit="workload")
        for workload in workloads:
            facts = workload.facts()
            one = _Measurement(
                workload,
                op=OP,
                workload=workload.name,
                facts={**facts, "device": gathered.device_name},
                tell=bar.set_postfix_str,
                **gathered.options,
            )
            chosen = providers
            if chosen is None:
                chosen = sparse_providers(device.type, group=facts["group"], rule=facts["rule"])
            one.check_and_time(chosen, modes)
            if facts["group"] in weighed:
                one.weigh(chosen, modes, one.alone)
            gathered.rows.extend(one.rows)
            timing.release(device)
            bar.update()
        bar.close()
    return gathered.table()


class _Measurement(Contest):
    """Attention on one workload, to the keys that its pattern shows and to all."""

    def __init__(self, sparse: SparseWorkload, **options: Any) -> None:
        super().__init__(**options)
        self.sparse = sparse

    def check_and_time(self, providers: Sequence[str], modes: Sequence[str]) -> None:
        """Check everybody, then time whoever was right."""
        self._check_and_time(providers, modes)
        self.ask_alone(providers, modes, self.alone)
        for name in providers:
            self.failure_rows(name, modes, {"latency": "ms"})

    def _check_and_time(self, providers: Sequence[str], modes: Sequence[str]) -> None:
        batch = setup(self.sparse.batch, self.device)
        self._check(providers, batch, modes)
        timing.release(self.device)
        ready: dict[str, Prepared] = {}
        for name in providers:
            if prepared := self._prepare(name, batch, modes):
                ready[name] = prepared
        del batch
        for mode in modes:
            self.time({name: one.run for name, one in ready.items()}, mode)
        self.time_builds(
            {(n, op): call for n, one in ready.items() for op, call in one.builds.items()}
        )

    def alone(self, name: str) -> tuple[Run, list[Tensor]]:
        """A provider with nothing but its own inputs, for its memory."""
        ready = SPARSE_PROVIDERS[name].prepare(
            setup(self.sparse.batch, self.device), self.sparse.pattern
        )
        return ready.run, [*ready.inputs, ready.grad_output, *ready.held]

    def _prepare(self, name: str, batch: Batch, modes: Sequence[str]) -> Prepared | None:
        provider = SPARSE_PROVIDERS[name]
        return self.prepare(name, modes, lambda: provider.prepare(batch, self.sparse.pattern))

    def _check(self, providers: Sequence[str], batch: Batch, modes: Sequence[str]) -> None:
        """Results at a sample of queries, where there are too many scores for all of them."""
        sample = sample_of(batch)
        checked = for_the_check(batch, sample)
        queries = len(packed_queries(batch, batch.q))
        self.facts["checked_queries"] = len(sample.places) / max(queries, 1)
        for sees_all, names in self._by_mask(providers):
            pattern = None if sees_all else self.sparse.pattern
            try:
                lists = None
                if isinstance(pattern, Retrieved):
                    lists = self._retrieved(pattern, checked, modes)
                expected = reference(checked, sample, pattern, lists)
                limit = tolerance(checked, sample, pattern, lists)
            except Exception as error:  # nobody can be checked
                for name in names:
                    for mode in modes:
                        self.fail(name, mode, error)
                continue
            for name in names:
                self._check_one(name, checked, modes, expected, sample, limit)

    def _by_mask(self, providers: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
        for sees_all in (False, True):
            names = [n for n in providers if SPARSE_PROVIDERS[n].sees_all == sees_all]
            if names:
                yield sees_all, names

    def _retrieved(self, pattern: Retrieved, batch: Batch, modes: Sequence[str]) -> KeyLists:
        """The lists, whose blocks must be the best."""
        queries, histories = histories_of(batch, packed_queries(batch, batch.q), batch.k)
        longest = int(batch.lengths.max())
        lists = pattern.keys(queries, histories, causal=False, longest=longest)
        regret = regret_of(batch, pattern, lists)
        self.row(OURS, FORWARD, "regret", "1", op=LISTS, value=regret)
        if not regret <= MOST_REGRET:
            message = f"wrong: regret {regret:.3g} of the blocks, allowed is {MOST_REGRET:g}"
            self.failed |= {(OURS, mode): ("error", message) for mode in modes}
        return lists

    def _check_one(
        self,
        name: str,
        batch: Batch,
        modes: Sequence[str],
        expected: Reference,
        sample: Sample,
        limit: float,
    ) -> None:
        ready = self._prepare(name, batch, modes)
        if ready is None:
            return

        def errors(mode: str) -> Errors:
            got = ready.compare_as(batch, mode)
            return errors_of(got, expected, sample, width=4 if mode == TRAINING else 1)

        self.check(name, modes, errors, limit)
