"""The shell of the CI templates, run: what kvbench is told, what its exit codes become, which refs are compared."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING
from tests.support.git_repo import git

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "main'; touch ${HOME}/stolen; $(touch stolen) `touch stolen` \"x"
WORDS = ("PASS", "FAIL", "Nothing was measured", "INCONCLUSIVE", "INVALID", "Nothing was compared")  # by exit code
# A stand-in for kvbench: notes its words, one a line, an empty line behind each call; `compare`, `sweep` and `gate` end
# as they are told, and `sweep` leaves a run.
_STAND_IN = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word" >> "$CALLS"; done
echo >> "$CALLS"
case "$1" in
  compare) exit "$CODE" ;;
  sweep) mkdir -p "$4$RUN" && touch "$4$RUN/manifest.json" && exit "${SWEPT:-0}" ;;
  gate) exit "${LIMIT:-0}" ;;
esac
"""


def _github(template: str, job: str, name: str) -> str:
    steps = yaml.safe_load((ROOT / "ci/github" / template).read_text())["jobs"][job]["steps"]
    (run,) = [step["run"] for step in steps if step.get("name") == name]
    return run


def _gitlab(job: str) -> str:
    return "\n".join(yaml.safe_load((ROOT / "ci/gitlab/timing-gate.yml").read_text())[job]["script"])


@pytest.fixture
def run(tmp_path):
    """Runs a script as the CI does, with a stand-in for kvbench: the ended process, kvbench's calls, the outputs."""
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    (programs / "kvbench").write_text(_STAND_IN)
    (programs / "kvbench").chmod(0o755)
    calls, output = tmp_path / "calls", tmp_path / "output"
    kept = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(work), "CALLS": str(calls)}

    def of(script: str, shell: tuple[str, ...], code: int = 0, **env: str):
        for path in (calls, output):
            path.write_text("")
        env = {**kept, "GITHUB_OUTPUT": str(output), "CODE": str(code), **env}
        done = subprocess.run([*shell, "-c", script], env=env, cwd=work, capture_output=True, text=True, timeout=30)
        assert "stolen" not in os.listdir(work)
        called = [call.split("\n") for call in calls.read_text().removesuffix("\n\n").split("\n\n") if call]
        return done, called, dict(line.split("=", 1) for line in output.read_text().splitlines())

    of.work = work
    return of


_BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # as GitHub starts it
_SH = ("sh", "-e")
_COMPARED = {
    "WORKLOADS": "w/a.yaml w/b.yaml", "POLICY": "p.yaml", "MAX_MINUTES": "7", "PRESET": "", "SERVE_CMD": "",
    "BUILD_CMD": "", "REPO": "", "OPTIONS": "",
}  # fmt: skip
_OTHER_ENGINE = {
    "PRESET": "vllm", "SERVE_CMD": "{python} -m it --port {port}", "BUILD_CMD": "make 'a b'", "REPO": ".",
    "OPTIONS": "-o sweep={}",
}  # fmt: skip
_OTHER_WORDS = [
    "-o", "sweep={}", "--workload", "w/a.yaml", "--workload", "w/b.yaml", "--preset", "vllm", "--serve-cmd",
    "{python} -m it --port {port}", "--build-cmd", "make 'a b'", "--repo", ".",
]  # fmt: skip
_LAST = ["--max-minutes", "7", "--policy", "p.yaml", "--output-dir", "results"]


def _gitlab_env(**env: str) -> dict[str, str]:
    ours = {f"KVBENCH_{name}": value for name, value in _COMPARED.items()}
    swept = {"KVBENCH_SWEEP": "w.yaml", "KVBENCH_LIMITS": "l.yaml", "RUN": "/w/r"}
    return {**ours, **swept, "CI_COMMIT_SHA": "abc", **env}


@pytest.mark.parametrize(
    ("policy", "code"), [*((policy, code) for policy in ("fail", "gitlab") for code in range(len(WORDS))), ("warn", 3)]
)
def test_the_exit_code_is_handed_on(run, code, policy):
    if policy == "gitlab":
        env = _gitlab_env(KVBENCH_BASE="v1", KVBENCH_CANDIDATE=HOSTILE)
        done, (call,), _ = run(_gitlab("kvbench-timing"), _SH, code, **env)
    else:
        env = {"BASE": "v1", "CANDIDATE": HOSTILE, "ON_INCONCLUSIVE": policy, **_COMPARED}
        done, (call,), output = run(_github("timing-gate.yml", "compare", "Compare"), _BASH, code, **env)
        assert output == {"code": str(code)}
    assert done.returncode == (0 if (code, policy) == (EXIT_INCONCLUSIVE, "warn") else code)
    assert done.stdout.startswith(WORDS[code])
    assert call == ["compare", "v1", HOSTILE, "--workload", "w/a.yaml", "--workload", "w/b.yaml", *_LAST]


def test_the_settings_of_another_engine_are_handed_on_and_github_keeps_a_run_for_the_history(run):
    env = {"BASE": "vllm serve {model}", "CANDIDATE": "b c", "ON_INCONCLUSIVE": "fail", **_COMPARED, **_OTHER_ENGINE}
    _, (call,), _ = run(_github("timing-gate.yml", "compare", "Compare"), _BASH, **env)
    assert call == ["compare", "vllm serve {model}", "b c", *_OTHER_WORDS, *_LAST]
    other = {f"KVBENCH_{name}": value for name, value in _OTHER_ENGINE.items()}
    _, (call,), _ = run(_gitlab("kvbench-timing"), _SH, **_gitlab_env(KVBENCH_BASE="a", **other))
    assert call == ["compare", "a", "abc", *_OTHER_WORDS, *_LAST]
    script = _github("timing-gate.yml", "compare", "Its entry for the history, and the trend")
    done, calls, _ = run(script, _BASH, RELEASE=HOSTILE)
    assert done.returncode == 0, done.stderr
    assert calls == [
        ["history", "add", "sweep", "--to", "history", "--release", HOSTILE],
        ["history", "past", "history", "--html", "results/trend.html"],
    ]
    assert "--release" not in run(script, _BASH, RELEASE="")[1][0]


_SWEPT = ["sweep", "w.yaml", "--output-dir", "sweep"]
_JUDGED = [["gate", "sweep/w/r", "--policy", "l.yaml"]]


def test_github_holds_the_sweep_to_its_limits(run):
    script = _github("timing-gate.yml", "compare", "Sweep, and its limits")
    env = {"SWEEP": "w.yaml", "LIMITS": "l.yaml", "RUN": "/w/r"}
    for codes, code in (({}, 0), ({"LIMIT": "1"}, 1), ({"SWEPT": "4"}, 4), ({"SWEPT": "4", "LIMIT": "1"}, 1)):
        done, calls, _ = run(script, _BASH, **env, **codes)
        assert (done.returncode, calls) == (code, [_SWEPT, *_JUDGED]), codes
    done, calls, _ = run(script, _BASH, **{**env, "LIMITS": "", "LIMIT": "1"})
    assert (done.returncode, calls) == (0, [_SWEPT])
    script = script.replace("--output-dir sweep", "--output-dir nowhere")  # a sweep that left no run
    shutil.rmtree(run.work / "sweep")
    done, calls, _ = run(script, _BASH, **env, SWEPT="2")
    assert (done.returncode, len(calls)) == (2, 1)


@pytest.mark.parametrize(
    ("compared", "limit", "code", "kept"),
    [(0, 0, 0, True), (1, 0, 1, True), (2, 0, 2, False), (0, 4, 4, True), (1, 4, 1, True), (3, 1, 1, True)],
)
def test_gitlab_keeps_a_run_of_a_tag_and_counts_its_limits(run, compared, limit, code, kept):
    env = _gitlab_env(CI_COMMIT_TAG="v2", KVBENCH_BASE="v1", LIMIT=str(limit))
    done, calls, _ = run(_gitlab("kvbench-timing"), _SH, compared, **env)
    assert done.returncode == code
    assert calls[1:3] == ([_SWEPT, *_JUDGED] if kept else [])
    if kept and limit == 0:
        assert [call[:2] for call in calls[3:]] == [["history", "add"], ["history", "past"]]
        assert calls[3][-2:] == ["--release", "v2"]
        done, calls, _ = run(_gitlab("kvbench-timing"), _SH, compared, **{**env, "KVBENCH_LIMITS": "", "LIMIT": "1"})
        assert done.returncode == compared and not [call for call in calls if call[0] == "gate"]


def test_the_runs_of_all_gpus_are_pushed_and_no_run_is_no_error(run):
    push = run.work / "ci" / "history_push.sh"
    push.parent.mkdir()
    push.write_text('#!/bin/sh\necho "pushed $* $(ls history | tr "\\n" " ")"\n')
    push.chmod(0o755)
    github, gitlab = _github("release.yml", "history", "Add to the history branch"), _gitlab("kvbench-history")
    for script, shell in ((github, _BASH), (gitlab, _SH)):
        assert "no run to keep" in run(script, shell)[0].stdout
    for gpu in "01":
        for folder in (f"mixed/r{gpu}", f"w{gpu}"):
            (run.work / f"artifacts/timing-gate-history-gpu-{gpu}" / folder).mkdir(parents=True)
    for script, shell in ((github, _BASH), (gitlab, _SH)):
        assert run(script, shell)[0].stdout == "pushed history kvbench-history mixed w0 w1 \n"
    assert sorted(os.listdir(run.work / "history/mixed")) == ["r0", "r1"]


def test_which_two_commits_are_compared(run):
    """In a repository with v1, a commit, v2, and a branch merged into it."""
    steps = (
        "init -qb main", "commit -qm one --allow-empty", "tag v1", "commit -qm two --allow-empty", "tag v2",
        "checkout -qb work v1", "commit -qm work --allow-empty", "checkout -q main", "merge -q --no-ff -m merge work",
    )  # fmt: skip
    for step in steps:
        git(run.work, *step.split())
    shas = {ref: git(run.work, "rev-parse", ref) for ref in ("v1", "v2", "main", "work")}
    for event, head, base, candidate, expected in (
        ("release", "v2", "", "", ("v1", "v2")),
        ("pull_request", "main", "", "", ("v2", "main")),
        ("workflow_dispatch", "main", "v1", "work", ("v1", "work")),
        ("release", "v1", "", "", EXIT_NOTHING),  # the first release: nothing before it
        ("workflow_dispatch", "v1", "--help", HOSTILE, None),
    ):
        env = {"EVENT": event, "HEAD": shas[head], "ASKED_BASE": base, "ASKED_CANDIDATE": candidate}
        done, _, output = run(_github("release.yml", "refs", "Which two commits"), _BASH, **env)
        if isinstance(expected, tuple):
            assert (done.returncode, output) == (0, {"base": shas[expected[0]], "candidate": shas[expected[1]]})
        else:
            assert not output and done.returncode != 0
            assert (done.returncode == EXIT_NOTHING) == (expected == EXIT_NOTHING)
    of_request = {"CI_MERGE_REQUEST_DIFF_BASE_SHA": "fork", "CI_COMMIT_SHA": "abc"}
    for env, compared in (
        ({"CI_MERGE_REQUEST_EVENT_TYPE": "detached", **of_request}, ["fork", "abc"]),
        ({"CI_MERGE_REQUEST_EVENT_TYPE": "merged_result", **of_request}, ["abc^1", "abc"]),
        ({"CI_COMMIT_SHA": shas["v2"], "CI_COMMIT_TAG": "v2", "KVBENCH_SWEEP": ""}, ["v1", shas["v2"]]),
    ):
        _, (call,), _ = run(_gitlab("kvbench-timing"), _SH, **_gitlab_env(**env))
        assert call[1:3] == compared
    done, calls, _ = run(_gitlab("kvbench-timing"), _SH, **_gitlab_env(CI_COMMIT_SHA=shas["v1"], CI_COMMIT_TAG="v2"))
    assert (done.returncode, calls) == (EXIT_NOTHING, [])
