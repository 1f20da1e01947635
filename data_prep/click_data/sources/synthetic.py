"""The embedded click log: made here, with interests planted in it.

What is planted, so that models can be told apart on it:

- A user's taste for each category is drawn independently of every other category and decides most
  of a label. The only evidence of it is what the user did in that category before, so a model that
  looks up the target's category in the history (target attention) beats one that averages over the
  whole history (mean-pooling), and beats counts of users and items by more.
- Users return to a dozen or so of the categories in no order, so the evidence about one category
  lies scattered over the whole history: a short cut of it loses most.
- Item quality and user bias are planted too, weaker: what any model can learn.
- Lengths of histories and popularity of items follow power laws. The longest history is many times
  the mean, which gives padded batches the waste of real logs.

With `gap` longer histories are better by construction: a user returns to a category only when at
least `gap` events of others have passed. So whatever tells of a taste lies farther back than that,
the last `gap` events (at a request for several events of one second, fewer by those) say nothing of
it, and since labels are noisy, every earlier return tells something more.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from click_data.errors import DataError
from click_data.events import MAX_EVENTS, ClickLog, label_column

_START = 1_700_000_000  # unix seconds
_SPAN = 180 * 86_400  # the whole log
_SESSION = 12  # mean events of a session
_TIED = 0.1  # share of a session's events in the same second as the one before

_LENGTH_POWER = 1.6  # Pareto tail exponent of history lengths
_LONGEST = 9.0  # cap on a history, in mean lengths
_ITEM_POWER = 0.8  # Zipf exponent of items within their category
_FOCUS = 2.2  # spread (log) of a user's visits over categories

_TASTE = 3.0  # standard deviations of the planted parts of a label's logit
_QUALITY = 1.0
_BIAS = 0.7


@dataclass(frozen=True)
class SyntheticOptions:
    """Sizes of the log. Every user has at least one event.

    gap: events that pass, at least, before a user returns to a category; 0 = visits know nothing of
    each other.
    """

    users: int = 1000
    items: int = 1000
    categories: int = 60
    events: int = 60_000
    gap: int = 0


def load(path: Path | None, options: SyntheticOptions, seed: int) -> ClickLog:
    """Draw a log. Options and seed fix every byte of what is prepared from it, with one NumPy."""
    assert path is None
    if not 1 <= options.categories <= options.items:
        raise DataError(f"synthetic: between 1 and {options.items} categories are needed")
    if not 1 <= options.users <= options.events:
        raise DataError(f"synthetic: between 1 and {options.events} users are needed")
    if not 0 <= options.gap < options.categories:
        raise DataError(
            f"synthetic: gap must lie between 0 and {options.categories - 1}, one less than the "
            f"categories, not {options.gap}"
        )
    for size in (options.events, options.items):
        if size > MAX_EVENTS:
            raise DataError(f"synthetic: at most {MAX_EVENTS} events and items, not {size}")
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths = _lengths(rng, options.users, options.events)
    user = np.repeat(np.arange(options.users), lengths)

    # Every category has an item; the rest fall where they may.
    item_category = np.concatenate(
        [
            np.arange(options.categories),
            rng.integers(options.categories, size=options.items - options.categories),
        ]
    )
    if options.gap:
        category = _spaced_visits(rng, lengths, options.categories, options.gap)
    else:
        category = _visits(rng, user, options.users, options.categories)
    item = _items(rng, category, item_category)

    taste = rng.standard_normal((options.users, options.categories))
    quality = rng.standard_normal(options.items)
    bias = rng.standard_normal(options.users)
    logit = _TASTE * taste[user, category] + _QUALITY * quality[item] + _BIAS * bias[user]
    label = rng.random(len(user)) < 1 / (1 + np.exp(-logit))

    events = pl.DataFrame(
        {
            "user_id": user.astype(np.int64),
            "item_id": item.astype(np.int64),
            "time": _times(rng, user, lengths),
            label_column("label"): label.astype(np.int8),
            "item category": category.astype(np.int64),
        }
    )
    return ClickLog(name="synthetic_far" if options.gap else "synthetic", events=events)


def _lengths(rng: np.random.Generator, users: int, events: int) -> NDArray[np.int64]:
    """History lengths [users]: a capped Pareto's quantiles, scaled to sum to `events`, shuffled."""
    share = (np.arange(users) + 0.5) / users
    raw = (1 - share) ** (-1 / _LENGTH_POWER)
    raw = np.minimum(raw, _LONGEST * raw.mean())
    spare = raw * (events - users) / raw.sum()
    lengths = 1 + np.floor(spare).astype(np.int64)
    lengths[users - (events - lengths.sum()) :] += 1  # what rounding down left over: the longest
    return rng.permutation(lengths)


def _visits(
    rng: np.random.Generator, user: NDArray[np.int64], users: int, categories: int
) -> NDArray[np.int64]:
    """The category of each event: independent draws from its user's own mix of categories."""
    mix = np.exp(_FOCUS * rng.standard_normal((users, categories)))
    cumulative = np.cumsum(mix / mix.sum(axis=1, keepdims=True), axis=1)
    # One search for all: user u's cumulative shares lie between u and u + 1.
    edges = (cumulative + np.arange(users)[:, None]).ravel()
    found = np.searchsorted(edges, user + rng.random(len(user)), side="right")
    return np.clip(found - user * categories, 0, categories - 1)


def _spaced_visits(
    rng: np.random.Generator, lengths: NDArray[np.int64], categories: int, gap: int
) -> NDArray[np.int64]:
    """As `_visits`, but out of the categories that the user's last `gap` events are not of."""
    preference = _FOCUS * rng.standard_normal((len(lengths), categories))
    latest = np.full((len(lengths), categories), -gap - 1)
    first = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    found = np.empty(lengths.sum(), np.int64)
    for place in range(lengths.max()):
        users = order[: np.count_nonzero(lengths > place)]
        # The largest of preferences with Gumbel noise is a draw from their softmax.
        draw = preference[users] + rng.gumbel(size=(len(users), categories))
        draw[place - latest[users] <= gap] = -np.inf
        category = draw.argmax(axis=1)
        latest[users, category] = place
        found[first[users] + place] = category
    return found


def _items(
    rng: np.random.Generator, category: NDArray[np.int64], item_category: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The item of each event: drawn within its category by a Zipf law over the category's items."""
    order = np.argsort(item_category, kind="stable")
    sizes = np.bincount(item_category)
    first = np.cumsum(sizes) - sizes
    rank = np.arange(len(order)) - first[item_category[order]]
    weight = (1.0 + rank) ** -_ITEM_POWER
    total = np.cumsum(weight)
    below = total[first] - weight[first]  # weight of all items of lower categories
    inside = total[first + sizes - 1] - below
    point = below[category] + rng.random(len(category)) * inside[category]
    found = np.searchsorted(total, point, side="right")
    return order[np.clip(found, first[category], first[category] + sizes[category] - 1)]


def _times(
    rng: np.random.Generator, user: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Unix seconds of each event, ascending within its user: sessions spread over the whole log."""
    position = np.arange(len(user)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    opens = (position == 0) | (rng.random(len(user)) < 1 / _SESSION)
    session = np.cumsum(opens) - 1
    starts = rng.integers(_SPAN, size=int(opens.sum()))
    starts = starts[np.lexsort((starts, user[opens]))]  # in order within each user
    gaps = np.where(rng.random(len(user)) < _TIED, 0, rng.integers(1, 120, size=len(user)))
    gaps[opens] = 0
    run = np.cumsum(gaps)
    time = _START + starts[session] + run - run[opens][session]
    # Where sessions of one user overlap, the later starts when the earlier has ended.
    return _ascending(time, user)


def _ascending(time: NDArray[np.int64], user: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running maximum within each user."""
    lift = user * (4 * _SPAN)
    return np.maximum.accumulate(time - _START + lift) - lift + _START
