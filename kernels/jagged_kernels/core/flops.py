"""Formulas for `torch.utils.flop_counter.FlopCounterMode`, which does not see inside of operators.

They count as PyTorch's own do: two FLOPs for each multiplication in a matrix product that the
operation needs, once each (and once more where a backward recomputes it), whatever a kernel does in
parts or twice; nothing for softmax, bias or activation.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_COUNTER = "torch.utils.flop_counter"
# Of each operator, until there is a counter.
_WAITING: list[tuple[Any, Callable[..., Any]]] = []


def define_flops(op: Any, count: Callable[..., Any]) -> None:
    """Gives an operator of `define_op` its formula.

    Args:
        count: the operator's inputs -> FLOPs. It may read contents, where there are any: only a
            counter calls it.
    """

    def formula(*inputs: Any, out_val: Any = None) -> Any:
        return count(*inputs)

    _WAITING.append((op.overloadpacket, formula))
    if _COUNTER in sys.modules:
        _register()


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    while _WAITING:
        packet, formula = _WAITING.pop()
        register_flop_formula(packet, get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    """Registers when the counter's module is imported. Importing it here would import Triton, which
    those who never launch a kernel need not wait for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenImported())
