"""How a function becomes an operator: one opaque call to autograd, fake tensors and torch.compile.

Below `torch.library.custom_op`, with an autograd kernel of its own, and where nobody looks without
the dispatcher: on short histories the time that a call takes on the host is the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import forward_ad, profiler

from jagged_kernels.core.autocast import without_autocast
from jagged_kernels.core.batches import call_in_turn, is_batched, map_in_turn

_LIBRARY = torch.library.Library("jagged_kernels", "FRAGMENT")
# Of each operator its function and, where it has one, that function with a gradient.
_EAGER: dict[Any, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}
_PLAIN = frozenset((int, float, bool, str, NoneType))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_SIMPLE = _PLAIN | _TENSORS
# Stands, among what a gradient needs, where autograd keeps a tensor.
_SAVED = object()


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
            returns, without looking at contents. Serves tensors on "meta" too.
        schema: "(Tensor x, int n) -> Tensor" where the annotations of `function` do not say it.

    Autocast is off in `function`. Under `torch.func.vmap` it is called for one after another.
    """
    name = name or function.__name__.lstrip("_")
    _LIBRARY.define(name + (schema or torch.library.infer_schema(function, mutates_args=())))
    function = without_autocast(function)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jagged_kernels::{name}", fake)
    op = getattr(torch.ops.jagged_kernels, name).default
    torch.library.register_vmap(op, call_in_turn(op), lib=_LIBRARY)
    _EAGER[op] = (function, None)
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
            used is None, never of all. It calls operators (by `call`): what it does is traced
            by `torch.compile`.

    What autograd and profilers show has the name of the operator.

    A second derivative raises, with respect to anything that the first depends on, and so does a
    derivative in forward mode: there is none.
    """
    name = op.name().removeprefix("jagged_kernels::")
    no_second = f"{op.name()} has no second derivatives; backend='reference' has".encode()

    # Autograd gets those inputs alone that want a gradient, and what it does not look at in one
    # argument: it takes time for each.
    def forward(
        ctx: Any,
        called: tuple[Callable[..., Any], tuple[Any, ...], list[int] | None, list[int]],
        *_leaves: Tensor,
    ) -> Any:
        run, inputs, lists, places = called
        output = run(*inputs)
        tensors, others = [], []
        for x in save(inputs, output):
            if type(x) not in _PLAIN and isinstance(x, Tensor):
                tensors.append(x)
                others.append(_SAVED)
            else:
                others.append(x)
        ctx.save_for_backward(*tensors)
        ctx.kept = (others, len(inputs), lists, places)
        ctx.set_materialize_grads(False)
        return output

    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        used = False
        for d_output in gradients:
            if d_output is not None:
                if is_batched(d_output):
                    return map_in_turn(lambda *given: backward(ctx, *given), gradients)
                used = True
        if not used:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return first_derivative(ctx, tensors, gradients)
        with torch.no_grad():
            found = first_derivative(ctx, tensors, gradients)
        # The node that raises stands between gradients and all that they depend on: autograd
        # passes by nodes that lead to none of the inputs that are asked for.
        behind = [*tensors, *[x for x in gradients if x is not None]]
        behind = [x for x in behind if x.requires_grad]
        if not behind:
            return found
        given = (*found, *behind)
        forbidden = torch._C._functions.DelayedError(no_second, len(given))  # pyright: ignore[reportAttributeAccessIssue]
        return forbidden(*given)[: len(found)]

    def first_derivative(
        ctx: Any, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        others, count, lists, places = ctx.kept
        rest = iter(tensors)
        saved = [next(rest) if x is _SAVED else x for x in others]
        wanted = [False] * (count if lists is None else sum(map(abs, lists)))
        for place, needed in zip(places, ctx.needs_input_grad[1:], strict=True):
            wanted[place] = needed
        found: Sequence[Any] = gradient(saved, _nest(wanted, lists), *gradients)
        if lists is not None:
            found = [d for part in found for d in _as_list(part)]
        leaves = [found[place] if place < len(found) else None for place in places]
        return (None, *leaves)

    # Autograd names the node of the backward by the class, with "Backward" behind.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    make_class: Any = type(torch.autograd.Function)
    Gradient = make_class(name, (torch.autograd.Function,), methods)

    def below_autograd(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def with_gradient(*inputs: Any) -> Any:
        flat, lists = _flatten(inputs)
        if _in_forward_mode() and any(map(_tangent, flat)):
            raise NotImplementedError(f"{op.name()} has no derivative in forward mode")
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        if not (places and torch.is_grad_enabled()):
            return below_autograd(*inputs)
        if _transforms():
            raise NotImplementedError(f"{op.name()}: gradients by torch.autograd, not torch.func")
        return Gradient.apply((below_autograd, inputs, lists, places), *[flat[i] for i in places])

    _LIBRARY.impl(name, with_gradient, "Autograd")
    # Past what looks for transforms of functions: `call` knows that there are none.
    apply = super(torch.autograd.Function, Gradient).apply  # pyright: ignore[reportAttributeAccessIssue]
    _EAGER[op] = (_EAGER[op][0], apply)


def transforms() -> bool:
    """Inside of `torch.func.grad`, `vmap` and the like: they refuse an `autograd.Function` that has
    no rules for them, and need none where its steps are called as they are."""
    return not torch.compiler.is_compiling() and _transforms()


def _transforms() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def call(op: Any, *inputs: Any) -> Any:
    """`op(*inputs)`; where nothing traces, fakes or transforms, without the dispatcher's time."""
    if torch.compiler.is_compiling():
        return op(*inputs)
    flat, lists = inputs, None
    if not _SIMPLE.issuperset(map(type, inputs)):
        flat, lists = _flatten(inputs)
        if not all(type(x) in _SIMPLE or _is_plain_list(x) for x in flat):
            return op(*inputs)
    if (
        torch._C._len_torch_dispatch_stack()
        or _transforms()
        or torch._C._is_tracing()
        or _in_forward_mode()
        or flat[0].is_meta
    ):
        return op(*inputs)
    function, gradient = _EAGER[op]
    places = []
    if torch.is_grad_enabled():
        places = [i for i, x in enumerate(flat) if type(x) in _TENSORS and x.requires_grad]
    if places and gradient is None:
        return op(*inputs)
    if gradient is not None and places:
        inputs = ((function, inputs, lists, places), *[flat[i] for i in places])
        function = gradient
    if not profiler._is_profiler_enabled:
        return function(*inputs)
    tensors = [x for x in flat if type(x) in _TENSORS]
    with _RecordFunctionFast(op.name(), tensors):
        return function(*inputs)


def _is_plain_list(x: Any) -> bool:
    return type(x) in (list, tuple) and _PLAIN.issuperset(map(type, x))


def _flatten(inputs: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Autograd sees tensors only outside lists: the inputs with lists of tensors spread out, and
    for each input the length of its list, -1 for others."""
    flat: list[Any] = []
    lists: list[int] = []
    for x in inputs:
        if isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) for part in x):
            lists.append(len(x))
            flat.extend(x)
        else:
            lists.append(-1)
            flat.append(x)
    return flat, lists


def _as_list(part: Any) -> Sequence[Any]:
    return part if isinstance(part, (list, tuple)) else [part]


def _nest(flat: Sequence[Any], lists: Sequence[int] | None) -> Sequence[Any]:
    """What `_flatten` spread out, for inputs or what belongs to them; None if there was no list."""
    if lists is None:
        return flat
    rest = iter(flat)
    return tuple([next(rest) for _ in range(n)] if n >= 0 else next(rest) for n in lists)
