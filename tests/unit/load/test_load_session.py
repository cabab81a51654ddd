"""What the users of one load share, without a server: whose fault lateness is, what waits to be parsed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.loads import ROOT

CASES = [
    "only_the_wait_for_a_place_is_queue",
    "a_turn_is_due_when_its_answer_can_be_read_and_what_delays_that_is_slip",
    "an_answer_whose_user_is_stopped_while_it_is_read_is_kept",
    "what_has_come_back_is_parsed_to_the_end_however_much_it_is",
    "after_a_stop_parsing_is_given_up_and_a_dead_parser_holds_nobody",
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of the cases of tests/support/session_cases.py."""
    command = [sys.executable, "-m", "tests.support.session_cases"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return {name.removeprefix("case_"): said for name, said in json.loads(done.stdout).items()}


@pytest.mark.parametrize("case", CASES)
def test_case(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


def test_no_case_is_left_out(outcomes: dict[str, str]) -> None:
    assert sorted(outcomes) == sorted(CASES)
