"""The CI templates and docs/adopting.md: safe by the rules that actionlint lacks, and true to the command line."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvbench.cli.main import cli
from tests.support.without_packages import WITHOUT

ROOT = Path(__file__).resolve().parents[3]
GITHUB = sorted((ROOT / "ci" / "github").glob("*.yml"))
SMOKE = ROOT / "ci" / "smoke.sh"
OWN = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GITLAB = sorted((ROOT / "ci" / "gitlab").glob("*.yml"))
ACTION = ROOT / "ci" / "github" / "action" / "action.yml"
PAGE = ROOT / "docs" / "adopting.md"
_BEFORE_A_COMMAND = re.compile(r"[;&|()]+|do|then|else|if|!|time|\{|[A-Za-z_]\w*=.*")
_AFTER_A_COMMAND = re.compile(r"[;&|()<>]+|\}")


def _jobs(path: Path) -> dict[str, dict]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path == ACTION:
        return {"action": data["runs"]}
    return data if path in GITLAB else data["jobs"]


def _steps(path: Path) -> Iterator[tuple[str, dict]]:
    for name, job in _jobs(path).items():
        for step in job.get("steps", ()):
            yield name, step


def _scripts(path: Path) -> list[str]:
    """The shell of a template, a text for each shell that runs it."""
    if path == SMOKE:
        return [path.read_text(encoding="utf-8")]
    if path not in GITLAB:
        return [step["run"] for _, step in _steps(path) if "run" in step]
    return ["\n".join([*job.get("before_script", ()), *job["script"]]) for job in _jobs(path).values()]


def _blocks(page: Path) -> list[str]:
    """The indented blocks of a page, its fenced ones, and each command in backquotes."""
    text = page.read_text(encoding="utf-8")
    indented = re.findall(r"(?:^(?: {4,}|\t).*\n)+", text, re.MULTILINE)
    fenced = re.findall(r"^ *```.*\n((?:.*\n)*?) *```", text, re.MULTILINE)
    return [*indented, *fenced, *re.findall(r"`(kvbench [^`]+)`", text.replace("\n", " "))]


def kvbench_commands(shell: str) -> list[list[str]]:
    """The words behind each ``kvbench`` that stands where a command stands; arrays of words, as ``"$@"``, left out."""
    found = []
    for line in re.sub(r"<[\w ]+>", "PLACEHOLDER", shell.replace("\\\n", " ")).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:  # half of a quoted text over several lines
            assert "kvbench " not in line, f"write it in one line, or with backslashes: {line}"
            continue
        for i, word in enumerate(words):
            if word.split("/")[-1] == "kvbench" and (i == 0 or _BEFORE_A_COMMAND.fullmatch(words[i - 1])):
                command = itertools.takewhile(lambda word: not _AFTER_A_COMMAND.fullmatch(word), words[i + 1 :])
                found.append([word for word in command if not re.fullmatch(r"\$@|\$\{\w+\[@\]\}", word)])
    return found


ALL = [*GITHUB, ACTION, *GITLAB, *OWN, SMOKE, PAGE]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_option_exists_and_the_shell_parses(path):
    """click stops at an unknown command or option before it shows the help."""
    shells = _blocks(path) if path == PAGE else _scripts(path)
    commands = [words for shell in shells for words in kvbench_commands(shell)]
    assert commands or path in OWN or path.name == "release.yml"  # which calls another workflow
    for words in commands:
        if words[0] == "serve" or "bench-engine" in words:  # parse by themselves
            continue
        done = CliRunner().invoke(cli, [*words, "--help"])
        assert done.exit_code == 0, f"{path.name}: kvbench {shlex.join(words)}: {done.output} {done.exception}"
    for script in () if path == PAGE else shells:
        command = ["bash", *(["--posix"] if path in GITLAB else []), "-n"]
        done = subprocess.run(command, input=script, text=True, capture_output=True, timeout=20)
        assert done.returncode == 0, done.stderr


def test_the_commands_of_a_shell_are_found_and_their_mistakes():
    assert kvbench_commands("pip install kvbench\necho kvbench compare --nonsense # kvbench --x") == []
    assert kvbench_commands('kvbench sweep "${words[@]}" > out && echo "kvbench ended"') == [["sweep"]]
    (words,) = kvbench_commands("if true; then PATH=x .venv/bin/kvbench compare a b --worload w || code=$?; fi")
    assert words == ["compare", "a", "b", "--worload", "w"]
    assert CliRunner().invoke(cli, [*words, "--help"]).exception is not None


@pytest.mark.parametrize("path", [*GITHUB, *OWN], ids=lambda path: path.name)
def test_github_is_safe(path):
    """No text of a pull request in a shell, least rights, a limit on every job, results kept whatever happens."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert data["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in data[True]  # YAML 1.1 reads `on` as true
    for name, job in data["jobs"].items():
        writes = "write" in (job.get("permissions") or {}).values()
        assert not writes or name in ("history", "attest", "pypi", "release")
        if "uses" in job:
            continue
        assert job["timeout-minutes"] == "${{ inputs.timeout-minutes }}" or job["timeout-minutes"] > 0
        uses = [step.get("uses", "") for step in job["steps"]]
        for step, action in zip(job["steps"], uses, strict=True):
            assert "${{" not in step.get("run", ""), f"{path.name}: {step.get('name')}: give it through env"
            assert not action or re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|[0-9a-f]{40})", action), action
            if action.startswith("actions/checkout@"):
                assert writes or step["with"]["persist-credentials"] is False
            if action.startswith("actions/upload-artifact@") and path not in OWN:
                assert step["if"].startswith("always()") and step["with"]["overwrite"] is True
        if any(kvbench_commands(step.get("run", "")) for step in job["steps"]):
            assert not writes, "what is on trial runs where nothing can be written"
            assert uses[-1].startswith("actions/upload-artifact@")


def test_the_action_uses_all_its_inputs_and_gives_none_to_a_shell_as_text():
    text, data = ACTION.read_text(encoding="utf-8"), yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    steps = data["runs"]["steps"]
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(data["inputs"])
    assert not any("${{" in step.get("run", "") for step in steps)
    assert all(step["shell"] == "bash" for step in steps if "run" in step)
    named = {step["id"] for step in steps if "id" in step}
    assert {use.split(".")[1] for use in re.findall(r"steps\.\w+", text)} <= named
    assert steps[-1]["uses"].startswith("actions/upload-artifact@") and steps[-1]["if"] == "always()"


def _run_step(name: str, folder: Path, code: int, **inputs: str) -> tuple[int, list[str], str]:
    """Runs a step's shell with a kvbench that ends with ``code``; the exit code, kvbench's words, and the outputs."""
    (script,) = [step["run"] for _, step in _steps(ACTION) if step["name"] == name]
    stub = folder / "bin" / "kvbench"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\nexit {code}\n')
    stub.chmod(0o755)
    env = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(folder / "output"), **inputs}
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=env, timeout=20, check=False)
    return done.returncode, (folder / "words").read_text().splitlines(), (folder / "output").read_text()


@pytest.mark.parametrize(
    ("code", "on_inconclusive", "ends"), [(0, "fail", 0), (1, "warn", 1), (3, "fail", 3), (3, "warn", 0)]
)
def test_a_comparison_of_the_action_ends_as_it_should(code, on_inconclusive, ends, tmp_path):
    inputs = {"BASE": "v 1", "CANDIDATE": ".", "WORKLOADS": "a b.yaml", "POLICY": "p.yaml", "MAX_MINUTES": "7",
              "OPTIONS": "--serve-cmd\n{python} -m x --port {port}\n", "ON_INCONCLUSIVE": on_inconclusive}  # fmt: skip
    ended, words, output = _run_step("Compare", tmp_path, code, **inputs)
    assert (ended, output) == (ends, f"code={code}\n")
    assert words[:5] == ["compare", "v 1", ".", "--serve-cmd", "{python} -m x --port {port}"]
    assert shlex.join(words[5:]) == (
        "--workload a --workload b.yaml --policy p.yaml --max-minutes 7 --output-dir kvbench-results"
    )


@pytest.mark.parametrize("code", [0, 1, 4])
def test_the_counter_gate_of_the_action_ends_with_its_exit_code(code, tmp_path):
    ended, words, output = _run_step("Counter gate", tmp_path, code)
    assert (ended, output) == (code, f"code={code}\n") and words[:2] == ["gate", "counters"]


# Runs kvbench as if only the packages that are named (by what they are imported as) had been installed.
_WITHOUT = f"""{WITHOUT}
from kvbench.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_the_counter_gate_needs_no_more_than_its_templates_install(tmp_path):
    pattern = r"install --disable-pip-version-check -c constraints.txt (.+)"
    (words,) = {line for path in (GITHUB[0], GITLAB[0]) for line in re.findall(pattern, path.read_text())}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    names = {re.split(r"[ >;=]", each)[0] for each in needed}
    assert set(words.split()) < names and len(names) > 15
    missing = [name.replace("-", "_") for name in names - set(words.split())]
    command = ("gate", "counters", ROOT / "workloads/ci_counters.yaml", "--lock", ROOT / "ci/counters.lock.json")
    command += ("--only", "async-forks/*", "--output-dir", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, ",".join(missing), *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "junit.xml").exists()


def test_the_caller_gives_what_the_reusable_workflow_takes_and_forks_are_not_measured():
    called = yaml.safe_load((ROOT / "ci/github/timing-gate.yml").read_text())[True]["workflow_call"]["inputs"]
    jobs = _jobs(ROOT / "ci/github/release.yml")
    assert jobs["timing"]["uses"].endswith("/timing-gate.yml")
    given = set(jobs["timing"]["with"])
    assert {name for name, each in called.items() if each.get("required")} <= given <= set(called)
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "ci/github/timing-gate.yml").read_text()))
    assert used == set(called)
    assert "github.event.pull_request.head.repo.full_name == github.repository" in jobs["refs"]["if"]
    gated = _jobs(ROOT / "ci/gitlab/timing-gate.yml")["kvbench-timing"]["rules"]
    (request,) = [rule["if"] for rule in gated if "merge_request_event" in rule["if"]]
    assert "$CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID" in request


def test_the_page_names_files_and_inputs_that_are_there():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:ci|workloads)/[\w./-]*\w", text)) - {"ci/noise"}
    assert len(named) > 6
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    called = yaml.safe_load((ROOT / "ci/github/timing-gate.yml").read_text())[True]["workflow_call"]["inputs"]
    (given,) = [yaml.safe_load(block) for block in _blocks(PAGE) if block.lstrip().startswith("install:")]
    assert set(given) <= set(called) and all(isinstance(value, str) for value in given.values())
    variables = set(_jobs(ROOT / "ci/gitlab/timing-gate.yml")["kvbench-timing"]["variables"])
    assert set(re.findall(r"KVBENCH_[A-Z_]+", text)) <= variables


def test_the_component_only_sets_what_the_timing_gate_has_and_uses_its_inputs():
    text = (ROOT / "ci/gitlab/component/kvbench.yml").read_text(encoding="utf-8")
    header, jobs = yaml.safe_load_all(text)
    (included,) = jobs.pop("include")
    gate = yaml.safe_load((ROOT / included["local"].lstrip("/")).read_text(encoding="utf-8"))
    assert set(jobs) <= set(gate)
    assert set(jobs["kvbench-timing"]["variables"]) <= set(gate["kvbench-timing"]["variables"])
    assert set(re.findall(r"\$\[\[ inputs\.([\w-]+) \]\]", text)) == set(header["spec"]["inputs"])
    (block,) = [block for block in _blocks(PAGE) if block.startswith("include:") and included["local"] not in block]
    given = yaml.safe_load(block)["include"][0]["inputs"]
    needed = {name for name, field in header["spec"]["inputs"].items() if "default" not in field}
    assert needed <= set(given) <= set(header["spec"]["inputs"])


@pytest.mark.parametrize("path", GITLAB, ids=lambda path: path.name)
def test_gitlab_keeps_results_and_limits_every_job(path):
    for name, job in _jobs(path).items():
        assert {"stage", "timeout", "rules", "script"} <= set(job), name
        if any(kvbench_commands(line) for line in job["script"]):
            assert job["artifacts"]["when"] == "always"
            junit = job["artifacts"]["reports"]["junit"]
            assert all(each.endswith("junit.xml") for each in ([junit] if isinstance(junit, str) else junit))
    if path.name == "timing-gate.yml":
        job = _jobs(path)["kvbench-timing"]
        assert "$GPU" in job["resource_group"] and job["variables"]["CUDA_VISIBLE_DEVICES"] == "$GPU"
        assert job["allow_failure"] == {"exit_codes": [3]}
