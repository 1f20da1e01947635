"""`StepGraphs`: a step over jagged batches as CUDA graphs, one for each bucket of sizes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from jagged_kernels.core.sizes import as_int, power_of_two
from jagged_kernels.graphs.buckets import MOST_PER_OCTAVE, Bucket, bucket_of
from jagged_kernels.graphs.static_batch import (
    Column,
    Form,
    Inputs,
    StaticBatch,
    check_form,
    form_of,
)
from jagged_kernels.graphs.waits import noted_waits

Step = Callable[[Any, Tensor], Any]
# Steps of a bucket before its graph is captured: the first compiles kernels and makes what is made
# once, the second is watched for waiting.
WARM_UPS = 2
# PyTorch's allocator of pinned memory goes on asking a graph whose capture failed: it must stay.
_FAILED: list[torch.cuda.CUDAGraph] = []


class StepGraphs:
    """A step that is captured once for each bucket of batch sizes, and then replayed.

    Where histories are short, launching a step takes the host longer than taking it does the
    device. A CUDA graph launches it at once, but is of one batch's sizes. Here a batch is brought
    to the next larger of a few sizes (`graphs.buckets`), copied to tensors that stay, and the graph
    of that bucket replayed. The tokens that a bucket has more are those of *padding users*, whose
    tokens and rows are zeros, and which belong to no one: a padded batch is a batch like any other,
    every operation takes it, and writes all of its rows.

    Args:
        step: called as `step(inputs, real)`: `inputs` as a batch, at a bucket's size, and `real`
            bool [B], False at padding users. Returns tensors, also in tuples and dictionaries, or
            None. It must leave out padding users where it adds up over users or tokens, as in
            `torch.where(real, loss, 0).sum() / real.sum()`: then all their gradients are zeros, and
            those of weights are the batch's. What it computes of zeros must be finite, and it
            changes none of its inputs in place. Of tokens `real` is
            `torch.repeat_interleave(real, x.lengths, output_size=len(x.values))`.
        per_octave: sizes from one power of two to the next, itself a power of two up to 16: the
            tokens of a padded batch are at most 1 / per_octave more than a batch's (from 16 on).
            More sizes waste less, and make more graphs.
        most_graphs: buckets that are kept. Batches of further ones are padded and taken without a
            graph.

    Attributes:
        replayed, eager: calls so far that replayed a graph, and that took the step without one.

    Raises:
        TypeError: `step` is no function, or a number no int.
        ValueError: `per_octave` or `most_graphs` is none of those.

    Called with a batch: names -> a `JaggedTensor` [T, ...], a tensor [B, ...] of users, or one []
    without dimensions, such as a learning rate; names, dtypes, shapes of tokens and who shares
    offsets are the same in all batches. The first two batches of a bucket are steps without a
    graph; none is ever taken twice, so that a step may hold an optimiser. On a CPU there are no
    graphs, and all else is the same. Returned are copies, without gradients, of what the step
    returned, padding users included.

    Raises there:
        TypeError, ValueError: a batch is not as the first one, or wants gradients, or the step
            changed it in place; the first line says which of its inputs.
        ValueError: `torch.autocast` is around the call: casts of weights that it keeps would be
            those of the capture. Enter it in the step.
        RuntimeError: the step cannot be captured: it waits for the device, and where, or what CUDA
            had against it.

    What a graph replays is what the step launched while it was captured:
    - What Python decides is decided then: numbers (a learning rate must be a tensor), `train()` and
      `eval()`, whether there are gradients, which kernels. Kernels are chosen by the sizes of the
      bucket, tokens and users.
    - What is kept from step to step (weights, state of optimisers, averages) must exist after the
      first two steps, and change in place. Gradients are not kept: leave them in the step, with the
      optimiser (of PyTorch's with `capturable=True`), or return them.
    - Build a schedule in the step, for all layers: while a graph is captured, each call without one
      builds its own. Random numbers are drawn anew in each replay.
    - Nothing may wait for the device: no `item()`, no indexing by bools, no data from the host. Of
      this package these wait: `to_padded` without `max_len`; `from_padded`, `jagged_recent`,
      `jagged_slice`, `jagged_index_select` and `jagged2_like` without `total`; `jagged_outer`
      without `like`; `jagged_unique`; `retrieved_blocks`, and `keys` by a rule, without `longest`;
      `KeyLists.from_rows` without `q_tokens` and `k_tokens`;
      `attention_schedule` of two offsets without `shared_offsets`; attention in PyTorch (float64,
      a head_dim above 256); sparse gradients of `jagged_embedding`; `JaggedTensor` without
      `validate=False`, users by index, `unbind`.
    - `longest` is of the bucket, too: the most tokens that any user will have. `total` in these is
      a size of one batch: what has as many tokens as one batch says has no bucket.

    Graphs share their memory, about as much as the largest needs; `memory` says it, with inputs.

    Example: a training step, of which a user's label is part of the batch.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train(inputs, real):
    ...     logit = model(jagged_mean(inputs["history"]))[:, 0]
    ...     loss = torch.where(real, (logit - inputs["label"]).square(), 0).sum() / real.sum()
    ...     loss.backward()
    ...     optimiser.step()
    ...     optimiser.zero_grad()
    ...     return loss
    >>> steps = StepGraphs(train)
    >>> for lengths in ([3, 1], [2, 5], [0, 4]):
    ...     history = JaggedTensor.from_list([torch.ones(n, 4) for n in lengths])
    ...     loss = steps({"history": history, "label": torch.ones(2)})
    >>> steps
    StepGraphs(buckets=1, graphs=0, replayed=0, eager=3)
    """

    def __init__(self, step: Step, *, per_octave: int = 4, most_graphs: int = 16) -> None:
        if not callable(step):
            raise TypeError(f"step must be a function, got {type(step).__name__}")
        per_octave = as_int("per_octave", per_octave)
        most_graphs = as_int("most_graphs", most_graphs)
        if not 1 <= per_octave <= MOST_PER_OCTAVE or power_of_two(per_octave) != per_octave:
            raise ValueError(
                f"per_octave must be a power of two up to {MOST_PER_OCTAVE}, got {per_octave}"
            )
        if most_graphs < 1:
            raise ValueError(f"most_graphs must be at least 1, got {most_graphs}")
        self.step, self.per_octave, self.most_graphs = step, per_octave, most_graphs
        self.replayed = self.eager = 0
        self._kept: dict[Bucket, _Kept] = {}
        self._expected: tuple[dict[str, Column], torch.device] | None = None
        self._captures: _Captures | None = None

    def __repr__(self) -> str:
        return (
            f"StepGraphs(buckets={len(self._kept)}, graphs={self.graphs}, "
            f"replayed={self.replayed}, eager={self.eager})"
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """(users, tokens, reach) of those that are kept, in the order of their first batches."""
        return tuple(self._kept)

    @property
    def graphs(self) -> int:
        """Captured so far."""
        return sum(kept.graph is not None for kept in self._kept.values())

    @property
    def memory(self) -> int:
        """Bytes that the inputs of all buckets have, and what captures reserved for the rest."""
        inputs = sum(kept.static.nbytes for kept in self._kept.values())
        return inputs + (0 if self._captures is None else self._captures.reserved)

    def __call__(self, batch: Inputs) -> Any:
        """Takes a step; see the class."""
        if torch._C._is_any_autocast_enabled():
            raise ValueError("torch.autocast is around StepGraphs: enter it in the step")
        form = form_of(batch)
        self._check(form)
        bucket = bucket_of(form.users, form.tokens, self.per_octave)
        kept = self._kept.get(bucket)
        if kept is None:
            kept = _Kept(StaticBatch(form, bucket))
            if len(self._kept) < self.most_graphs:
                self._kept[bucket] = kept
        kept.static.fill(batch, form)
        if form.device.type != "cuda":
            self.eager += 1
            return _copied(self._taken(kept.static))
        if self._captures is None:
            self._captures = _Captures(form.device)
        with torch.cuda.device(form.device):
            return self._on_a_gpu(kept, self._captures)

    def _on_a_gpu(self, kept: _Kept, captures: _Captures) -> Any:
        if kept.graph is None and kept.warm_ups < WARM_UPS:
            watched = kept.warm_ups == WARM_UPS - 1
            outputs = captures.beside(lambda: self._taken(kept.static), watched=watched)
            kept.warm_ups += 1
            self.eager += 1
            return _copied(outputs)
        if kept.graph is None:
            kept.graph, kept.outputs = captures.captured(
                lambda: tree_map_only(Tensor, Tensor.detach, self._taken(kept.static))
            )
        kept.graph.replay()
        self.replayed += 1
        return _copied(kept.outputs)

    def _taken(self, static: StaticBatch) -> Any:
        before = static.versions()
        outputs = self.step(dict(static.inputs), static.real)
        for name, version in static.versions().items():
            if version != before[name]:
                raise ValueError(
                    f"the step changed {name} in place: padding users would keep it in the next "
                    "batch; copy it first"
                )
        return outputs

    def _check(self, form: Form) -> None:
        if self._expected is None:
            self._expected = form.columns, form.device
        columns, device = self._expected
        check_form(form.columns, columns)
        if form.device != device:
            raise ValueError(f"the batch is on {form.device}, and the first one was on {device}")


class _Kept:
    """Of a bucket."""

    def __init__(self, static: StaticBatch) -> None:
        self.static, self.warm_ups = static, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Any = None


def _copied(outputs: Any) -> Any:
    # The next replay, of any graph, writes to the memory of these.
    return tree_map_only(Tensor, lambda x: x.detach().clone(), outputs)


class _Captures:
    """The stream that steps are warmed up and captured in, and the memory of all graphs.

    A node that adds up a weight's gradient belongs to the stream where it was made: so warming up
    in another one would make the capture wait for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.device, self.reserved = device, 0

    def beside(self, step: Callable[[], Any], *, watched: bool) -> Any:
        """A step in the stream, before whatever the current stream is given next.

        Raises:
            RuntimeError: it was watched, and waited.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        waits: list[str] = []
        try:
            with torch.cuda.stream(self.stream):
                if watched:
                    with noted_waits() as waits:
                        outputs = step()
                else:
                    outputs = step()
        finally:  # what a step had launched before it raised goes on
            current.wait_stream(self.stream)
        if waits:
            raise RuntimeError(
                f"the step cannot be captured: it waits for the device at {waits[0]}"
            )
        return outputs

    def captured(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of a step, and its outputs, which are nothing yet.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may make the next batch meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        try:
            # The outer one, because a capture that fails does not leave its stream.
            with _uncollected(), torch.cuda.stream(self.stream), capture:
                before = torch.cuda.memory_reserved(self.device)
                outputs = step()
                self.reserved += torch.cuda.memory_reserved(self.device) - before
        except Exception as error:
            self._give_up(graph)
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            said = (str(first).splitlines() or [type(first).__name__])[0]
            raise RuntimeError(f"the step cannot be captured: {said}") from error
        return graph, outputs

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """What PyTorch does where a capture ends, and leaves undone where CUDA has refused it."""
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
        except RuntimeError:  # it has ended in order
            return
        torch._C._cuda_releasePool(self.device.index, self.pool)
        _FAILED.append(graph)
        # The device's generator of random numbers counts for a capture until one has ended.
        with contextlib.suppress(RuntimeError), _uncollected():
            nothing = torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"
            )
            with torch.cuda.stream(self.stream), nothing:
                torch.zeros((), device=self.device)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles: a graph that it deletes ends a capture in failure."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
