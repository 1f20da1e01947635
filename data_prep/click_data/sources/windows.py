"""Histories that each row repeats, put together again: one sequence a user, and how far rows see.

A log of rows with their own histories says many times over what a user did: the first so many
events, or the last so many before the row. Here each history is found in the sequence that all of
a user's histories make, so that the sequence is held once.
"""

from collections.abc import Sequence
from typing import TypeVar

Event = TypeVar("Event")


def put_together(
    histories: Sequence[Sequence[Event]], *, ordered: bool
) -> tuple[list[Event], list[int]]:
    """The events of a user and, for each history, how many of them there are up to its last one.

    histories: those that are windows that move, in the order of their rows. One that begins like
    the sequence is its beginning; one that begins like it ends goes on from there. ordered: rows
    are known to be in order of time, so that a history that has nothing to do with the end comes
    behind a gap. So a row may see more than its own history held, of earlier events only.

    Raises ValueError, with the number of the history, for one that ends like the sequence begins,
    or, where rows may be in any order, has nothing to do with its end: it may be of an earlier
    time than those before it, whose rows would see what came later.
    """
    events: list[Event] = []
    ends: list[int] = []
    for number, history in enumerate(histories):
        window = list(history)
        if window != events[: len(window)]:
            common = _overlap(events, window)
            inside = 0 if common else _find(events, window)
            if inside:
                ends.append(inside)
                continue
            if events and not common and (not ordered or _overlap(window, events)):
                raise ValueError(number)
            events += window[common:]
            ends.append(len(events))
        else:
            ends.append(len(window))
    return events, ends


def _overlap(left: list[Event], right: list[Event]) -> int:
    """How many events, at most, end one list and begin the other."""
    longest = min(len(left), len(right))
    return next((n for n in range(longest, 0, -1) if left[-n:] == right[:n]), 0)


def _find(events: list[Event], window: list[Event]) -> int:
    """Where a window ends inside of a sequence; 0 if it is not there."""
    size = len(window)
    starts = range(len(events) - size + 1)
    return next((at + size for at in starts if events[at : at + size] == window), 0)
