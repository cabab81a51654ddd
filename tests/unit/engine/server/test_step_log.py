"""The step log: a line for each step whose numbers add up, and a disk that fails does not stop the engine."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from kvbench_engine.engine import Engine
from kvbench_engine.kv.manager import LEDGER, KVStats
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.server.step_log import COLUMNS, StepLog
from tests.support.fake_engine import fake_engine


def run(engine: Engine, log: StepLog, requests: int) -> None:
    engine.on_step = log.write
    for i in range(requests):
        engine.add_request(Request(f"r{i}", tuple(range(1, 40)), SamplingParams(max_tokens=30, n=2)))
    while engine.has_work():
        engine.step()


def rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize(("layout", "requests"), [("paged", 16), ("contiguous", 4)])
def test_lines_add_up_to_what_the_engine_counted(tmp_path: Path, layout: str, requests: int) -> None:
    path = tmp_path / "steps.csv"
    settings = {"preemption_mode": "swap", "enable_prefix_caching": layout == "paged"}
    engine = fake_engine(kv_slots=1024, max_model_len=128, max_num_seqs=32, layout=layout, **settings)
    path.write_text("of another run\n")
    log = StepLog(str(path))
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    run(engine, log, requests)
    log.close()
    lines, stats = rows(path), engine.stats()
    run(engine, log, 1)
    log.close()
    assert rows(path) == lines, "a closed log takes no more"
    assert tuple(lines[0]) == COLUMNS and len(set(COLUMNS)) == len(COLUMNS)
    assert {f"kv_{field.name}" for field in dataclasses.fields(KVStats)} <= set(COLUMNS)
    assert sum(line["prefill_tokens"] for line in lines) == stats.prefill_tokens_scheduled
    assert sum(line["decode_tokens"] for line in lines) == stats.decode_tokens_scheduled
    assert sum(line["preempted"] for line in lines) == stats.num_preemptions
    assert sum(line["recomputed_tokens"] for line in lines) == stats.recomputed_tokens
    for name in ("copied_slots", "swapped_out_slots", "swapped_in_slots", "prefix_hits"):
        assert sum(line[name] for line in lines) == getattr(stats.counters, name), name
    assert stats.counters.copied_slots > 0
    for name in ("swapped_out_slots", "prefix_hits"):
        assert (getattr(stats.counters, name) > 0) == (layout == "paged"), name  # a reservation is never taken back
    for place in LEDGER:
        assert sum(line[f"ledger_{place}"] for line in lines) == stats.slot_steps[place]
    for pages, column in (("physical", "kv_pages_owned"), ("logical", "kv_pages_logical")):
        assert sum(line[column] for line in lines) == stats.page_steps[pages]
    assert (stats.page_steps["physical"] < stats.page_steps["logical"]) == (layout == "paged")
    for line in lines:
        assert sum(line[f"ledger_{place}"] for place in LEDGER) == line["kv_slots_total"]
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    assert lines[-1]["kv_pages_owned"] == lines[-1]["running"] == lines[-1]["waiting"] == 0


@pytest.mark.parametrize("path", ["", ".", "/nowhere/steps.csv", "/dev/full"])
def test_a_path_that_cannot_be_or_a_full_disk_is_one_sentence(path: str) -> None:
    if path == "/dev/full" and not Path(path).exists():
        pytest.skip("no /dev/full")
    with pytest.raises(ValueError, match=r"cannot be written .*--step-log") as caught:
        StepLog(path)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_ends_the_log_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def write(self, text: str = "") -> int:
            raise OSError(28, "No space left on device")

        close = write

    log = StepLog(str(tmp_path / "steps.csv"))
    monkeypatch.setattr(log, "_file", FullDisk())
    engine = fake_engine()
    run(engine, log, 2)
    assert engine.stats().finished == {"length": 4}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]  # once, not once a step
    log.close()
