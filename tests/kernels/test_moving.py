"""Jagged tensors moved, pinned and detached: what shared offsets goes on sharing them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from jagged_kernels import Jagged2Tensor, JaggedTensor, jagged2_like
from jagged_kernels.tensors import moving

LENGTHS = torch.tensor([2, 0, 3])


def pair() -> tuple[JaggedTensor, JaggedTensor]:
    x = JaggedTensor.from_lengths(torch.arange(5.0), LENGTHS)
    return x, x.with_values(torch.ones(5, 2))


def test_moved_together_they_share_offsets():
    x, y = pair()
    m = jagged2_like(x)
    there = x.to("meta")
    assert there.device.type == there.offsets.device.type == "meta"
    for other in (y.to("meta"), y.to(device="meta"), y.to("meta", torch.float16), m.to("meta")):
        assert type(other) in (JaggedTensor, Jagged2Tensor)
        assert other.offsets is there.offsets
    assert m.to("meta").matrix_offsets.device.type == "meta"
    assert y.to("meta", torch.float16).dtype == torch.float16
    assert x.to("cpu").offsets is x.offsets
    assert x.to(torch.float16).offsets is x.offsets
    assert x.cpu().offsets is x.offsets
    assert m.to(torch.float64).matrix_offsets is m.matrix_offsets


def test_copies_on_one_device_outlive_those_on_another(monkeypatch):
    """Without a second device the other copies are pinned ones: here clones."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    x, y = pair()
    there, pinned = x.to("meta"), x.pin_memory()
    assert y.to("meta").offsets is there.offsets
    assert y.pin_memory().offsets is pinned.offsets


def test_other_offsets_are_others():
    x, _ = pair()
    other = JaggedTensor(x.values, x.offsets.clone())
    assert x.to("meta").offsets is not other.to("meta").offsets


@pytest.mark.parametrize("changed", ["source", "copy"])
def test_changes_in_place_are_noticed(changed):
    x, y = pair()
    there = x.to("meta")
    (x if changed == "source" else there).offsets.add_(0)
    again = y.to("meta")
    assert again.offsets is not there.offsets
    assert again.offsets is x.to("meta").offsets


def test_nothing_is_kept_alive():
    x, y = pair()
    there = x.to("meta")
    copy, source = weakref.ref(there.offsets), weakref.ref(x.offsets)
    before = len(moving._copies)
    del there
    gc.collect()
    assert copy() is None
    assert y.to("meta").offsets.shape == (4,)
    del x, y
    gc.collect()
    assert source() is None
    assert len(moving._copies) == before - 1


def test_in_inference_mode():
    x, y = pair()
    with torch.inference_mode():
        assert x.to("meta").offsets.shape == (4,)
        there = x.to("meta")
        assert y.to("meta").offsets is there.offsets
        # Of these PyTorch counts no changes.
        fresh, other = pair()
        there = fresh.to("meta")
        assert other.to("meta").offsets is not there.offsets


def test_copies_without_numbers_are_not_handed_out():
    x, y = pair()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = x.to("meta")
    assert isinstance(fake.offsets, torch._subclasses.FakeTensor)
    assert not isinstance(y.to("meta").offsets, torch._subclasses.FakeTensor)


def test_compiled_moves():
    x, _ = pair()
    moved: Any = torch.compile(lambda x: x.to("meta"), fullgraph=True, backend="eager")
    there = moved(x)
    assert there.offsets.device.type == there.values.device.type == "meta"


def test_pinned_together_they_share_offsets(monkeypatch):
    """Without a GPU nothing is pinned: here each tensor is copied."""
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    x, y = pair()
    pinned = x.pin_memory()
    assert pinned.values is not x.values
    assert pinned.offsets is not x.offsets
    assert torch.equal(pinned.offsets, x.offsets)
    assert y.pin_memory().offsets is pinned.offsets
    assert jagged2_like(x).pin_memory().offsets is pinned.offsets
    x.offsets[2:].add_(0)
    assert y.pin_memory().offsets is not pinned.offsets


def test_pinned_already(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    x, _ = pair()
    assert x.pin_memory().offsets is x.offsets


def test_moves_in_threads():
    pairs = [pair() for _ in range(50)]
    found: list[bool] = []

    def move(own: list[tuple[JaggedTensor, JaggedTensor]]) -> None:
        for x, y in own:
            there = x.to("meta")
            found.append(y.to("meta").offsets is there.offsets)

    threads = [threading.Thread(target=move, args=(pairs[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 50


@pytest.mark.gpu
def test_on_a_gpu():
    x, y = pair()
    pinned = x.pin_memory()
    assert pinned.values.is_pinned()
    assert pinned.offsets.is_pinned()
    assert y.pin_memory().offsets is pinned.offsets
    there = pinned.to("cuda", non_blocking=True)
    assert y.pin_memory().cuda(non_blocking=True).offsets is there.offsets
    assert y.pin_memory().to("cuda", torch.float16, True).offsets is there.offsets
    assert x.cuda().offsets is y.to("cuda").offsets
    back = there.cpu()
    assert torch.equal(back.offsets, x.offsets)
    assert back.offsets is there.with_values(there.values + 1).cpu().offsets
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert y.pin_memory().cuda(non_blocking=True).offsets is not there.offsets
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_moves_in_a_cuda_graph_are_of_the_graph():
    x, y = (each.pin_memory() for each in pair())
    there = x.cuda(non_blocking=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = y.cuda(non_blocking=True)
    assert captured.offsets is not there.offsets
    y.offsets.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert captured.offsets.tolist() == [0, 4, 4, 10]
