"""Hypothesis drives the real engine, scheduler, managers and pools through everything that a client, a full pool and a
failing executor can do to them, on pools so small that everything collides.

After every rule every invariant is asserted; in the end every request must have had the tokens that it would have had
alone, and an idle engine must own nothing. No torch: ``CountingExecutor`` keeps a shadow of what each slot holds.

The seed is fixed, but Hypothesis also draws constants of the modules that are imported, so the examples differ a little
with the tests that ran before in the same process. ``KVBENCH_DEEP=40`` runs forty times as many, other ones each time:

    KVBENCH_DEEP=40 python -m pytest tests/property/test_engine_machine.py
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.engine_machine import ContiguousMachine, EngineMachine

DEEP = int(os.environ.get("KVBENCH_DEEP", "0"))
RULES_IN_CI = 15_000

pytestmark = pytest.mark.timeout(900 * max(1, DEEP))


def _profile(machine: type[EngineMachine], share: float):
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(380 * share) * max(1, DEEP),
        stateful_step_count=50,
        derandomize=not DEEP,
        database=None if not DEEP else settings.default.database,
        print_blob=True,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    return case


TestPaged = _profile(EngineMachine, 0.75)
TestContiguous = _profile(ContiguousMachine, 0.35)


def test_that_many_rules_were_executed():
    """The claim of the two tests above: it is only worth what has really run, and what has really happened."""
    assert EngineMachine.executed >= RULES_IN_CI * max(1, DEEP), "the tests above belong to this one"
    assert EngineMachine.overlapped >= 0.3 * EngineMachine.executed
    assert len(EngineMachine.events) == 19, EngineMachine.events
    # Too rare to count on; test_contiguous and test_async_scheduling bring them about.
    rare = {"refused_fragmented", "pending ending preempted"}
    assert all(count >= 3 for event, count in EngineMachine.events.items() if event not in rare), EngineMachine.events
