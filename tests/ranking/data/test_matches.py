"""Earlier events of the item that is asked about: against loops, and in any pieces."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from click_data import ClickDataset, open_dataset, prepare
from jagged_ranking.data import matches
from jagged_ranking.data.matches import MATCHES, earlier_matches, match_features, whole_matches


@pytest.fixture(scope="module")
def few_items(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """A log in which users come back to the same items."""
    out = tmp_path_factory.mktemp("few") / "log"
    return open_dataset(prepare("synthetic", out=out, users=20, items=12, categories=3, events=900))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 12)), max_size=6),
)
def test_against_a_plain_loop(events: list, asked: list) -> None:
    events = sorted(events, key=lambda event: event[0])
    owner, item = (torch.tensor([e[at] for e in events], dtype=torch.int64) for at in (0, 1))
    whose, what, end = (torch.tensor([a[at] for a in asked], dtype=torch.int64) for at in range(3))
    end = end.clamp(max=len(events))
    count, since = earlier_matches(owner, item.int(), whose, what.int(), end, rows=5)
    for row, (user, wanted, _) in enumerate(asked):
        stop = int(end[row])
        places = [at for at in range(stop) if events[at] == (user, wanted)]
        assert int(count[row]) == len(places)
        assert int(since[row]) == (stop - 1 - places[-1] if places else -1)


@pytest.mark.parametrize("piece", [1, 97, 10**6])
def test_all_that_a_request_may_see_and_nothing_later(
    few_items: ClickDataset, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matches, "PIECE", piece)
    columns, histories = few_items.requests("test"), few_items.histories
    counts, sinces = [], []
    for request in range(len(columns)):
        begin = histories.offsets[columns.user[request]]
        seen = histories.item[begin : begin + columns.prefix[request]]
        for item in columns.item[columns.offsets[request] : columns.offsets[request + 1]]:
            places = np.flatnonzero(seen == item)
            counts.append(len(places))
            sinces.append(len(seen) - 1 - places[-1] if len(places) else -1)
    assert max(counts) > 1
    wanted = match_features(torch.tensor(counts).int(), torch.tensor(sinces).int())
    found = whole_matches(few_items, columns)
    assert list(found) == list(MATCHES)
    for name, values in zip(MATCHES, wanted.T, strict=True):
        assert found[name].tolist() == values.tolist(), name
