"""Elementwise, softmax, pooling and norm operations: what all of them must hold to."""

from __future__ import annotations

import math

import pytest
import torch
from interaction_cases import OPERATIONS
from operation_cases import (
    DEVICE,
    DTYPES,
    assert_as_exact_as_reference,
    assert_compiles,
    assert_gradients_exact,
    flat,
    results,
)

NAMES = list(OPERATIONS)
BACKENDS = ("native", "triton")
MIXED = [3, 0, 21, 1, 9, 0]
WIDE = 40


def _with_a_whale(operation):
    """One longer than a piece (with `short_pieces`), a tile of rows and a block of scores."""
    if operation.squares:
        return [3, 140]
    return [5, 1040 if operation.operands["x"] == ("token", ()) else 300, 0, 2]


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of few tokens, so that users of a few hundred have many."""
    from jagged_kernels.ops.normalise import triton_softmax
    from jagged_kernels.ops.pooling import triton_max, triton_sum

    for module, name in (
        (triton_sum, "SUM_CUT"),
        (triton_max, "MAX_CUT"),
        (triton_max, "BACKWARD_CUT"),
        (triton_softmax, "BACKWARD_CUT"),
        (triton_softmax, "NARROW_CUT"),
        (triton_softmax, "NARROW_BACKWARD_CUT"),
    ):
        cut = getattr(module, name)
        monkeypatch.setattr(module, name, cut._replace(steps=2))
    cuts = {size: cut._replace(steps=2) for size, cut in triton_softmax.SOFTMAX_CUTS.items()}
    monkeypatch.setattr(triton_softmax, "SOFTMAX_CUTS", cuts)


@pytest.fixture
def poisoned_allocations(monkeypatch):
    """Memory that nothing wrote reads as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_exact_as_the_reference(name, dtype):
    operation = OPERATIONS[name]
    tensors = operation.tensors(MIXED, 5, offsets_dtype=torch.int32)
    assert_as_exact_as_reference(operation.call, tensors, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_long_users_and_wide_tokens(name, poisoned_allocations, short_pieces):
    operation = OPERATIONS[name]
    for columns, lengths in ((WIDE, _with_a_whale(operation)), (140, [7, 0, 30])):
        tensors = operation.tensors(lengths, columns)
        assert_as_exact_as_reference(operation.call, tensors, torch.float32)


@pytest.mark.parametrize("name", ["softmax2 rows", "self difference"])
def test_rows_longer_than_a_program_holds(name, monkeypatch):
    from jagged_kernels.ops.elementwise import triton_self_difference
    from jagged_kernels.ops.normalise import triton_softmax2

    monkeypatch.setattr(triton_softmax2, "ELEMENTS", 64)
    monkeypatch.setattr(triton_self_difference, "ELEMENTS", 256)
    monkeypatch.setattr(triton_self_difference, "COLUMNS", 64)
    tensors = OPERATIONS[name].tensors([5, 140, 0, 40, 33], 3)
    assert_as_exact_as_reference(OPERATIONS[name].call, tensors, torch.float32)
    if name == "softmax2 rows":  # whose largest is far below 0
        tensors["x"] -= 200
        assert_as_exact_as_reference(OPERATIONS[name].call, tensors, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_that_are_kept_read_twice_and_cut(dtype, monkeypatch, poisoned_allocations):
    from jagged_kernels.ops.normalise import triton_column_softmax as columns

    config = columns.ColumnConfig(held=16, elements=128, num_warps=1, maxnreg=128)
    for name in ("FORWARD_CONFIG", "BACKWARD_CONFIG", "MERGED_CONFIG"):
        monkeypatch.setattr(columns, name, config)
    small = {"WIDTH": 8, "PIECE": 32, "SCORES": 512, "MERGED_SCORES": 512}
    for name, value in small.items():
        monkeypatch.setattr(columns, name, value)
    # More pieces than are merged at once.
    monkeypatch.setattr(columns, "_STATES", 2)
    operation = OPERATIONS["softmax2 columns"]
    for lengths in ([20, 5, 0, 32, 33, 9, 1, 70], [33]):
        tensors = operation.tensors(lengths, 3)
        assert_as_exact_as_reference(operation.call, tensors, dtype)
        # Pieces that are not there count for nothing, and not as a score of 0.
        tensors["x"] -= 200
        assert_as_exact_as_reference(operation.call, tensors, dtype)


@pytest.mark.parametrize("name", ["sum", "max", "softmax"])
def test_more_pieces_than_a_merge_reads_at_once(name):
    from jagged_kernels.device.pieces import MERGE_LANES, piece_shape
    from jagged_kernels.ops.normalise.triton_softmax import SOFTMAX_CUTS
    from jagged_kernels.ops.pooling.triton_max import MAX_CUT
    from jagged_kernels.ops.pooling.triton_sum import SUM_CUT

    operation, columns = OPERATIONS[name], 33
    cut = {"sum": SUM_CUT, "max": MAX_CUT, "softmax": SOFTMAX_CUTS[4]}[name]
    lengths = [2, (MERGE_LANES + 1) * piece_shape(columns, 4, cut).piece + 3]
    tensors = _on_device(operation.tensors(lengths, columns))
    tensors["x"].abs_()  # so that a sum does not cancel
    ours, exact = (flat(operation.call(backend, **tensors)) for backend in ("triton", "reference"))
    for out, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 4, 5, 64])
def test_softmax_of_users_that_are_held_read_twice_and_cut(
    columns, dtype, poisoned_allocations, short_pieces
):
    """Users at the edges of every tile, of a piece, and of more."""
    from jagged_kernels.device.pieces import piece_shape
    from jagged_kernels.ops.normalise import triton_softmax

    is_narrow = columns * dtype.itemsize <= 16
    cut = triton_softmax.NARROW_CUT if is_narrow else triton_softmax.SOFTMAX_CUTS[dtype.itemsize]
    shape = piece_shape(columns, dtype.itemsize, cut)
    edges = [shape.tile >> halvings for halvings in range(1, 5)]
    lengths = [0, *(edge + more for edge in edges for more in (0, 1)), 1]
    lengths += [shape.tile, shape.tile + 1, shape.piece, shape.piece + 1, 3 * shape.piece - 1]
    operation = OPERATIONS["softmax"]
    assert_as_exact_as_reference(operation.call, operation.tensors(lengths, columns), dtype)


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_softmax_of_pieces_far_from_zero(shift, short_pieces):
    """Pieces that a user does not have count for nothing, and not as a score of 0."""
    x = torch.randn(700, 3, generator=torch.Generator().manual_seed(0)) + shift
    offsets = torch.tensor([0, 690, 700])
    x, offsets = x.to(DEVICE), offsets.to(DEVICE)
    (found,) = flat(OPERATIONS["softmax"].call("triton", offsets=offsets, x=x))
    torch.testing.assert_close(found[:690], x[:690].softmax(0))


@pytest.mark.parametrize("stride", [2**19, 2**21])
def test_softmax_of_narrow_rows_far_apart(stride, monkeypatch):
    """Addresses in a tile are of 32 bits: rows that lie too far apart for it are copied."""
    from jagged_kernels.ops.normalise import triton_softmax

    launched = []
    monkeypatch.setattr(triton_softmax, "launch", lambda *a, **k: launched.append(a[3]))
    x = torch.empty_strided((5000, 1), (stride, 1), device="meta")
    offsets = torch.empty(2, dtype=torch.int64, device="meta")
    triton_softmax.launch_softmax(x, offsets)
    triton_softmax.launch_softmax_backward(x, x, offsets)
    assert launched
    for constants in launched:
        for name in ("X_STRIDE", "D_STRIDE"):
            assert constants["TILE"] * constants[name] < 2**31


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_hardly_any_tokens(name, lengths):
    tensors = OPERATIONS[name].tensors(lengths, 6)
    assert_as_exact_as_reference(OPERATIONS[name].call, tensors, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    assert_gradients_exact(OPERATIONS[name].call, OPERATIONS[name].tensors([3, 0, 5, 1], 2))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole_and_for_other_batches(name):
    operation = OPERATIONS[name]
    lengths = ([3, 0, 6, 0, 1, 2, 0, 1], [5, 2, 2, 4], [11, 3])
    batches = [operation.tensors(each, 5) for each in lengths]
    fixed = ["native"] if name == "self difference" else []
    assert_compiles(operation.call, batches, sizes_compiled_in=fixed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_operands_of_any_layout(name, backend):
    """Transposed, and every second element of a larger tensor."""
    operation = OPERATIONS[name]
    tensors = operation.tensors(MIXED, 4)
    outputs = flat(operation.call(backend, **_on_device(tensors)))
    for tensor in operation.operands:
        loose = tensors[tensor].repeat_interleave(2, -1)[..., ::2]
        apart = tensors | {tensor: loose.transpose(0, -1).contiguous().transpose(0, -1)}
        for name_, operand in (("loose", loose), ("transposed", apart[tensor])):
            changed = _on_device(tensors) | {tensor: operand.to(DEVICE)}
            for out, expected in zip(
                flat(operation.call(backend, **changed)), outputs, strict=True
            ):
                # Not to the bit: PyTorch's own sums may take another order.
                torch.testing.assert_close(out, expected, msg=f"{tensor} {name_}")


def _gradients(operation, backend, tensors):
    """Outputs, and gradients for gradients of the outputs that depend on the outputs alone."""
    leaves = {
        name: t.clone().requires_grad_(t.is_floating_point())
        for name, t in _on_device(tensors).items()
    }
    outputs = [t for t in flat(operation.call(backend, **leaves)) if t.is_floating_point()]
    torch.stack([(out * out.detach().cos()).sum() for out in outputs]).sum().backward()
    kinds = {name: kind for name, (kind, _) in operation.operands.items()}
    grads = [leaves[name].grad for name, kind in kinds.items() if kind != "parameter"]
    return [*(out.detach() for out in outputs), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_wider_ones(name, short_pieces):
    """Read where they lie, for gradients too, they give what rows without gaps give."""
    operation = OPERATIONS[name]
    tensors = _on_device(operation.tensors([3, 0, 70 if operation.squares else 600, 1]))

    def run(*, wide):
        """Outputs, and of each operand the gradient."""
        given, leaves = dict(tensors), []
        for operand in operation.operands:
            packed = tensors[operand]
            leaf = torch.stack([packed, packed], 1).requires_grad_()
            leaves.append(leaf)
            given[operand] = leaf[:, 0] if wide else leaf[:, 0].contiguous()
        outputs = [t for t in flat(operation.call("triton", **given)) if t.is_floating_point()]
        # Gradients of outputs, too, have rows in wider ones then.
        packed = [torch.stack([out, out.detach()], 1)[:, 0] if wide else out for out in outputs]
        torch.stack([(out * out.detach().cos()).sum() for out in packed]).sum().backward()
        return outputs, [leaf.grad for leaf in leaves if leaf.grad is not None]

    for found, expected in zip(run(wide=True), run(wide=False), strict=True):
        for ours, packed in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, packed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_user_does_not_depend_on_where_it_lies(name, backend, short_pieces):
    """Bit for bit, outputs and gradients, behind a user of an odd length."""
    operation = OPERATIONS[name]
    lengths = [11, 5, 0, *_with_a_whale(operation)]
    together = operation.tensors(lengths, WIDE)
    alone = _gradients(operation, backend, operation.without_first_user(together))
    for with_first, result in zip(_gradients(operation, backend, together), alone, strict=True):
        assert torch.equal(with_first[len(with_first) - len(result) :], result)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_with_its_user(name, backend):
    operation = OPERATIONS[name]
    tensors = operation.tensors([4, 6, 0, 9, 2], 3)
    sick = {name: t.clone() for name, t in tensors.items()}
    for operand, (kind, _) in operation.operands.items():
        first_user = {"token": 4, "user": 1, "score": 16, "parameter": 0}[kind]
        sick[operand][:first_user] = math.nan
    clean = _gradients(operation, backend, tensors)
    healthy = operation.without_first_user(tensors)
    sizes = [len(t) for t in _gradients(operation, backend, healthy)]
    for result, expected, size in zip(
        _gradients(operation, backend, sick), clean, sizes, strict=True
    ):
        first = len(result) - size
        assert torch.equal(result[first:], expected[first:])
        assert result[:first].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_offsets_of_either_dtype(name):
    operation = OPERATIONS[name]
    wide = operation.tensors(MIXED, 5)
    narrow = operation.tensors(MIXED, 5, offsets_dtype=torch.int32)
    for backend in BACKENDS:
        first = results(operation.call, backend, _on_device(wide))
        second = results(operation.call, backend, _on_device(narrow))
        for result in first:
            assert torch.equal(first[result].double(), second[result].double()), result


def _on_device(tensors):
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
