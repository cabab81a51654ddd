"""Change points: what Otava is asked, what is made of its answer, and that no failure of it is one of the history."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.history.model import all_series
from kvbench.history.otava import find_change_points
from kvbench.history.read import find_runs, read_runs
from tests.support.stored_runs import write_run
from tests.unit.history.test_history import show

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
here = Path({folder!r})
(here / "asked.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
config = json.loads(Path("otava.yaml").read_text())
(here / "config.json").write_text(json.dumps(config))
for name, test in config["tests"].items():
    (here / (name + ".csv")).write_text(Path(test["file"]).read_text())
exec((here / "answer.py").read_text())
"""
CHANGE = {
    "metric": "c0", "index": 5, "time": 1, "forward_change_percent": "-10", "magnitude": "0.1",
    "mean_before": "100.0", "stddev_before": "1.0", "mean_after": "90.0", "stddev_after": "1.0", "pvalue": "0.000010",
}  # fmt: skip


def fake_otava(folder: Path, answer: str) -> str:
    """A program that notes what it is asked and then does ``answer`` (Python, with ``config`` as it was given)."""
    folder.mkdir(exist_ok=True)
    program = folder / "otava"
    program.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    (folder / "answer.py").write_text(answer)
    return str(program)


def saying(*lines: Any) -> str:
    return "\n".join(f"print({line if isinstance(line, str) else json.dumps(line)!r})" for line in lines)


def series(results: Path) -> list:
    runs, _ = read_runs(find_runs([results]))
    return [each for each in all_series(runs) if each.metric.name == "output_throughput"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Twelve runs of one cell, the fourth of them not valid."""
    for day in range(12):
        write_run(tmp_path / "results", day, {"a-c3": [100.0 + day]}, invalid=["a-c3"] if day == 3 else [])
    return tmp_path / "results"


def test_what_it_is_asked_and_what_its_answer_means(results: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("BRANCH", "main")
    monkeypatch.setenv("SLACK_BOT_TOKEN", "secret")
    other = {"time": 1, "attributes": {}, "changes": [CHANGE]}
    program = fake_otava(tmp_path / "fake", saying({"t0": [other]}))
    found, note = find_change_points(series(results), program)
    [asked] = series(results)
    [(_, [change])] = found.items()
    assert change.point.run.name == asked.counted[5].run.name and asked.counted[5].value == 106.0
    assert (change.change, change.p) == (pytest.approx(-0.1), 1e-5)
    assert "advisory" in note and "55 %" in note and "1 in 1 series" in note
    arguments, environment = json.loads((tmp_path / "fake" / "asked.json").read_text())
    assert arguments[:2] == ["analyze", "all"] and {"--since", "--until", "json", "--config-file"} < set(arguments)
    assert not {"BRANCH", "SLACK_BOT_TOKEN"} & set(environment)
    rows = list(csv.reader((tmp_path / "fake" / "t0.csv").open()))
    assert rows[0] == ["time", "c0"] and [float(row[1]) for row in rows[1:]] == [100, 101, 102, *range(104, 112)]
    assert rows[1][0] == "2026-01-01T03:00:00+00:00"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise SystemExit('broken')", "ended with 1 (broken)"),
        ("", "answered for 0 tests"),
        ("print('no json')", "not JSON: 'no json'"),
        ("print('[' * 100000)", "not JSON"),
        ("sys.stdout.buffer.write(b'\\xff')", "UTF-8"),
        (saying({"t0": []}, {"t0": []}), "something else than one object"),
        (saying({"t1": []}), None),
        (saying({"t0": [], "t1": []}), "something else than one object"),
        (saying({"t0": 3}), "another form"),
        (saying({"t0": [{"changes": [7]}]}), "another form"),
        (saying({"t0": [{"changes": [{"index": 1}]}]}), "lacks its numbers"),
        *(
            (saying({"t0": [{"changes": [CHANGE | wrong]}]}), said)
            for wrong, said in (
                ({"index": 0}, "a change at 0"), ({"index": 11}, "a change at 11"), ({"index": "5"}, "a change at '5'"),
                ({"index": True}, "a change at True"), ({"metric": "c9"}, "not asked for"), ({"pvalue": "2"}, "p 2"),
                ({"mean_before": "0.0"}, "mean of 0"), ({"mean_after": "nan"}, "to nan"),
            )
        ),
    ],
)  # fmt: skip
def test_a_failure_or_another_answer_is_a_note(results: Path, tmp_path: Path, answer: str, said: str | None) -> None:
    found, note = find_change_points(series(results), fake_otava(tmp_path / "fake", answer))
    assert found == {} and note.startswith("Change points: not found out")
    assert said is None or said in note


def test_its_time_is_bounded(results: Path, tmp_path: Path) -> None:
    program = fake_otava(tmp_path / "fake", "import time; time.sleep(60)")
    began = time.monotonic()
    found, note = find_change_points(series(results), program, limit_s=1.0)
    assert found == {} and "took more than 1 s" in note and time.monotonic() - began < 30


def test_without_it_history_says_how_to_get_it_and_goes_on(results: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output, _ = show(results)
    [line] = [line for line in output.splitlines() if line.startswith("Change points")]
    assert code == 0 and "pip install apache-otava" in line and "111 tok/s" in output
    assert "'gone' is no program" in show(results, "--otava", "gone")[1]


def test_a_program_that_cannot_be_run_is_a_note(results: Path, tmp_path: Path) -> None:
    program = tmp_path / "otava"
    program.write_text("#!/there/is/no/such/interpreter\n")
    program.chmod(0o755)
    assert "cannot be run" in find_change_points(series(results), str(program))[1]


def test_it_is_marked_wherever_it_is_shown(results: Path, tmp_path: Path) -> None:
    answer = "print(json.dumps({'t0': [{'changes': [CHANGE]}]}))".replace("CHANGE", repr(CHANGE))
    options = ("--otava", fake_otava(tmp_path / "fake", answer), "--metric", "output_throughput")
    page = tmp_path / "page.html"
    table = show(results, *options, "--html", page)[1]
    assert "output throughput *" in table and "* a change point, advisory" in table
    assert "change point (advisory)" in page.read_text() and "55 %" in page.read_text().split("<figure")[0]
    told = json.loads(show(results, *options, "--json")[1])
    assert [point["advisory"] for point in told["series"][0]["change_points"]] == [True]
    assert "advisory" in told["change_points"]


def test_few_runs_are_not_asked_about(tmp_path: Path) -> None:
    for day in range(7):
        write_run(tmp_path / "results", day, {"a-c3": [100.0]})
    program = fake_otava(tmp_path / "fake", saying({"t0": []}))
    found, note = find_change_points(series(tmp_path / "results"), program)
    assert found == {} and "no series has the 8" in note and not (tmp_path / "fake" / "asked.json").exists()


@pytest.mark.skipif("OTAVA" not in os.environ, reason="OTAVA does not name the program of an installed Apache Otava")
def test_otava_itself_finds_a_step_of_ten_percent_where_it_is(tmp_path: Path) -> None:
    """30 runs with independent noise of 1 %; from the 19th on, two of three cells are 10 % slower."""
    noise = np.random.default_rng(7).normal(0, 0.01, (30, 3))
    for day, row in enumerate(noise):
        levels = (0.9, 1.0, 0.9) if day >= 18 else (1.0, 1.0, 1.0)
        cells = {name: [100 * level * float(np.exp(e))] for name, level, e in zip("abc", levels, row, strict=True)}
        write_run(tmp_path, day, cells, invalid=["c"] if day in (2, 4) else [])
    found, note = find_change_points(series(tmp_path), os.environ["OTAVA"])
    assert {each.cell: [point.point.run.name[:8] for point in points] for each, points in found.items()} == {
        "a": ["20260119"],
        "c": ["20260119"],
    }, note
    for each, points in found.items():
        before, after = ([p.value for p in each.counted if (p.run.started.day >= 19) == late] for late in (False, True))
        # Otava's own means are of the stretch that it compared, which may leave runs at its ends out
        assert points[0].change == pytest.approx(np.mean(after) / np.mean(before) - 1, abs=0.01)
        assert points[0].p < 0.001
