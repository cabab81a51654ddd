"""Launches with one of two speeds are found among pairs, and pairs of one speed are left alone."""

import numpy as np
import pytest

from kvbench.gate.compare.conclude import two_speed_notes
from kvbench.gate.timing.modes import SMALLEST_GAP, two_speeds
from kvbench.gate.timing.pairs import PairTable
from kvbench.gate.timing.rules import DEFAULT_RULES

SEEN = np.log([33.1, 26.2, 33.4, 33.0, 26.0, 26.3, 32.8, 33.2])  # tokens/s by launch, as on a GPU


def test_the_slower_pairs_are_named_with_their_distance():
    split = two_speeds(SEEN - np.log(33))
    assert split.slower.tolist() == [False, True, False, False, True, True, False, False]
    assert split.gap == pytest.approx(SEEN[~split.slower].mean() - SEEN[split.slower].mean())


@pytest.mark.parametrize("pairs", [6, 8, 16])
def test_normal_pairs_are_rarely_taken_for_two_groups(pairs):
    samples = np.random.default_rng(1).normal(0, 0.05, size=(1500, pairs))
    assert sum(two_speeds(sample) is not None for sample in samples) <= 0.012 * len(samples)  # 0.5 % expected


def test_two_speeds_are_mostly_found_in_eight_pairs_as_scattered_as_vllms():
    rng = np.random.default_rng(2)
    samples = rng.normal(0, 0.016, size=(400, 8)) - 0.23 * (rng.random((400, 8)) < 0.5)
    assert sum(two_speeds(sample) is not None for sample in samples) > 0.85 * len(samples)


@pytest.mark.parametrize("values", [
    np.repeat([0.0, 0.9 * SMALLEST_GAP], 4),  # a difference that nobody would act on
    np.array([0.0] * 7 + [-0.3]),  # a single launch
    SEEN[:5],  # too few
])  # fmt: skip
def test_what_is_too_small_or_too_few_is_no_group(values):
    assert two_speeds(np.asarray(values)) is None


@pytest.mark.parametrize(("side", "words"), [("base", "launches of the base"), ("candidate", "26.17 tokens/s in 3")])
def test_the_verdict_names_the_side_and_its_two_speeds(side, words):
    values = {name: np.full((8, 1, 3), 33.0) for name in ("base", "candidate")}
    values[side][:, 0, 0] = np.exp(SEEN)
    notes = two_speed_notes(
        PairTable.from_values(values["base"], values["candidate"], ["c16"], ["c16"], DEFAULT_RULES.metrics)
    )
    assert len(notes) == 1 and words in notes[0]
    equal = values["base"] * 0 + 33.0
    assert two_speed_notes(PairTable.from_values(equal, equal, ["c16"], ["c16"], DEFAULT_RULES.metrics)) == []
