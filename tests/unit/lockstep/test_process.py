"""A process of engines: it answers, refuses, dies or hangs, and never outlives us."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from kvbench.common.errors import UsageError
from kvbench.lockstep.process import EngineFailedError, EngineProcess, open_all, why_not_stepped
from kvbench.workload.load_section import LoadConfig

LOAD = {"mode": "closed", "concurrency": [2], "num_requests": [4], "ignore_eos": True, "prompts": {
    "kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}],
}}  # fmt: skip
HELLO = "import json, sys, time, os\nsay = lambda **a: print(json.dumps(a), flush=True)\n"


def scripted(tmp_path, body):
    return EngineProcess((sys.executable, "-c", HELLO + body), tmp_path / "log")


ECHO = "say(protocol=2)\nfor line in sys.stdin:\n    say(**json.loads(line))\n"


def test_answers_come_in_order_and_the_end_stops_the_process(tmp_path):
    with scripted(tmp_path, ECHO) as process:
        process.greet()
        process.send(n=1)
        process.send(n=2, text="\n " + "x" * 200_000)
        assert [process.receive(20)["n"] for _ in range(2)] == [1, 2]
        pid = process._process.pid
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        ("say(protocol=3, options=['n', 'priority'])", {"n", "priority"}, None),
        ("say(protocol=3)", {"priority"}, "priority"),
        ("say(protocol=2)", {"priority"}, None),  # the built-in engine always takes it
        ("say(protocol=2)", (), None),
        ("say(protocol=2, options=['n'])", {"n"}, None),
        ("say(protocol=2)", {"n"}, " n"),  # an older version knows no options
        ("say(protocol=2, options=['n'])", {"n", "beam_width"}, "beam_width"),
        ("say(protocol=1)", (), "protocol 1"),
        ("sys.exit('no torch')", (), "no torch"),
    ],
)
def test_why_an_engine_of_another_protocol_or_version_or_none_is_not_stepped(tmp_path, body, options, reason):
    with scripted(tmp_path, body) as process:
        found = why_not_stepped(process, LoadConfig.model_validate(LOAD), options)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(("load", "fits"), [
    ({}, True), ({"temperature": 0.7}, False), ({"ignore_eos": False}, False),
])  # fmt: skip
def test_an_engine_that_decodes_greedily_is_not_stepped_under_another_load(tmp_path, load, fits):
    with scripted(tmp_path, "say(protocol=3, greedy_only=True)") as process:
        assert (why_not_stepped(process, LoadConfig.model_validate(LOAD | load)) is None) == fits


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("say(protocol=2); time.sleep(60)", "within 0.2 s"),
        ("say(protocol=2); sys.stderr.write('torn page'); sys.exit(3)", "torn page"),
        ("say(protocol=2); os.kill(os.getpid(), 9)", "signal 9"),
        ("say(protocol=2); sys.stdin.readline(); say(error='no room for 3 pages')", "no room for 3 pages"),
        ("say(protocol=2); sys.stdin.readline(); print('a banner', flush=True)", "a banner"),
    ],
)
def test_an_engine_that_fails_is_named_with_its_reason(tmp_path, body, word, monkeypatch):
    monkeypatch.setattr("kvbench.lockstep.process.TURN_LIMIT_S", 0.2 if "within" in word else 20)
    with scripted(tmp_path, body) as process:
        process.greet()
        with pytest.raises(EngineFailedError, match=word) as failed:
            process.ask(do="turn")
        assert failed.value.process is process


def test_what_checks_for_an_interruption_is_asked_while_an_engine_computes(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    process = EngineProcess((sys.executable, "-c", HELLO + "time.sleep(60)"), tmp_path / "log", check=interrupt)
    with pytest.raises(KeyboardInterrupt), process:
        process.receive(20)
    assert not process.alive


def test_refused_settings_are_the_users_mistake_and_a_death_is_not(tmp_path):
    refuses = "say(protocol=2)\nsys.stdin.readline()\nsay(error='page_size cannot be 0')\nsys.stdin.readline()"
    with scripted(tmp_path, refuses) as process:
        process.greet()
        with pytest.raises(UsageError, match="page_size cannot be 0"):
            open_all([(process, "a", {"page_size": 0})])
    for fails in ("sys.exit(1)", "time.sleep(60)"):
        with scripted(tmp_path, f"say(protocol=2)\nsys.stdin.readline()\n{fails}") as process:
            process.greet()
            with pytest.raises(EngineFailedError):
                open_all([(process, "a", {})], 0.2 if "sleep" in fails else 20)


def test_a_process_stays_on_its_cores_with_all_its_threads(tmp_path):
    spin = (
        "import threading\n[threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(3)]\n"
    )
    core = min(os.sched_getaffinity(0))
    with scripted(tmp_path, spin + ECHO) as process:
        process.greet()
        process.stay_on([core])
        threads = psutil.Process(process._process.pid).threads()
        assert len(threads) == 4 and all(os.sched_getaffinity(thread.id) == {core} for thread in threads)


def test_the_memory_of_a_process_counts_what_it_has_written(tmp_path):
    body = "data = bytearray(200 << 20); data[::4096] = b'x' * len(data[::4096]); say(protocol=3); time.sleep(60)"
    with scripted(tmp_path, "say(protocol=3); time.sleep(60)") as small, scripted(tmp_path, body) as large:
        for process in (small, large):
            process.greet()
        assert 190 << 20 < large.memory() - small.memory() < 210 << 20
        small.__exit__()
        assert small.memory() == 0
