"""How a function becomes an operator: one opaque call to autograd, fake tensors and torch.compile.

Below `torch.library.custom_op` and with an autograd kernel of its own: on short histories the time
that a call takes on the host is the time that it takes, and this way is 3x cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LIBRARY = torch.library.Library("jagged_kernels", "FRAGMENT")
# Of each operator, the function that it was made from.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def define_op(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    schema: str | None = None,
    name: str | None = None,
) -> Any:
    """`torch.ops.jagged_kernels.<name>`, by default the function's, without a gradient.

    Args:
        function: takes positional arguments without defaults and returns new tensors: neither an
            argument nor a view of one.
        fake: the same arguments -> empty tensors of the shapes, dtypes and device that `function`
            returns, without looking at contents.
        schema: "(Tensor x, int n) -> Tensor" where the annotations of `function` do not say it.
    """
    name = name or function.__name__.lstrip("_")
    _LIBRARY.define(name + (schema or torch.library.infer_schema(function, mutates_args=())))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jagged_kernels::{name}", fake)
    op = getattr(torch.ops.jagged_kernels, name).default
    _FUNCTIONS[op] = function
    return op


def define_gradient(
    op: Any,
    *,
    save: Callable[[tuple[Any, ...], Any], Sequence[Any]],
    gradient: Callable[..., Sequence[Tensor | Sequence[Tensor | None] | None]],
) -> None:
    """Gives an operator of `define_op` its gradient.

    Args:
        save: (inputs, output) -> what `gradient` needs of them, tensors and others.
        gradient: (saved, wanted, *gradients of the outputs) -> gradients of the first inputs;
            the inputs after those have none. `wanted[i]`: does input i need a gradient. For an
            input that is a list of tensors, both are lists. The gradient of an output that nobody
            used is None, never of all. It calls operators: what it does is traced by
            `torch.compile`.

    A second derivative raises: there is none.
    """

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, lists: list[int], *flat: Any) -> Any:
            inputs = _nest(flat, lists)
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            saved = save(inputs, output)
            ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in saved])
            ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
            ctx.lists, ctx.inputs = lists, len(flat)
            ctx.set_materialize_grads(False)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            if all(g is None for g in gradients):
                return (None,) * (1 + ctx.inputs)
            tensors = ctx.saved_tensors
            saved = [o if t is None else t for t, o in zip(tensors, ctx.others, strict=True)]
            wanted = _nest(ctx.needs_input_grad[1:], ctx.lists)
            found: list[Tensor | None] = []
            for part in gradient(saved, wanted, *gradients):
                found.extend(part if isinstance(part, Sequence) else [part])
            return (None, *found, *(None,) * (ctx.inputs - len(found)))

    def with_gradient(*inputs: Any) -> Any:
        flat, lists = _flatten(inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat):
            return Gradient.apply(lists, *flat)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    name = op.name().removeprefix("jagged_kernels::").removesuffix(".default")
    _LIBRARY.impl(name, with_gradient, "Autograd")


def nobody_looks(*inputs: Any) -> bool:
    """Whether no gradient is wanted and nothing traces, fakes or transforms these tensors: then
    the function of an operator may be called itself, without the dispatcher's time."""
    grad = torch.is_grad_enabled()
    return (
        all(type(x) in _PLAIN and not (grad and x.requires_grad) for x in inputs if x is not None)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def call_op(op: Any, *inputs: Any) -> Any:
    """`op(*inputs)` for an operator of `define_op`; its function itself where `nobody_looks`."""
    if torch.compiler.is_compiling():
        return op(*inputs)
    tensors = (x for x in _flatten(inputs)[0] if isinstance(x, Tensor))
    return _FUNCTIONS[op](*inputs) if nobody_looks(*tensors) else op(*inputs)


def _flatten(inputs: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Autograd sees tensors only outside lists: the inputs with lists of tensors spread out, and
    for each input the length of its list, -1 for others."""
    flat: list[Any] = []
    lists: list[int] = []
    for x in inputs:
        spread = isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x)
        lists.append(len(x) if spread else -1)
        flat.extend(x if spread else [x])
    return flat, lists


def _nest(flat: Sequence[Any], lists: Sequence[int]) -> tuple[Any, ...]:
    """What `_flatten` spread out, for inputs or what belongs to them."""
    rest = iter(flat)
    return tuple([next(rest) for _ in range(n)] if n >= 0 else next(rest) for n in lists)
