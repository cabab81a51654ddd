"""After a load nothing may be held, on the device or on the host."""

from __future__ import annotations

import itertools

import pytest

from kvbench.common.errors import MeasurementError
from kvbench.measure import server_state
from kvbench.targets.prometheus import parse_metrics

TEXT = """
# TYPE kvbench:kv_pages_owned gauge
kvbench:kv_pages_owned {owned}
# TYPE kvbench:swap_slots_used gauge
kvbench:swap_slots_used {swapped}
"""


def sample(owned=0, swapped=0):
    return parse_metrics(TEXT.replace("{owned}", str(owned)).replace("{swapped}", str(swapped)), at=0.0)


class Scripted:
    """A target whose readings are given; the last one stays."""

    def __init__(self, *samples):
        self._samples = itertools.chain(samples[:-1], itertools.repeat(samples[-1]))
        self.reads = 0

    def metrics(self):
        self.reads += 1
        return next(self._samples)

    def check_alive(self):
        pass


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch):
    monkeypatch.setattr(server_state, "RELEASE_BOUND_S", 0.2)
    monkeypatch.setattr(server_state, "IDLE_BOUND_S", 0.2)


def test_swapped_slots_are_waited_for_like_owned_pages():
    target = Scripted(sample(owned=3), sample(swapped=16), sample())
    assert server_state.leak_reasons(server_state.wait_release(target)) == []
    assert target.reads == 3


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"swapped": 16}, ["16 swap slots were still used 0.2 s after the last request ended"]),
        ({"owned": 3}, ["3 KV pages were still owned 0.2 s after the last request ended"]),
        ({"owned": 3, "swapped": 16}, ["3 KV pages", "16 swap slots"]),
    ],
)
def test_what_stays_makes_the_load_invalid(kept, words):
    reasons = server_state.leak_reasons(server_state.wait_release(Scripted(sample(**kept))))
    assert len(reasons) == len(words)
    assert all(reason.startswith(word) for reason, word in zip(reasons, words, strict=True))


def test_a_server_that_keeps_swapped_sequences_is_not_idle():
    with pytest.raises(
        MeasurementError, match=r"not idle after 0.2 s: 0 requests, 0 pages owned, 16 slots of the swap"
    ):
        server_state.wait_idle(Scripted(sample(swapped=16)))
    server_state.wait_idle(Scripted(sample(swapped=16), sample()))


def test_a_server_without_metrics_keeps_nothing_that_could_be_said():
    assert server_state.wait_release(Scripted(None)) is None
    assert server_state.leak_reasons(None) == []
    foreign = parse_metrics("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n", 0.0)
    assert server_state.leak_reasons(server_state.wait_release(Scripted(foreign))) == []
