"""Workers on other machines watch their own, and the load is judged by what they saw there."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from kvbench.common.foreign_cpu import MachineWatch, Server, as_judged, contention_reasons
from kvbench.load.multi.machines import Seen, machine_reasons, without_ours, worst_machine
from kvbench.load.samples import SCHEMA
from tests.support.loads import LoadRunner
from tests.support.raw_worker import RawWorker
from tests.unit.load.test_load_shared import LIMIT_S, ended, master_of, requests, start


def report(foreign: float | None, client: float = 0.2, steal: float | None = 0.0, **more: Any) -> dict[str, Any]:
    """As ``contention.machine_report``."""
    known = {"foreign_cpu_cores": foreign, "steal_share": steal, "client_cpu_cores": client, "seconds": 10.0}
    return {"load_average": 0.5, "cores": 8, "server_cpu_cores": None} | known | more


def test_what_the_load_itself_uses_on_a_machine_is_not_foreign_to_it() -> None:
    """Two workers and the master on one machine, a worker on another, and one of which nothing is known."""
    workers = [
        Seen("worker 1", "a", report(0.90, client=0.5)),
        Seen("worker 2", "a", report(0.65, client=0.25)),
        Seen("worker 3", "b", report(0.30)),
        Seen("worker 4", None, report(0.30)),
        Seen("worker 5", "c", report(None)),
    ]
    told = [each["foreign_cpu_cores"] for each in without_ours(workers, "a", 0.05)]
    assert told[:4] == pytest.approx([0.90 - 0.25 - 0.05, 0.65 - 0.5 - 0.05, 0.30, 0.30]) and told[4] is None
    assert without_ours(workers[:2], None, 0.05)[0]["foreign_cpu_cores"] == pytest.approx(0.65)
    beside = dataclasses.replace(workers[1], report=report(0.1, client=2.0))
    assert without_ours([workers[0], beside], None, 0.0)[0]["foreign_cpu_cores"] == 0.0


def test_each_workers_machine_is_held_to_the_limits_and_the_worst_is_told() -> None:
    names = ["worker 1", "worker 2", "worker 3"]
    assert machine_reasons(names, [report(0.0), report(0.1), report(None, steal=None)]) == []
    assert worst_machine(names, [report(0.02), report(0.06), report(None, steal=None)])["of"] == "worker 2"
    seen = [report(0.02), report(0.05), report(0.03, steal=0.2)]
    (said,) = machine_reasons(names, seen)
    assert said.startswith("worker 3: the host took 20.0% of the CPU time away")
    assert worst_machine(names, seen) == seen[2] | {"of": "worker 3"}


@pytest.mark.parametrize("local", [False, True])
def test_a_machine_that_only_leads_is_not_judged_unless_the_server_runs_on_it(local: bool) -> None:
    busy, quiet = report(3.0, client=0.01, server_cpu_cores=1.5), report(0.02, of="worker 1", with_leader=False)
    server = Server(7 if local else None, local)
    told, reasons = as_judged(busy, quiet, server)
    assert (told["foreign_cpu_cores"], told["of"], told["client_cpu_cores"]) == (0.02, "worker 1", 0.2)
    assert told["server_cpu_cores"] == 1.5
    assert reasons == (contention_reasons(busy) if local else [])
    # Where a worker shares it, that worker has judged it, and knows which processes are the load's.
    assert as_judged(busy, quiet | {"with_leader": True}, server)[1] == []
    assert as_judged(busy, None, server) == (busy, contention_reasons(busy))


def test_workers_hand_back_how_their_machines_were(loads: LoadRunner) -> None:
    spec = loads.spec(requests(60, tag=8960, max_tokens=10), model="mock?itl_ms=20")
    master, port = master_of(spec, 2)
    workers = [start("--worker", "--master-port", port) for _ in range(2)]
    result = ended(master, spec.parent)
    assert result.code == 0, result.stderr
    assert [w.wait(timeout=10) for w in workers] == [0, 0]
    client = result.load["client"]
    assert MachineWatch(Server(None)).report().keys() == client["machine"].keys() - {"of", "with_leader"}
    assert client["machine"]["with_leader"] and client["machine"]["of"] in [p["name"] for p in client["processes"]]
    for process in client["processes"]:
        seen = process["machine"]
        own_s = process["cpu_fraction"] * result.load["duration_s"]  # by its own clock; the kernel's has ticks of 10 ms
        assert seen["client_cpu_cores"] * seen["seconds"] > own_s - 0.05 and own_s > 0
        assert seen["seconds"] > 2.5  # 15 requests of 0.18 s one after the other, of each of 4 users


def test_a_worker_whose_machine_others_used_makes_the_load_invalid(loads: LoadRunner) -> None:
    spec = loads.spec(requests(20, tag=8970), model="mock")
    master, port = master_of(spec, 1)
    samples = msgpack.packb([SCHEMA.names, []])
    done = {"zero": 0.0, "mismatches": 0, "machine": report(1.5), "sizes": {"samples": len(samples), "lags": 0}}
    with RawWorker(port) as raw:
        raw.greet()
        for call in raw.calls(LIMIT_S):
            raw.reply(call, t2=1.0, t3=1.0, left_s=1.0, piece=samples, **done)
            if call["op"] == "start":
                raw.say("kvbench_event", {"event": "ended", "done": 20, "failed": 0, "gone": None, "signal": 0})
            if call["op"] == "quit":
                break
        result = ended(master, spec.parent)
    said = " ".join(result.load["invalid_reasons"])
    assert "worker 1 of 1" in said and "on raw): other processes used 1.50 of a core while this load ran" in said
    assert result.load["client"]["machine"]["foreign_cpu_cores"] == 1.5
    assert result.load["client"]["machine"]["with_leader"] is False
