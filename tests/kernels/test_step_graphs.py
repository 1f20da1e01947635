"""Steps over padded batches: the same numbers as without padding. What is captured and replayed is
in test_step_graphs_gpu."""

from __future__ import annotations

import math
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_steps import GENERATOR, Model, a_batch, everyone, some_lengths, step_loss

from jagged_kernels import JaggedTensor, StepGraphs
from jagged_kernels.graphs.buckets import LEAST, _next_below, bucket_of, round_up
from jagged_kernels.graphs.static_batch import StaticBatch, form_of
from jagged_kernels.graphs.step_graphs import _Captures
from jagged_kernels.graphs.waits import noted_waits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_octave", [1, 2, 4, 8, 16])
def test_sizes_are_few_and_not_much_larger(per_octave):
    sizes = [round_up(size, per_octave) for size in range(5000)]
    assert sizes == sorted(sizes)
    assert all(round_up(size, per_octave) == size for size in sizes)
    for size, rounded in enumerate(sizes):
        assert size <= rounded
        assert rounded == LEAST or rounded - size < size / per_octave
    few = sorted(set(sizes))
    assert [_next_below(size, per_octave) for size in few] == [0, *few[:-1]]
    octaves = math.log2(4096 / LEAST)
    assert len({size for size in sizes if size <= 4096}) == 1 + octaves * per_octave


@pytest.mark.parametrize("longest", [1, 3, 60, 2000])
def test_padding_users_hold_what_is_over_and_none_is_the_longest(longest):
    for _ in range(200):
        users = int(torch.randint(1, 300, (), generator=GENERATOR))
        sides = [some_lengths(users, longest), some_lengths(users, 2)]
        tokens = tuple(int(lengths.sum()) for lengths in sides)
        bucket = bucket_of(users, tokens, 4)
        batch = {
            f"side {number}": JaggedTensor.from_lengths(torch.ones(size, 1), lengths)
            for number, (size, lengths) in enumerate(zip(tokens, sides, strict=True))
        }
        form = form_of(batch)
        static = StaticBatch(form, bucket)
        static.fill(batch, form)
        for lengths, x in zip(sides, static.inputs.values(), strict=True):
            assert isinstance(x, JaggedTensor)
            assert len(x) == bucket.users
            JaggedTensor(x.values, x.offsets)  # looks at the contents
            assert torch.equal(x.lengths[:users], lengths)
            assert x.lengths[users:].max() <= max(1, int(lengths.max()))
        assert static.real.tolist() == [True] * users + [False] * (bucket.users - users)


@pytest.mark.parametrize("per_octave", [1, 4, 16])
def test_padding_users_have_room_for_the_most_that_a_batch_leaves(per_octave):
    """Of a batch of one token more than a size that there is, and of a second side of few."""
    sizes = sorted({round_up(size, per_octave) for size in range(2000)})
    for users in range(1, 100):
        for tokens in (0, *[size + 1 for size in sizes]):
            bucket = bucket_of(users, (tokens, 1), per_octave)
            padding = bucket.users - users
            for size, reach, own in zip(bucket.tokens, bucket.reach, (tokens, 1), strict=True):
                assert padding * reach >= size - own


def test_the_batches_of_a_bucket_have_about_as_many_tokens_a_user():
    """By which kernels are chosen."""
    for users, tokens in ((512, 600_000), (1000, 33_000), (4096, 300_000)):
        bucket = bucket_of(users, (tokens,), 4)
        assert tokens / users == pytest.approx(bucket.tokens[0] / bucket.users, rel=0.3)


# --- inputs ---------------------------------------------------------------------------------------


LENGTHS = ([3, 0, 9, 1], [0, 0, 30, 1], [7, 2, 2, 2, 5, 0], [1], [40, 17, 3], [0, 0])


def test_a_filled_batch_is_as_new_whatever_was_there_before():
    batches = [a_batch(lengths) for lengths in ([5, 9], [1, 0, 2], [14], [5, 9])]
    bucket = bucket_of(3, (16, 16), 4)
    kept = StaticBatch(form_of(batches[0]), bucket)
    for batch in batches:
        form = form_of(batch)
        kept.fill(batch, form)
        fresh = StaticBatch(form, bucket)
        fresh.fill(batch, form)
        assert torch.equal(kept.real, fresh.real)
        for name, x in fresh.inputs.items():
            held: Any = batch[name]
            x_kept: Any = kept.inputs[name]
            if isinstance(x, JaggedTensor):
                assert torch.equal(x_kept.offsets, x.offsets)
                held, x, x_kept = held.values, x.values, x_kept.values
            assert torch.equal(x_kept, x)
            if x.dim():
                assert torch.equal(x[: len(held)], held)
                assert not x[len(held) :].any()
    assert kept.inputs["x"].offsets is kept.inputs["item"].offsets


def test_sides_of_other_lengths_are_filled_each_by_its_own():
    """Also where as many tokens as one has more, the other has fewer."""
    bucket = bucket_of(2, (16, 16), 4)
    batches = []
    for n, m in ((5, 9), (9, 5), (3, 9)):
        sides = JaggedTensor.from_list([torch.ones(n)]), JaggedTensor.from_list([torch.ones(m)])
        batches.append(dict(zip("ab", sides, strict=True)))
    static = StaticBatch(form_of(batches[0]), bucket)
    for batch in batches:
        static.fill(batch, form_of(batch))
        for name, x in batch.items():
            padded: Any = static.inputs[name]
            JaggedTensor(padded.values, padded.offsets)  # looks at the contents
            assert padded.offsets[1] == len(x.values) == padded.values.sum()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_keep_their_dtype(dtype):
    x = JaggedTensor(torch.ones(3), torch.tensor([0, 2, 3], dtype=dtype))
    steps = StepGraphs(lambda inputs, real: inputs["x"].offsets)
    assert steps({"x": x}).dtype == dtype


def test_losses_and_gradients_are_those_without_padding():
    model = Model()
    names = [name for name, _ in model.named_parameters()]

    def step(inputs, real):
        loss = step_loss(model, inputs, real)
        return loss, dict(zip(names, torch.autograd.grad(loss, [*model.parameters()]), strict=True))

    steps = StepGraphs(step)
    for lengths in LENGTHS * 2:
        batch = a_batch(lengths)
        found, expected = steps(batch), step(batch, everyone(batch))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert len(steps.buckets) < len(LENGTHS)
    assert (steps.replayed, steps.eager, steps.graphs) == (0, 2 * len(LENGTHS), 0)
    assert steps.memory > 0


def test_training_is_that_without_padding():
    models = Model(), Model()
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]

    def taken(number, inputs, real):
        loss = step_loss(models[number], inputs, real)
        loss.backward()
        optimisers[number].step()
        optimisers[number].zero_grad()
        return loss

    steps = StepGraphs(lambda inputs, real: taken(0, inputs, real), per_octave=1)
    for number in range(20):
        batch = a_batch(some_lengths(4 + number % 3, 9 if number % 2 else 30))
        expected = taken(1, batch, everyone(batch)).detach()
        torch.testing.assert_close(steps(batch), expected, rtol=1e-10, atol=1e-12)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


def test_what_kernels_write_behind_a_batch_is_finite_and_its_gradients_are_zeros():
    model = Model(torch.float32, backend="triton").to(DEVICE)
    held = {}

    def step(inputs, real):
        x = inputs["x"]
        leaf = x.values.clone().requires_grad_()
        loss = step_loss(model, {**inputs, "x": x.with_values(leaf)}, real)
        loss.backward()
        held["gradient"] = leaf.grad
        return loss, [p.grad for p in model.parameters()]

    steps = StepGraphs(step)
    steps(
        a_batch([6, 9], torch.float32, bad=True, device=DEVICE)
    )  # in the same bucket: nothing of it may stay
    model.zero_grad()
    batch = a_batch([3, 1], torch.float32, device=DEVICE)
    found = steps(batch)
    assert len(steps.buckets) == 1
    assert not held["gradient"][4:].any()
    model.zero_grad()
    torch.testing.assert_close(found, step(batch, everyone(batch)))


def test_results_are_copies_without_gradients():
    x = JaggedTensor.from_list([torch.ones(2, 1), torch.ones(1, 1)])
    weight = torch.ones(1, requires_grad=True)

    def step(inputs, real):
        return {"x": inputs["x"], "products": [inputs["x"].values * weight]}

    steps = StepGraphs(step)
    first = steps({"x": x})
    second = steps({"x": x.with_values(2 * x.values)})
    assert isinstance(first["x"], JaggedTensor)
    assert first["x"].values[:4, 0].tolist() == [1, 1, 1, 0]
    assert second["products"][0][:4, 0].tolist() == [2, 2, 2, 0]
    assert not second["products"][0].requires_grad
    assert StepGraphs(lambda inputs, real: None)({"x": x}) is None


def test_a_step_may_take_its_inputs_out_of_what_it_is_given():
    steps = StepGraphs(lambda inputs, real: inputs.pop("x").values.sum())
    assert [steps({"x": JaggedTensor.from_list([torch.ones(n)])}) for n in (2, 3)] == [2, 3]


def test_inference_mode_leaves_inputs_that_training_takes():
    x = JaggedTensor.from_list([torch.ones(2, 1), torch.ones(1, 1)])
    weight = torch.ones(1, requires_grad=True)

    def step(inputs, real):
        loss = (inputs["x"].values * weight).sum()
        return torch.autograd.grad(loss, weight) if torch.is_grad_enabled() else loss

    steps = StepGraphs(step)
    with torch.inference_mode():
        assert steps({"x": x}) == 3
    (gradient,) = steps({"x": x.with_values(2 * x.values)})
    assert gradient == 6
    with torch.inference_mode():
        assert steps({"x": x}) == 3


def test_the_stream_of_a_step_that_raised_is_waited_for(monkeypatch):
    """Its launches go on, and read inputs that the next batch would overwrite."""
    log = []
    streams = [SimpleNamespace(wait_stream=lambda other, me=me: log.append((me, other)))
               for me in ("current", "own")]  # fmt: skip
    current, own = streams
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    captures: Any = SimpleNamespace(stream=own, device=None)

    def step():
        log.append("taken")
        raise KeyError

    with pytest.raises(KeyError):
        _Captures.beside(captures, step, watched=False)
    assert log == [("own", current), "taken", ("current", own)]


def test_further_buckets_are_not_kept():
    steps = StepGraphs(lambda inputs, real: inputs["x"].offsets.max(), most_graphs=2)
    sizes = [steps({"x": JaggedTensor.from_list([torch.ones(n)])}) for n in (1, 100, 1000, 1, 1000)]
    assert sizes == [16, 112, 1024, 16, 1024]
    assert [bucket.tokens for bucket in steps.buckets] == [(16,), (112,)]
    assert repr(steps) == "StepGraphs(buckets=2, graphs=0, replayed=0, eager=5)"


class Recorded:
    """In place of CUDA: what is taken, watched, captured and replayed."""

    def __init__(self):
        self.log = []

    def beside(self, step, *, watched):
        self.log.append("watched" if watched else "taken")
        return step()

    def captured(self, step):
        self.log.append("captured")
        outputs = step()
        outputs.fill_(torch.nan)  # a capture computes nothing
        return SimpleNamespace(replay=lambda: self._replay(outputs)), outputs

    def _replay(self, outputs):
        self.log.append("replayed")
        outputs.fill_(7)


def test_the_third_batch_of_a_bucket_is_captured():
    x = JaggedTensor.from_list([torch.ones(3)])
    captures: Any = Recorded()
    steps = StepGraphs(lambda inputs, real: inputs["x"].values.sum())
    steps({"x": x})
    (kept,) = steps._kept.values()
    found = [steps._on_a_gpu(kept, captures) for _ in range(5)]
    assert captures.log == ["taken", "watched", "captured", "replayed", "replayed", "replayed"]
    assert torch.stack(found).tolist() == [3, 3, 7, 7, 7]
    assert repr(steps) == "StepGraphs(buckets=1, graphs=1, replayed=3, eager=3)"


# --- errors ---------------------------------------------------------------------------------------


def two_users(values=(1.0, 2.0, 3.0), **options):
    return JaggedTensor(torch.tensor(values, **options), torch.tensor([0, 2, 3]))


X = two_users()


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        ({"a": torch.ones(2)}, ValueError, "a batch must have a JaggedTensor, got a"),
        ({}, ValueError, "a batch must have a JaggedTensor, got nothing"),
        ({"x": X, "y": [1]}, TypeError, "y must be a JaggedTensor or a tensor, got .*list"),
        ({"x": X, "y": torch.ones(3)}, ValueError, r"y must have 2 rows, one a user .* got 3"),
        ({"x": X, "y": JaggedTensor.from_list([torch.ones(1)])}, ValueError,
         "y has 1 users, and others have 2"),
        ({"x": X, "y": JaggedTensor(torch.ones(4), X.offsets, validate=False)}, ValueError,
         "y must have 3 tokens, as others of its offsets, got 4"),
        ({"x": two_users(requires_grad=True)}, ValueError, "x wants a gradient"),
        ({"x": X.with_values(torch.ones(3, requires_grad=True) * 2)}, ValueError,
         "x wants a gradient"),
        ({"x": X, "y": torch.ones(2, device="meta")}, ValueError, "y is on meta, .* on cpu"),
    ],
)  # fmt: skip
def test_batches_that_are_none(batch, error, said):
    with pytest.raises(error, match=said):
        StepGraphs(lambda inputs, real: None)(batch)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": X}, r"y is not there, and of the first batch float32 \[T0, 2\]"),
        ({"x": X, "y": X.with_values(torch.ones(3, 3))}, r"y is float32 \[T0, 3\], .* \[T0, 2\]"),
        ({"x": X, "y": X.with_values(torch.ones(3, 2).int())}, r"y is int32 \[T0, 2\]"),
        ({"x": X, "y": JaggedTensor(torch.ones(3, 2), X.offsets.clone())}, r"y is .* \[T1, 2\]"),
        ({"x": X, "y": torch.ones(2, 2)}, r"y is float32 \[B, 2\]"),
        ({"x": X, "y": torch.tensor(1.0)}, r"y is float32 \[\]"),
        (
            {"x": X, "y": X.with_values(torch.ones(3, 2)), "z": X},
            r"z is float32 \[T0\], .* not there",
        ),
    ],
)
def test_batches_that_are_not_as_the_first(batch, said):
    steps = StepGraphs(lambda inputs, real: None)
    steps({"x": X, "y": X.with_values(torch.ones(3, 2))})
    with pytest.raises(ValueError, match=said):
        steps(batch)


def test_a_batch_on_another_device_than_the_first():
    steps = StepGraphs(lambda inputs, real: None)
    steps({"x": X})
    with pytest.raises(ValueError, match="the batch is on meta, and the first one was on cpu"):
        steps({"x": JaggedTensor(torch.ones(3, device="meta"), X.offsets.to("meta"))})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_octave": 3}, "per_octave must be a power of two up to 16, got 3"),
        ({"per_octave": 32}, "per_octave"),
        ({"per_octave": 0}, "per_octave"),
        ({"most_graphs": 0}, "most_graphs must be at least 1, got 0"),
    ],
)
def test_options_that_are_none(options, said):
    with pytest.raises(ValueError, match=said):
        StepGraphs(lambda inputs, real: None, **options)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda inputs, real: inputs["x"].values.add_(1)),
        ("x", lambda inputs, real: inputs["x"].offsets.mul_(1)),
        ("label", lambda inputs, real: inputs["label"].zero_()),
        ("real", lambda inputs, real: real.logical_not_()),
    ],
)
def test_a_step_that_changes_its_inputs_is_refused(name, change):
    """The next batch would find it at its padding users."""
    with pytest.raises(ValueError, match=f"the step changed {name} in place"):
        StepGraphs(change)({"x": X, "label": torch.ones(2)})


def test_autocast_is_entered_in_the_step():
    steps = StepGraphs(lambda inputs, real: None)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="enter it in the step"):
        steps({"x": X})


# --- what waits -----------------------------------------------------------------------------------


def test_waits_of_this_thread_are_noted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        warnings.warn("called a synchronizing CUDA operation (Triggered at ...)", stacklevel=1)

    with noted_waits() as waits:
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        assert waits == []
        wait()
        wait()
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert len(waits) == 2
    assert all(place.startswith(f"{__file__}:") for place in waits)
    assert modes == ["warn", 2]
