"""`from_torchrec` and `to_torchrec`: with stand-ins always, with TorchRec where it is installed."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import JaggedTensor, from_torchrec, to_torchrec
from jagged_kernels.tensors import torchrec as converters

VALUES = torch.arange(6.0, device=DEVICE)
WEIGHTS = VALUES + 10
# Users of key "item": [0, 1], [], [2]; of "shop": [], [3], [4, 5].
LENGTHS = torch.tensor([2, 0, 1, 0, 1, 2], device=DEVICE)
OFFSETS = torch.tensor([0, 2, 2, 3, 3, 4, 6], device=DEVICE)
BY_KEY = {"item": [[0, 1], [], [2]], "shop": [[], [3], [4, 5]]}


class Stand:
    """The methods of TorchRec's tensors for what is given, and no others."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, lambda part=part: part)


def one(**parts: Any) -> Any:
    return Stand(**parts)


def keyed(**parts: Any) -> Any:
    return Stand(**{"keys": ["item", "shop"], "values": VALUES, **parts})


def as_lists(x: dict[str, JaggedTensor]) -> dict[str, list[list[float]]]:
    return {key: [user.tolist() for user in part.unbind()] for key, part in x.items()}


def assert_same(found: JaggedTensor, expected: JaggedTensor) -> None:
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.offsets, expected.offsets)


@pytest.fixture(params=["TorchRec", "stand-in"])
def module(request, monkeypatch):
    """What `to_torchrec` builds its results from."""
    if request.param == "TorchRec":
        pytest.importorskip("torchrec")
        return import_module("torchrec.sparse.jagged_tensor")

    class Keyed(Stand):
        empty = staticmethod(lambda is_weighted: Keyed(
            keys=[], values=torch.zeros(0), lengths=torch.zeros(0, dtype=torch.int32),
            weights=torch.zeros(0) if is_weighted else None,
        ))  # fmt: skip

        def __init__(self, **parts: Any) -> None:
            strides = parts.pop("stride_per_key_per_rank", None)
            one = [parts.pop("stride", None)] * len(parts["keys"])
            users = one if strides is None else [sum(ranks) for ranks in strides]
            super().__init__(**parts, stride_per_key=users)

    stand_in = SimpleNamespace(JaggedTensor=Stand, KeyedJaggedTensor=Keyed)
    monkeypatch.setattr(converters, "_torchrec", lambda: stand_in)
    return stand_in


@pytest.mark.parametrize("parts", [{"lengths": LENGTHS}, {"offsets": OFFSETS}], ids=list)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_keyed_stand_ins(parts, dtype):
    x = keyed(**{name: part.to(dtype) for name, part in parts.items()})
    found = from_torchrec(x)
    assert as_lists(found) == BY_KEY
    assert {part.offsets.dtype for part in found.values()} == {dtype}
    assert found["shop"].values.data_ptr() == VALUES[3:].data_ptr()


def test_what_is_not_known_yet_is_none():
    """TorchRec computes lengths from offsets, and the other way round, when first asked."""
    unknown = {"offsets_or_none": None, "weights_or_none": None, "offset_per_key_or_none": None}
    x = keyed(lengths_or_none=LENGTHS, offsets=None, weights=None, offset_per_key=None, **unknown)
    assert as_lists(from_torchrec(x)) == BY_KEY


def test_from_one_stand_in():
    found = from_torchrec(one(values=VALUES, offsets=OFFSETS))
    assert_same(found, JaggedTensor(VALUES, OFFSETS))
    assert found.offsets is OFFSETS
    empty = one(values=VALUES[:0], offsets=OFFSETS[:0], lengths=LENGTHS[:0])
    assert len(from_torchrec(empty)) == 0


def test_weights_have_offsets_of_their_values():
    x = keyed(lengths=LENGTHS, weights=WEIGHTS)
    values, weights = from_torchrec(x, weights=True)
    assert as_lists(values) == BY_KEY
    assert as_lists(weights)["shop"] == [[], [13], [14, 15]]
    assert weights["shop"].offsets is values["shop"].offsets
    assert as_lists(from_torchrec(x, weights=False)) == BY_KEY
    x = one(values=VALUES, lengths=LENGTHS, weights=WEIGHTS)
    values, weights = from_torchrec(x, weights=True)
    assert_same(weights, values.with_values(WEIGHTS))


def test_keys_of_different_numbers_of_users():
    x = keyed(lengths=LENGTHS, stride_per_key=[4, 2])
    assert as_lists(from_torchrec(x)) == {"item": [[0, 1], [], [2], []], "shop": [[3], [4, 5]]}


def test_bounds_that_are_known_are_not_read(monkeypatch):
    x = keyed(offsets=OFFSETS, offset_per_key=[0, 3, 6])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waits"))
    found = from_torchrec(x, validate=False)
    monkeypatch.undo()
    assert as_lists(found) == BY_KEY


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (keyed(lengths=LENGTHS, weights=WEIGHTS), {}, "x has weights: weights=True returns them"),
        (keyed(lengths=LENGTHS), {"weights": True}, "weights=True, but x has no weights"),
        (keyed(lengths=LENGTHS, weights=WEIGHTS[1:]), {"weights": True}, "for each of 6 .* got 5"),
        (keyed(lengths=LENGTHS, keys=["a", "a"]), {}, "key 'a' is there twice"),
        (keyed(lengths=LENGTHS, keys=list("abcd")), {}, "4 keys have 6 lengths, and strides"),
        (keyed(lengths=LENGTHS, stride_per_key=[3, 4]), {}, r"6 lengths, and strides \[3, 4\]"),
        (keyed(lengths=LENGTHS + 1), {}, r"offsets\[-1\] = 12 and values of 6 tokens"),
    ],
)
def test_wrong_contents(x, options, message):
    with pytest.raises(ValueError, match=message):
        from_torchrec(x, **options)


def test_wrong_kinds():
    for wrong, message in [
        ([1, 2], r"must have values\(\) that are a tensor, got list"),
        (Stand(values=VALUES), r"must have lengths\(\) or offsets\(\), got Stand"),
        (Stand(values=VALUES, lengths=VALUES), "lengths must be integers, got torch.float32"),
    ]:
        with pytest.raises(TypeError, match=message):
            from_torchrec(wrong)  # pyright: ignore


def parts_of(lengths: dict[str, list[int]]) -> dict[str, JaggedTensor]:
    """Values of each key from 0 on."""
    return {
        key: JaggedTensor.from_list([torch.arange(n, device=DEVICE).float() for n in users])
        for key, users in lengths.items()
    }


@pytest.mark.parametrize(
    "lengths",
    [
        {"item": [2, 0, 1], "shop": [0, 1, 2]},
        {"item": [2, 0, 1], "shop": [4]},
        {"item": [0, 0], "shop": [0, 0]},
        {"item": [3, 1]},
        {},
    ],
    ids=["", "of different users", "without tokens", "one key", "no keys"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_keyed_round_trip(module, lengths, weighted):
    x = parts_of(lengths)
    weights = {key: part.with_values(part.values + 0.5) for key, part in x.items()}
    made = to_torchrec(x, weights if weighted else None)
    assert isinstance(made, module.KeyedJaggedTensor)
    found = from_torchrec(made, weights=weighted)
    pairs = [(found[0], x), (found[1], weights)] if weighted else [(found, x)]
    for ours, expected in pairs:
        assert list(ours) == list(expected)
        for key, part in expected.items():
            assert_same(ours[key], part)


def test_weights_may_come_in_another_order(module):
    x = parts_of({"item": [2, 0], "shop": [1, 0]})
    weights = {key: x[key].with_values(x[key].values + n) for key, n in (("shop", 7), ("item", 4))}
    made = to_torchrec(x, weights)
    assert made.keys() == ["item", "shop"]
    assert made.weights().tolist() == [4, 5, 7]


def test_what_is_made_knows_how_many_tokens_a_key_has(module):
    """Else TorchRec waits for the device when it is first asked."""
    made = to_torchrec(parts_of({"item": [2, 1], "shop": [1, 0]}))
    assert made.length_per_key() == [3, 1]
    if hasattr(made, "length_per_key_or_none"):
        assert made.length_per_key_or_none() == [3, 1]


def test_nested_tensors_go_there_too(module):
    x = JaggedTensor(VALUES, OFFSETS)
    other = x.with_values(WEIGHTS)
    nested: Any = {"item": x.to_nested(), "shop": other}
    found = from_torchrec(to_torchrec(nested, {"item": other, "shop": x}), weights=True)
    assert_same(found[0]["item"], x)
    assert_same(found[0]["shop"], other)
    assert_same(found[1]["item"], other)
    one: Any = x.to_nested()
    assert_same(from_torchrec(to_torchrec(one)), x)


@pytest.mark.parametrize("weighted", [False, True])
def test_round_trip_of_one(module, weighted):
    x = JaggedTensor(VALUES, OFFSETS)
    made = to_torchrec(x, x.with_values(WEIGHTS) if weighted else None)
    assert isinstance(made, module.JaggedTensor)
    assert made.values() is VALUES
    assert made.offsets() is OFFSETS
    if weighted:
        values, weights = from_torchrec(made, weights=True)
        assert_same(weights, x.with_values(WEIGHTS))
    else:
        values = from_torchrec(made)
    assert_same(values, x)


def test_gradients_flow_both_ways(module):
    leaf = VALUES.clone().requires_grad_()
    x = {
        "item": JaggedTensor(leaf[:3], OFFSETS[:4]),
        "shop": JaggedTensor(leaf[3:], OFFSETS[3:] - 3),
    }
    (2 * from_torchrec(to_torchrec(x))["shop"].values).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0, 0, 0, 2, 2, 2]


def test_what_does_not_fit_each_other(module):
    x = parts_of({"item": [2, 1], "shop": [1, 1]})
    wide = x["shop"].with_values(torch.zeros(2, 3, device=DEVICE))
    for arguments, error, message in [
        ((x, {"item": x["item"]}), ValueError, r"keys of x, \['item', 'shop'\], got \['item'\]"),
        ((x, x["item"]), ValueError, "got JaggedTensor"),
        ((x, {**x, "shop": x["item"]}), ValueError, r"weights\['shop'\] must have the offsets of"),
        (({**x, "shop": wide},), ValueError, r"x\['shop'\] .* x\['item'\], \[T\] of .*T, 3\]"),
        (({**x, "shop": 1},), TypeError, r"x\['shop'\] must be a JaggedTensor, got int"),
        ((x["item"], x["shop"]), ValueError, "weights must have the offsets of x"),
        (([1],), TypeError, "x must be a JaggedTensor, got list"),
    ]:
        if DEVICE != "cpu" and "the offsets of" in message:
            continue  # their contents are not compared there, which would wait
        with pytest.raises(error, match=message):
            to_torchrec(*arguments)


def test_torchrec_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec.sparse.jagged_tensor", None)
    with pytest.raises(ImportError, match=r"needs TorchRec: pip install torchrec ") as error:
        to_torchrec(JaggedTensor(VALUES, OFFSETS))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("known", ["lengths", "offsets"])
@pytest.mark.parametrize("weighted", [False, True])
def test_of_torchrec_itself(known, weighted):
    pytest.importorskip("torchrec")
    module = import_module("torchrec.sparse.jagged_tensor")
    kjt = module.KeyedJaggedTensor(
        keys=["item", "shop"],
        values=VALUES,
        weights=WEIGHTS if weighted else None,
        **{known: {"lengths": LENGTHS, "offsets": OFFSETS}[known]},
    )
    found = from_torchrec(kjt, weights=weighted)
    values, weights = found if weighted else (found, {})
    peers = kjt.to_dict()
    assert list(values) == list(peers)
    for key, peer in peers.items():
        assert_same(values[key], JaggedTensor(peer.values(), peer.offsets()))
        if weighted:
            assert torch.equal(weights[key].values, peer.weights())
    assert as_lists(values) == BY_KEY
    assert as_lists(from_torchrec(kjt, weights=False)) == BY_KEY  # of bounds that it knows by now


def test_of_torchrec_with_strides():
    pytest.importorskip("torchrec")
    module = import_module("torchrec.sparse.jagged_tensor")
    kjt = module.KeyedJaggedTensor(
        keys=["item", "shop"],
        values=VALUES,
        lengths=LENGTHS,
        stride_per_key_per_rank=[[3, 1], [1, 1]],
        inverse_indices=(["item", "shop"], torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])),
    )
    expected = {"item": [[0, 1], [], [2], []], "shop": [[3], [4, 5]]}
    assert as_lists(from_torchrec(kjt)) == expected
    again = to_torchrec(from_torchrec(kjt))
    assert again.stride_per_key() == [4, 2]
    assert again.length_per_key_or_none() == [3, 3]
    assert len(from_torchrec(module.JaggedTensor.empty())) == 0
