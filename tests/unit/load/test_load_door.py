"""Who is not wanted cannot disturb a load: strangers with another token, with none, and what is no worker at all."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.support.loads import LoadRunner, stamps_of
from tests.support.raw_worker import RawWorker
from tests.unit.load.test_load_shared import LIMIT_S, ended, master_of, requests, start, wait_for

TOKEN = {"KVBENCH_LOAD_TOKEN": "right"}


def turned_away(process: subprocess.Popen, why: str) -> None:
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4
    assert why in err
    assert "right" not in err and "wrong" not in err  # neither token


def test_a_stranger_before_the_load_does_it_no_harm(loads: LoadRunner) -> None:
    """Two wanted workers, and between them one with another token; Locust would deal users out to all three."""
    spec = loads.spec(requests(20, tag=8000), model="mock")
    master, port = master_of(spec, 2, **TOKEN)
    first = start("--worker", "--master-port", port, **TOKEN)
    turned_away(start("--worker", "--master-port", port, KVBENCH_LOAD_TOKEN="wrong"), "another KVBENCH_LOAD_TOKEN")
    second = start("--worker", "--master-port", port, **TOKEN)
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in (first, second)] == [0, 0]
    assert result.samples["ok"].all() and len(result.samples) == 20
    written = "".join(path.read_text(errors="ignore") for path in spec.parent.iterdir())
    assert "right" not in written + result.stderr + result.stdout


def test_strangers_during_the_load_do_it_no_harm(loads: LoadRunner) -> None:
    """One with another token, and one too many with the right one. 80 requests at 4 users take over 2 s."""
    spec = loads.spec(requests(80, tag=8100), model="mock?ttft_ms=100")
    master, port = master_of(spec, 2, **TOKEN)
    workers = [start("--worker", "--master-port", port, **TOKEN) for _ in range(2)]
    wait_for(master, 0.1)
    wrong = start("--worker", "--master-port", port, KVBENCH_LOAD_TOKEN="wrong")
    surplus = start("--worker", "--master-port", port, **TOKEN)
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0]
    assert result.load["locust"] == {"num_requests": 80, "num_failures": 0}
    assert result.samples["ok"].all()
    for process in (wrong, surplus):
        process.communicate(timeout=LIMIT_S)


def _garbage(raw: RawWorker) -> None:
    raw.send_bytes(b"\xc1")  # no msgpack
    raw.send_bytes(b"\x90")  # no message
    raw.send_bytes(b"")
    raw.send_bytes(b"\x93\xa4spam\xc0\x01")
    raw.say("kvbench_hello", [1, 2])
    raw.say("kvbench_hello", {"proof": 7, "version": {}})


def _lies(raw: RawWorker) -> None:
    """A stranger's own statistics, an exception, a stop; and all of it without having been let in."""
    raw.greet()
    entry = {"name": "x", "method": "POST", "num_requests": 1000}
    raw.say("stats", {"stats": [], "stats_total": entry, "errors": {}, "user_classes_count": {}})
    for kind in ("spawning", "spawning_complete", "heartbeat", "client_stopped", "exception", "quit"):
        raw.say(kind, {"state": "ready", "current_cpu_usage": 0.0, "user_classes_count": {"ClosedLoopUser": 3}})


@pytest.mark.parametrize("disturb", [_garbage, _lies])
def test_what_a_stranger_sends_is_dropped(loads: LoadRunner, disturb: Callable[[RawWorker], None]) -> None:
    """Before the load and during it."""
    tag = 8200 if disturb is _garbage else 8300
    spec = loads.spec(requests(40, tag=tag), model="mock?ttft_ms=100")
    master, port = master_of(spec, 2, **TOKEN)
    with RawWorker(port, "wrong") as raw, RawWorker(port, "wrong") as other:
        disturb(raw)
        assert any(call.get("op") == "refused" for call in raw.calls(10.0))
        workers = [start("--worker", "--master-port", port, **TOKEN) for _ in range(2)]
        wait_for(master, 0.1)
        disturb(other)
        result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0]
    assert result.load["locust"] == {"num_requests": 40, "num_failures": 0}
    assert result.samples["ok"].all() and (tag, 0) in stamps_of(loads.url)


def test_nobody_speaks_for_another(loads: LoadRunner) -> None:
    """A stranger that knows a worker's name says that it has stopped."""
    spec = loads.spec(requests(8, tag=8400), model="mock")
    master, port = master_of(spec, 1, **TOKEN)
    with RawWorker(port, "right") as member, RawWorker(port, "wrong") as liar:
        member.greet()
        asked = member.calls(20.0)
        call = next(asked)
        assert call["op"] == "clock"
        liar.say("quit", None, node=member.node)
        liar.say("kvbench_reply", {"id": call["id"], "t2": 0.0, "t3": 0.0}, node=member.node)
        assert list(liar.heard(0.5)) == []
        member.reply(call, error="this is the member's own word")
        result = ended(master, spec.parent)
    assert result.code == 4
    assert "(pid" in result.stderr and "this is the member's own word" in result.stderr
