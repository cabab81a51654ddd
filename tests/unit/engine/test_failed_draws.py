"""A request whose logits are not numbers that a token can be drawn from fails alone, with a reason."""

from __future__ import annotations

import pytest

from kvbench_engine.sequence import Drawn
from tests.support.engine_parts import CountingExecutor, collect, request, small_engine, undisturbed


class FailingExecutor(CountingExecutor):
    """Draws nothing for the request "bad" once it has ``known`` tokens."""

    def __init__(self, known: int):
        super().__init__()
        self.known = known

    def draw(self, seq):
        drawn = super().draw(seq)
        return Drawn(()) if seq.request_id == "bad" and seq.num_tokens >= self.known else drawn


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("known", [5, 8], ids=["at the prompt", "later"])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 2, "best_of": 3}, {"n": 2, "beam_width": 3}], ids=str)
def test_a_request_without_a_draw_ends_alone_with_an_error_for_each_of_its_outputs(params, known, overlaps):
    engine = small_engine(512, FailingExecutor(known), max_num_seqs=8, page_size=4, async_scheduling=overlaps)
    others = [request("before", 6), request("after", 9)]
    for one in (others[0], request("bad", 5, **params), others[1]):
        engine.add_request(one)
    tokens: dict[str, list[int]] = {}
    failed = []
    while engine.has_work():
        outputs = engine.step()
        engine.check_integrity()
        collect(outputs, tokens)
        failed += [output for output in outputs if output.finish_reason == "error"]
    assert sorted(output.index for output in failed) == list(range(params.get("n", 1)))
    assert {output.request_id for output in failed} == {"bad"}
    assert all(f"after {known} tokens" in output.error and "NaN" in output.error for output in failed)
    given = undisturbed(others)
    assert {name: own for name, own in tokens.items() if not name.startswith("bad")} == given
    stats = engine.stats()
    assert stats.finished == {"error": params.get("n", 1), "length": 2}
    assert stats.kv.pages_owned == 0 and stats.num_requests_running == 0
    engine.add_request(request("bad", 3, max_tokens=1))  # the id is free again


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("known", [10, 14], ids=["at the prompt", "later"])
@pytest.mark.parametrize("params", [{}, {"n": 2}, {"n": 2, "beam_width": 3}], ids=str)
def test_nothing_of_a_request_that_failed_is_found_in_the_prefix_cache(params, known, overlaps):
    """Nor what it had found there, nor what another one had computed beyond that; other prompts stay cached."""
    settings = {"max_num_seqs": 8, "page_size": 4, "async_scheduling": overlaps, "enable_prefix_caching": True}
    engine = small_engine(512, FailingExecutor(known), **settings)
    cached = {}
    for name, prompt, more in (
        ("first", [7] * 10, {}), ("other", range(10), {}), ("longer", [*[7] * 10, 1, 2, 3], {}),
        ("bad", [7] * 10, params), ("again", [*[7] * 10, 1, 2, 3], {}), ("other again", range(10), {}),
    ):  # fmt: skip
        seq = engine.add_request(request(name, prompt, max_tokens=6, **more))
        while engine.has_work():
            engine.step()
            engine.check_integrity()
        cached[name] = seq.num_cached
    assert engine.stats().finished["error"] == params.get("n", 1)
    assert cached == {"first": 0, "other": 0, "longer": 8, "bad": 8, "again": 0, "other again": 8}


def test_siblings_of_a_sequence_that_failed_leave_nothing_cached_either():
    """A prompt of less than a page: the first page of each sibling holds a token of its own, and is another one."""
    engine = small_engine(512, FailingExecutor(9), page_size=4, enable_prefix_caching=True)
    engine.add_request(request("bad", 3, n=3))
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    assert engine.stats().counters.freed_pages >= 6 and engine.stats().kv.pages_cached == 0
