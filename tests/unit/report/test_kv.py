"""Whether KV memory was the bottleneck, as a run says it."""

from __future__ import annotations

from kvbench.report.kv import kv_bottleneck
from kvbench.report.page import context
from kvbench.runs.read import read_run
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_of
from tests.support.synthetic_run import make_run

ROOM = {"usage_max": 0.92, "kv_full": 0.0}


def test_kv_that_nobody_waited_for_was_not_the_bottleneck():
    said = kv_bottleneck(run_of(cell(observed={"usage_max": 0.4}), cell(page_size=32, observed=ROOM)))
    assert "not the bottleneck at 24" in said and "92 %" in said and "(paged (page 32))" in said


def test_those_that_waited_or_preempted_are_named_and_those_that_did_not():
    full = {"usage_max": 1.0, "kv_full": 0.5}
    run = run_of(
        cell("contiguous", observed=full), cell(observed=ROOM | {"kv_full": 0.01}), cell(page_size=8, preemptions=2,
        observed=ROOM), cell("contiguous", load=3, observed=full)
    )  # fmt: skip
    said = kv_bottleneck(run)
    assert "was the bottleneck at 24" in said and "contiguous (requests waited for room 50 %" in said
    assert "paged (page 8) (6 preemptions)" in said and "not for paged (page 16)." in said
    assert context(run)[0] == said


def test_nothing_is_said_of_a_server_that_tells_no_usage():
    assert kv_bottleneck(run_of(cell(), cell("contiguous"))) == ""


def test_a_request_waits_for_room_only_while_another_would_not_fit(tmp_path):
    """The toy engine's contiguous layout queues at 24 users and holds all 3; its paged one has room for all."""
    run = read_run(make_run(tmp_path))
    waited = {(c.config_id, c.load.value): max(c.observed("kv_full").values()) for c in run.cells}
    low, high = sorted({load for _, load in waited})
    assert waited["layout-contiguous", high] > 0.5 and waited["layout-contiguous", low] == 0
