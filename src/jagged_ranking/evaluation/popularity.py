"""The floor of next items: the item that most users had, whoever asks ("PopRec").

- popularity: counted over the train period's events.
- popularity_leak: counted over all events, held-out ones among them. It is no floor that a model
  could be asked to beat, since it has seen what it is tested on; published tables count so (S3-Rec,
  Zhou et al., CIKM 2020, table of LastFM), and a reproduction of their number says that data and
  metrics are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jagged_ranking.data.data_shape import NEXT_ITEM_RATE
from jagged_ranking.evaluation.all_items import all_item_metrics
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.metrics import OF_PROBABILITIES

if TYPE_CHECKING:
    from click_data import ClickDataset

NEXT_ITEM_FLOORS = ("popularity", "popularity_leak")


def evaluate_next_item_floor(
    name: str, dataset: ClickDataset, *, splits: Sequence[str] = ("test",)
) -> list[Evaluation]:
    """One of `NEXT_ITEM_FLOORS` on the splits; nothing is fitted."""
    if name == "popularity":
        count = dataset.items.column("train_count").to_numpy()
    else:
        count = np.bincount(dataset.histories.item, minlength=dataset.item_rows)
    share = count / (count.max() + 1)
    found = []
    for split in splits:
        columns = dataset.requests(split)
        one = Evaluation.of(split, columns, share[columns.item], train_ctr=NEXT_ITEM_RATE)
        for name in OF_PROBABILITIES:  # shares of the most popular item are none
            one.metrics.pop(name, None)
        one.metrics.update(all_item_metrics(_ranks(dataset, split, count)))
        found.append(one)
    return found


def _ranks(dataset: ClickDataset, split: str, count: np.ndarray) -> np.ndarray:
    """As `ranks_among_all`, of the requests' first candidates by these counts [N]."""
    columns, histories = dataset.requests(split), dataset.histories
    offsets = np.asarray(histories.offsets)
    ranks = []
    for user, prefix, first in zip(columns.user, columns.prefix, columns.offsets, strict=False):
        target = columns.item[first]
        others = np.arange(len(count)) > 0
        others[histories.item[offsets[user] : offsets[user] + prefix]] = False
        others[target] = False
        left = count[others]
        ranks.append(1 + (left > count[target]).sum() + (left == count[target]).sum() / 2)
    return np.array(ranks)
