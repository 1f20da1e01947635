"""Triton's interpreter without two thirds of its time, which change no result.

A call of a device function sets every function of `triton.language` anew, although the launch has
set them, and every sum and product of integers is computed twice more, for an assertion that is
only made with the option `debug`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

from triton import language
from triton.language import core


def make_lean(interpreter: Any) -> None:
    """Change `triton.runtime.interpreter` for the rest of this process."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Once(interpreter._patch_lang)


class _Once:
    """`_patch_lang` of a whole launch: what is set stays so until its last program has run."""

    def __init__(self, patch: Callable[[Callable[..., Any]], Any]) -> None:
        self.patch = patch
        self.scopes: list[Any] = []
        self.patched: frozenset[str] = frozenset()

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Set what `function` sees of the language, where it is not set yet.

        Returns:
            What a launch calls `restore` of. Device functions do not.
        """
        seen = _languages(function)
        if not self.scopes or not seen <= self.patched:
            self.scopes.append(self.patch(function))
            self.patched |= seen
        return self

    def restore(self) -> None:
        """The language as it was before the launch."""
        self.patched = frozenset()
        while self.scopes:
            self.scopes.pop().restore()


@cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    modules = function.__globals__.values()
    return frozenset(
        module.__name__ for module in (language, core) if any(m is module for m in modules)
    )
