"""Cutting, joining, selecting and padding users' tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_cases import (
    COMPILER,
    DTYPES,
    assert_as_exact_as_reference,
    assert_compiles,
    assert_gradients_exact,
    flat,
)
from torch import Tensor

from jagged_kernels import (
    Jagged2Tensor,
    JaggedTensor,
    from_padded,
    jagged2_to_padded,
    jagged_cat,
    jagged_index_select,
    jagged_recent,
    jagged_slice,
    lengths_to_offsets,
    to_padded,
)
from jagged_kernels.ops.layout.cat import cat_rows
from jagged_kernels.ops.layout.copies import place_rows
from jagged_kernels.ops.layout.index_select import select_rows, select_rows_backward
from jagged_kernels.ops.layout.jagged2_padded import cut_matrices, pad_matrices
from jagged_kernels.ops.layout.slice import cut_users
from jagged_kernels.tensors.jagged2 import jagged2_offsets

BACKENDS: list[Any] = ["reference", "native", "triton"]
# Empty users at either end and between, one token, and more tokens than one program takes.
LENGTHS = {
    "mixed": (0, 3, 0, 0, 17, 1, 5, 0),
    "whale": (2, 1500, 0, 1),
    "one token": (1,),
    "no tokens": (0, 0),
    "no users": (),
}


def offsets_of(lengths: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).to(DEVICE)


def tokens(lengths: Any, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((sum(lengths), *shape), generator=generator).to(DEVICE)


def slice_call(backend: Any, x: Tensor, offsets: Tensor, start: Any, length: Any) -> JaggedTensor:
    return jagged_slice(JaggedTensor(x, offsets), start, length, backend=backend)


def recent_call(backend: Any, x: Tensor, offsets: Tensor) -> JaggedTensor:
    return jagged_recent(JaggedTensor(x, offsets), 4, backend=backend)


def select_call(backend: Any, x: Tensor, offsets: Tensor, users: Tensor) -> JaggedTensor:
    return jagged_index_select(JaggedTensor(x, offsets), users, backend=backend)


def cat_call(
    backend: Any, x: Tensor, y: Tensor, prefix: Tensor, token: Tensor, offsets: Tensor,
    others: Tensor,
) -> JaggedTensor:  # fmt: skip
    parts = [prefix, JaggedTensor(x, offsets), token, JaggedTensor(y, others)]
    return jagged_cat(parts, backend=backend)


def padded_call(
    truncate: Any, pad: Any, length: int, backend: Any, x: Tensor, offsets: Tensor
) -> tuple[Tensor, JaggedTensor]:
    """There, and back with the padded gradient of its own."""
    sides = {"truncate": truncate, "pad": pad, "backend": backend}
    padded = to_padded(JaggedTensor(x, offsets), length, value=-1.5, **sides)
    return padded, from_padded(padded * 2, offsets=offsets, total=x.shape[0], **sides)


def case(name: str, lengths: Any, *shape: int, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """Tensors of an operation on users of these lengths."""
    x, offsets, users = tokens(lengths, *shape), offsets_of(lengths, dtype), len(lengths)
    if name == "slice":
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(-2, 8, (users,), generator=generator).to(DEVICE)
        length = torch.randint(-2, 12, (users,), generator=generator).to(DEVICE, torch.int32)
        return {"x": x, "offsets": offsets, "start": start, "length": length}
    if name == "select":
        chosen = [user for user in range(users) for _ in range(user % 3)][::-1]
        picked = torch.tensor(chosen + chosen[:2], dtype=torch.int64).to(DEVICE)
        return {"x": x, "offsets": offsets, "users": picked}
    if name == "cat":
        other = [(5 * n + 3) % 7 for n in lengths]
        dense = tokens((users * 2,), *shape, seed=3).unflatten(0, (users, 2))
        return {
            "x": x, "y": tokens(other, *shape, seed=2), "prefix": dense,
            "token": tokens((1,), *shape, seed=4), "offsets": offsets,
            "others": offsets_of(other, torch.int32),
        }  # fmt: skip
    return {"x": x, "offsets": offsets}


CALLS = {"slice": slice_call, "recent": recent_call, "select": select_call, "cat": cat_call}


def padded(truncate: str, pad: str, length: int = 4) -> Any:
    def call(*args: Any, **tensors: Any) -> Any:
        return padded_call(truncate, pad, length, *args, **tensors)

    return call


SIDES = [(t, p) for t in ("right", "left") for p in ("right", "left")]
CALLS |= {f"padded {t} {p}": padded(t, p) for t, p in SIDES}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize("name", CALLS)
def test_exact(name, lengths, dtype):
    assert_as_exact_as_reference(CALLS[name], case(name, lengths, 6), dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64,), (600,)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_widths_and_int32_offsets(name, shape):
    tensors = case(name, LENGTHS["mixed"], *shape, dtype=torch.int32)
    assert_as_exact_as_reference(CALLS[name], tensors, torch.float32)


@pytest.mark.parametrize("name", ["slice", "select", "cat", "padded left left"])
def test_any_dtype_is_copied(name):
    tensors = case(name, LENGTHS["mixed"], 3)
    for dtype in (torch.bool, torch.int16, torch.int64):
        whole = {
            key: (value * 3).to(dtype) if value.is_floating_point() else value
            for key, value in tensors.items()
        }
        if name.startswith("padded"):
            x = JaggedTensor(whole["x"], whole["offsets"])
            found = [to_padded(x, 4, value=1, backend=b) for b in BACKENDS]
        else:
            found = [CALLS[name](b, **whole).values for b in BACKENDS]
        assert all(result.dtype == dtype for result in found)
        assert all(torch.equal(result, found[0]) for result in found)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["slice", "recent", "select", "cat"])
def test_complex_numbers_are_copied_by_pytorch(name, dtype):
    tensors = case(name, LENGTHS["mixed"], 3)
    whole = {key: t.to(dtype) if t.is_floating_point() else t for key, t in tensors.items()}
    expected = CALLS[name]("reference", **whole).values
    for backend in ("native", "auto"):
        assert torch.equal(CALLS[name](backend, **whole).values, expected)
    line = f"^the triton backend has no {str(dtype)[6:]}; use backend='native' or 'auto'$"
    with pytest.raises(NotImplementedError, match=line):
        CALLS[name]("triton", **whole)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", ["slice", "recent", "select", "from_padded"])
def test_one_graph_without_total(name, backend):
    offsets = offsets_of((3, 0, 2))
    users = torch.tensor([2, 0], device=DEVICE)

    def cut(values: Tensor) -> Tensor:
        x = JaggedTensor(values, offsets, validate=False)
        result = {
            "slice": lambda: jagged_slice(x, 1, 2, backend=backend),
            "recent": lambda: jagged_recent(x, 1, backend=backend),
            "select": lambda: jagged_index_select(x, users, backend=backend),
            "from_padded": lambda: from_padded(values[None], offsets[-1:], backend=backend),
        }[name]()
        return result.values

    values = tokens((5,), 4)
    torch._dynamo.reset()
    compiled = torch.compile(cut, fullgraph=True, backend=COMPILER)
    assert torch.equal(compiled(values), cut(values))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(2, 1), (0,), ()], ids=str)
def test_padding_keeps_the_dtype(lengths, backend):
    offsets = offsets_of(lengths)
    for dtype in (torch.bool, torch.uint8, torch.float16):
        x = JaggedTensor(torch.ones(sum(lengths), dtype=dtype, device=DEVICE), offsets)
        scores = torch.ones(sum(n * n for n in lengths), dtype=dtype, device=DEVICE)
        m = Jagged2Tensor(scores, offsets, jagged2_offsets(offsets))
        assert to_padded(x, 2, backend=backend).dtype == dtype
        assert jagged2_to_padded(m, 2, backend=backend).dtype == dtype


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    assert_gradients_exact(CALLS[name], case(name, (0, 3, 1, 6), 2))


@pytest.mark.parametrize("name", CALLS)
def test_strided_values(name):
    """Tokens that are columns of a wider tensor, or transposed."""
    tensors = case(name, LENGTHS["mixed"], 5)
    wide = torch.cat([tensors["x"], tensors["x"] + 1], 1)
    for view in (wide[:, 5:], tensors["x"].t().contiguous().t()):
        assert not view.is_contiguous()
        expected, found = (
            flat(CALLS[name](backend, **{**tensors, "x": view}))
            for backend in ("reference", "triton")
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["slice", "select", "cat", "padded left left"])
def test_nan_stays_with_its_user(name):
    tensors = case(name, (3, 2, 4), 2)
    tensors["x"][3:5] = math.nan
    for backend in ("native", "triton"):
        expected, found = (flat(CALLS[name](b, **tensors)) for b in ("reference", backend))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_without_tokens_trains(name, backend):
    tensors = case(name, (0, 0), 3)
    x = tensors.pop("x").requires_grad_()
    outs = flat(CALLS[name](backend, x=x, **tensors))
    torch.stack([out.sum() for out in outs]).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def with_total(name: str) -> Any:
    """The operation with the number of tokens of its result, which a graph needs."""

    def call(backend: Any, size: Tensor, **tensors: Tensor) -> Any:
        x = JaggedTensor(tensors["x"], tensors["offsets"])
        total = size.shape[0]
        if name == "slice":
            return jagged_slice(
                x, tensors["start"], tensors["length"], total=total, backend=backend
            )
        if name == "recent":
            return jagged_recent(x, 4, total=total, backend=backend)
        return jagged_index_select(x, tensors["users"], total=total, backend=backend)

    return call


@pytest.mark.parametrize("name", CALLS)
def test_compiles(name):
    batches = []
    for lengths in ((3, 0, 5, 1, 0, 2, 0, 1, 1), (1, 9, 2, 4), (6, 7)):
        tensors = case(name, lengths, 15)
        if name in ("slice", "recent", "select"):
            total = CALLS[name]("native", **tensors).values.shape[0]
            tensors["size"] = torch.zeros(total, dtype=torch.int8)
        batches.append(tensors)
    call = with_total(name) if "size" in batches[0] else CALLS[name]
    assert_compiles(call, batches)


def test_operators_pass_opcheck():
    lengths = (3, 0, 5)
    x, offsets = tokens(lengths, 4).requires_grad_(), offsets_of(lengths)
    users = torch.tensor([2, 0, 2], device=DEVICE)
    chosen = offsets_of((5, 3, 5))
    ends = (0, 4, True, False, 0.5)
    torch.library.opcheck(place_rows, (x, offsets, None, None, 1, 3, 12, *ends))
    torch.library.opcheck(cut_users, (offsets, None, None, 1, users, None))
    torch.library.opcheck(cut_users, (offsets, users, None, None, None, 2))
    torch.library.opcheck(select_rows, (x, offsets, users, chosen, 13))
    d_out = tokens((13,), 4)
    torch.library.opcheck(select_rows_backward, (d_out, offsets, users, chosen, 8))
    shared, own = tokens((2,), 4).requires_grad_(), offsets_of((2,))
    whole = offsets_of((5, 2, 7))
    torch.library.opcheck(cat_rows, ([x, shared], [offsets, own], [False, True], whole, 14))
    scores, matrices = tokens((34,)).requires_grad_(), jagged2_offsets(offsets)
    torch.library.opcheck(pad_matrices, (scores, offsets, matrices, 4, 0.0))
    torch.library.opcheck(cut_matrices, (tokens((3,), 4, 4), offsets, matrices, 34))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slice_clamps(dtype):
    """What int32 offsets cannot hold, too, an int or a tensor: it would wrap round."""
    x = JaggedTensor(torch.arange(9, device=DEVICE), offsets_of((4, 0, 5), dtype))
    for start, length, expected in [
        (-3, 2, [[0, 1], [], [4, 5]]),
        (3, 10**12, [[3], [], [7, 8]]),
        (10**12, 1, [[], [], []]),
        (2**32 + 1, 1, [[], [], []]),
        (-(2**32) + 1, 2**32 + 1, [[0, 1, 2, 3], [], [4, 5, 6, 7, 8]]),
        (1, -5, [[], [], []]),
    ]:
        each = [torch.full((3,), number, device=DEVICE) for number in (start, length)]
        for backend in ("reference", "native", "triton"):
            for given_start, given_length in ((start, length), each):
                found = jagged_slice(x, given_start, given_length, backend=backend)
                assert [part.tolist() for part in found.unbind()] == expected


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    start=st.integers(-2, 7),
    length=st.integers(-1, 7),
)
def test_slices_undo_cat(lengths, start, length):
    """The two parts of a user joined again; the recent tokens are a slice."""
    x = JaggedTensor(torch.arange(sum(lengths)), offsets_of(lengths).cpu())
    head = jagged_slice(x, 0, start)
    tail = jagged_slice(x, start, sum(lengths))
    assert torch.equal(jagged_cat([head, tail]).values, x.values)
    recent = jagged_slice(x, x.lengths - length, x.lengths.clamp(max=max(length, 0)))
    assert torch.equal(jagged_recent(x, length).values, recent.values)


def matrices_call(length: int) -> Any:
    def call(backend: Any, scores: Tensor, offsets: Tensor) -> Tensor:
        m = Jagged2Tensor(scores, offsets, jagged2_offsets(offsets))
        return jagged2_to_padded(m, length, value=-2.0, backend=backend)

    return call


def matrices(lengths: Any, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    return {"scores": tokens([n * n for n in lengths]), "offsets": offsets_of(lengths, dtype)}


@pytest.mark.parametrize("length", [0, 1, 4, 70])
@pytest.mark.parametrize("lengths", [(0, 3, 0, 5, 1), (40, 0, 2), (0,), ()], ids=str)
def test_matrices_to_padded(lengths, length):
    tensors = matrices(lengths, torch.int32)
    assert_as_exact_as_reference(matrices_call(length), tensors, torch.float32)


def test_matrices_to_padded_gradients_and_graph():
    assert_gradients_exact(matrices_call(3), matrices((2, 0, 4)))
    assert_compiles(matrices_call(3), [matrices((2, 0, 4)), matrices((5, 1))])


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_padded_rows():
    """The rows of the last users, beyond int32, are as those of the first."""
    users, length = 2**21 + 2, 1024
    lengths = torch.zeros(users, dtype=torch.int64, device="cuda")
    lengths[0], lengths[-2], lengths[-1] = 3, 2, length
    values = torch.arange(length + 5, device="cuda").to(torch.int8)
    x = JaggedTensor(values, lengths_to_offsets(lengths))
    padded = to_padded(x, length, value=-1)
    assert padded.numel() > 2**31
    alone = JaggedTensor(values, lengths_to_offsets(lengths[[0, -2, -1]]))
    few = to_padded(alone, length, value=-1)
    assert torch.equal(padded[[0, -2, -1]], few)
    assert bool((padded[1:-2] == -1).all())
    assert torch.equal(from_padded(padded, offsets=x.offsets, total=len(values)).values, values)


def test_from_padded_takes_lengths_or_offsets():
    x = JaggedTensor(tokens((2, 0, 3), 4), offsets_of((2, 0, 3)))
    dense = to_padded(x, 3)
    for found in (from_padded(dense, x.lengths), from_padded(dense, offsets=x.offsets)):
        assert torch.equal(found.values, x.values)
        assert torch.equal(found.offsets, x.offsets)


TOP: Any = "top"
ANY: Any = torch.zeros(3)
LIST: Any = [1, 1]


def x_of(*lengths: int) -> Any:
    return JaggedTensor(tokens(lengths, 2), offsets_of(lengths))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jagged_slice(x_of(2, 1), torch.zeros(3).long().to(DEVICE), 1), ValueError,
         r"start must be an int or \[B\] = \[2\] .* got \(3,\)"),
        (lambda: jagged_slice(x_of(2), 0, torch.ones(1).to(DEVICE)), TypeError, "length must "),
        (lambda: jagged_recent(ANY, 1), TypeError, "x must be a JaggedTensor, got Tensor"),
        (lambda: jagged_index_select(x_of(2), torch.zeros(1, 1).long().to(DEVICE)), ValueError,
         r"users must be \[N\] on .*, got \(1, 1\)"),
        (lambda: jagged_index_select(x_of(2), torch.zeros(1).to(DEVICE)), TypeError, "users must"),
        (lambda: jagged_cat([tokens((3,), 2)]), TypeError, r"at least one.*got \[Tensor\]"),
        (lambda: jagged_cat([x_of(2), x_of(2, 1)]), ValueError, r"part 1 \(2 users, \(3, 2\)\)"),
        (lambda: jagged_cat([x_of(2), tokens((2,), 3)]), ValueError, r"part 1 \(\(2, 3\)\)"),
        (lambda: jagged_cat([x_of(2), tokens((2,), 3, 2)]), ValueError, r"\[1, N, 2\]"),
        (lambda: jagged_cat([x_of(2), x_of(2).to(torch.float16)]), TypeError, "of one dtype"),
        (lambda: to_padded(x_of(2), -1), ValueError, "at least 0, got -1"),
        (lambda: to_padded(x_of(2), 1, pad=TOP), ValueError, "'right' and 'top'"),
        (lambda: from_padded(tokens((3,), 2)), TypeError, "either lengths or offsets"),
        (lambda: from_padded(tokens((3,), 2), offsets=offsets_of((1, 1))), ValueError,
         r"offsets \[B \+ 1\], got \(3, 2\) and \(3,\)"),
        (lambda: from_padded(tokens((3,), 2), offsets=offsets_of((1, 1))[0]), ValueError,
         r"\(3, 2\) and \(\)"),
        (lambda: from_padded(tokens((2,), 2), LIST), TypeError, "Tensor and list"),
        (lambda: from_padded(LIST, offsets=offsets_of((1, 1))), TypeError, "list and Tensor"),
        (lambda: JaggedTensor.from_padded(tokens((2,), 2), LIST), TypeError, "Tensor and list"),
        (lambda: from_padded(tokens((2,), 2), tokens((2,))), TypeError, "lengths must be int32 or"),
        (lambda: from_padded(tokens((2,), 2).to("meta"), offsets_of((1,))), ValueError,
         "padded and lengths must be on one device, got meta and"),
        (lambda: from_padded(tokens((2,), 2).to(torch.int8), offsets_of((1, 1)).diff(), value=300),
         ValueError, "value must be a number that torch.int8 and a float hold, got 300"),
        (lambda: to_padded(x_of(2).to(torch.int64), 1, value=2**53 + 1), ValueError,
         "int64 and a float hold, got 9007199254740993"),
        (lambda: from_padded(tokens((2,), 2).to(torch.complex64), offsets_of((1, 1)).diff()),
         TypeError, "tensors must be real, got torch.complex64"),
        (lambda: to_padded(x_of(2).to(torch.complex128), 1), TypeError, "got torch.complex128"),
        (lambda: jagged2_to_padded(x_of(2), 3), TypeError, "Jagged2Tensor"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(DEVICE == "cuda", reason="contents are not read where that would wait")
def test_wrong_contents_raise_on_a_cpu():
    with pytest.raises(IndexError, match=r"\[0, 2\), got 0 to 2"):
        jagged_index_select(x_of(2, 1), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="total is 5, but the result has 3 tokens"):
        jagged_slice(x_of(2, 1), 0, 9, total=5)


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_bools_are_filled_up_with_bools(backend):
    x = JaggedTensor(torch.tensor([True, False], device=DEVICE), offsets_of((1, 1)))
    padded = to_padded(x, 2, value=3.0, backend=backend)
    assert padded.view(torch.uint8).tolist() == [[1, 1], [0, 1]]


def test_a_frequent_user_is_summed_in_float32():
    """300 copies of one user, in half precision."""
    x = torch.ones(3, 2, device=DEVICE, dtype=torch.float16, requires_grad=True)
    jagged = JaggedTensor(x, offsets_of((1, 2)))
    users = torch.ones(300, dtype=torch.int64, device=DEVICE)
    out = jagged_index_select(jagged, users, backend="triton")
    out.values.backward(torch.full_like(out.values, 0.1))
    assert x.grad is not None
    exact = 300 * float(torch.tensor(0.1, dtype=torch.float16))
    assert x.grad[0].tolist() == [0, 0]
    assert (x.grad[1:].double() - exact).abs().max() <= exact * 2**-11


@pytest.mark.parametrize("columns", [3, 70])
def test_copies_of_users_of_many_pieces(columns, monkeypatch):
    from jagged_kernels.ops.layout import triton_select

    monkeypatch.setattr(triton_select, "SELECT_CUT", triton_select.SELECT_CUT._replace(steps=1))
    lengths = (2, 700, 0, 1, 300)
    users = torch.tensor([1, 4, 1, 0, 2, 1])
    tensors = {"x": tokens(lengths, columns), "offsets": offsets_of(lengths), "users": users}
    assert_as_exact_as_reference(select_call, tensors, torch.float32)


def test_more_users_than_a_program_cuts(monkeypatch):
    from jagged_kernels.ops.layout import triton_copies

    monkeypatch.setattr(triton_copies, "_USERS", 4)
    lengths = (3, 0, 5, 1, 2, 2, 0, 4, 1, 6, 3)
    x = JaggedTensor(tokens(lengths, 2), offsets_of(lengths))
    users = torch.tensor([10, 0, 9, 9, 1, 2, 7, 3, 5], device=DEVICE)
    for call in (
        lambda backend: jagged_slice(x, 1, 2, backend=backend),
        lambda backend: jagged_index_select(x, users, backend=backend),
    ):
        found, expected = call("triton"), call("reference")
        assert torch.equal(found.offsets, expected.offsets)
        assert torch.equal(found.values, expected.values)


def test_copies_of_users_far_outside_are_nobodys():
    """Whose numbers in 32 bits would be those of users that there are."""
    from jagged_kernels.ops.layout import triton_select

    select = torch.tensor([2**32, 1, 1 - 2**32, 0, 2**32 + 1, 2**62], device=DEVICE)
    order, first = triton_select._order_copies(select, 2)
    assert first.tolist() == [1, 2, 3]
    assert order[1:3].tolist() == [3, 1]


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_results_have_the_dtype_of_those_given(dtype, backend):
    x = JaggedTensor(tokens((2, 1), 2), offsets_of((2, 1), dtype))
    users = torch.tensor([1, 0, 1], device=DEVICE)
    for made in (
        jagged_slice(x, 1, users[:2], backend=backend),
        jagged_recent(x, 1, backend=backend),
        jagged_index_select(x, users, backend=backend),
        jagged_cat([x, x, tokens((1,), 2)], backend=backend),
        from_padded(tokens((2,), 2), offsets=x.offsets, backend=backend),
    ):
        assert made.offsets.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("users", "copies"), [(1, 1), (3, 700), (300, 40), (129, 256), (5, 0)])
def test_copies_in_the_order_of_their_users(users, copies, dtype, monkeypatch):
    """Counted as well as sorted, with users that do not exist before and behind all others."""
    from jagged_kernels.ops.layout import triton_select

    generator = torch.Generator().manual_seed(0)
    select = torch.randint(-2, users + 2, (copies,), generator=generator, dtype=dtype).to(DEVICE)
    right_order = select.clamp(-1, users).sort(stable=True).indices
    numbers = torch.arange(users + 1, device=DEVICE, dtype=dtype)
    right_first = (select[None, :] < numbers[:, None]).sum(1)
    for limit in (triton_select.FEW_COMPARISONS, -1):
        monkeypatch.setattr(triton_select, "FEW_COMPARISONS", limit)
        order, first = triton_select._order_copies(select, users)
        assert torch.equal(first.long(), right_first)
        # Nobody reads the order of copies of users that do not exist.
        behind = int(right_first[0]), int(right_first[-1])
        assert torch.equal(order.long()[slice(*behind)], right_order[slice(*behind)])
