"""Commands that are killed lose nothing: one moment of what `make kills` does for longer."""

import dataclasses
import random
import time

import kills


# `reproduce` takes a minute; test_interrupts.py and test_unfinished.py have its parts.
def test_a_training_that_is_killed_loses_and_leaves_nothing(monkeypatch):
    command = kills.COMMANDS["train"]
    shorter = dataclasses.replace(command, arguments=(*command.arguments, "--epochs", "4"))
    monkeypatch.setitem(kills.COMMANDS, "train", shorter)
    said: list[str] = []
    violations = kills.watch("train", moments=1, seed=5, say=said.append)
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
