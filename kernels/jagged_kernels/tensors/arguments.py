"""What is said of an argument of the wrong kind: apart from `checks`, so that the containers,
which `checks` imports, say it too."""

from __future__ import annotations


def not_a_tensor(name: str, given: object) -> TypeError:
    """The error to raise. Whoever asks writes `isinstance` itself: what runs in every call has no
    further call for it, and type checkers follow."""
    return TypeError(f"{name} must be a tensor, got {type(given).__name__}")
