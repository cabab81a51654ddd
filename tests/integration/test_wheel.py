"""The wheel in an empty folder: it is whole, its light core needs no torch, and what the help says can be typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvbench.cli.main import cli
from kvbench.common.packages import REPOSITORY
from tests.support.without_packages import WITHOUT

IN_WHEEL = ("engine", "kernels", "kvbench", "workloads", "docs", "ci")
ENGINE_ONLY = ("torch", "triton", "transformers", "safetensors", "numba", "uvloop")
_RUN = f"""{WITHOUT}
import contextlib, io, json
from kvbench.cli.main import main
ended = []
for words in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    imported = {{name.partition(".")[0] for name, module in sys.modules.items() if module}}
    ended.append([code, out.getvalue(), sorted(imported)])
open(sys.argv[2], "w").write(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the unpacked wheel."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in IN_WHEEL:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(built), str(source)], check=True, timeout=200)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(built / "site")
    return built / "site"


@pytest.fixture
def run(site, tmp_path):
    """Runs commands of the wheel in one process, in an empty folder: [exit code, output, imported packages] each."""

    def run(*commands: list[str], missing: tuple[str, ...] = ENGINE_ONLY):
        result = tmp_path / "ended.json"
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", _RUN, ",".join(missing), str(result)], input=json.dumps(commands), text=True,
            cwd=folder, env={**os.environ, "PYTHONPATH": str(site)}, timeout=200, check=True,
        )  # fmt: skip
        return json.loads(result.read_text())

    return run


def examples(command: click.Command = cli) -> Iterator[list[str]]:
    """Yields the words of each example in the help of a command and those below it."""
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        yield from examples(below)
    paragraphs = re.split(r"\n *\n|\x08", command.help or "")
    for paragraph in (text for text in paragraphs if re.match(r"\s*Examples?:", text)):
        for line in re.sub(r"\n {10,}", " ", paragraph).splitlines():
            if line.strip().startswith("kvbench "):
                yield shlex.split(re.split(r" [#>&(]", line)[0])[1:]


def test_the_wheel_has_no_import_name_but_kvbenchs_own(site):
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {
        "kvbench", "kvbench_engine", "kvbench_kernels"
    }  # fmt: skip
    shipped = {path.relative_to(site / "kvbench" / "shipped").as_posix() for path in site.glob("kvbench/shipped/**/*")}
    assert {"workloads/mixed.yaml", "ci/gates.yaml", "ci/counters.lock.json", "docs/commands.md"} <= shipped
    assert [name for name in shipped if name.endswith(".py")] == []


def test_every_file_that_an_example_names_ships(site):
    words = [word for example in examples() for word in example if re.match(r"(workloads|ci)/", word)]
    written = {"workloads/canaries/kvbench-tiny.jsonl"}
    assert len(words) > 30 and all((site / "kvbench/shipped" / word).is_file() for word in set(words) - written)


def test_examples_run_without_the_engine_in_an_empty_folder(run):
    runnable = []
    for example in examples():
        options = {word for word in example if word.startswith("--")}
        if example[0] == "sweep" and not options & {"--resume", "--target", "--executor", "--serve-cmd"}:
            runnable.append([*example, "--dry-run"])
        elif example[0] in ("plan", "help") or (example[0] == "init" and len(example) > 2):
            runnable.append([word.replace("my.yaml", f"my-{len(runnable)}.yaml") for word in example])
    commands = [*runnable, ["plan", "mixed"], ["trace", "--help"]]
    commands += [["simulate", "--device", "H200", "--model", "llama-3.1-8b", "--input-len", "64", "--output-len", "16",
                  "--concurrency", "4", "--num-prompts", "16"]]  # fmt: skip
    ended = run(*commands)
    assert len(runnable) >= 18
    assert [(words, out[-500:]) for words, (code, out, _) in zip(commands, ended, strict=True) if code] == []


def test_what_needs_the_engine_says_so_and_leaves_nothing_behind(run, tmp_path):
    lines = ("sweep mixed", "serve", "claims", "quality mixed", "dev tune", "dev bench-engine",
             "dev canaries x --output y",
             "compare page_size=16 page_size=32 --workload ci_timing --policy ci/gates.yaml")  # fmt: skip
    for line, (code, out, _) in zip(lines, run(*map(str.split, lines)), strict=True):
        assert (code, "kvbench[engine]" in out, out.count("\n") <= 2) == (2, True, True), (line, out)
    assert not list((tmp_path / "empty").iterdir())


def test_counters_are_judged_by_the_lock_that_ships_and_never_accepted_beside_it(run, tmp_path):
    judged, accepted = run(["gate", "counters", "--only", "async-forks/*"], ["accept", "counters", "--reason", "x"])
    assert judged[0] == 0 and "pass" in judged[1].lower()
    assert accepted[0] == 2 and "no folder ci" in accepted[1]
    assert not list((tmp_path / "empty").iterdir())


def test_commands_import_none_of_the_packages_that_take_long_before_they_need_them(run):
    load = ["load", "--url", "http://127.0.0.1:9", "--input-len", "8", "--output-len", "8", "--concurrency", "1"]
    ended = run(["--help"], ["load", "--help"], load, missing=())
    (_, out, modules), (code, _, later), (refused, _, first_request) = ended
    assert "Usage: kvbench" in out and (code, refused) == (0, 2)
    rest = {"pandas", "scipy", "plotly", "locust", "torch"}
    assert not {*modules, *later} & {*rest, "numpy", "pydantic", "pyarrow"} and not rest & set(first_request)
