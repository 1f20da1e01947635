"""Commands that are killed lose nothing: a few moments of what `make kills` does for longer."""

import dataclasses

import kills
import pytest


@pytest.mark.parametrize(("name", "moments"), [("reproduce", 1), ("train", 2)])
def test_nothing_is_lost_or_left(name, moments, monkeypatch):
    command = kills.COMMANDS[name]
    if name == "reproduce":  # a notebook is enough
        one = dataclasses.replace(command, arguments=(*command.arguments, "--only", "04"))
        monkeypatch.setitem(kills.COMMANDS, name, one)
    said: list[str] = []
    violations = kills.watch(name, moments=moments, seed=1, say=said.append)
    assert not violations, "\n".join(said)


def test_half_of_the_moments_are_of_runs_that_went_on():
    places = kills.draw(20, kills.random.Random(0))
    assert sorted({*map(len, places)}) in ([1, 2], [1, 2, 3])
    assert sum(map(len, places)) == 20
    assert sorted(int(10 * first) for first, *_ in places) == list(range(10))
