"""What a sweep recommends: never what costs, is at risk or of unknown quality; with its numbers, by load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.effects.comparison import Call
from kvbench.metrics.definitions import ENGINE
from kvbench.metrics.model import CanaryCounts
from kvbench.report.comparisons import THROUGHPUT
from kvbench.report.recommend import Recommendation, recommend
from kvbench.report.recommend_lines import lines
from kvbench.runs.model import Run
from kvbench.runs.read import read_run
from kvbench.workload.file import resolve
from tests.support.quality_results import KLD_OUTSIDE, figures, outside, with_quality
from tests.support.quality_results import measured_run as run
from tests.support.report_cells import FAST, FASTER, LATE, SLOW, WIDE, cell, in_engine_time, refused, wrong
from tests.support.report_cells import run as run_without_quality

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
PREFIX: dict[str, Any] = {"enable_prefix_caching": True}
COMMAND = ["kvbench", "sweep", "workloads/mixed.yaml"]
REFERENCE = Path("results/reference")
UNKNOWN = dict.fromkeys(("paged-p16-fp8_e4m3", "paged-p16-int8_per_token_head"))  # of mixed-cpu: not measured


def text(said: Recommendation) -> str:
    return "\n".join(lines(said, width=500))


def test_only_what_was_measured_and_is_within_the_limits_is_recommended() -> None:
    other, page = cell(throughput=FASTER, **FP8), cell(page_size=8, throughput=FAST)
    measured = run(cell(), other, page)
    assert recommend(measured).changed == {"page_size": 16}
    assert recommend(with_quality(measured, {other.config_id: outside()})).changed == {"page_size": 16}
    assert recommend(with_quality(measured, note="random")).changed == {}
    assert recommend(with_quality(measured, git={"sha": "b"})).changed != {}  # the run does not tell its commit
    good = recommend(with_quality(measured, {other.config_id: figures(0.0009)}))
    assert good.changed == {"kv_cache_dtype": "auto"}
    # the best that is not quantised, and when
    assert good.fallback[0].startswith("paged (page 8)") and "kvbench quality" in good.fallback[-1]
    both = recommend(with_quality(measured, {other.config_id: figures(0.0009), page.config_id: outside()}))
    assert both.fallback[0].startswith("paged (page 16)")


def test_without_a_quality_the_baseline_is_kept_with_the_command_that_measures_it() -> None:
    said = recommend(run_without_quality(cell(), cell(page_size=8, throughput=FAST), command=COMMAND))
    assert (said.changed, said.alone, said.evidence) == ({}, (), ())
    assert len(said.held_back) == 1 and said.held_back[0].startswith("page 8: +51 %")
    assert said.unmeasured[0].command.startswith("kvbench quality ") and "page 8" in said.unmeasured[0].why
    assert "for now" in text(said) and "nothing else is decided" not in text(said)
    assert not recommend(run(cell(), cell(page_size=8, throughput=FAST))).held_back


def test_another_engine_is_asked_for_canaries() -> None:
    how = {"command": COMMAND, "backend": "vllm", "target": "vllm"}
    said = recommend(run_without_quality(cell(), cell(page_size=8, throughput=FAST), **how))
    assert said.changed == {} and "load.canaries=" in said.unmeasured[0].command
    counts = {"sent": 40, "answered": 40, "wrong": 0, "distinct": 40}
    right = replace(cell(page_size=8, throughput=FAST), canaries=CanaryCounts(**counts))
    assert recommend(run_without_quality(cell(), right, **how)).changed == {"page_size": 16}


def test_the_quality_of_what_is_recommended_is_told_with_the_model_that_answered() -> None:
    other = cell(throughput=FASTER, **FP8)
    known = {other.config_id: figures(0.0009, 63, 0.002)}
    said = recommend(with_quality(run(cell(), other), known, beside=True, model="kvbench-tiny"))
    assert said.quality["model"] == "kvbench-tiny" and said.quality["safe"]
    assert (said.quality["kld"], said.quality["passkeys"]) == (0.0009, 63 / 64)
    assert said.answers in text(said)
    assert all(part in said.answers for part in ("KLD 0.0009", "+0.2 %", "98 %", "kvbench-tiny"))


def test_what_is_outside_the_limits_is_rejected_with_its_reason() -> None:
    other = cell(throughput=FASTER, **FP8)
    for page in (cell(page_size=8, throughput=FAST), cell(page_size=8)):  # beside a best, and without one
        measured = with_quality(run(cell(), other, page, command=COMMAND), {other.config_id: outside()})
        (line,) = (each for each in recommend(measured).rejected if "FP8" in each)
        assert KLD_OUTSIDE in line and not any("quality" in step.why for step in recommend(measured).unmeasured)
        assert not any("FP8" in each for each in (*recommend(measured).evidence, *recommend(measured).alone))
    unknown = recommend(run(cell(), other, cell(page_size=8, throughput=FAST), command=COMMAND))
    assert len(unknown.alone) == 1 and any("quality" in step.why for step in unknown.unmeasured)


def test_a_baseline_outside_the_limits_is_kept_and_that_is_said_first() -> None:
    base = cell()
    said = recommend(with_quality(run(base, cell(page_size=8)), {base.config_id: outside()}))
    assert said.changed == {} and KLD_OUTSIDE in said.doubts[0].why
    assert not said.settings and not said.flags and not said.quality["safe"] and "All settings" not in text(said)


def test_settings_that_pay_alone_are_not_said_to_pay_together() -> None:
    alone = [cell(), cell(page_size=8, throughput=FASTER), cell(throughput=FAST, **PREFIX)]
    said = recommend(run(*alone, command=COMMAND))
    assert said.changed == {"page_size": 16} and len(said.alone) == 1
    assert said.together is not None and said.together.command.endswith("design=full")
    both = cell(page_size=8, throughput=(250.0, 251.0, 252.0), **PREFIX)
    known = recommend(run(*alone, both, command=COMMAND))
    assert known.changed == {"page_size": 16, "enable_prefix_caching": False}
    assert known.alone == () and known.together is None and len(known.rejected) == 2
    worse = recommend(run(*alone, cell(page_size=8, throughput=SLOW, **PREFIX), command=COMMAND))
    assert worse.changed == {"page_size": 16} and worse.alone == () and worse.together is None


def test_another_value_of_the_same_setting_is_no_addition() -> None:
    said = recommend(run(cell(), cell(page_size=8, throughput=FASTER), cell(page_size=4, throughput=FAST)))
    assert said.alone == () and len(said.rejected) == 1


def test_what_pays_at_one_load_only_is_said_with_its_load() -> None:
    high, low = cell(page_size=8, throughput=FAST), cell(page_size=8, load=3, throughput=SLOW)
    said = recommend(run(cell(), high, cell(load=3), low))
    assert said.changed == {} and any(line.startswith("only at 24 at once") for line in said.evidence)
    prefix = [cell(**PREFIX), cell(load=3, throughput=FAST, **PREFIX)]
    page = [cell(page_size=8, throughput=FAST), cell(page_size=8, load=3)]
    said = recommend(run(cell(), cell(load=3), *prefix, *page))
    assert said.changed == {"page_size": 16}
    assert any(line.startswith("at 3 at once rather prefix caching") for line in said.evidence)


def test_the_effects_are_those_of_the_report_with_load_and_clock() -> None:
    other = cell(page_size=8, throughput=FAST)
    known = in_engine_time((other, THROUGHPUT, 1.17, 1.16, 1.18, Call.BETTER))
    first = recommend(run(cell(), other, engine_time=known)).effects[0]
    wanted = {"load": "24 at once", "metric": THROUGHPUT, "clock": ENGINE, "ratio": 1.17, "low": 1.16, "high": 1.18}
    assert first == wanted | {"call": Call.BETTER}


def test_the_fallback_is_the_baseline_with_what_it_served() -> None:
    base = cell(throughput=(99.0, 100.0, 101.0), ttft=(490.0, 500.0, 510.0))
    other = cell(throughput=FAST, server={"prefix_cache_hits_total": 25, "prefix_cache_queries_total": 100}, **PREFIX)
    changes = ["-o", "engine.page_size=32", "-o", "load.repeats=3"]
    said = recommend(run(base, other, command=[*COMMAND, *changes], workload_file=COMMAND[2]))
    assert said.fallback[0].startswith("paged (page 16) (enable_prefix_caching: false)")
    assert all(part in said.fallback[1] for part in ("100", "500 ms", "20.0 ms", "load.repeats=3", "--url URL"))
    assert "25 %" in said.fallback[2] and "page_size=32" not in said.fallback[1]  # of the sweep's server
    assert recommend(run(base, cell(page_size=8))).fallback == ()  # it is the baseline itself


def test_where_paging_costs_latency_contiguous_is_a_fallback_with_its_numbers() -> None:
    paged = cell(throughput=FAST, tpot=(40.0, 41.0, 42.0))
    (line,) = recommend(run(paged, cell("contiguous"))).fallback
    assert line.startswith("contiguous where p95 ITL") and "41.0 ms" in line and "20.0 ms" in line
    better = recommend(run(paged, cell("contiguous"), cell(page_size=8, throughput=FASTER, tpot=(40.0, 41.0, 42.0))))
    assert better.changed == {"page_size": 16} and line in better.fallback[-1]
    assert not any("contiguous" in line for line in recommend(run(cell(throughput=FAST), cell("contiguous"))).fallback)


@pytest.mark.parametrize(
    ("paged", "contiguous", "advice"),
    [
        ({}, {}, "contiguous is as good"),
        ({"throughput": FAST}, {}, "page"),
        ({}, {"throughput": FAST}, "do not page"),
        ({"throughput": WIDE}, {}, "not decided whether paging pays"),
        ({"throughput": FAST, "ttft": LATE}, {}, "page, unless p95 TTFT counts more than output tokens/s"),
        ({"ttft": LATE, "tpot": (10.0, 10.1, 10.2)}, {}, "page, unless p95 TTFT counts more than p95 ITL"),
        ({"ttft": LATE}, {}, "do not page"),
    ],
)
def test_when_not_to_page_follows_from_the_pair_at_each_load(paged: Any, contiguous: Any, advice: str) -> None:
    low = cell(load=3), cell("contiguous", load=3, throughput=SLOW)
    said = recommend(run(cell(**paged, baseline=True), cell("contiguous", **contiguous), *low))
    at = {line.split(":")[0]: line.split(":")[1].strip() for line in said.paging if line.startswith("at ")}
    assert at == {"at 3 at once": "page", "at 24 at once": advice}


def test_without_a_pair_it_says_how_to_measure_one() -> None:
    said = recommend(run(cell(), cell(page_size=8), command=COMMAND))
    assert len(said.paging) == 1 and "sweep.layout=[contiguous, paged]" in said.paging[0]
    foreign = recommend(run(cell(), cell(page_size=32), command=COMMAND, backend="vllm"))
    assert "vLLM" in foreign.paging[0] and "sweep.layout" not in foreign.paging[0]


def test_what_is_open_is_named_with_the_command_that_decides_it() -> None:
    one = run(cell(throughput=(100.0,)), cell(page_size=8, throughput=(150.0,)), command=COMMAND, gpus=[])
    steps = recommend(one).unmeasured
    assert steps[0].command.endswith("--repeats 3") and any("GPU" in step.why for step in steps)
    assert any("24 at once" in step.why for step in steps)  # the only load
    assert any("served figures have" in step.why for step in steps)  # one repeat; three are enough
    enough = recommend(run(cell(), cell(page_size=8), command=COMMAND)).unmeasured
    assert not any("served figures have" in step.why for step in enough)


def test_doubts_about_the_run_come_first() -> None:
    fine = run(cell(), cell(page_size=8, throughput=FAST))
    assert recommend(fine).doubts == ()
    bad = run(cell(), cell(page_size=8, throughput=FAST), cell(page_size=4, reasons=("it lagged",)), command=COMMAND)
    said = recommend(bad)
    assert "it lagged" in lines(said)[0] and said.doubts[0].command.startswith("kvbench sweep --resume ")
    assert "not measured" in lines(recommend(replace(fine, missing=("paged-p4-c24",))))[0]
    disturbed = replace(cell(), invalid_repeats={"2": ["lag"]})
    assert len(recommend(run(disturbed, cell(page_size=8))).doubts) == 1
    fast = wrong(page_size=8, throughput=(900.0, 900.0, 900.0))
    assert "page 8" not in recommend(run(cell(), fast)).configuration
    served = recommend(run(refused(), cell("contiguous", baseline=False)))
    assert served.configuration.endswith("(refused)") and len(served.doubts) == 1
    assert served.in_doubt and "\nKeep " not in text(served)  # what refuses requests is not advised
    assert not recommend(fine).in_doubt


def test_nothing_is_recommended_without_a_baseline_or_a_load() -> None:
    for measured in (run(), run(cell(page_size=8))):
        said = recommend(measured)
        assert (said.configuration, said.settings, said.effects) == ("", {}, ()) and said.verdict in text(said)


@pytest.fixture(scope="module")
def mixed() -> Run:
    """The reference run, with known answers of all but two configurations."""
    return with_quality(read_run(REFERENCE / "mixed-cpu"), UNKNOWN)


def test_the_text_begins_with_what_to_set_and_only_its_commands_are_wider_than_the_terminal(mixed: Run) -> None:
    said = recommend(mixed)
    shown = lines(said, width=80)
    assert any("enable_prefix_caching: true" in line for line in shown[:6]) and len(shown) < 60
    assert said.together is not None
    commands = [each.command for each in (said.together, *said.unmeasured) if each.command]
    assert len(commands) == 2 and all(any(line.strip() == command for line in shown) for command in commands)
    assert any("`kvbench load workloads/mixed.yaml --profile cpu --at c32 --url URL`" in line for line in shown)
    wide = [line for line in shown if len(line) > 80]
    assert all("kvbench " in line for line in wide)
    whole = " ".join(" ".join(shown).split())
    assert all(sentence in whole for sentence in (*said.evidence, *said.alone, *said.fallback, *said.paging))
    assert all(each.why in whole for each in said.unmeasured)


def test_the_engine_section_can_be_pasted_into_the_workload(mixed: Run) -> None:
    said = recommend(mixed)
    pasted = yaml.safe_load("engine:" + text(said).partition("\nengine:")[2].partition("\n\n")[0])["engine"]
    assert pasted == said.settings
    again = resolve({**mixed.spec, "engine": pasted, "sweep": {}}, profile="cpu", source=None)
    assert again.engine == next(one.settings for one in mixed.cells if one.name == said.configuration)


@pytest.mark.parametrize("name", ["vllm-cpu/sweep", "llamacpp-cpu/llamacpp"])
def test_flags_are_those_that_the_engine_was_launched_with(name: str) -> None:
    measured = read_run(REFERENCE / name)
    said = recommend(measured)
    config = next(one.config_id for one in measured.cells if one.marked_name == said.configuration)
    launched = measured.manifest.servers[config].server.command
    flags = said.flags.split()
    assert len(flags) > 8 and set(flags) <= set(launched)


def test_the_reference_run_recommends_what_pays_once_its_answers_are_measured(mixed: Run) -> None:
    before = recommend(replace(mixed, quality=None))
    assert before.changed == {} and any(each.startswith("prefix caching") for each in before.held_back)
    assert before.unmeasured[0].command == "kvbench quality results/reference/mixed-cpu"
    said = recommend(mixed)
    assert said.changed == {"enable_prefix_caching": False} and said.doubts == ()
    gain = next(row for row in said.effects if row["metric"] == THROUGHPUT and row["load"] == "32 at once")
    assert gain["clock"] == ENGINE and 1.16 <= gain["low"] <= gain["ratio"] <= gain["high"] <= 1.18
    assert len(said.alone) == 3 and said.together is not None
