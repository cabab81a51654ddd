"""Whose turn is next, and how long a turn should be."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from kvbench.common.errors import MeasurementError
from kvbench.lockstep import turns
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.turns import (
    MAX_COLD_COST,
    TURNS,
    TurnTaker,
    choose_turn,
    cold_cost,
    mean_step,
    share_done,
    take_turns,
)


class ScriptedEngine:
    """Stands for the process of one engine: each step takes the next of ``seconds``; ``log`` gets who took a turn."""

    def __init__(self, name, seconds, log):
        self.name, self.left, self.clock, self.log = name, list(seconds), 0.0, log

    def send(self, do, name, steps):
        assert do == "turn" and name == self.name
        self.steps = steps

    def receive(self, limit_s):
        name, steps = self.name, self.steps
        taken, self.left = self.left[:steps], self.left[steps:]
        self.clock += sum(taken)
        self.log.append((name, len(taken)))
        return {"steps": [[s, 0, 1, 1] for s in taken], "clock": self.clock, "ended": not self.left}


@pytest.fixture(autouse=True)
def clocks_may_differ(monkeypatch):
    """Scripted engines take no time."""
    monkeypatch.setattr(turns, "CLOCKS_DIFFER_S", math.inf)


def seats_of(**seconds):
    log = []
    return [TurnTaker(ScriptedEngine(name, each, log), name) for name, each in seconds.items()], log


def test_clocks_stay_within_one_turn_of_each_other_while_both_run():
    seats, log = seats_of(fast=[1.0] * 400, slow=[3.0] * 100)
    take_turns(seats, random.Random(0), 2, math.inf)
    clocks, widest = Counter(), 0.0
    left = Counter(fast=400, slow=100)
    for name, steps in log:
        clocks[name] += steps * {"fast": 1.0, "slow": 3.0}[name]
        left[name] -= steps
        if min(left.values()) > 0:
            widest = max(widest, abs(clocks["fast"] - clocks["slow"]))
    assert widest <= 6.0
    assert [seat.clock for seat in seats] == [400.0, 300.0] and all(seat.ended for seat in seats)
    assert sum(seats[0].turns) == len(seats[0].steps) == 400


def test_ties_are_broken_at_random_and_the_seed_repeats_them():
    firsts, orders = Counter(), []
    for seed in (1, 1, *range(2, 60)):
        seats, log = seats_of(a=[1.0] * 8, b=[1.0] * 8, c=[1.0] * 8)
        take_turns(seats, random.Random(seed), 1, math.inf)
        firsts[log[0][0]] += 1
        orders.append(log)
    assert orders[0] == orders[1] != orders[2]
    assert min(firsts[name] for name in "abc") >= 10


def test_a_load_that_does_not_end_in_time_is_given_up_and_an_engine_that_alone_goes_on_is_named():
    seats, _ = seats_of(base=[1.0] * 4, candidate=[1.0] * 4)
    with pytest.raises(MeasurementError, match="base, candidate") as failed:
        take_turns(seats, random.Random(0), 1, until=0.0)
    assert not isinstance(failed.value, EngineFailedError)
    seats[0].ended = True
    with pytest.raises(EngineFailedError, match="candidate") as failed:
        take_turns(seats, random.Random(0), 1, until=0.0)
    assert failed.value.process is seats[1].process


def test_how_far_a_load_is_counts_the_tokens_of_all_engines_and_what_has_ended_as_done():
    seats, _ = seats_of(a=[1.0] * 8, b=[1.0] * 8)  # a token a step
    assert share_done(seats, 8) == 0.0
    seats[0].begin_turn(4)
    seats[0].end_turn()
    assert share_done(seats, 8) == pytest.approx(0.25)
    seats[0].begin_turn(4)
    seats[0].end_turn()
    seats[1].begin_turn(2)
    seats[1].end_turn()
    assert share_done(seats, 100) == pytest.approx((1.0 + 0.02) / 2)  # a ended early, of 100 tokens at most


def with_turns(seconds, decoding=None):
    """A seat whose turns had these step times [turns, steps]."""
    seat = TurnTaker(None, "x")
    for turn, times in enumerate(seconds):
        tokens = 4 if decoding is None else decoding[turn]
        seat.steps += [[s, 0, tokens, tokens] for s in times]
        seat.turns.append(len(times))
    return seat


def test_cold_cost_is_what_the_place_in_a_turn_adds_whatever_the_machines_speed():
    rng = np.random.default_rng(0)
    truth = np.array([0.10, 0.04, 0.01, 0, 0, 0, 0, 0])
    speed = rng.uniform(0.8, 1.2, (50, 1))  # of each turn
    found = cold_cost([with_turns(0.01 * speed * (1 + truth) * rng.normal(1, 0.002, (50, 8)))])
    assert found == pytest.approx(truth, abs=0.002)


def test_cold_cost_ignores_turns_with_prompts_or_changing_batches():
    clean = with_turns(np.full((10, 8), 0.01))
    mixed = with_turns(np.tile(np.linspace(0.01, 0.9, 8), (30, 1)))
    for step in mixed.steps[::8]:
        step[1] = 12  # a prompt in each turn
    assert cold_cost([clean, mixed]) == pytest.approx(np.zeros(8))
    assert cold_cost([mixed]) is None


def test_the_mean_step_of_all_engines_with_and_without_prompts():
    first, second = with_turns([[0.01, 0.03]]), with_turns([[0.02, 0.1]])
    second.steps[1][1] = 12  # a prompt
    assert mean_step([first, second]) == pytest.approx(0.04)
    assert mean_step([first, second], decodes_only=True) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("cost", "length"),
    [
        ([0.0] * 8, 1),
        ([MAX_COLD_COST * 0.99] + [0.0] * 7, 1),
        ([0.039, 0.0] + [0.0] * 6, 2),
        ([0.07, 0.0] + [0.0] * 6, 4),
        ([0.5, 0.3] + [0.1] * 6, TURNS[-1]),
        (None, TURNS[-1]),
    ],
)
def test_the_shortest_turn_is_taken_that_is_within_two_percent_of_an_engine_alone(cost, length):
    assert choose_turn(None if cost is None else np.array(cost)) == length


@pytest.mark.parametrize(("answer", "words"), [
    ({"steps": [[0.5, 0, 1, 1]], "clock": 0.5}, "claim 0.5 s of a turn that took"),  # longer than the turn
    ({"steps": [[1e-6, 0, 1, 1], [0.0, 0, 1, 1]], "clock": 1e-6}, "a step took 0 s"),
    ({"steps": [[math.nan, 0, 1, 1]], "clock": 1e-6}, "a step took nan s"),
    ({"steps": [[1e-6, 0, 1, 1]], "clock": -1.0}, "its clock went from 0 to -1 s"),  # back in time
    ({"steps": [[1e-6, 0, 1, 1]], "clock": 1.0}, "its clock went from 0 to 1 s"),  # ahead, where nothing arrives
    ({"steps": [[1e-6, 0, 1]], "clock": 1e-6}, "not as the protocol has it"),
    ({"clock": 1e-6}, "not as the protocol has it"),
])  # fmt: skip
def test_an_engine_whose_turn_cannot_be_true_fails(monkeypatch, answer, words):
    class Liar(ScriptedEngine):
        def receive(self, limit_s):
            return {"ended": True, **answer}

        def ask(self, **load):
            return {"metrics": ""}

    monkeypatch.setattr(turns, "CLOCKS_DIFFER_S", 0.002)
    engine = TurnTaker(Liar("liar", [], []), "liar")
    engine.load(requests=[], concurrency=1)
    engine.begin_turn(2)
    with pytest.raises(EngineFailedError, match=words):
        engine.end_turn()


@pytest.mark.parametrize(("claimed", "waited", "hides"), [
    (0.29, 1.0, True), (0.31, 1.0, False), (0.01, 0.9, False),  # too short to tell
])  # fmt: skip
def test_steps_much_shorter_than_the_wait_for_them_hide_time(claimed, waited, hides):
    engine = TurnTaker(ScriptedEngine("a", [], []), "a", steps=[(claimed, 0, 1, 1)], waited_s=waited)
    assert bool(engine.why_hidden()) == hides
