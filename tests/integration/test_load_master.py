"""``kvbench load --master``: a machine that only leads is not judged; those of the workers are."""

from __future__ import annotations

import json

import pytest
import yaml

from kvbench.cli.main import main
from kvbench.common import foreign_cpu as contention
from tests.integration.test_load_command import fake_server
from tests.support.loads import free_port
from tests.support.sweep_parts import TINY
from tests.unit.load.test_load_shared import start


def test_what_is_told_and_judged_is_the_workers_machine(tmp_path, monkeypatch, capsys) -> None:
    """Of this process, any use of its machine by others is too much; the worker has the limits of a load."""
    monkeypatch.setattr(contention, "MAX_FOREIGN_CORES", -1000.0)
    workload, port, out = tmp_path / "tiny.yaml", str(free_port()), tmp_path / "out"
    workload.write_text(yaml.safe_dump({**TINY, "sweep": {}}))
    place = ("--master", "--bind-port", port, "--output-dir", str(out), "--no-calibration")
    with fake_server() as (url, _):
        worker = start("--worker", "--master-port", port)
        try:
            with pytest.raises(SystemExit) as ended:
                main(["load", str(workload), "--url", url, *place])
            assert worker.wait(timeout=20) == 0
        finally:
            worker.kill()
            worker.communicate()
    assert ended.value.code in (0, 4)  # others may be using the machine now
    kept, said = json.loads((out / "metrics.json").read_text()), capsys.readouterr().out
    machine, (process,) = kept["machine"], kept["metrics"]["client"]["processes"]
    assert machine["of"] == process["name"] and machine["with_leader"]
    assert machine["foreign_cpu_cores"] == process["machine"]["foreign_cpu_cores"] is not None
    assert f"other processes on the machine of {process['name']}, the most disturbed one, used" in said
    assert not [reason for reason in kept["invalid_reasons"] if reason.startswith("other processes used")]
    assert kept["calibration"] is None and "client: not calibrated" in said
