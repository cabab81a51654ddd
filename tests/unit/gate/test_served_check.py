"""The served check against live servers that differ outside of their engine, and what a verdict makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_OK, EXIT_REGRESSION, Interrupted, UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.foreign_cpu import ServerProcess
from kvbench.gate.compare import served_check
from kvbench.gate.compare.conclude import conclude, judge_again
from kvbench.gate.compare.folder import GivenUp
from kvbench.gate.compare.pair_runner import ATTEMPTS, ATTEMPTS_TO_BLAME
from kvbench.gate.compare.served_check import FILE, ServedCheck, wait_until_idle
from kvbench.gate.policy import load_policy
from kvbench.gate.timing.plan import SIDES, match_designs
from kvbench.gate.verdict.outputs import write_outputs
from kvbench.targets.builtin import BuiltinTarget
from kvbench.workload.design import make_design
from kvbench.workload.load_section import load_point
from tests.support.compare_folders import noisy_pairs, stored_comparison
from tests.support.loads import FAKE
from tests.support.verdicts import read

POINTS = (load_point("closed", concurrency=4, rate=None, num_requests=8),)
POLICY = load_policy(None)
CELLS = ("mixed/a-c4", "mixed/b-c4")


class Check:
    """A served check of the workload ``mixed`` in the folder of a comparison whose pairs pass."""

    def __init__(self, path, *, change=(0.0, 0.0, 0.0), check=lambda: None, timeout_s=20.0, **env):
        self.folder = stored_comparison(path, *noisy_pairs(16, 2, 3, change), CELLS)
        self.env, self.started, self.failed = {side: env.get(side, {}) for side in SIDES}, [], []
        design = make_design({"layout": "paged"}, {}, POINTS, "one_at_a_time")
        load = SimpleNamespace(load=SimpleNamespace(timeout_s=timeout_s))
        about = {"workload": load, "manifest": SimpleNamespace(is_built_in=True)}
        choices = {side: SimpleNamespace(new_target=lambda s=side: self._target(s), **about) for side in SIDES}
        sides = {side: SimpleNamespace(choice=choices[side]) for side in SIDES}
        self.workload = SimpleNamespace(name="mixed", matches=match_designs("mixed", design, design), sides=sides)
        on_failed = lambda attempt, most: self.failed.append(attempt)  # noqa: E731
        self.check = ServedCheck(self.folder, 7, check, lambda text: None, on_failed, rounds=20)

    def _target(self, side):
        self.started.append(side)
        env = {"FAKE_TOKEN_S": "0.002", **self.env[side]}
        return BuiltinTarget(command=(sys.executable, str(FAKE)), env=env, start_timeout_s=20.0)

    def run(self):
        self.gave_up = self.check.run([self.workload])
        return self

    def verdict(self, **manifest):
        return conclude(self.folder, self.folder.state().model_copy(update=manifest), POLICY)


SPINS = "import sys, time\nuntil = time.monotonic() + {s}\nprint('on', flush=True)\n"
SPINS += "while time.monotonic() < until: pass\nopen(sys.argv[1], 'w').close()\ntime.sleep(60)"


@pytest.mark.parametrize(("seconds", "limit_s"), [(0.6, 20.0), (60, 0.3)])
def test_a_server_that_still_computes_after_its_answer_is_waited_for(tmp_path, monkeypatch, seconds, limit_s):
    monkeypatch.setattr(served_check, "_IDLE_LIMIT_S", limit_s)
    words = [sys.executable, "-c", SPINS.format(s=seconds), str(tmp_path / "idle")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            wait_until_idle(SimpleNamespace(server=lambda: ServerProcess(process.pid)))
            assert (tmp_path / "idle").exists() == (seconds < limit_s)
        finally:
            process.kill()
    wait_until_idle(SimpleNamespace(server=lambda: ServerProcess(process.pid)))  # one that is gone
    wait_until_idle(SimpleNamespace(server=lambda: ServerProcess(None)))


@pytest.mark.full
def test_the_same_server_passes_though_it_died_once_and_each_round_is_kept(tmp_path):
    done = Check(tmp_path, candidate={"FAKE_FAULT": "die:7", "FAKE_FAULT_ONCE": str(tmp_path / "once")}).run()
    assert done.gave_up is None and [each.blamed for each in done.failed] == ["candidate"]
    assert "out of memory, dying" in str(done.failed[0])
    launches = read_json(tmp_path / FILE)["checks"]["mixed/paged"]
    assert len(launches[0]) == 20 and {r["first"] for r in launches[0]} == set(SIDES)  # both were measured anew
    assert all(r[side]["e2e_ms"] >= 16 > 0 < r[side]["ttft_ms"] for r in launches[0] for side in SIDES)
    verdict = done.verdict()
    assert {f.id for f in verdict.findings if f.suite == "served"} == {
        "served/mixed/paged/ttft_ms", "served/mixed/paged/e2e_ms",
    }  # fmt: skip
    assert verdict.exit_code in (EXIT_OK, EXIT_INCONCLUSIVE)  # the latter where a busy machine leaves it undecided
    if verdict.exit_code == EXIT_OK:
        started = len(done.started)
        done.run()
        assert len(done.started) == started  # nothing is measured twice


def test_a_slow_server_around_an_unchanged_engine_fails_and_the_sentence_says_where_it_lies(tmp_path):
    done = Check(tmp_path, candidate={"FAKE_RESPONSE_S": "0.02"}).run()
    assert sorted(done.started) == ["base"] * 2 + ["candidate"] * 2  # confirmed on another launch
    verdict = done.verdict()
    assert verdict.exit_code == EXIT_REGRESSION and "outside of the engine" in verdict.sentence
    failed = verdict.of("fail")
    assert {f.suite for f in failed} == {"served"} and "served/mixed/paged/ttft_ms" in {f.id for f in failed}
    assert all(f.figures["difference_ms"] >= 12 and len(f.series) == 40 for f in failed)
    again, folder = judge_again(tmp_path, POLICY)
    assert again == verdict
    write_outputs(verdict, folder)
    assert read(folder) == verdict
    for name in ("junit.xml", "summary.md", "pairs.html"):
        assert "outside of the engine" in (folder / name).read_text()
    assert "round 40: " in (folder / "pairs.html").read_text()


@pytest.mark.parametrize(
    ("candidate_ms", "launches", "change", "code"),
    [
        (60, 1, 0.0, EXIT_INCONCLUSIVE),  # undecided after one launch
        (80, 2, 0.0, EXIT_REGRESSION),
        (80, 2, 9.0, EXIT_REGRESSION),  # what the engine explains is not said to lie outside of it
    ],
)
def test_rounds_that_were_kept_are_judged_with_the_pairs(tmp_path, candidate_ms, launches, change, code):
    done = Check(tmp_path, change=(-change / 10, change, change))
    latencies = {side: {"ttft_ms": ms, "e2e_ms": ms} for side, ms in zip(SIDES, (40, candidate_ms), strict=True)}
    rounds = [{"first": "base", **latencies}] * 20
    write_json(tmp_path / FILE, {"format": 1, "checks": {"mixed/paged": [rounds] * launches}})
    verdict = done.verdict()
    served = [f for f in verdict.findings if f.suite == "served"]
    assert verdict.exit_code == code and {f.outcome for f in served} == {verdict.outcome}
    assert any("outside" in f.sentence for f in served) == (launches == 2 and not change)
    if not change:
        assert served[0].sentence in verdict.sentence
        assert conclude(done.folder, done.folder.state(), POLICY, pairs=8).outcome == "pass"  # a look is at pairs alone
    write_json(tmp_path / FILE, {"format": 0})
    with pytest.raises(UsageError, match="format"):
        done.verdict()


def test_a_change_that_contradicts_the_medians_beside_it_is_noted(tmp_path):
    done = Check(tmp_path)
    drifting = [(50, 52), (60, 62), (70, 65), (80, 82), (90, 68)] * 4  # median round +2 ms; the medians are 70 and 65
    rounds = [{"first": "base", "base": {"ttft_ms": b, "e2e_ms": 40}, "candidate": {"ttft_ms": c, "e2e_ms": 40.01}}
              for b, c in drifting]  # fmt: skip
    write_json(tmp_path / FILE, {"format": 1, "checks": {"mixed/paged": [rounds]}})
    (note,) = (note for note in done.verdict().notes if "medians shown" in note)
    (ttft,) = (f for f in done.verdict().findings if f.id.endswith("/ttft_ms"))
    assert ttft.change > 0 and all(words in note for words in ("TTFT", "+2 ms", "-5 ms"))


FIRE = {"path": "stream", "first": 2, "do": "reset"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("env", "attempts", "blamed", "code", "words"),
    [
        ({"candidate": {"FIRE": json.dumps([FIRE])}}, ATTEMPTS_TO_BLAME, "candidate", EXIT_REGRESSION, "failed alone"),
        ({"base": {"FAKE_FAULT": "exit_at_start"}}, ATTEMPTS, "base", EXIT_INVALID, "a library is missing"),
    ],
)
def test_a_server_that_does_not_serve_is_told_with_its_side_and_reason(tmp_path, env, attempts, blamed, code, words):
    done = Check(tmp_path, **env).run()
    assert [each.blamed for each in done.failed] == [blamed] * attempts and done.gave_up == done.failed[-1]
    assert {each.first for each in done.failed} == set(SIDES)  # in turn
    assert not (tmp_path / FILE).exists()
    verdict = done.verdict(voids=tuple(done.failed), void=GivenUp(0, done.gave_up.turn))
    assert verdict.exit_code == code and words in verdict.sentence
    assert "pair 0" not in str(verdict.to_json())


def test_an_interruption_stops_the_servers(tmp_path):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 12:
            raise Interrupted("SIGINT")

    done = Check(tmp_path, check=check)
    targets, new = [], done._target
    done._target = lambda side: targets.append(new(side)) or targets[-1]
    with pytest.raises(Interrupted):
        done.run()
    assert len(targets) == 2 and all(target._process is None for target in targets)
