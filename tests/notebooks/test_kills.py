"""Commands that are killed lose nothing: a few moments of what `make kills` does for longer."""

import dataclasses
import random
import time

import kills
import pytest

ONE = "04_quality: {models: [mean_pool], seeds: [0], replicates: 20, options: {epochs: 2}}\n"
OPTIONS = {"reproduce": ("--only", "04"), "train": ("--epochs", "4")}


@pytest.mark.parametrize(("name", "moments"), [("reproduce", 1), ("train", 2)])
def test_nothing_is_lost_or_left(name, moments, monkeypatch):
    command = kills.COMMANDS[name]
    shorter = dataclasses.replace(command, arguments=(*command.arguments, *OPTIONS[name]))
    monkeypatch.setitem(kills.COMMANDS, name, shorter)
    monkeypatch.setattr(kills, "PRESET", ONE)
    said: list[str] = []
    violations = kills.watch(name, moments=moments, seed=5, say=said.append)
    assert not violations, "\n".join(said)


def test_half_of_the_moments_are_of_runs_that_went_on():
    places = kills.draw(20, random.Random(0))
    assert {*map(len, places)} <= {1, 2, 3}
    assert sum(map(len, places)) == 20
    assert sorted(int(10 * first) for first, *_ in places) == list(range(10))


def test_a_kernel_that_is_starting_ends_with_its_command():
    words = ("-m", "jagged_ranking.cli", "run", "04_quality", "--out", "OUT")
    command = dataclasses.replace(kills.COMMANDS["reproduce"], arguments=words)
    kills.adopt(True)
    try:
        with kills.fresh_place(data=None) as place:
            running = kills.start(command, place)
            deadline = time.monotonic() + 60
            while not any("kernel.json" in line for line in running.lines()):
                assert time.monotonic() < deadline, running.said()
            assert running.kill()
            left = running.left()[1]
            running.end()
    finally:
        kills.adopt(False)
    assert not left
