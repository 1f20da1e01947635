"""`measure_interaction`: every peer of an operation checked, timed and weighed, as one table."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from jagged_ranking import results
from jagged_ranking.devices import device_name
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings, ceiling_rows, measure_ceilings
from jagged_ranking.measure.contest import Contest, Run, known
from jagged_ranking.measure.interaction import elementwise, products, shapes
from jagged_ranking.measure.interaction.catalogue import OPERATIONS, Operation
from jagged_ranking.measure.interaction.layout import Layout
from jagged_ranking.measure.interaction.problem import Peer, Problem, Ready, several
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.providers import FORWARD, MODES, TRAINING, Unavailable
from jagged_ranking.measure.reference import Errors, compare
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
# A float32 provider may use the tf32 mode of the matrix units.
LEAST_TOLERANCE = 1e-3
# So many roundings to the dtype of the batch a peer may be off by: some add up in that dtype, which
# is less exact but the same thing. Ours is held to what PyTorch makes that sums in float32.
PEER_ROUNDINGS = 5


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
    with timing.threads(device, cpu_threads), timing.earlier_objects_apart():
        name = device_name(device)
        if ceilings is None:
            ceilings = measure_ceilings(device, dtype=workloads[0].dtype)
        common = {"run_id": run_id, "run_key": run_key}
        config = {"device": name, "ceiling_dtype": ceilings.dtype}
        rows = ceiling_rows(ceilings, config=config, **common)
        bar = tqdm(total=len(operations) * len(workloads), disable=not progress, unit="batch")
        for operation in (OPERATIONS[name] for name in operations):
            for workload in workloads:
                one = _Measurement(
                    operation,
                    workload,
                    device=device,
                    device_name=name,
                    effort=effort or Effort(),
                    ceilings=ceilings,
                    common=common,
                    tell=lambda said, op=operation: bar.set_postfix_str(f"{op.name}, {said}"),
                )
                one.check_and_time(modes)
                if workload.name in weighed:
                    one.weigh_all(modes)
                rows += one.rows
                bar.update()
            timing.release(device)
        bar.close()
    return results.frame(rows)


class _Measurement(Contest):
    """One operation on one workload."""

    def __init__(
        self,
        operation: Operation,
        workload: Workload,
        *,
        device: torch.device,
        device_name: str,
        **options: Any,
    ) -> None:
        self.operation, self.workload = operation, workload
        problem = self._problem(device)
        facts = {k: v for k, v in workload.facts().items() if k not in _ATTENTION}
        for kind, (forward, backward) in (("bytes", problem.bytes), ("flops", problem.flops)):
            facts |= {f"{kind}_{FORWARD}": forward, f"{kind}_{TRAINING}": forward + backward}
        facts["device"] = device_name
        super().__init__(
            op=operation.name, workload=workload.name, facts=facts, device=device, **options
        )
        self.problem: Problem | None = problem
        self.providers = (OURS, *problem.peers)

    def check_and_time(self, modes: Sequence[str]) -> None:
        """Check everybody, then time whoever was right."""
        assert self.problem is not None
        modes = self._possible(modes)
        ready: dict[str, Ready] = {}
        try:
            expected, limit = self._expected(self.problem, max(modes, key=MODES.index))
        except Exception as error:  # nobody can be checked
            for name in self.providers:
                for mode in modes:
                    self.fail(name, mode, error)
        else:
            ready = self._prepare_all(self.problem, modes)
            self._check(ready, expected, limit, modes)
            del expected
        self.problem = None
        for mode in modes:
            self.time({name: one.run for name, one in ready.items()}, mode)
        for name in self.providers:
            self.failure_rows(name, modes, {"latency": "ms"})

    def weigh_all(self, modes: Sequence[str]) -> None:
        """Each provider alone on the device, with nothing but its own inputs."""
        self.weigh(self.providers, self._possible(modes), self._alone)

    def _alone(self, name: str) -> tuple[Run, list[Tensor]]:
        problem = self._problem(self.device)
        ready = Ready(_peer(problem, name), problem.inputs, self._gradients(problem))
        return ready.run, ready.tensors()

    def _problem(self, device: torch.device) -> Problem:
        return PROBLEMS[self.operation.name](Layout(self.workload, device))

    def _possible(self, modes: Sequence[str]) -> list[str]:
        return [mode for mode in modes if mode == FORWARD or self.operation.backward]

    def _prepare_all(self, problem: Problem, modes: Sequence[str]) -> dict[str, Ready]:
        ready: dict[str, Ready] = {}
        gradients = self._gradients(problem)
        for name in self.providers:
            self.tell(name, "prepare")
            try:
                peer = _peer(problem, name)
                for mode in modes:
                    self.refuse(name, mode, peer.needs)
                if any((name, mode) not in self.failed for mode in modes):
                    ready[name] = Ready(peer, problem.inputs, gradients)
            except Exception as error:
                for mode in modes:
                    self.fail(name, mode, error)
        return ready

    @property
    def _plain(self) -> str:
        """The backend that providers are held against: on a CPU the specification; on a GPU the
        native one, vectorised PyTorch that shares nothing with the kernels, since a loop over
        users would take minutes."""
        return "native" if self.device.type == "cuda" else "reference"

    def _expected(self, problem: Problem, mode: str) -> tuple[list[Tensor], float]:
        """Results in float32, and the relative error beyond which ours is wrong: five times that of
        vectorised PyTorch on the batch in its dtype, which sums in float32 where ours does."""
        plain = problem.ours(self._plain)
        whole = [x.float() if x.is_floating_point() else x for x in problem.inputs]
        gradients = self._gradients(problem)
        expected = Ready(plain, whole, [g.float() for g in gradients]).compare_as(mode)
        same = Ready(plain, problem.inputs, gradients).compare_as(mode)
        return expected, max(5 * _errors(same, expected).relative, LEAST_TOLERANCE)

    def _gradients(self, problem: Problem) -> list[Tensor]:
        """Of the outputs: standard normal, the same at every call; nothing for integers."""
        with torch.no_grad():
            outputs = several(problem.call(self._plain, *problem.inputs))
        found = []
        for out in outputs:
            generator = torch.Generator(out.device).manual_seed(0)
            numbers = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            numbers.normal_(generator=generator)
            found.append(numbers.to(out.dtype) if out.is_floating_point() else out)
        return found

    def _check(
        self,
        ready: dict[str, Ready],
        expected: Sequence[Tensor],
        limit: float,
        modes: Sequence[str],
    ) -> None:
        peer_limit = max(limit, PEER_ROUNDINGS * torch.finfo(self.workload.dtype).eps)
        for name, one in ready.items():
            for mode in modes:
                if (name, mode) in self.failed:
                    continue
                self.tell(name, f"check, {mode}")
                try:
                    errors = _errors(one.compare_as(mode), expected)
                except Exception as error:
                    self.fail(name, mode, error)
                    continue
                self.judge(name, mode, errors, limit if name == OURS else peer_limit)


def _peer(problem: Problem, name: str) -> Peer:
    if name == OURS:
        return problem.ours()
    peer = problem.peers[name]
    if isinstance(peer, Unavailable):
        raise peer
    return peer


def _errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> Errors:
    for one, other in zip(got, expected, strict=False):
        if one.shape != other.shape:
            raise ValueError(f"shape {tuple(one.shape)} in place of {tuple(other.shape)}")
    return compare(list(zip(got, expected, strict=False)))
