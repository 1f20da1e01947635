"""`jagged_collate`: samples of every structure, alone and in a `DataLoader` with workers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from jagged_kernels import JaggedTensor, jagged_collate


class Sample(NamedTuple):
    item: Any
    label: Any


def lists(x: JaggedTensor) -> list[Any]:
    JaggedTensor(x.values, x.offsets)  # which checks them
    return [part.tolist() for part in x]


def test_tensors():
    batch = jagged_collate([torch.tensor([3, 5]), torch.tensor([]).long(), torch.tensor([4])])
    assert lists(batch) == [[3, 5], [], [4]]
    assert lists(jagged_collate([np.arange(2), np.arange(1)])) == [[0, 1], [0]]
    batch = jagged_collate([np.arange(2), np.array([])])
    assert batch.dtype == torch.int64
    item = JaggedTensor(torch.tensor([7]), torch.tensor([0, 1]))
    nothing = JaggedTensor(torch.zeros(0), torch.tensor([0, 0]))
    assert jagged_collate([nothing, item]).dtype == torch.int64


def test_structures_stay():
    one, two = torch.tensor([3, 5]), torch.tensor([4])
    batch = jagged_collate([Sample(one, 1), Sample(two, 0)])
    assert type(batch) is Sample
    assert lists(batch.item) == [[3, 5], [4]]
    assert batch.label.tolist() == [1, 0]
    batch = jagged_collate([(one, [two, 0.5]), (two, [one, 1.5])])
    assert type(batch) is tuple
    assert type(batch[1]) is list
    assert lists(batch[1][0]) == [[4], [3, 5]]
    assert batch[1][1].tolist() == [0.5, 1.5]


def test_columns_of_one_length_share_offsets():
    samples = [
        {
            "item": torch.arange(n),
            "time": torch.ones(n, 2),
            "other": torch.arange(m),
            "name": str(n),
        }
        for n, m in ((2, 2), (0, 1), (3, 3))
    ]
    batch = jagged_collate(samples)
    assert batch["item"].offsets is batch["time"].offsets
    assert batch["item"].offsets is not batch["other"].offsets
    assert lists(batch["other"]) == [[0, 1], [0], [0, 1, 2]]
    assert batch["name"] == ["2", "0", "3"]
    assert jagged_collate(samples)["item"].offsets is not batch["item"].offsets


def test_dense_tensors_are_stacked():
    samples = [
        {"item": torch.arange(n), "features": torch.full((4,), n), "label": torch.tensor(n)}
        for n in (2, 1)
    ]
    batch = jagged_collate(samples, dense=("features",))
    assert batch["features"].tolist() == [[2] * 4, [1] * 4]
    assert batch["label"].tolist() == [2, 1]
    assert lists(batch["item"]) == [[0, 1], [0]]
    batch = jagged_collate([{"of": sample} for sample in samples], dense=["features"])
    assert batch["of"]["features"].tolist() == [[2] * 4, [1] * 4]
    batch = jagged_collate([tuple(sample.values()) for sample in samples], dense=(1,))
    assert batch[1].tolist() == [[2] * 4, [1] * 4]


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int32), (torch.int32, torch.int64)])
def test_jagged_samples_are_batches(dtypes):
    samples = []
    for lengths, dtype in zip(((2, 0), (1, 3)), dtypes, strict=True):
        values = torch.arange(sum(lengths))
        item = JaggedTensor.from_lengths(values, torch.tensor(lengths, dtype=dtype))
        samples.append({"item": item, "time": item.with_values(values + 7)})
    batch = jagged_collate(samples)
    assert lists(batch["item"]) == [[0, 1], [], [0], [1, 2, 3]]
    assert lists(batch["time"]) == [[7, 8], [], [7], [8, 9, 10]]
    assert batch["item"].offsets is batch["time"].offsets
    assert batch["item"].offsets.dtype == dtypes[1]


def test_jagged_samples_that_share_some_offsets_are_not_of_the_same_users():
    first, second, third = (JaggedTensor.from_list([torch.arange(n)]) for n in (2, 1, 3))
    batch = jagged_collate([{"a": first, "b": first}, {"a": second, "b": third}])
    assert lists(batch["a"]) == [[0, 1], [0]]
    assert lists(batch["b"]) == [[0, 1], [0, 1, 2]]


def test_columns_on_other_devices_have_offsets_of_their_own():
    samples = [{"a": torch.ones(n), "b": torch.ones(n, device="meta")} for n in (2, 1)]
    batch = jagged_collate(samples)
    assert batch["a"].offsets.device == batch["a"].device
    assert batch["b"].offsets.device == batch["b"].device


def test_more_tokens_than_int32_offsets_hold():
    half = 2**30
    x = JaggedTensor(torch.zeros(1).expand(half), torch.tensor([0, half], dtype=torch.int32))
    with pytest.raises(ValueError, match="int32 offsets hold at most 2147483647 tokens"):
        jagged_collate([x, x])


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "at least one sample"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], ValueError, "tensor 1 has shape"),
        ([torch.zeros(2), torch.tensor(1.0)], ValueError, "tensor 1 has shape"),
        ([{"a": 1}, {"b": 1}], ValueError, r"keys are \['a'\] in sample 0 and \['b'\] in sample 1"),
        ([(1, 2), (1,)], ValueError, "numbers of values are 2 in sample 0 and 1 in sample 1"),
        ([{"a": 1}, torch.zeros(2)], TypeError, "sample 0 has a dict sample 1 has a Tensor"),
        ([[1], {"a": 1}], TypeError, "sample 0 has a list sample 1 has a dict"),
    ],
    ids=str,
)
def test_samples_that_do_not_fit(samples, error, message):
    with pytest.raises(error, match=message):
        jagged_collate(samples)


class Histories(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = torch.arange(index)
        return {"item": item, "time": item * 10.0, "features": torch.ones(3) * index, "user": index}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_in_a_loader(workers, pin):
    loader = DataLoader(
        Histories(),
        batch_size=4,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=partial(jagged_collate, dense={"features"}),
    )
    batches = list(loader)
    assert [batch["user"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    for batch in batches:
        assert lists(batch["item"]) == [list(range(user)) for user in batch["user"]]
        assert torch.equal(batch["time"].values, batch["item"].values * 10.0)
        assert batch["features"].tolist() == [[float(user)] * 3 for user in batch["user"]]
        assert batch["item"].offsets is batch["time"].offsets
        for tensor in (batch["item"].values, batch["item"].offsets, batch["features"]):
            assert tensor.is_pinned() == pin


def test_a_loader_pins_what_it_collates(monkeypatch):
    """Without a GPU nothing is pinned: here each tensor is copied."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda self, device=None: self.clone())
    from torch.utils.data._utils.pin_memory import pin_memory

    dataset = Histories()
    batch = jagged_collate([dataset[3], dataset[5]], dense={"features"})
    pinned: Any = pin_memory(batch)
    assert type(pinned["item"]) is JaggedTensor
    assert pinned["item"].values is not batch["item"].values
    assert lists(pinned["item"]) == lists(batch["item"])
    assert pinned["item"].offsets is pinned["time"].offsets
