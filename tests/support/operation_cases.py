"""Checks that every jagged operation passes, whatever it computes.

An operation is given as `call(backend, **tensors)`: it makes its `JaggedTensor`s from plain tensors
and returns tensors or jagged ones, alone or in a tuple. Floating-point tensors get gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_cases import DEVICE, assert_no_worse
from torch import Tensor

Call = Callable[..., Any]
COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)


def results(call: Call, backend: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs ("out0", ...) and gradients ("d_x" for tensor x), for fixed random gradients of the
    outputs."""
    leaves = _leaves(tensors)
    outputs = flat(call(backend, **leaves))
    found = {f"out{index}": out.detach() for index, out in enumerate(outputs)}
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
    for out in outputs:
        if out.requires_grad:
            d_out = torch.randn(out.shape, generator=generator, dtype=torch.float32)
            # In half precision first: every precision then gets the same gradient.
            loss = loss + (out * d_out.bfloat16().to(out)).sum(dtype=torch.float64)
    if loss.requires_grad:
        loss.backward()
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            found[f"d_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def assert_as_exact_as_reference(
    call: Call,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    backends: Sequence[str] = ("native", "triton"),
) -> None:
    """Errors against the float64 reference are at most `FACTOR` times those that the reference
    itself makes in `dtype`; integer results are equal; a rerun gives the same bits."""
    tensors = {name: _cast(t.to(DEVICE), dtype) for name, t in tensors.items()}
    double = {name: _cast(t, torch.float64) for name, t in tensors.items()}
    exact, peer = results(call, "reference", double), results(call, "reference", tensors)
    for backend in backends:
        ours = results(call, backend, tensors)
        again = results(call, backend, tensors)
        for name, result in ours.items():
            assert result.dtype == peer[name].dtype, (backend, name)
            assert torch.equal(result, again[name]), f"{backend} {name}: a rerun differs"
        whole = [name for name in ours if not ours[name].is_floating_point()]
        for name in whole:
            assert torch.equal(ours.pop(name), exact[name]), (backend, name)
        assert_no_worse(ours, peer, exact, name=backend)


def assert_gradients_exact(
    call: Call, tensors: dict[str, Tensor], *, backends: Sequence[str] = ("reference", "native")
) -> None:
    """`torch.autograd.gradcheck` in float64."""
    names = list(tensors)
    for backend in backends:
        leaves = _leaves({name: _cast(t, torch.float64) for name, t in tensors.items()})

        def outputs(*values: Tensor, backend: str = backend) -> tuple[Tensor, ...]:
            found = flat(call(backend, **dict(zip(names, values, strict=True))))
            return tuple(out for out in found if out.is_floating_point())

        assert torch.autograd.gradcheck(outputs, tuple(leaves.values()))


def assert_compiles(
    call: Call,
    batches: Sequence[dict[str, Tensor]],
    *,
    backends: Sequence[str] = ("native", "triton"),
    sizes_compiled_in: Sequence[str] = (),
) -> None:
    """One graph for all batches, with the eager results and gradients.

    In the first batch no two sizes must be equal that are not so in the others: PyTorch takes them
    for one.

    Args:
        sizes_compiled_in: backends that are compiled for each batch again.
    """
    for backend in backends:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=COMPILER, dynamic=True)
        for number, batch in enumerate(batches):
            tensors = {name: t.to(DEVICE) for name, t in batch.items()}
            eager = results(call, backend, tensors)
            again = number == 0 or backend in sizes_compiled_in
            with torch.compiler.set_stance("default" if again else "fail_on_recompile"):
                graph = results(compiled, backend, tensors)
            torch.testing.assert_close(graph, eager)


def flat(result: Any) -> list[Tensor]:
    """The tensors of an operation's result: of jagged ones, the values."""
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in flat(part)]
    return [result if isinstance(result, Tensor) else result.values]


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: t.detach().clone().requires_grad_(t.is_floating_point())
        for name, t in tensors.items()
    }


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
