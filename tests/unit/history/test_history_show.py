"""Stored runs as series: order, machines, what counts; and what the command shows of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbench.common.errors import UsageError
from kvbench.history.cli import history
from kvbench.history.series import INCOMPLETE, INVALID, VALID, Series, all_series, title_of
from kvbench.history.show import sparkline
from kvbench.runs.read import read_run
from kvbench.runs.stored import find_runs, read_runs
from tests.support.synthetic_run import MACHINE, VARIANTS, make_run, repeat, write_run


def series_of(*folders: Path, metric: str = "output_throughput") -> list[Series]:
    runs, _ = read_runs(find_runs(folders))
    return [series for series in all_series(runs) if series.figure.name == metric]


def values(series: Series) -> list[float]:
    return [point.value for point in series.counted]


def show(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output, errors of ``kvbench history``; usage errors are raised."""
    done = CliRunner(env={"COLUMNS": "100"}).invoke(
        history, list(map(str, arguments)), standalone_mode=False, catch_exceptions=False
    )
    return done.return_value, done.stdout, done.stderr


def shown(*arguments: object) -> dict[str, Any]:
    return json.loads(show(*arguments, "--json")[1])


def test_a_value_is_the_median_over_the_repeats_in_the_order_of_the_runs_starts(tmp_path):
    for age, day in enumerate((5, 0, 3)):
        folder = write_run(tmp_path, day, {"a-c3": [100.0 + day]})
        os.utime(folder / "manifest.json", (1000 - age, 1000 - age))
    other_zone = {"started": "2026-01-05T23:00:00-08:00"}  # 07:00 UTC of the 6th: after day 5's 03:00
    repeats = [repeat(1, 90.0, 120.0, 9.0), repeat(2, 110.0, 80.0, 12.0), repeat(3, 100.0, 200.0, 10.0)]
    folder = write_run(tmp_path, 1, {"a-c3": repeats}, name="cells", workload_name="mixed", **other_zone)
    assert values(series_of(tmp_path)[0]) == [100.0, 103.0, 105.0, 100.0]
    assert find_runs([tmp_path / "cells"]) == [folder.resolve()]
    assert {each["metric"]: each["last"] for each in shown(tmp_path)["series"]} == pytest.approx({
        "output_throughput": 100.0, "p95_ttft_ms": 120.0, "p95_itl_ms": 10.0, "kv_cache_usage_perc": 0.9,
        "kv_waste_share": 0.03, "prefix_cache_hit_rate": 0.25,
    })  # fmt: skip


def test_the_folder_of_a_sweep_is_read_as_its_report_reads_it(tmp_path):
    folder = make_run(tmp_path / "mixed" / "run", VARIANTS["one_cell"])
    [cell] = read_run(folder).cells
    [series] = series_of(tmp_path, metric="p95_itl_ms")
    assert list(series.points[0].values) == list(cell.per_repeat("itl_ms.p95").values())
    [series] = series_of(tmp_path, metric="steady_output_throughput")
    assert list(series.points[0].values) == list(cell.throughput().values()) and len(cell.repeats) == 3
    assert cell.has_steady and not series_of(tmp_path, metric="output_throughput")


def test_the_whole_run_is_a_series_of_all_runs_only_where_a_repeat_of_one_has_no_steady_window(tmp_path):
    def repeats(*steady: float | None) -> list[dict[str, Any]]:
        found = [repeat(n, 90.0) for n, _ in enumerate(steady, 1)]
        for each, value in zip(found, steady, strict=True):
            each["metrics"]["steady_output_throughput"] = value
        return found

    write_run(tmp_path, 0, {"a-c3": repeats(100.0, 110.0)})
    write_run(tmp_path, 1, {"a-c3": repeats(120.0, None)})
    write_run(tmp_path, 2, {"a-c3": repeats(104.0, 106.0)})
    steady, whole = (series_of(tmp_path, metric=name)[0] for name in ("steady_output_throughput", "output_throughput"))
    assert (values(steady), values(whole)) == ([105.0, 105.0], [90.0] * 3)
    assert "whole run" in title_of(whole.figure) and "whole run" not in title_of(steady.figure)
    assert show(tmp_path, "--metric", "output_throughput")[1].count("whole run") == 1
    settled = {"ttft_ms": {"p95": 50.0, "n": 8}, "itl_ms": {"p95": 5.0}}
    for day, requests in ((3, 8), (4, 7)):
        found = repeats(104.0, 106.0)
        for each in found:
            each["metrics"]["steady_latency"] = settled | {"ttft_ms": {"p95": 50.0, "n": requests}}
        write_run(tmp_path, day, {"b-c3": found})
    steady, whole = (series_of(tmp_path, metric=name)[-1] for name in ("steady_p95_ttft_ms", "p95_ttft_ms"))
    assert (values(steady), values(whole)) == ([50.0], [100.0] * 2)  # where 8 requests came in the window, and 7


def test_committed_runs_are_shown_where_there_are_no_others_or_they_are_named_and_a_kept_run_is_one(tmp_path):
    write_run(tmp_path / "reference", 0, {"a-c3": [50.0]})
    write_run(tmp_path / "compare", 2, {"a-c3": [1.0]}, kind="compare")  # nothing that history would show instead
    assert values(series_of(tmp_path)[0]) == [50.0] and shown(tmp_path)["runs"] == 1
    run = write_run(tmp_path, 3, {"a-c3": [100.0]})
    alone = shown(tmp_path)
    assert alone["runs"] == 1 and alone["series"][0]["last"] == 100.0
    assert f"{tmp_path / 'reference'} are left out" in show(tmp_path)[2]
    assert shown(tmp_path, tmp_path / "reference")["runs"] == 2
    kept = tmp_path / "history" / "mixed" / run.name
    shutil.copytree(run, kept)
    (kept / "release.json").write_text('{"release": "v1"}')
    for folders in (("mixed", "history"), ("history", "mixed")):
        found = shown(*(tmp_path / folder for folder in folders))
        assert found["runs"] == 1 and found["series"][0]["points"][0]["release"] == "v1"


def test_another_machine_or_model_is_another_series_and_another_version_is_not(tmp_path):
    others = (
        {"cpu": {"model": "other", "cores": 2}},
        {"cpu": {"model": "synthetic", "cores": 4}},
        {"gpus": [{"name": "H100"}]},
        {"device": "cuda"},
        {"profile": "gpu"},
        {"model": {"name": "larger"}},
        {"backend": "vllm"},
    )
    for day, other in enumerate(others):
        write_run(tmp_path, day, {"a-c3": [50.0 + day]}, **other)
    same = ({}, {"versions": {"kvbench": "9"}}, {"os": "Linux 9"}, {"memory_bytes": 5})
    for day, facts in enumerate(same, len(others)):
        write_run(tmp_path, day, {"a-c3": [100.0]}, **facts)
    assert sorted(map(values, series_of(tmp_path))) == [*([50.0 + day] for day in range(7)), [100.0] * 4]


def test_a_cell_with_another_definition_is_another_series_and_says_so(tmp_path):
    write_run(tmp_path, 0, {"a-c3": [100.0]})
    write_run(tmp_path, 1, {"a-c3": [50.0]}, load={"num_requests": 7})
    changed = {"name": "mixed", "seed": 0, "load": {"mode": "closed", "prompts": {"tokens": 9}}}
    write_run(tmp_path, 2, {"a-c3": [25.0]}, workload=changed)
    write_run(tmp_path, 3, {"a-c3": [101.0]})
    assert list(map(values, series_of(tmp_path))) == [[100.0, 101.0], [50.0], [25.0]]
    assert show(tmp_path)[1].count("a-c3 [") == 3
    for day, load in enumerate(({"repeats": 3}, {"repeats": 5, "slo": {"ttft_ms": 1}, "concurrency": [3, 9]}), 4):
        write_run(tmp_path, day, {"b-c3": [100.0]}, workload={"name": "mixed", "load": load})
    assert len(series_of(tmp_path)) == 4  # repeats and objectives change no request


def test_what_is_not_valid_or_not_complete_is_shown_and_not_counted(tmp_path):
    write_run(tmp_path, 0, {"a-c3": [100.0]})
    write_run(tmp_path, 1, {"a-c3": [1.0]}, invalid=["a-c3"])
    write_run(tmp_path, 2, {"a-c3": [2.0]}, status="incomplete")
    write_run(tmp_path, 3, {"p16-c32": [1.0], "p16-c4": [1.0], "p8-c4": [1.0], "contiguous-c4": [1.0]})
    summary = write_run(tmp_path, 4, {"a-c3": [110.0]}) / "cells" / "a-c3" / "summary.json"
    stored = json.loads(summary.read_text())
    del stored["valid"]  # counts, as in its report
    summary.write_text(json.dumps(stored))
    series, *others = series_of(tmp_path)
    assert [each.key.cell for each in others] == ["contiguous-c4", "p8-c4", "p16-c4", "p16-c32"]  # natural order
    assert [point.state for point in series.points] == [VALID, INVALID, INCOMPLETE, VALID]
    assert values(series) == [100.0, 110.0] and series.change == pytest.approx(0.10)
    assert sparkline(series.points) == "▁··█"
    equal = [dataclasses.replace(series.points[0], values=(3.0 * 1.37**i,)) for i in range(60)]
    assert {sparkline([point] * n) for point in equal for n in (1, 2)} == {"▄", "▄▄"}


def test_damage_is_named_and_passed_over(tmp_path):
    write_run(tmp_path, 0, {"a-c3": [100.0]})
    (write_run(tmp_path, 1, {"a-c3": [1.0]}) / "manifest.json").write_text('{"form')
    (write_run(tmp_path, 2, {"a-c3": [1.0], "b-c3": [1.0]}) / "cells" / "a-c3" / "summary.json").write_text("[]")
    write_run(tmp_path, 3, {"a-c3": [1.0]}, format=99)
    write_run(tmp_path, 4, {"a-c3": [1.0]}, started="soon")
    compared = write_run(tmp_path, 5, {"a-c3": [1.0]}, kind="compare")
    write_run(compared / "candidate", 5, {"a-c3": [1.0]})  # a part of it
    code, _, errors = show(tmp_path)
    assert code == 0 and values(series_of(tmp_path)[0]) == [100.0]
    for said in ("-0000001", "a-c3", "format is 99", "'soon'", "compare"):
        assert said in errors
    assert len(errors.splitlines()) == 5


def test_what_is_asked_for_is_shown(tmp_path):
    code, output, errors = show(tmp_path)
    assert (code, output) == (5, "") and len(errors.splitlines()) == 1
    for day in range(4):
        machine = MACHINE | {"profile": f"p{day % 2}"}
        write_run(tmp_path, day, {"paged-c3": [100.0], "contiguous-c3": [50.0]}, **machine)
        write_run(tmp_path, day, {"paged-c3": [100.0]}, name="chat")

    def cells(*options: str) -> set[tuple[str, str, str]]:
        return {(s["workload"], s["cell"], s["metric"]) for s in shown(tmp_path, *options)["series"]}

    assert {metric for *_, metric in cells("--workload", "chat", "--metric", "p95*")} == {"p95_ttft_ms", "p95_itl_ms"}
    assert {cell for _, cell, _ in cells("--cell", "cont*")} == {"contiguous-c3"}
    assert {workload for workload, *_ in cells("--cell", "chat/*")} == {"chat"}
    assert {s["place"]["profile"] for s in shown(tmp_path, "--machine", "PROFILE P1")["series"]} == {"profile p1"}
    code, _, errors = show(tmp_path, "--cell", "nothing*")
    assert code == 5 and "--cell" in errors
    newest = shown(tmp_path, "--last", "1", "--workload", "chat")["series"][0]["points"]
    assert [point["started"][:10] for point in newest] == ["2026-01-04"]
    for wrong in ((tmp_path, "--metric", "speed"), (tmp_path / "gone",)):
        with pytest.raises(UsageError, match=str(wrong[-1])):
            show(*wrong)


def test_the_page_holds_every_run_and_needs_no_network(tmp_path):
    days = 40
    for day in range(days):
        write_run(tmp_path, day, {"<b>x-c3": [100.0, 101.0], "y-c3": [50.0]}, invalid=["y-c3"] if day == 2 else [])
    page = tmp_path / "trend.html"
    assert show(tmp_path, "--html", page)[0] == 0
    text = page.read_text()
    figures = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    lines = [trace for trace in figures[0]["data"] if trace.get("name") == "run"]
    assert len(figures) == 6 and [len(trace["x"]) for trace in lines] == [days, days]
    assert [sum(y is None for y in trace["y"]) for trace in lines] == [0, 1]
    assert [trace["x"] for trace in figures[0]["data"] if trace.get("name") == "does not count"] == [[2.0]]
    assert "<b>x" not in text.split("<main>")[1].split("<script")[0]
    assert "&lt;b&gt;x-c3" in figures[0]["layout"]["annotations"][0]["text"]
    assert "<link" not in text.replace('<link rel="icon" href="data:,">', "") and "<script src" not in text
