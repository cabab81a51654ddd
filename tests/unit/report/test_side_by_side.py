"""Cells side by side: which of them are compared, how, and what is said of the others."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_ind

from kvbench.cli.main import cli, main
from kvbench.common.errors import UsageError
from kvbench.common.stats import welch_interval
from kvbench.effects.comparison import Call
from kvbench.report.comparisons import THROUGHPUT
from kvbench.report.side_by_side import MOST_SIDES, Group, differences, groups_of, obstacles, one_group, ratios
from kvbench.report.side_by_side_page import drawings, engine_time, markdown, page
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.read import read_run
from tests.support.records import put
from tests.support.report_cells import cell, in_engine_time, mark_few, refused, run, wrong
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

WORSE, OPEN = Call.WORSE, Call.UNDECIDED
EVIL = "<script>alert(1)</script>"
RISING = (100.0, 200.0, 400.0)  # repeats that scatter, as those of a machine that gets quieter
MACHINE = {"cpu": {"model": "EPYC", "cores": 2}, "device": "EPYC", "model": {"name": "llama-32m"}}


def of(*cells: MeasuredCell, name: str = "now", **manifest: Any) -> Run:
    return replace(run(*cells, **{**MACHINE, **manifest}), folder=Path("/nonexistent/mixed") / name)


def pair(a: MeasuredCell, b: MeasuredCell, **other_run: Any) -> Group:
    """Two cells of one run, or of two if anything is said of the other."""
    first = of(a, b)
    second = of(b, name="later", **other_run) if other_run else first
    return one_group([(first, a), (second, b)])[0]


def faster(values: tuple[float, ...] = RISING) -> MeasuredCell:
    """10 % more tokens/s in every repeat."""
    return cell(page_size=32, throughput=tuple(1.1 * value for value in values))


def more_requests() -> MeasuredCell:
    """As ``faster``, of 60 requests a repeat instead of 48."""
    one = faster()
    for repeat in one.repeats:
        put(repeat.metrics, completed=60)
    return one


def shown(groups: list[Group]) -> str:
    """What Markdown says, without its escapes."""
    return html.unescape(markdown(groups).replace("\\", ""))


def test_repeats_of_one_run_are_paired_and_those_of_two_runs_are_not() -> None:
    slow, fast = cell(throughput=RISING), faster()
    paired = ratios(*pair(slow, fast))[0]
    assert paired.call == "better" and paired.ratio == pytest.approx(1.1)
    assert (paired.low, paired.high) == pytest.approx((1.1, 1.1)) and "paired" in paired.basis
    apart = ratios(*pair(slow, fast, git={"short_sha": "abc"}))[0]
    assert apart.call == "undecided" and "Welch" in apart.basis
    assert apart.ratio == pytest.approx(1.1) and apart.low < 0.5 and apart.high > 2


def test_the_interval_of_two_runs_is_welchs() -> None:
    a, b = np.array([4.6, 4.7, 4.65]), np.array([4.9, 5.1, 4.95])
    expected = tuple(ttest_ind(b, a, equal_var=False).confidence_interval(0.95))
    assert welch_interval(a, b) == pytest.approx(expected)
    first, other = cell(throughput=tuple(np.exp(a))), cell(throughput=tuple(np.exp(b)))
    found = ratios(*pair(first, other, seeds={}))[0]
    assert (found.low, found.high) == pytest.approx(tuple(map(math.exp, expected)))
    assert found.call == "better" and math.isnan(welch_interval([1.0], b)[0])
    assert welch_interval([2.0, 2.0], [3.0, 3.0]) == (1.0, 1.0)


def test_fewer_than_three_repeats_make_no_interval_and_no_verdict() -> None:
    for other_run in ({}, {"os": "Linux 9"}):
        found = ratios(*pair(cell(throughput=RISING[:2]), faster(RISING[:2]), **other_run))[0]
        assert (found.low, found.call) == (None, "undecided") and "2 repeat" in found.basis


LATER = {"git": {"short_sha": "abc"}}
PROMPTS = {"workload": {"name": "mixed", "load": {"prompts": {"tokens": 9}, "repeats": 3}}}


@pytest.mark.parametrize(
    ("b", "other_run", "named"),
    [
        (faster(), {"cpu": {"model": "Xeon", "cores": 2}}, "another machine: EPYC, 2 cores and Xeon, 2 cores"),
        (faster(), {"gpus": [{"name": "H100"}]}, "another machine: none and H100"),
        (faster(), {"device": "H100"}, "another device"),
        (faster(), {"model": {"name": "llama-3.1-8b"}}, "another model: llama-32m and llama-3.1-8b"),
        (cell(load=3), {}, "another load: 24 concurrent requests and 3 concurrent requests"),
        (faster(), PROMPTS, "load.prompts.tokens"),
        (faster(), {"seeds": {"workload": 7}}, "seed"),
        (more_requests(), {}, "requests a repeat"),
        (cell(page_size=32, reasons=("repeat 1: it lagged",)), {}, "it lagged"),
        (refused(page_size=32), {}, "refused"),
        (wrong(page_size=32), {}, "passkey-7"),
    ],
)
def test_what_must_not_be_compared_has_a_reason_and_no_ratio_anywhere(
    b: MeasuredCell, other_run: dict[str, Any], named: str
) -> None:
    group = pair(cell(throughput=RISING), b, **other_run)
    assert any(named in reason for reason in obstacles(*group)) and ratios(*group) == []
    text = markdown([group])
    assert re.search(r"No ratio of B against A.*" + re.escape(named.split(":")[0].split(".")[0]), text)
    assert "no ratio of B" in text and not re.search(r"\d\.\d\dx", text)
    assert not any(drawing.key == "effects" for drawing in drawings([group]))


def test_other_code_versions_settings_and_targets_are_compared_and_shown_first() -> None:
    other = {**LATER, "versions": {"torch": "9"}, "target": "vllm", "os": "Linux 9"}
    group = pair(cell(), cell(kv_cache_dtype="fp8_e4m3", budget=1 << 20), **other)
    assert ratios(*group)
    found = dict(differences([group]))
    assert found["commit"] == ("–", "abc") and found["version of torch"] == ("–", "9")
    assert found["KV dtype"] == ("KV in the model's dtype", "FP8 KV (e4m3)") and found["target"][1] == "vllm"
    assert found["KV budget"] == ("128 MiB", "1 MiB")
    assert not {"model", "device", "processor", "load", "layout", "page size", "workload"} & found.keys()
    text = shown([group])
    assert text.index("What differs") < text.index("Effects") and "FP8 KV (e4m3)" in text
    assert differences([pair(cell(), replace(cell(), cell_id="copy"))]) == []


def test_a_group_has_two_to_six_different_cells() -> None:
    cells = [cell(load=load) for load in range(1, MOST_SIDES + 2)]
    one = of(*cells)
    for chosen in ([], cells[:1], cells, [cells[0], cells[0]]):
        with pytest.raises(UsageError):
            one_group([(one, each) for each in chosen])
    assert [side.letter for side in one_group([(one, each) for each in cells[:6]])[0]] == list("ABCDEF")


def test_two_runs_are_put_side_by_side_cell_by_cell_the_highest_load_first() -> None:
    a = of(cell(load=3), cell(load=24), cell("contiguous", load=24))
    b = of(cell(load=3), cell(load=24, throughput=(200.0, 201.0, 202.0)), cell(page_size=8), name="later", **LATER)
    groups = groups_of(a, b)
    assert [(x.cell.load.value, x.letter, y.letter) for x, y in groups] == [(24, "A", "B"), (3, "A", "B")]
    text = shown(groups)
    assert "higher in 1, level in 1" in text
    assert "In A but not in every run: contiguous-24" in text and "In B but not" in text
    assert [name for name, _ in differences(groups)] == ["commit"]
    assert len(groups_of(a, b, of(cell(load=3), name="third"))) == 1
    with pytest.raises(UsageError, match="beside itself"):
        groups_of(a, b, a)
    with pytest.raises(UsageError, match="7 runs"):
        groups_of(*(of(cell(), name=str(number)) for number in range(7)))
    with pytest.raises(UsageError, match="share no measured cell"):
        groups_of(of(cell(load=3)), of(cell(load=4), name="later"))


def test_cells_of_other_engines_match_by_load_and_the_settings_that_are_varied() -> None:
    """An engine without pages of a size names its cells otherwise."""
    caching = "enable_prefix_caching"
    ours = of(*(cell(load=3, page_size=32, **{caching: on}) for on in (False, True)))
    theirs = [replace(cell(load=3, **{caching: on}), cell_id=f"paged-{on}") for on in (False, True)]
    for each in theirs:
        each.settings.pop("page_size", None)
    llama = of(*theirs, name="llama", target="llamacpp")
    vllm = of(*(cell(load=3, page_size=32, **{caching: on}) for on in (True, False)), name="vllm", target="vllm")
    groups = groups_of(ours, vllm, llama)
    assert [[side.cell.settings[caching] for side in group] for group in groups] == [[False] * 3, [True] * 3]
    text = shown(groups)
    assert "B vllm" in text and "C llamacpp" in text and "A the built-in engine" in text
    assert "own default: watermark, preemption, scheduling, max_num_seqs and max_num_batched_tokens. Such" in text
    assert "own default" not in shown(groups_of(ours, of(*ours.cells, name="later")))
    unnamed = llama.manifest.model_copy(update={"target": None})
    with pytest.raises(UsageError, match="share no measured cell"):
        groups_of(ours, replace(llama, cells=llama.cells[:1], manifest=unnamed))
    swept = of(*(cell(load=3, page_size=size) for size in (16, 64)), name="swept")
    one = replace(llama, cells=llama.cells[:1])
    for runs in ((swept, one), (one, swept)):  # which page size is llama.cpp's?
        with pytest.raises(UsageError, match="share no measured cell"):
            groups_of(*runs)


def test_more_cells_than_six_are_all_in_the_table_and_six_are_drawn() -> None:
    loads = range(1, 10)
    a, b = (of(*(cell(load=load) for load in loads), name=name) for name in ("now", "later"))
    late = replace(b, cells=tuple(replace(one, valid=one.load.value < 8) for one in b.cells))
    groups = groups_of(a, late)
    text = shown(groups)
    assert all(f"{load} at once" in text for load in loads)
    (effects,) = drawings(groups)
    drawn = effects.figure.layout.yaxis.ticktext
    assert len(drawn) == 6 and not any("9 at once" in tick or "8 at once" in tick for tick in drawn)


def test_a_ratio_that_the_values_above_it_contradict_says_what_they_give() -> None:
    """Values are medians; Welch's ratio of two runs is of geometric means."""
    a, b = cell(throughput=(100.0, 100.0, 200.0)), cell(page_size=32, throughput=(110.0, 110.0, 110.0))
    text = shown([pair(a, b, git={"short_sha": "abc"})])
    assert "0.87x?" in text and "medians give 1.10x" in text
    few = cell(page_size=32)
    mark_few(few, "ttft_ms")
    text = shown([pair(cell(), few)])
    assert text.count("500*") == 1 and "p95 130" in text
    assert "medians give" not in shown([pair(cell(throughput=RISING), faster())])


def test_the_figure_marks_what_is_better_and_what_is_not_decided() -> None:
    drawn = drawings([pair(cell(throughput=RISING), faster())])[0]
    marks = {(t.xaxis or "x", t.name): (t.x[0], t.text[0]) for t in drawn.figure.data if t.mode == "markers+text"}
    assert marks["x", "better"] == (pytest.approx(10.0), "+10 %")
    assert dict(marks.keys())["x2"] == "level" and "±5 %" in drawn.caption
    open_ = drawings([pair(cell(throughput=RISING), faster(), git={"short_sha": "abc"})])[0]
    assert "better" not in open_.title and "not decided" in open_.title


def test_engine_time_of_one_run_is_said_of_its_baseline_only_and_from_the_first_cells_side() -> None:
    base, slow, other = cell(), cell("contiguous"), cell(page_size=8)
    effects = in_engine_time((slow, THROUGHPUT, 0.5, 0.4, 0.625, WORSE), (other, THROUGHPUT, 1.01, 0.97, 1.05, OPEN))
    one = replace(of(base, slow, other), engine_time=effects)
    group = one_group([(one, slow), (one, base), (one, other)])
    (said,) = engine_time(group)
    assert said.startswith("B against A") and "2.0x (1.6 to 2.5)" in said
    said = engine_time(one_group([(one, base), (one, slow), (one, other)]))
    assert "−50 % (−60 to −38)" in said[0] and "not decided" in said[1]
    assert said[0] in shown([one_group([(one, base), (one, slow)])[0]])
    later = replace(one, folder=Path("/nonexistent/mixed/later"))
    assert engine_time(groups_of(one, later)) == []  # two runs have two sittings


def test_everything_from_outside_is_escaped() -> None:
    a, b = cell(reasons=(EVIL,)), replace(faster(), name=EVIL)
    one = of(a, name="<b>run", workload={"name": EVIL, "load": {"prompts": {EVIL: EVIL}}}, os=EVIL)
    group = one_group([(one, a), (of(b, model={"name": EVIL}, versions={EVIL: EVIL}), b)])[0]
    source = page([group])
    assert "<script>alert" not in source and "<b>run" not in source and source.count("&lt;script&gt;alert(1)") > 5
    assert "<script" not in markdown([group])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two small synthetic runs with raw samples."""
    small = Scenario(configs=PAIR, num_requests=30, concurrencies=(6,))
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "a", small), make_run(folder / "b", replace(small, seed=0, slowdown={"baseline": 1.5}))


def test_the_command_writes_page_and_markdown_of_two_runs(two_runs, tmp_path, capsys) -> None:
    a, b = two_runs
    before = sorted(path for folder in two_runs for path in folder.rglob("*"))
    assert cli.main(["report", str(a), str(b), "--output-dir", str(tmp_path)], standalone_mode=False) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.html", "compare.md"]
    assert sorted(path for folder in two_runs for path in folder.rglob("*")) == before
    source = (tmp_path / "compare.html").read_text()
    drawn = [f"{figure}-{number}" for number in (1, 2) for figure in ("distributions", "timeline")]
    assert re.findall(r'<figure id="([\w-]+)"', source) == ["effects", *drawn]
    assert "<script src" not in source and "lower in 1, level in 1" in source
    assert "against A in 2 cells: B lower in 1" in capsys.readouterr().out


def test_the_command_refuses_what_cannot_be_put_side_by_side(two_runs, tmp_path, capsys) -> None:
    a, b = two_runs
    for runs in ([a, b, a], [a, tmp_path]):
        with pytest.raises(SystemExit) as ended:
            main(["report", *map(str, runs), "--output-dir", str(tmp_path / "out")])
        assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_the_figures_are_of_the_cells_under_their_letters(two_runs: tuple[Path, Path]) -> None:
    a, b = map(read_run, two_runs)
    _, latencies, kv, *_ = drawings(groups_of(a, b))
    names = {f"A {a.folder.name}", f"B {b.folder.name}"}
    assert {trace.name for trace in latencies.figure.data} == names and latencies.caption == ""
    assert any(f"B {b.folder.name}" in (note.text or "") for note in kv.figure.layout.annotations)
    one = groups_of(a, b)[0][0].cell
    (ttft,) = [t for t in latencies.figure.data if t.name.startswith("A") and t.visible and t.xaxis in (None, "x")]
    assert np.interp(95, ttft.y, ttft.x) == pytest.approx(one.percentile("ttft_ms", "p95")[0], rel=0.2)
