"""A server that sends nonsense: each request is judged alone, and one bad answer never costs the rest of the load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbench.requests.request import RequestSpec
from tests.support.fire_wire import BROKEN, ENDLESS, LATE, TOKENS, WHOLE
from tests.support.loads import LoadRunner, fake_server

NAMES = [*BROKEN, *ENDLESS, *WHOLE]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server() as (_, url):
        yield url


@pytest.fixture(scope="module")
def load(url, tmp_path_factory):
    """One load, one user: every faulty answer, each followed by a right one on the same connection if it was kept."""
    requests = []
    for name in NAMES:
        requests.append(RequestSpec(len(requests), name, None, f"fire:{name}", TOKENS))
        requests.append(RequestSpec(len(requests), f"after {name}", (1, 2, 3, len(requests)), None, 3))
    runner = LoadRunner(tmp_path_factory.mktemp("wire"), url)
    return runner.run(requests, concurrency=1, timeout_s=0.5)


def test_the_load_ends_with_every_request_accounted_for(load):
    assert load.code == 0 and "Traceback" not in load.stderr, load.stderr
    assert load.samples["class"].tolist() == [c for name in NAMES for c in (name, f"after {name}")]
    assert load.load["completed"] == load.samples["ok"].sum() and not load.load["incomplete"]


@pytest.mark.parametrize("name", [*BROKEN, *ENDLESS])
def test_a_broken_answer_is_a_failure_of_its_kind(load, name):
    row = load.samples.set_index("class").loc[name]
    assert not row["ok"] and row["error"]
    assert row["error_kind"] in {**BROKEN, **ENDLESS}[name][0].split(), row["error"]


@pytest.mark.parametrize("name", WHOLE)
def test_an_odd_answer_that_is_right_succeeds(load, name):
    row = load.samples.set_index("class").loc[name]
    assert row["ok"], row["error"]
    assert row["output_tokens"] == TOKENS and len(row["chunk_times"]) == TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_the_next_request_is_not_touched(load, name):
    row = load.samples.set_index("class").loc[f"after {name}"]
    assert row["ok"], row["error"]
    assert row["output_token_ids"].tolist() == [0, 1, 2] and row["prompt_tokens"] == 4


def test_what_comes_late_is_not_taken_for_the_next_answer(url, tmp_path):
    """Open loop, 0.15 s apart: the connection is idle when bytes come that belong to no request."""
    requests = []
    for name in [*LATE, *LATE]:
        k = len(requests)
        requests.append(RequestSpec(k, name, None, f"fire:{name}", TOKENS, arrival_s=0.15 * k))
        requests.append(RequestSpec(k + 1, "next", (1, 2, 3), None, 3, arrival_s=0.15 * (k + 1)))
    result = LoadRunner(tmp_path, url).run(requests, mode="open", concurrency=None, timeout_s=2)
    assert result.code == 0 and result.samples["ok"].all(), result.samples["error"].tolist()
    assert result.samples["output_tokens"].tolist() == [TOKENS, 3] * 4
