"""Events sorted into one history a user."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from click_data.arrays import as_arrow, encode, gather, lists, stable_order
from click_data.schema import label_column


@dataclass(frozen=True)
class Histories:
    """All events by user and time, those of one instant as the log has them.

    users: distinct ids [U], ascending; offsets int64 [U+1] into the events.
    user, item int32 (a number in the order of item ids, see `vocabulary`), time int64 [T].
    labels: int8 [T] by task, where events carry them; signals: float32 [T] by name, labels that
        are not all the same among them; contexts [T] by name, as the log has them, for requests
        about the events.
    """

    users: pl.Series
    offsets: NDArray[np.int64]
    user: NDArray[np.int32]
    item: NDArray[np.int32]
    time: NDArray[np.int64]
    labels: dict[str, NDArray[np.int8]]
    signals: dict[str, NDArray[np.float32]]
    contexts: dict[str, pl.Series]

    def table(self, id_of: NDArray[np.int32]) -> pa.Table:
        """histories.parquet; id_of: the id of each item."""
        columns = {"item": gather(id_of, self.item), "time": self.time, **self.signals}
        offsets = pa.array(self.offsets.astype(np.int32))
        return pa.table(
            {
                "user_id": as_arrow(self.users),
                **{name: lists(values, offsets) for name, values in columns.items()},
            }
        )

    def among_first(self, count: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The events [T] that are among the first so many of their user's; count: [U]."""
        position = np.arange(len(self.user)) - self.offsets[self.user]
        return position < count[self.user]

    def earlier(self, user: NDArray[np.int32], time: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many events each of some users has at strictly earlier times than one each, [N]."""
        # Events and questions sorted together: a question comes before the events of its time.
        whose = np.concatenate([user, self.user])
        when = np.concatenate([time, self.time])
        kind = np.repeat(np.array([0, 1], np.int8), [len(user), len(self.user)])
        order = stable_order(kind, when, whose)
        events_before = np.cumsum(kind[order], dtype=np.int64)
        found = np.empty(len(order), np.int64)
        found[order] = events_before
        return found[: len(user)] - self.offsets[user]


def histories_of(
    events: pl.DataFrame,
    candidates: pl.DataFrame | None,
    items: pl.Series,
    tasks: Sequence[str],
) -> Histories:
    """Sort the events of a log; who is asked without a history has an empty one."""
    ids = [events["user_id"]] + ([] if candidates is None else [candidates["user_id"]])
    users = pl.concat([one.unique() for one in ids]).unique().sort()
    user, time = encode(events["user_id"], users), events["time"].to_numpy()
    order = stable_order(time, user)
    counts = np.bincount(user, minlength=len(users))
    carried = [task for task in tasks if label_column(task) in events.columns]
    labels = {task: gather(events[label_column(task)].to_numpy(), order) for task in carried}
    told = {task: values for task, values in labels.items() if np.ptp(values) > 0}
    named = [name for name in events.columns if name.startswith("signal ")]
    signals = {task: values.astype(np.float32) for task, values in told.items()}
    signals |= {
        name.removeprefix("signal "): gather(events[name].to_numpy(), order) for name in named
    }
    return Histories(
        users=users,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        user=gather(user, order),
        item=gather(encode(events["item_id"], items), order),
        time=gather(time, order),
        labels=labels,
        signals=signals,
        contexts={
            name.removeprefix("context "): events[name].gather(order)
            for name in events.columns
            if name.startswith("context ")
        },
    )
