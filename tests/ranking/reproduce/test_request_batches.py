"""Batches of requests whose histories have given lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from jagged_ranking.reproduce.request_batches import (
    BatchLengths,
    RequestBatches,
    of_cap,
    of_log,
    of_waste,
)

CPU = torch.device("cpu")
LENGTHS = BatchLengths(name="some", group="real", cap=4, batches=((3, 0, 9), (1, 4, 2)))


@pytest.mark.parametrize("waste", [0.0, 0.5, 0.85])
def test_lengths_of_a_waste_have_it_at_the_same_number_of_events(waste: float) -> None:
    found = of_waste(waste, cap=64, tokens=4096, batches=3, seed=0)
    assert found.waste == pytest.approx(waste, abs=0.005)
    for lengths in found.batches:
        assert max(lengths) == 64
        assert sum(lengths) == pytest.approx(4096, rel=0.02)
    assert len(set(found.batches)) == (1 if waste == 0 else 3)
    with pytest.raises(ValueError, match="waste 1"):
        of_waste(1.0, cap=64, tokens=4096, batches=1, seed=0)


def test_lognormal_lengths_waste_most_of_a_padded_batch() -> None:
    found = of_cap(256, tokens=16384, batches=2, seed=1)
    assert 0.8 < found.waste < 0.92
    for lengths in found.batches:
        assert max(lengths) == 256
        assert sum(lengths) == pytest.approx(16384, rel=0.2)
    assert found == of_cap(256, tokens=16384, batches=2, seed=1)


def test_lengths_of_a_log_are_its_own_cut_at_the_cap() -> None:
    found = of_log("log", np.array([2, 5, 40]), cap=16, tokens=600, batches=2, seed=0)
    assert {*itertools.chain(*found.batches)} == {2, 5, 16}
    assert all(sum(lengths) == pytest.approx(600, rel=0.3) for lengths in found.batches)


def test_a_batch_holds_the_lengths_the_candidates_and_what_came_before() -> None:
    made = RequestBatches(LENGTHS, items=50, candidates=2, device=CPU, seed=0)
    batches = made.each()
    assert [batch.events.tolist() for batch in batches] == [[3, 0, 4], [1, 4, 2]]
    for batch in batches:
        assert batch.asked.tolist() == [2, 2, 2]
        assert batch.item.lengths.tolist() == batch.events.tolist()
        assert (batch.age.values > 0).all()
        assert batch.item.values.min() >= 1
        assert batch.item.values.max() < made.shape.num_items
    assert not torch.equal(batches[0].user, batches[1].user)


def test_endless_batches_are_the_same_ones_in_turn() -> None:
    made = RequestBatches(LENGTHS, items=50, candidates=1, device=CPU, seed=0)
    found = [batch.item.values.tolist() for batch in itertools.islice(made.endless(), 5)]
    assert found[:2] == [batch.item.values.tolist() for batch in made.each()]
    assert found[2:] == [found[0], found[1], found[0]]


def test_few_items_are_in_most_histories() -> None:
    long = BatchLengths(name="long", group="real", cap=5000, batches=((5000,),))
    (batch,) = RequestBatches(long, items=1000, candidates=1, device=CPU, seed=0).each()
    counts = torch.bincount(batch.item.values.long(), minlength=1000)
    assert counts[1:11].sum() > 5 * counts[501:511].sum()
