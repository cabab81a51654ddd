"""The figures of quality.json from what engines predicted and answered, the limits and what breaks them."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.quality.answering import UNKNOWN, predicted_answers
from kvbench.quality.figures import Positions, figures, full_pool_figures, outside_of
from kvbench.quality.prompts import Prompt
from kvbench.runs.quality import MARGINS, Bin, ConfigurationFigures, limits_of

RNG = np.random.default_rng(0)


def prompt(name: str, set_name: str, turns: int = 1, answer: str | None = None, depth: float | None = None) -> Prompt:
    return Prompt(name, set_name, ((5,) * 20,) * turns, 4, answer, depth)


def positions(count: int, own: int) -> Positions:
    """The last ``count - own`` are of answers."""
    kld, change, before, after = (RNG.random(count) for _ in range(4))
    flags = np.arange(count) < own
    return Positions(kld, change, before, after, flags, ~flags, flags)


FORCED = [
    prompt("a", "average"),
    prompt("b", "average", 2),
    prompt("c", "malformed"),
    prompt("d", "easy", 1, "17", 0.5),
]
POSITIONS = [positions(23, 19), positions(47, 38), positions(12, 10), positions(30, 25)]
KEYS = [Prompt("k1", "passkey", ((5,) * 33,), 4, "17", 0.0), Prompt("k2", "passkey", ((5,) * 65,), 4, "18", 1.0)]
BASELINE = {"a": ((1, 2, 3, 4),), "b": ((1, 2, 3, 4), (5, 6, 7, 8)), "c": ((1, 1, 1, 1),), "d": ((17,),)}
BASELINE |= {"k1": ((17,),), "k2": ((18,),)}
ANSWERS = BASELINE | {"b": ((1, 2, 3, 4), (5, 9, 7, 8)), "c": ((2, 1, 1, 1),), "k2": ((81,),)}


def decode(ids):
    return " " + " ".join(map(str, ids))


def made(**changed):
    return figures(FORCED, KEYS, POSITIONS, ANSWERS | changed, BASELINE, decode, 16)


def test_every_position_counts_alike():
    found = made()
    kld, change = (np.concatenate([getattr(each, of) for each in POSITIONS]) for of in ("kld", "change"))
    assert found.positions == len(kld) == 112
    assert found.mean == pytest.approx(kld.mean()) and found.max == kld.max()
    assert [found.p95, found.p99] == pytest.approx(np.percentile(kld, [95, 99]))
    assert found.rms_dp == pytest.approx(np.sqrt((change**2).mean()))
    decoded = np.concatenate([each.decoded for each in POSITIONS])
    assert found.prompt_mean == pytest.approx(kld[~decoded].mean())
    assert found.decode_mean == pytest.approx(kld[decoded].mean())
    for name in ("mean", "rms_dp", "perplexity_change"):
        assert found.value(f"{name}_low") < found.value(name) < found.value(f"{name}_high")


def test_the_perplexity_is_of_the_texts_own_tokens_alone():
    before, after = (
        np.concatenate([getattr(each, of)[each.own] for each in POSITIONS[:2]]) for of in ("expected_loss", "loss")
    )
    found = made()
    assert found.perplexity == pytest.approx(np.exp(after.mean()))
    assert found.perplexity_change == pytest.approx(np.exp(after.mean()) / np.exp(before.mean()) - 1)
    assert found.sets["malformed"].perplexity_change is None


def test_an_answer_agrees_as_a_whole_with_all_its_turns():
    greedy = made().greedy
    assert (greedy.answers, greedy.agree) == (4, 2)
    assert greedy.first_divergence == 2.5  # of 5, in the second turn, and 0
    assert made(b=BASELINE["b"], c=BASELINE["c"]).greedy.first_divergence is None
    assert made().sets["average"].greedy.agree == 1


def test_passkeys_are_counted_by_depth_length_and_place_in_a_page():
    found = made().passkey
    assert (found.asked, found.right) == (3, 2)
    assert found.by_depth == (
        Bin(of="0 to 20 %", asked=1, right=1),
        Bin(of="40 to 60 %", asked=1, right=1),
        Bin(of="80 to 100 %", asked=1, right=0),
    )
    assert [row.of for row in found.by_length] == ["17 to 32", "33 to 64", "65 to 128"]
    assert found.by_residue == (Bin(of="1", asked=2, right=1), Bin(of="4", asked=1, right=1))


def test_without_texts_there_is_no_perplexity_to_tell():
    found = figures(FORCED[2:3], [], POSITIONS[2:3], ANSWERS, BASELINE, decode, 16)
    assert "perplexity" not in found.to_json()
    assert found.passkey.to_json() == {"asked": 0, "right": 0, "by_depth": (), "by_length": (), "by_residue": ()}


@pytest.mark.parametrize(
    ("chosen", "answers"),
    [
        ([9, 7, 8, 9, 3, 4, 5], ((7, 8), (3, 4, 5))),
        ([9, 7, 6, 9, 3, 4, 5], ((7, 6), (UNKNOWN,) * 3)),
        ([9, 7, 8, 9, 3, 6, 5], ((7, 8), (3, 6, UNKNOWN))),
    ],
    ids=["the same", "another first answer", "another second answer"],
)
def test_predictions_tell_a_greedy_answer_up_to_its_first_token_that_differs(chosen, answers):
    """Turns of a token beside the first: what the engine would choose after the own tokens of a prompt is no answer."""
    own, none = np.array([True, False, False, True, False, False, False]), np.empty(0)
    predictions = Positions(none, none, none, none, none, ~own, own, np.array(chosen))
    assert predicted_answers(((7, 8), (3, 4, 5)), predictions) == answers


COUNTERS = {"preemptions": 3, "swapped_pages": 2, "evicted_pages": 1, "forks": 4}
KNOWN = {
    "mean": 1e-5, "mean_high": 2e-5, "p99": 1e-4, "rms_dp": 0.001, "rms_dp_high": 0.002,
    "perplexity_change": 0.0, "perplexity_change_high": 0.001,
    "greedy": {"share": 0.9, "low": 0.8}, "passkey": {"share": 1.0, "low": 0.95},
}  # fmt: skip


def known(**changes) -> ConfigurationFigures:
    return ConfigurationFigures.model_validate(KNOWN | changes)


CONTROL = known()


def test_a_limit_is_the_controls_worse_end_and_a_margin():
    limits = limits_of(CONTROL)
    assert limits == pytest.approx({
        "mean": 2e-5 + 0.002, "p99": 1e-4 + 0.02, "rms_dp": 0.017, "perplexity_change": 0.011,
        "greedy.share": 0.8 + MARGINS["greedy.share"], "passkey.share": 0.93,
    })  # fmt: skip
    assert "perplexity_change" not in limits_of(ConfigurationFigures(mean_high=0.0))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"mean": 0.0021}, "mean KLD"),
        ({"p99": 0.03}, "p99"),
        ({"rms_dp": 0.018}, "RMS"),
        ({"perplexity_change": 0.012}, "perplexity"),
        ({"greedy": {"share": 0.49}}, "greedy"),
        ({"passkey": {"share": 0.92}}, "passkeys"),
        ({"full_pool": full_pool_figures(40, ["a"] * 30, [True], COUNTERS)}, "greedy answers at a full pool"),
        ({"full_pool": full_pool_figures(40, [], [True] * 10 + [False], COUNTERS)}, "passkeys at a full pool"),
        ({"full_pool": full_pool_figures(40, [], [True], COUNTERS, ["3 pages lost"])}, "3 pages lost"),
    ],
)
def test_what_breaks_a_limit_is_said_and_what_keeps_it_is_not(change, word):
    limits = limits_of(CONTROL)
    good = {"full_pool": full_pool_figures(40, ["a", "a"], [True] * 9, COUNTERS)}
    assert outside_of(known(**good), limits) == []
    (sentence,) = outside_of(known(**good | change), limits)
    assert word in sentence


@pytest.mark.parametrize(
    ("kv_cache_dtype", "right_with_room", "wrong_at_full_pool", "outside"),
    [
        ("auto", 40, 1, 1),
        ("auto", 39, 0, 1),
        ("int4_per_token_head", 30, 10, 0),  # a quarter on both sides
        ("fp8_e4m3", 40, 1, 0),
        ("fp8_e4m3", 40, 15, 1),
    ],
)
def test_one_wrong_canary_is_outside_in_full_precision_and_else_more_than_chance_explains(
    kv_cache_dtype, right_with_room, wrong_at_full_pool, outside
):
    answers = [(f"canary-{index}", index >= wrong_at_full_pool) for index in range(40)]
    off = [f"canary-{index}" for index in range(right_with_room, 40)]
    pool = full_pool_figures(40, [], [True], COUNTERS, canaries=answers, wrong_with_room=off)
    alone = {"asked": 40, "right": right_with_room}
    figures = known(kv_cache_dtype=kv_cache_dtype, canaries=alone, full_pool=pool)
    found = outside_of(figures, limits_of(CONTROL))
    assert len(found) == outside and all("canaries" in each for each in found)


@pytest.mark.parametrize("name", ["mean", "p99", "rms_dp", "perplexity_change"])
def test_what_is_no_number_is_outside(name):
    limits = limits_of(CONTROL)
    for value in (float("nan"), None):
        assert len(outside_of(known(**{name: value}), limits)) == 1
    assert len(outside_of(CONTROL, limits | {name: float("nan")})) == 1


def test_a_full_pool_is_told_by_answers_passkeys_canaries_and_events():
    answers = [("k1", True), ("k1", False), ("k2", True)]
    found = full_pool_figures(40, ["a", "b", "a"], [True, False], COUNTERS, (), answers, ["k1", "k3"])
    assert found.to_json() == {
        "answers": 40, "agree": 37, "passkey_asked": 2, "passkey_right": 1, "wrong": ("a", "b"),
        "preemptions": 3, "swapped_pages": 2, "evicted_pages": 1, "forks": 4, "problems": (),
        "canaries": {"answered": 3, "distinct": 2, "wrong": 1, "which": ("k1",), "wrong_with_room": 1},
    }  # fmt: skip
