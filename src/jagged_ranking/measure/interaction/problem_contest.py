"""One problem, everybody who solves it: checked, timed, weighed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure.contest import Contest, Run
from jagged_ranking.measure.interaction.problem import Peer, Problem, Ready, several
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.providers import FORWARD, MODES, TRAINING, Unavailable
from jagged_ranking.measure.reference import LEAST_TOLERANCE, Errors, compare

# So many roundings to the dtype of the batch a peer may be off by: some add up in that dtype, which
# is less exact but the same thing. Ours is held to what PyTorch makes that sums in float32.
PEER_ROUNDINGS = 5


class ProblemContest(Contest):
    """Our operation and its peers on one problem.

    Args:
        make: makes the problem, the same at every call: whoever is weighed has inputs of its own.
        dtype: of its inputs.
        backward: whether it has gradients.
        facts: of the batch; bytes, flops and the device's name are added.
        device: where it runs.
        device_name: how rows call that.
        options: of `Contest`.
    """

    def __init__(
        self,
        make: Callable[[], Problem],
        *,
        dtype: torch.dtype,
        backward: bool,
        facts: Mapping[str, Any],
        device: torch.device,
        device_name: str,
        **options: Any,
    ) -> None:
        self.make, self.dtype, self.backward = make, dtype, backward
        problem = make()
        facts = dict(facts)
        for kind, (forward, back) in (("bytes", problem.bytes), ("flops", problem.flops)):
            facts |= {f"{kind}_{FORWARD}": forward, f"{kind}_{TRAINING}": forward + back}
        facts["device"] = device_name
        super().__init__(facts=facts, device=device, **options)
        self.problem: Problem | None = problem
        self.providers = (OURS, *problem.peers)
        peers = problem.peers.items()
        self.needs = {OURS: 0, **{name: getattr(peer, "needs", 0) for name, peer in peers}}

    def check_and_time(self, modes: Sequence[str]) -> None:
        """Check everybody, then time whoever was right."""
        modes = self._possible(modes)
        self._check_and_time(modes)
        self.ask_alone(self.providers, modes, self._alone, lambda name, mode: self.needs[name])
        for name in self.providers:
            self.failure_rows(name, modes, {"latency": "ms"})

    def _check_and_time(self, modes: Sequence[str]) -> None:
        assert self.problem is not None
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
        builds = {(OURS, op): call for op, call in self.problem.builds.items()}
        self.problem = None
        for mode in modes:
            self.time({name: one.run for name, one in ready.items()}, mode)
        self.time_builds(builds)

    def weigh_all(self, modes: Sequence[str]) -> None:
        """Each provider alone on the device, with nothing but its own inputs."""
        self.weigh(self.providers, self._possible(modes), self._alone)

    def _alone(self, name: str) -> tuple[Run, list[Tensor]]:
        problem = self.make()
        ready = Ready(_peer(problem, name), problem.inputs, self._gradients(problem))
        return ready.run, ready.tensors()

    def _possible(self, modes: Sequence[str]) -> list[str]:
        return [mode for mode in modes if mode == FORWARD or self.backward]

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
        peer_limit = max(limit, PEER_ROUNDINGS * torch.finfo(self.dtype).eps)
        for name, one in ready.items():
            allowed = limit if name == OURS else peer_limit
            self.check(
                name, modes, lambda mode, one=one: _errors(one.compare_as(mode), expected), allowed
            )


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
