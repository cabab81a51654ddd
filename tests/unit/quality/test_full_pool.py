"""What the checks of a canary run find in its answers, and what it is made of."""

from __future__ import annotations

import dataclasses

from kvbench.requests.canaries import as_request
from tests.support.canaries import canary
from tests.support.pressed import (
    COPY,
    FORKS,
    PASSKEY,
    REPEAT,
    Answer,
    Place,
    pressed_requests,
    unequal_answers,
    wrong_answers,
)

SEED = 7
RIGHT, WRONG = [8, 9], [8, 4]


def answer(request: int, tokens: list[int], index: int = 0, step: int = 1) -> Answer:
    """Its tokens are drawn from ``step`` on, one a step, in the pages of that step."""
    return Answer(request, index, tokens, [Place(step + i, (step + i,), 0, 0) for i in range(len(tokens))])


def test_a_wrong_answer_is_told_by_its_kind_the_first_token_that_differs_and_the_place_there():
    requests = [as_request(canary("p"), 0), as_request(canary("c", kind="copy"), 1)]
    found = list(wrong_answers(requests, [answer(0, WRONG, step=5), answer(1, [3, 9], step=2)], SEED))
    assert [(each.check, each.canary, each.position, each.place.step) for each in found] == [
        (PASSKEY, "p", 1, 6),
        (COPY, "c", 0, 2),
    ]
    assert {each.seed for each in found} == {SEED} and found[0].place.page_table == (6,)
    assert (found[0].expected, found[0].got) == ("9", "4")
    assert not list(wrong_answers(requests, [answer(0, RIGHT), answer(1, RIGHT)], SEED))


def test_an_answer_that_ends_early_is_wrong():
    (found,) = wrong_answers([as_request(canary(), 0)], [answer(0, RIGHT[:1])], SEED)
    assert found.position == 1 and found.got == ""


def test_forks_are_held_against_each_other_and_a_prompt_that_comes_again_against_its_first_answer():
    requests = [as_request(canary(), 0, answers=2), as_request(canary(), 1)]
    (found,) = unequal_answers(requests, [answer(0, RIGHT), answer(0, WRONG, index=1, step=4)], SEED)
    assert (found.check, found.answer, found.place.step) == (FORKS, 1, 5)
    (found,) = unequal_answers(requests, [answer(0, RIGHT), answer(1, WRONG, step=4)], SEED)
    assert (found.check, found.request, found.place.step) == (REPEAT, 1, 5)
    assert not list(unequal_answers(requests, [answer(0, WRONG), answer(0, WRONG, index=1), answer(1, WRONG)], SEED))


def test_answers_that_nobody_knows_are_neither_wrong_nor_unequal():
    unknown = [dataclasses.replace(as_request(canary(), i), expected_token_ids=None) for i in range(2)]
    answers = [answer(0, RIGHT), answer(1, WRONG)]
    assert not list(wrong_answers(unknown, answers, SEED)) and not list(unequal_answers(unknown, answers, SEED))


def test_requests_repeat_canaries_fork_some_and_grow_beside_them_by_seed_alone():
    known = [canary(str(i), prompt=range(3, 40 + i)) for i in range(60)]
    made = pressed_requests(known, 40, SEED)
    assert made == pressed_requests(known, 40, SEED) != pressed_requests(known, 40, SEED + 1)
    asked = [each for each in made if each.canary is not None]
    assert len(asked) == 40 and len({each.canary for each in asked}) < 40
    assert any(each.n == 2 for each in asked) and len(made) > len(asked)
    assert [each.index for each in made] == list(range(len(made)))
