"""The gate's finding on a cell's canaries: one wrong answer fails full precision, more than offline a quantised KV."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvbench.cli.gate import gate
from kvbench.cli.run_guarded import guarded
from kvbench.gate.limits import judge_canaries, judge_limits
from kvbench.gate.policy import GateLimit
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS
from kvbench.metrics.model import CanaryCounts
from kvbench.runs.quality import QualityResult
from tests.support import verdicts
from tests.support.report_cells import cell, run, wrong
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def counted(found: int, answered: int = 20, distinct: int = 20, **settings):
    counts = {"sent": answered + 1, "answered": answered, "wrong": found, "distinct": distinct}
    if found:
        counts["first_wrong"] = "passkey-3 (request 9), from token 1 on: 5, not 6"
    return dataclasses.replace(cell(**settings), canaries=CanaryCounts(**counts))


def offline(of, asked: int | None = 100, right: int = 100, **changes) -> QualityResult:
    figures = {"mean": 0.001} if asked is None else {"canaries": {"asked": asked, "right": right}}
    known = {"workload": "w", "model": "m", "beside": False, "weights": "m", "control": {}, "limits": {}} | changes
    return QualityResult(configurations={of.config_id: figures}, **known)


def judge(of, quality=None, doubt=None):
    return judge_canaries(run(of, workload={"name": "mixed"}), of, quality, doubt)


def test_one_wrong_answer_in_full_precision_fails_whatever_is_known_of_its_quality():
    finding = judge(wrong(), offline(wrong(), right=50))
    assert (finding.outcome, finding.candidate, finding.suite) == (FAIL, 2.0, "limit")
    assert finding.id == "limit/mixed/paged (page 16)-24/canaries"
    assert "2 of 40" in finding.sentence and "passkey-7" in finding.sentence
    assert "wrong_answers.jsonl" in finding.details[0]
    (other,) = judge_limits(run(wrong(), workload={"name": "m"}), [GateLimit("metric", "p95_ttft_ms", high=1e6)])
    assert other.outcome == INVALID and "passkey-7" in other.sentence


ONE, FOUR = counted(1, **FP8), counted(4, **FP8)


@pytest.mark.parametrize(
    ("of", "quality", "outcome", "words"),
    [
        (counted(0), None, PASS, ""),  # without a wrong answer nothing else need be known
        (counted(0, **FP8), None, PASS, ""),  # none is not more than any rate
        (counted(0, answered=0, distinct=0), None, INVALID, ""),
        (dataclasses.replace(counted(0), valid=False, invalid_reasons=("late",)), None, PASS, ""),
        (counted(3, **FP8), offline(FOUR), PASS, "0 of 100"),  # p = 0.004
        (FOUR, offline(FOUR), FAIL, "0 of 100"),  # p = 0.0006
        (FOUR, offline(FOUR, right=95), PASS, "5 of 100"),
        (counted(20, **FP8), offline(FOUR, right=60), FAIL, "40 of 100"),
        (counted(4, 60, 20, **FP8), offline(FOUR), PASS, "0 of 100"),  # 20 canaries, each three times: 1 of 20
        (ONE, None, INVALID, "kvbench quality"),  # an offline rate that is not known
        (ONE, offline(ONE, asked=None), INVALID, "kvbench quality"),
        (ONE, offline(ONE, beside=True), INVALID, "kvbench quality"),
        (ONE, offline(cell()), INVALID, "kvbench quality"),
    ],
)
def test_a_quantised_kv_fails_only_beyond_its_offline_rate(of, quality, outcome, words):
    finding = judge(of, quality)
    assert finding.outcome == outcome and words in finding.sentence
    if quality and outcome != INVALID and of.canaries.wrong:
        doubted = judge(of, quality, "measured with other code")
        assert doubted.outcome == INVALID and "other code" in doubted.sentence


def test_the_command_judges_canaries_without_a_policy_and_beside_one(tmp_path, capsys):
    """One of two cells had canaries; then two of its answers are wrong."""
    folder = make_run(tmp_path / "mixed" / "now", Scenario(configs=PAIR, concurrencies=(3,), repeats=2, num_requests=8))
    summary = next(folder.glob("cells/baseline*/summary.json"))
    stored = json.loads(summary.read_text())

    def judged(*words: object, **changes: object) -> tuple[int, list[tuple[str, str]]]:
        summary.write_text(json.dumps(stored | changes))
        command = [str(word) for word in (folder, "--output-dir", tmp_path / "out", *words)]
        code = guarded(lambda: gate.main(command, standalone_mode=False))
        found = verdicts.read(tmp_path / "out").findings if (tmp_path / "out").is_dir() else ()
        return code, [(finding.id.rpartition("/")[2], finding.outcome) for finding in found]

    (policy := tmp_path / "gates.yaml").write_text("limits: [{metric: failure_rate, max: 0}]")
    assert judged()[0] == 2  # neither a policy nor a canary
    counts = {"sent": 9, "answered": 9, "wrong": 0, "distinct": 9}
    assert judged(canaries=counts) == (0, [("canaries", "pass")])
    told = {"valid": False, "wrong_answers": ["repeat 1: 2 of 9 canaries were answered wrongly"]}
    told["canaries"] = counts | {"wrong": 2, "first_wrong": "passkey-1, differs"}
    assert judged(**told) == (1, [("canaries", "fail")])
    assert "WRONG ANSWERS" in " ".join(capsys.readouterr().out.split())
    code, found = judged("--policy", policy, **told)
    assert code == 1
    assert sorted(found) == [("canaries", "fail"), ("failure_rate", "invalid"), ("failure_rate", "pass")]
