"""Who is not wanted cannot disturb a load: strangers with another token, with none, and what is no worker at all."""

from __future__ import annotations

import signal

from tests.support.loads import LoadRunner, stamps_of
from tests.support.raw_worker import RawWorker
from tests.unit.load.test_load_shared import LIMIT_S, ended, master_of, requests, said_by, wait_for, worker_of

TOKEN = {"KVBENCH_LOAD_TOKEN": "right"}


def disturb(raw: RawWorker) -> None:
    """No messages; then a stranger's own statistics, an exception, a stop, all without having been let in."""
    for frame in (b"\xc1", b"\x90", b"", b"\x93\xa4spam\xc0\x01"):
        raw.send_bytes(frame)
    raw.say("kvbench_join", [1, 2])
    raw.say("kvbench_join", {"proof": 7, "version": {}})
    entry = {"name": "x", "method": "POST", "num_requests": 1000}
    raw.say("stats", {"stats": [], "stats_total": entry, "errors": {}, "user_classes_count": {}})
    for kind in ("spawning", "spawning_complete", "heartbeat", "client_stopped", "exception", "quit", "kvbench_ended"):
        raw.say(kind, {"state": "ready", "current_cpu_usage": 0.0, "user_classes_count": {"ClosedLoopUser": 3}})


def test_strangers_before_and_during_the_load_do_it_no_harm(loads: LoadRunner) -> None:
    """Two wanted workers; beside them one with another token, one that leaves again, one too many, and garbage."""
    spec = loads.spec(requests(80, tag=8000), model="mock?ttft_ms=100")
    master, port = master_of(spec, 2, **TOKEN)
    stranger = worker_of(port, KVBENCH_LOAD_TOKEN="wrong")
    with RawWorker(port, "wrong") as before, RawWorker(port, "right") as leaving, RawWorker(port, "right") as surplus:
        disturb(before)
        assert "KVBENCH_LOAD_TOKEN" in before.join()["error"]
        assert leaving.join().keys() == {"proof"}
        leaving.say("quit")
        code, said = said_by(stranger)
        assert code == 4 and "another KVBENCH_LOAD_TOKEN" in said
        workers = [worker_of(port, **TOKEN) for _ in range(2)]
        wait_for(master, done=4)
        assert "all its workers" in surplus.join()["error"]
        disturb(surplus)
        result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(LIMIT_S) for w in workers] == [0, 0]
    assert result.samples["ok"].all() and len(result.samples) == 80
    assert result.load["locust"] == {"num_requests": 80, "num_failures": 0}
    assert sorted(p["name"][:13] for p in result.load["client"]["processes"]) == ["worker 1 of 2", "worker 2 of 2"]
    written = "".join(path.read_text(errors="ignore") for path in spec.parent.iterdir())
    assert "right" not in written + result.stderr + result.stdout + said and "Traceback" not in result.stderr


def test_nobody_speaks_for_another(loads: LoadRunner) -> None:
    """A stranger that knows a worker's name says that it has stopped, and answers in its place."""
    spec = loads.spec(requests(8, tag=8400), model="mock")
    master, port = master_of(spec, 1, **TOKEN)
    with RawWorker(port, "right") as member, RawWorker(port, "wrong") as liar:
        assert "error" not in member.join()
        assert next(kind for kind, _ in member.heard(LIMIT_S) if kind != "heartbeat") == "kvbench_clock"
        liar.say("quit", None, node=member.node)
        liar.say("kvbench_clock", {"t2": 0.0, "t3": 0.0}, node=member.node)
        assert list(liar.heard(0.5)) == []
        member.say("kvbench_clock", {"error": "this is the member's own word"})
        result = ended(master, spec.parent)
    assert result.code == 4 and "this is the member's own word" in result.stderr


def test_a_load_whose_only_worker_has_another_token_does_not_begin(loads: LoadRunner) -> None:
    """Neither does a worker begin for a master that does not know its token."""
    spec = loads.spec(requests(20, tag=7600), model="mock")
    master, port = master_of(spec, 1, **TOKEN)
    with RawWorker(port, "wrong") as raw:
        assert "error" in raw.join()
        master.send_signal(signal.SIGTERM)
        result = ended(master, spec.parent)
    assert result.code == 143 and not (spec.parent / "load.json").exists()
    assert (7600, 0) not in stamps_of(loads.url)
