"""Keeping runs: small files only, whole or not at all, and never changed once there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbench.common.errors import UsageError
from kvbench.history.cli import history
from kvbench.history.store import add_run
from kvbench.metrics.definitions import LOWER, METRICS, Metric
from tests.support.synthetic_run import VARIANTS, make_run, repeat, write_run
from tests.unit.history.test_history_show import shown


def add(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(history, ["add", *map(str, arguments)], standalone_mode=False, catch_exceptions=False)
    return done.return_value, done.stdout, done.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_small_files_are_kept_and_say_the_same(tmp_path):
    run = make_run(tmp_path / "results" / "mixed" / "run", VARIANTS["one_cell"])
    (run / "logs").mkdir()
    (run / "logs" / "a.log").write_text("log")
    code, output, _ = add(run, "--to", tmp_path / "history")
    kept = tmp_path / "history" / "mixed" / "run"
    assert code == 0 and output.startswith("added: ")
    names = set(files(kept))
    assert {name.rsplit("/", 1)[-1] for name in names} == {"manifest.json", "summary.json"}
    assert len(names) == 1 + len(list((run / "cells").iterdir()))
    assert (kept / "manifest.json").read_bytes() == (run / "manifest.json").read_bytes()
    text = b"".join(files(kept).values()).decode()
    assert VARIANTS["one_cell"].text not in text
    assert sum(map(len, files(kept).values())) < sum(map(len, files(run / "cells").values())) / 4
    assert shown(kept)["series"] == shown(run)["series"] != []
    hits = {"hits": 1920, "queries": 1920, "counted": None, "told": 1920}  # only the answers tell them
    run = write_run(tmp_path / "usage", 0, {"a-c3": [repeat(1, 100.0) | {"server": {}, "prefix_cache": hits}]})
    add(run, "--to", tmp_path / "of-usage")
    (rate,) = (one for one in shown(tmp_path / "of-usage")["series"] if one["metric"] == "prefix_cache_hit_rate")
    assert rate["points"][0]["values"] == [1.0]


def test_adding_again_changes_nothing_and_another_content_is_refused(tmp_path):
    run = write_run(tmp_path / "results", 0, {"a-c3": [100.0], "b-c3": [50.0]})
    to = tmp_path / "history"
    add(run, "--to", to)
    before = files(to)
    assert add(run, "--to", to)[1].startswith("there already: ") and files(to) == before
    summary = run / "cells" / "a-c3" / "summary.json"
    changed = json.loads(summary.read_text())
    changed["repeats"][0]["metrics"]["output_throughput"] = 101.0
    summary.write_text(json.dumps(changed))
    with pytest.raises(UsageError, match=r"a-c3/summary.json differs.*not changed"):
        add(run, "--to", to)
    with pytest.raises(UsageError, match=r"b-c3/summary.json differs"):  # a cell fewer
        add(write_run(tmp_path / "fewer", 0, {"a-c3": [100.0]}), "--to", to)
    assert files(to) == before
    write_run(tmp_path / "results", 1, {"a-c3": [100.0]})
    with pytest.raises(UsageError, match="differs"):
        add(tmp_path / "results", "--to", to)
    assert len(list((to / "mixed").iterdir())) == 2  # one that is refused does not keep the others out
    changed["repeats"][0]["metrics"] |= {"output_throughput": 100.0, "steady_latency": {"ttft_ms": {"p95": 9.0}}}
    changed["repeats"][0]["prefix_cache"] = {"hits": 8, "queries": 10}
    summary.write_text(json.dumps(changed))  # an older version kept neither steady latencies nor hits
    assert add(run, "--to", to)[1].startswith("there already: ")


def test_a_release_is_marked_once_and_kept_in_a_history_of_a_history(tmp_path):
    run, to = write_run(tmp_path / "results", 0, {"a-c3": [100.0]}), tmp_path / "history"
    for words, said in (((), "added"), (("--release", "v1"), "marked"), (("--release", "v1"), "there already")):
        assert add(run, "--to", to, *words)[1].startswith(said)
        (run / "verdict.json").write_text("pass")  # `kvbench gate` in between makes no other run of it
    assert not list(to.rglob("verdict.json"))
    for release, says in (("v2", "release 'v1' already"), (" ", "no name")):
        with pytest.raises(UsageError, match=says):
            add(run, "--to", to, "--release", release)
    add(to, "--to", tmp_path / "two")
    assert files(to) == files(tmp_path / "two")
    assert shown(tmp_path / "two")["series"][0]["points"][0]["release"] == "v1"
    assert add(run, "--to", tmp_path / "two")[1].startswith("there already")


def test_what_is_no_complete_run_of_a_sweep_is_left_out_unless_told(tmp_path):
    results, to = tmp_path / "results", tmp_path / "history"
    half = write_run(results, 0, {"a-c3": [1.0]}, status="incomplete")
    write_run(results, 1, {"a-c3": [1.0]}, kind="compare")
    (write_run(results, 2, {"a-c3": [1.0]}) / "manifest.json").write_text("{")
    code, output, errors = add(results, "--to", to)
    assert (code, output) == (5, "") and not to.exists()
    for said in ("is not complete", "`kvbench compare`", "not JSON", "no run to keep"):
        assert said in errors
    whole = write_run(results, 3, {"a-c3": [1.0]})
    code, output, _ = add(results, "--to", to)
    assert code == 0 and [path.name for path in (to / "mixed").iterdir()] == [whole.name]
    assert add(half, "--to", to, "--incomplete")[0] == 0


def test_a_run_is_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    run, to = write_run(tmp_path / "results", 0, {"a-c3": [1.0], "b-c3": [1.0]}), tmp_path / "history"
    written = []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        add_run(run, to, None)
    assert len(written) == 3 and not files(to)
    monkeypatch.undo()
    add_run(run, to, None)
    assert len(files(to)) == 4


def test_a_metric_that_is_added_to_the_table_has_a_trend_and_is_kept(tmp_path: Path, monkeypatch) -> None:
    row = Metric("slip", "slip_ms", "ms", LOWER, "late sends", "slip", ("p95",), samples=lambda good: good["slip"])
    monkeypatch.setitem(METRICS, "slip", row)
    one = repeat(1, 100.0)
    one["metrics"]["slip_ms"] = {"p95": 3.5, "n": 9}
    run = write_run(tmp_path / "results", 0, {"a-c3": [one]})
    assert add(run, "--to", tmp_path / "history")[0] == 0
    for folder in ("results", "history"):
        (trend,) = (each for each in shown(tmp_path / folder)["series"] if each["metric"] == "p95_slip_ms")
        assert (trend["last"], trend["unit"], trend["better"]) == (3.5, "ms", "lower")
