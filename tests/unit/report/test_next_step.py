"""The next experiment: what the run leaves open, with a command that would decide it."""

from __future__ import annotations

import shlex

import yaml

from kvbench.effects.comparison import Call
from kvbench.report.comparisons import THROUGHPUT
from kvbench.report.decision import Decision
from kvbench.report.next_steps import NextStep
from kvbench.report.next_steps import next_steps as steps_of
from kvbench.runs.model import Run
from tests.support.quality_results import measured_run as run
from tests.support.quality_results import outside, with_quality
from tests.support.report_cells import FAST, cell, in_engine_time
from tests.support.report_cells import run as run_without_quality

COMMAND = ["kvbench", "sweep", "workloads/mixed.yaml"]


def next_steps(measured: Run) -> list[NextStep]:
    return steps_of(Decision.of(measured))


def test_an_invalid_run_is_measured_again_first() -> None:
    steps = next_steps(run(cell(), cell(page_size=8, reasons=("lag",)), command=COMMAND))
    assert steps[0].command.startswith("kvbench sweep --resume ")
    load = run(cell(reasons=("lag",)), command=["kvbench", "load", "--resume", "--url", "URL"], kind="load")
    assert next_steps(load)[0].command == "kvbench load --url URL --resume"


def test_what_pays_asks_for_its_quality_until_it_is_measured() -> None:
    for how in ({"kv_cache_dtype": "fp8_e4m3"}, {"page_size": 8}):
        measured = run_without_quality(cell(), cell(throughput=FAST, **how), command=COMMAND)
        assert any(step.command.startswith("kvbench quality ") for step in next_steps(measured))
        assert not any("quality" in step.command for step in next_steps(with_quality(measured)))
    assert not next_steps(run_without_quality(cell(), cell(page_size=8), command=COMMAND))  # nobody would set it
    other = run_without_quality(cell(), cell(page_size=8, throughput=FAST), command=COMMAND, backend="vllm")
    assert any("load.canaries=" in step.command for step in next_steps(other))
    quantised = cell(kv_cache_dtype="fp8_e4m3", throughput=FAST)  # where canaries do not speak for it
    assert not next_steps(run_without_quality(cell(), quantised, command=COMMAND, backend="vllm"))


def test_settings_that_pay_alone_are_to_be_measured_together() -> None:
    alone = [cell(), cell(page_size=8, throughput=FAST), cell(enable_prefix_caching=True, throughput=FAST)]
    (step,) = next_steps(run(*alone, command=COMMAND))
    words = shlex.split(step.command)
    assert words[:3] == COMMAND and words[-1] == "design=full"
    assert yaml.safe_load(words[4].removeprefix("sweep=")) == {
        "page_size": [16, 8], "enable_prefix_caching": [False, True],
    }  # fmt: skip
    fast = cell(kv_cache_dtype="int4_per_token_head", throughput=(160.0, 161.0, 162.0))
    unsafe = with_quality(run(*alone, fast, command=COMMAND), {fast.config_id: outside()})
    assert not any("int4" in step.command for step in next_steps(unsafe) if "together" in step.why)
    both = cell(page_size=8, enable_prefix_caching=True)
    assert not any("together" in step.why for step in next_steps(run(*alone, both, command=COMMAND)))


def test_open_effects_ask_for_as_much_more_as_they_need() -> None:
    base, other = cell(throughput=(100.0,)), cell(page_size=8, throughput=(100.0,))
    effect = (other, THROUGHPUT, 1.02, 0.99, 1.05, Call.UNDECIDED)
    known = in_engine_time(effect, smallest_seen=0.04, seconds=120.0)
    (step,) = next_steps(run(base, other, engine_time=known, command=COMMAND))
    assert step.command.endswith(" --lockstep-minutes 9")  # 2 minutes x (4 % / 2 %)^2, and a tenth more
    far = in_engine_time(effect, smallest_seen=0.4, seconds=120.0)  # hours: not proposed
    assert not next_steps(run(base, other, engine_time=far, command=COMMAND))
    one = (cell(throughput=(100.0,)), cell(page_size=8, throughput=(150.0,)))
    assert next_steps(run(*one, command=COMMAND))[0].command.endswith("--repeats 3")


def test_a_load_that_filled_nothing_asks_for_a_higher_one() -> None:
    room = {"kv_full": 0.0, "waiting_mean": 0.0, "usage_max": 0.2}
    found = next_steps(run(cell(observed=room), cell(page_size=8, observed=room), command=COMMAND))
    assert any(step.command.endswith("-o 'load.concurrency=[24, 48]'") for step in found)


def test_nothing_is_proposed_without_a_cell() -> None:
    decided = in_engine_time((cell(page_size=8), THROUGHPUT, 1.1, 1.08, 1.12, Call.BETTER))
    assert [step.why for step in next_steps(run(engine_time=decided, command=COMMAND))] == []
