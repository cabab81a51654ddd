"""Sweeps whose server is killed, hung, or answers nonsense: an end within a bound, a sentence, a run to go on with."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import psutil
import pytest

from tests.support.sweep_parts import Bench, complaints, finished, manifest, wait_until

# name: (the endpoint that is struck, how, further fields of the rule, the reason told, repeats)
LOST = {
    "info killed": ("/server_info", "kill", {}, "the server was killed by signal 9", 1),
    "warm-up drip": ("plain", "drip_body", {}, "/v1/completions did not answer", 1),
    "warm-up page": ("plain", "html", {}, 'answered 200 "Bad gateway', 1),
    "reset 500": ("/reset_prefix_cache", "status", {}, "/reset_prefix_cache answered 500", 1),
    "metrics endless": ("/metrics", "flood", {"from_s": 0.1}, "the answer is longer than 64 MiB", 1),
    "stream killed": ("stream", "mid_kill", {"first": 3}, " of 6 requests: the server was killed by signal 9", 2),
    "stream hung": ("stream", "mid_stop", {"first": 3}, "/metrics did not answer", 1),  # it holds every connection
}
MAIN = ("warm-up drip", "metrics endless", "stream killed")


def fire(bench: Bench, rule: dict, load: dict, **env: str) -> CompletedProcess[str]:
    """A sweep of one configuration with time-outs of a second, against a server with this rule."""
    path = bench.write(sweep={}, load={"timeout_s": 1.0, "num_requests": 6} | load)
    return bench.sweep(str(path), "--no-report", "--no-calibration", FIRE=json.dumps([rule]), **env)


def family(bench: Bench) -> list[str]:
    """Command lines of a sweep's processes that still live."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "status"]):
        ours = (process.info["environ"] or {}).get("FAKE_LAUNCHES") == str(bench.folder / "launches.jsonl")
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"] or []))
    return [command for command in found if "fork_server" not in command]  # which is of this whole process


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in MAIN else pytest.mark.full) for n in LOST])
def test_a_server_that_fails_costs_its_loads_and_a_sentence(tmp_path, name):
    path, do, more, words, repeats = LOST[name]
    bench = Bench(tmp_path)
    count = {} if path in ("/metrics", "plain") else {"count": 1}  # one poll or warm-up that fails is only counted
    rule = {"path": path, "do": do, "once_a_launch": str(tmp_path / "spent"), **count, **more}
    done = fire(bench, rule, {"repeats": repeats}, FAKE_TOKEN_S="0.03")
    found = manifest(bench.only_run())
    assert done.returncode == 4 and found["status"] == "incomplete"
    (failure,) = found["failures"]
    assert failure["repeat"] == 1 and words in failure["reason"], failure
    assert failure["reason"] in done.stdout and "--resume" in done.stdout
    assert len(finished(bench.only_run())) == repeats - 1  # the other launch was measured
    wait_until(lambda: not family(bench), 5)


def test_a_share_of_failures_within_the_limit_is_counted_and_no_more(tmp_path):
    bench = Bench(tmp_path)
    rule = {"path": "stream", "do": "status", "status": 503, "first": 15, "count": 1}  # after the warm-up's 8
    done = fire(bench, rule, {"num_requests": 120, "concurrency": [8], "timeout_s": 10.0, "repeats": 1})
    run = bench.only_run()
    assert done.returncode in (0, 4) and manifest(run)["status"] == "complete"
    (told,) = [json.loads(path.read_text()) for path in run.glob("cells/*/loads/*/done.json")]
    assert told["metrics"]["failure_kinds"] == {"http_error": 1} and complaints(run) == []
    assert ' requests failed: "HTTP 503' in done.stdout
