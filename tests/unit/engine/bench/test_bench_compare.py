"""Sides side by side: ratios within a repeat, equal work, bars, exit codes, and turns that fail."""

import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial

import pytest

from kvbench_engine.bench.case import PromptBatch, make_case, speed_of
from kvbench_engine.bench.command import build_parser, check_json_path, chosen_sides, main, verdict
from kvbench_engine.bench.compare import SpeedBar, SpeedComparison, compare, parse_bars
from kvbench_engine.bench.turns import run_apart, run_command

TOKENS = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]


def turns(speeds, outputs=TOKENS):
    """A side that reaches ``speeds``, one after the other."""
    given = iter(speeds)
    return lambda: (next(given), outputs)


def test_ratios_are_taken_within_a_repeat_and_every_side_takes_its_turn():
    said = []
    sides = {"kvbench": turns([10.0, 100.0]), "hf-static": turns([5.0, 20.0])}
    result = compare(sides, 2, lambda *turn: said.append(turn))
    assert result.output_tokens_per_s == {"kvbench": [10.0, 100.0], "hf-static": [5.0, 20.0]}
    assert result.ratio == {"hf-static": [2.0, 5.0]} and result.same_tokens == {"hf-static": 1.0}
    assert sorted(said) == [("hf-static", 0, 5.0), ("hf-static", 1, 20.0), ("kvbench", 0, 10.0), ("kvbench", 1, 100.0)]
    assert "kvbench is 3.50x (2.00 to 5.00), 100% of requests token for token equal" in result.lines()[1]


def test_other_tokens_in_any_repeat_are_other_work_and_who_could_not_be_measured_is_named():
    outputs = iter([TOKENS, [*TOKENS[:4], [9, 11]], TOKENS])
    result = compare({"kvbench": turns([1.0] * 3), "vllm": lambda: (1.0, next(outputs))}, 3, lambda *_: None)
    assert result.same_tokens == {"vllm": 0.8} and result.other_work() == ["vllm"]

    def broken():
        raise ValueError("not done in 600 s")

    with pytest.raises(ValueError, match=r"^vllm could not be measured: not done in 600 s$"):
        compare({"kvbench": turns([1.0]), "vllm": broken}, 1, lambda *_: None)


def test_in_half_precision_only_first_tokens_tell_other_work():
    """A choice between nearly equal logits may fall differently, and all tokens after it."""
    ours = [[*tokens, 1, 2, 3, 4, 5] for tokens in TOKENS]
    late, in_decode = [[*tokens[:4], 99] for tokens in ours], [[*tokens[:1], 99] for tokens in ours]
    for theirs, share, other in ((late, 1.0, []), ([[99], *ours[1:]], 0.8, []), (in_decode, 0.0, ["vllm"])):
        sides = {"kvbench": turns([1.0], ours), "vllm": turns([1.0], theirs)}
        result = compare(sides, 1, lambda *_: None, half_precision=True)
        assert result.same_tokens == {"vllm": share} and result.other_work() == other
        assert f"{share:.0%} of requests in their first 4 tokens equal" in result.lines()[1]


def test_bars_are_of_sides_that_run():
    sides = ("kvbench", "hf-continuous", "vllm")
    assert parse_bars(["hf-continuous=5", "vllm=1.5"], sides) == [SpeedBar("hf-continuous", 5.0), SpeedBar("vllm", 1.5)]
    for text in ("vllm", "vllm=-1", "vllm=nan", "vllm=inf"):
        with pytest.raises(ValueError, match=f"--require cannot be '{text}': write SIDE=RATIO"):
            parse_bars([text], sides)
    for text, ran in (("hf-static=2", sides), ("kvbench=1", sides), ("vllm=1", ("vllm", "hf-static"))):
        with pytest.raises(ValueError, match=f"the sides that run are {', '.join(ran)}"):
            parse_bars([text], ran)


@pytest.mark.parametrize(
    ("ratios", "same", "machine", "code", "words"),
    [
        ([4.9, 5.0, 9.0], 1.0, {}, 0, "bar 5.00x vllm: 5.00x, reached"),
        ([4.9, 4.99, 9.0], 1.0, {"disturbed": False}, 1, "bar 5.00x vllm: 4.99x, MISSED"),
        ([9.0], 0.5, {}, 4, "not a comparison of equal work: vllm"),
        ([1.0], 1.0, {"disturbed": True, "foreign_cpu_cores": 1.234}, 4, "other processes used 1.23 of a core"),
    ],
)
def test_the_median_decides_and_what_is_no_measurement_passes_nothing(capsys, ratios, same, machine, code, words):
    comparison = SpeedComparison({"kvbench": ratios, "vllm": [1.0] * len(ratios)}, {"vllm": ratios}, {"vllm": same})
    assert verdict(comparison, [SpeedBar("vllm", 5.0)], machine) == code
    assert words in capsys.readouterr().out


def test_sides_by_default_are_all_that_can_run():
    sides = partial(build_parser().parse_args)
    assert chosen_sides(sides([])) == ("kvbench", "hf-continuous", "hf-continuous-best", "hf-static")
    with_vllm = chosen_sides(sides(["--vllm-python", "/bin/sh"]))
    assert with_vllm[-2:] == ("vllm", "vllm-eager") and len(with_vllm) == 6
    assert chosen_sides(sides(["--sides", "hf-static,kvbench,hf-static"])) == ("hf-static", "kvbench")
    with pytest.raises(ValueError, match="--sides vllm needs --vllm-python"):
        chosen_sides(sides(["--sides", "kvbench,vllm"]))
    with pytest.raises(ValueError, match="'/nowhere/python' is not a program"):
        chosen_sides(sides(["--vllm-python", "/nowhere/python"]))


def test_the_case_is_the_seeds_and_short_answers_are_no_speed():
    case = make_case(32, 64, 8192, 0)
    assert case == make_case(32, 64, 8192, 0) != make_case(32, 64, 8192, 1)
    assert {len(p) for p in case.prompts} == {32, 64, 128, 512} and case.longest == 576 and case.total_output == 2048
    assert all(0 < token < 8192 for prompt in case.prompts for token in prompt)
    small = PromptBatch(((1,), (2, 3)), 2)
    assert speed_of(small, [[4, 5], [6, 7]], 0.5) == 8.0
    with pytest.raises(ValueError, match="2 answers to 2 prompts, 1 of them not of 2 tokens"):
        speed_of(small, [[4, 5], [6]], 0.5)
    with pytest.raises(ValueError, match="1 answers to 2 prompts"):
        speed_of(small, [[4, 5]], 0.5)


def test_a_turn_is_a_process_of_its_own_whose_error_end_and_delay_are_told():
    for function, argument, limit_s, words in (
        (int, "x", 60.0, "invalid literal for int"), (os._exit, 3, 60.0, "its process died"),
        (time.sleep, 60, 0.2, r"not done in 0.2 s"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run_apart(function, argument, limit_s=limit_s)


def test_a_command_that_fails_says_its_last_lines(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ValueError, match=r"^exit code 3: b \| c \| d$"):
        run_command(["/bin/sh", "-c", "printf 'a\\nb\\n\\nc\\nd\\n' >&2; exit 3"], os.environ, log, 60)
    with pytest.raises(ValueError, match="/nowhere/python cannot be started: No such file"):
        run_command(["/nowhere/python"], os.environ, log, 60)
    run_command(["/bin/sh", "-c", "echo $GREETING"], {"GREETING": "hello"}, log, 60)
    assert log.read_text() == "hello\n"


@pytest.mark.parametrize("too_long", [True, False], ids=["too-long", "left-behind"])
def test_what_a_command_started_ends_with_it(tmp_path, too_long):
    log, start = tmp_path / "log", "sleep 60 & echo $!"
    with pytest.raises(ValueError, match=r"^not done in 1 s$") if too_long else nullcontext():
        run_command(["/bin/sh", "-c", start + ("; wait" if too_long else "")], os.environ, log, 1.0)
    child = int(log.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid):
    try:
        os.kill(pid, signal.SIGCONT)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    for name in (tmp_path, tmp_path / "missing" / "x.json"):
        with pytest.raises(ValueError, match=r"--json .* cannot be written"):
            check_json_path(str(name))
    check_json_path(str(tmp_path / "x.json"))


def test_an_environment_without_vllm_is_refused_before_anything_is_measured():
    with pytest.raises(ValueError, match="has no vLLM"):
        main(["--sides", "kvbench,vllm", "--vllm-python", sys.executable])
