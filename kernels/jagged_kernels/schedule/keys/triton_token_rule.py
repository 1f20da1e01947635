"""`token_rule.token_visible` in kernels: those that build lists, and those of attention."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rule(targets_ptr, contexts_ptr, user, length):
    """(history, contexts) of a user, or of a block of users, int32: the tokens before the targets,
    and those of them that are contexts. The pointers may be None."""
    history = length
    if targets_ptr is not None:
        targets = tl.load(targets_ptr + user).to(tl.int32)
        history = tl.maximum(length - tl.maximum(targets, 0), 0)
    contexts = length * 0
    if contexts_ptr is not None:
        contexts = tl.load(contexts_ptr + user).to(tl.int32)
        contexts = tl.minimum(tl.maximum(contexts, 0), history)
    return history, contexts


@triton.jit
def token_visible(i, j, length, left, first, history, contexts):
    """Whether the query at place i sees key j; int32 of any shapes that broadcast.

    Args:
        i, j: places among the user's keys, from 0; the last query stands at the last key. No pair
            is visible of which one is not among them.
        length: the user's keys.
        left, first: of `TokenRule`.
        history, contexts: of `load_rule`.
    """
    # A query sees the keys of an interval, some before it, and itself: ends of intervals are of
    # queries alone, which leaves little to be done for each pair.
    i = tl.where((i >= 0) & (i < length), i, -1)
    j = tl.where((j >= 0) & (j < length), j, length)
    is_context = (i >= 0) & (i < contexts)
    last_context = tl.maximum(contexts - 1, 0)
    at = tl.minimum(tl.maximum(i, last_context), history)
    # Keys before `end` stand before the query; a context sees all that are no targets.
    end = tl.where(is_context, history, tl.where(at > last_context, at, 0))
    begin = tl.where((left < 0) | is_context | (at - left <= last_context), 0, at - left)
    return ((j < end) & ((j >= begin) | (j < first))) | (i == j)
