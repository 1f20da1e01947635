"""Steps that are captured once for a bucket and replayed for batches of other lengths."""

from __future__ import annotations

import copy
import gc
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from graph_steps import Model, a_batch, everyone, some_lengths, step_loss
from processes import run_python

from jagged_kernels import JaggedTensor, StepGraphs, jagged_attention
from jagged_kernels.graphs.step_graphs import WARM_UPS

pytestmark = pytest.mark.gpu


class Training:
    """A model, its optimiser, and a step of them."""

    def __init__(self, model, optimiser: Any = torch.optim.AdamW, **options):
        self.model = copy.deepcopy(model)
        self.optimiser = optimiser(self.model.parameters(), lr=0.01, **options)

    def __call__(self, inputs, real):
        loss = step_loss(self.model, inputs, real)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss


def batch_of(users, longest):
    return a_batch(some_lengths(users, longest), torch.float32, device="cuda")


def two_sizes(count):
    """Batches of other lengths each time, in two buckets or a few."""
    for number in range(count):
        yield batch_of(60, 12) if number % 2 else batch_of(50, 60)


def test_training_by_graphs_is_training():
    """Within rounding: sums over tokens are of other lengths with padding. By SGD: AdamW divides
    by gradients, also by those that are nothing but rounding."""
    model = Model(torch.float32).cuda()
    plain, graphed = (Training(model, torch.optim.SGD, momentum=0.9) for _ in range(2))
    steps = StepGraphs(graphed, per_octave=1)
    for batch in two_sizes(20):
        expected = plain(batch, everyone(batch)).detach()
        torch.testing.assert_close(steps(batch), expected, rtol=1e-3, atol=1e-5)
    assert steps.graphs >= 2
    assert steps.replayed == 20 - steps.eager
    assert steps.eager <= WARM_UPS * len(steps.buckets)
    assert steps.memory > 0
    for mine, other in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_two_captures_train_one_model_in_turns():
    """Each has graphs and buckets of its own, over the same weights and optimiser."""
    model = Model(torch.float32).cuda()
    plain, graphed = (Training(model, torch.optim.SGD, momentum=0.9) for _ in range(2))
    turns = [StepGraphs(graphed, per_octave=1) for _ in range(2)]
    for number, batch in enumerate(two_sizes(24)):
        expected = plain(batch, everyone(batch)).detach()
        found = turns[number // 2 % 2](batch)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert all(steps.replayed for steps in turns)
    for mine, other in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_a_step_that_raised_is_done_before_its_inputs_change():
    out = torch.zeros(8, device="cuda")

    def step(inputs, real):
        torch.cuda._sleep(10**8)
        out.copy_(inputs["label"][:8])
        raise ValueError("of the step")

    steps, batches = StepGraphs(step), [batch_of(8, 8) for _ in range(2)]
    for batch in batches:
        with pytest.raises(ValueError, match="of the step"):
            steps(batch)
        batch["was"] = out.clone()
    for batch in batches:
        assert torch.equal(batch["was"], batch["label"])


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (128, torch.bfloat16)], ids=str)
def test_a_replay_is_the_padded_step_to_the_bit(dim, dtype):
    """The same kernels by the same sizes, of long users Hopper's own."""
    steps_taken = []

    def attend(inputs, real):
        steps_taken.append(real)
        q, k, v = (inputs[name].values.clone().requires_grad_() for name in "qkv")
        x = inputs["q"]
        out = jagged_attention(*map(x.with_values, (q, k, v)), causal=True).values
        (out * inputs["weight"].values).sum().backward()
        return out, q.grad, k.grad, v.grad

    replayed, eager = StepGraphs(attend, per_octave=1), StepGraphs(attend, per_octave=1)
    for number in range(8):
        lengths = some_lengths(8, 1500)
        x = JaggedTensor.from_lengths(torch.zeros(int(lengths.sum()), 1), lengths).to("cuda")
        values = (torch.randn(len(x.values), 2, dim, device="cuda", dtype=dtype) for _ in range(4))
        names = ("q", "k", "v", "weight")
        batch: dict[str, Any] = dict(zip(names, map(x.with_values, values), strict=True))
        for kept in eager._kept.values():
            kept.warm_ups = 0
        for mine, expected in zip(replayed(batch), eager(batch), strict=True):
            assert torch.equal(mine, expected), number
    assert replayed.replayed > 0
    assert eager.replayed == 0
    assert len(steps_taken) == 8 + replayed.eager + replayed.graphs


def test_replays_do_not_wait_nor_compile():
    from jagged_kernels.attention.plain import dkv, dq
    from jagged_kernels.attention.plain import forward as triton_forward
    from jagged_kernels.attention.plain import short as triton_short
    from jagged_kernels.schedule import triton_rows

    kernels = (
        triton_rows._fill_kernel,
        triton_forward._forward_kernel,
        dq._dq_kernel,
        dkv._dkv_kernel,
        triton_short._short_forward_kernel,
        triton_short._short_backward_kernel,
    )

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    steps = StepGraphs(Training(Model(torch.float32).cuda(), capturable=True), per_octave=1)
    batches = list(two_sizes(12))
    for _ in range(WARM_UPS + 1):
        for batch in batches:
            steps(batch)
    before, replayed = compiled(), steps.replayed
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            steps(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before
    assert steps.replayed == replayed + len(batches)


def test_results_outlive_other_replays():
    steps = StepGraphs(lambda inputs, real: (inputs["x"].values * 2 + 1).sum(0), per_octave=1)
    batches = [batch_of(50, 60), batch_of(60, 3)] * 4
    found = [steps(batch) for batch in batches]
    assert steps.graphs == 2
    for total, batch in zip(found, batches, strict=True):
        (bucket,) = (b for b in steps.buckets if b.tokens[0] // 2 < len(batch["x"].values)
                     <= b.tokens[0])  # fmt: skip
        expected = batch["x"].values.sum(0) * 2 + bucket.tokens[0]
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)


def test_random_numbers_are_drawn_anew():
    steps = StepGraphs(lambda inputs, real: torch.nn.functional.dropout(inputs["x"].values))
    batch = batch_of(8, 8)
    found = [steps(batch) for _ in range(WARM_UPS + 4)]
    assert steps.replayed == 4
    assert not any(torch.equal(a, b) for a, b in pairwise(found))


def test_another_thread_may_make_batches_while_a_step_is_captured():
    done, failures, made = threading.Event(), [], []

    def make():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    made.append(torch.ones(1000).pin_memory().to("cuda", non_blocking=True) + 1)
                    del made[:-10]
        except Exception as error:  # where it is looked at
            failures.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        steps = StepGraphs(Training(Model(torch.float32).cuda(), capturable=True), per_octave=1)
        losses = [steps(batch) for batch in two_sizes(12)]
    finally:
        done.set()
        thread.join()
    assert not failures
    assert steps.graphs >= 2
    assert torch.stack(losses).isfinite().all()


def works_still():
    """A capture that failed leaves nothing behind: random numbers, memory, other captures."""
    torch.rand(1000, device="cuda")
    steps = StepGraphs(Training(Model(torch.float32).cuda(), capturable=True), per_octave=1)
    losses = [steps(batch) for batch in two_sizes(12)]
    return steps.graphs >= 2 and bool(torch.stack(losses).isfinite().all())


def test_a_step_that_waits_is_refused_before_it_is_captured():
    def step(inputs, real):
        return inputs["x"].values.sum() / inputs["x"].lengths.max().item()

    steps = StepGraphs(step)
    batch = batch_of(8, 8)
    steps(batch)
    line = step.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match=rf"waits for the device at .*{__file__}:{line}"):
        steps(batch)
    assert works_still()


def test_an_optimiser_that_is_not_capturable_is_refused():
    steps = StepGraphs(Training(Model(torch.float32).cuda()))
    batch = batch_of(8, 8)
    for _ in range(WARM_UPS):
        steps(batch)
    with pytest.raises(RuntimeError, match=r"the step cannot be captured: .*capturable is False"):
        steps(batch)
    assert works_still()


def test_what_cuda_refuses_leaves_stream_memory_and_generator_in_order():
    """In a process of its own: how a refused capture leaves the rest, PyTorch does not say."""
    code = """
import torch
from jagged_kernels import JaggedTensor, StepGraphs

def step(inputs, real):
    total = torch.dropout(inputs["x"].values, 1e-9, True).sum()
    if torch.cuda.is_current_stream_capturing():
        total.item()
    return total

x = JaggedTensor.from_list([torch.ones(3, device="cuda"), torch.ones(2, device="cuda")])
steps = StepGraphs(step)
print([steps({"x": x}).item() for _ in range(2)])
try:
    steps({"x": x})
except RuntimeError as error:
    print(error)
print(torch.cuda.current_stream() == torch.cuda.default_stream())
print(torch.rand(2, device="cuda").unique().numel())
more = StepGraphs(lambda inputs, real: torch.dropout(inputs["x"].values, 1e-9, True).sum())
print([more({"x": x}).item() for _ in range(4)], more.graphs)
"""
    found = run_python(code)
    lines = found.stdout.splitlines()
    assert found.returncode == 0, found.stderr
    assert lines[0] == "[5.0, 5.0]"
    assert lines[1].startswith("the step cannot be captured: ")
    assert lines[2:] == ["True", "2", "[5.0, 5.0, 5.0, 5.0] 1"]


def test_graphs_that_nobody_has_are_not_deleted_in_a_capture():
    class Circle:
        def __init__(self):
            self.me, self.steps = self, StepGraphs(lambda inputs, real: inputs["x"].values * 2)

    def use(circle):
        for _ in range(WARM_UPS + 1):
            circle.steps(batch)

    batch, thresholds = batch_of(8, 8), gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            use(Circle())
        steps = StepGraphs(lambda inputs, real: tuple((inputs["x"].values + 1,) for _ in range(9)))
        for _ in range(WARM_UPS):
            steps(batch)
        gc.enable()
        gc.set_threshold(1)
        steps(batch)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert steps.replayed == 1
