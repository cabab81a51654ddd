"""The command line: help like a manual, quick to start, and a sentence with exit code 2 for bad input."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys

import click
import pytest
import yaml

from kvbench.cli import run_guarded
from kvbench.cli.groups import OTHERS, SectionedGroup
from kvbench.cli.load import load
from kvbench.cli.main import cli, main
from kvbench.cli.sweep import sweep
from kvbench.common import errors
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import write_json
from kvbench.common.options import RequestCommand, RequestOption, request_in
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.manifest import new_manifest
from kvbench.runs.results import Manifest
from kvbench.sweep.requests import LoadRequest, SweepRequest
from kvbench.workload.design import plan_sweep
from kvbench.workload.file import load_workload
from kvbench.workload.options import Answers

GROUPS = {
    "Everyday": ("init", "plan", "sweep", "load", "report", "recommend", "view", "export", "serve", "doctor"),
    "For CI": ("gate", "compare", "bisect", "audit", "accept", "history"),
    "Studies": ("claims", "simulate", "quality", "trace", "cache-sim", "check-engine"),
    "More": ("dev", "help"),
}
DEV = (
    "calibrate-client", "calibrate-model", "calibrate", "tune", "bench-engine", "canaries", "predict", "mock-server",
)  # fmt: skip
COMMANDS = [name for names in GROUPS.values() for name in names]
CLASSES = [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 8}]
WORKLOAD = {
    "name": "tiny",
    "model": {"config": "llama-32m"},
    "engine": {"layout": "paged", "page_size": 16, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8},
    "sweep": {"layout": ["contiguous"]},
    "load": {"concurrency": [1], "num_requests": 4, "prompts": {"kind": "synthetic", "classes": CLASSES}},
}
NOBODY = ("--url", "http://127.0.0.1:9")


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """(exit code, stdout, stderr) of ``kvbench arguments`` in a folder with tiny.yaml."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.mark.parametrize("command", [("sweep", "tiny.yaml"), ("simulate", "tiny.yaml", "--device", "L4")])
def test_ray_that_is_not_installed_is_said_and_nothing_is_written(run, monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run(*command, "--executor", "ray")
    assert code == 2 and "kvbench[ray]" in err
    code, _, err = run(*command, "--ray-address", "10.0.0.1:6379")
    assert code == 2 and "--executor ray" in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def sections(text):
    """The first words of the rows below each heading of a help."""
    rows = {}
    for line in text.splitlines():
        if re.fullmatch(r" {0,2}[A-Z].*:", line):
            rows[line.strip()[:-1]] = heading = []
        elif rows and re.match(r"  \S", line):
            heading.append(line.split()[0])
    return rows


def test_help_lists_the_groups_of_commands_and_the_exit_codes(run):
    code, out, _ = run("--help")
    shown = sections(out)
    assert code == 0 and {name: tuple(shown[name]) for name in GROUPS} == GROUPS and OTHERS not in shown
    assert re.findall(r"^ {2,6}(\d+) ", out, re.MULTILINE) == ["0", "1", "2", "3", "4", "5", "130"]
    assert "--resume" in out and "--bind-host" in out
    code, out, _ = run("serve", "--help")  # of the server, where it parses
    assert code == 0 and "--kv-budget" in out and "usage: kvbench serve" in out
    shown = sections(run("dev", "--help")[1])
    listed = [name for names in shown.values() for name in names if name[0] != "-"]
    assert OTHERS not in shown and sorted(listed) == sorted((*DEV, "doctor")) and set(cli.commands) == set(COMMANDS)


@pytest.mark.parametrize("name", ["tune", "calibrate-client"])
def test_an_old_name_works_and_says_the_new_one(run, name):
    new, old = run("dev", name, "--help"), run(name, "--help")
    assert old[0] == new[0] == 0 and new[2] == ""
    assert old[2] == f"`kvbench {name}` is now `kvbench dev {name}`\n"
    assert old[1].replace(f"kvbench {name}", f"kvbench dev {name}") == new[1]
    assert run(name, "--bogus")[0] == run("dev", name, "--bogus")[0] == 2


def test_a_command_of_another_package_has_a_group_of_its_own():
    group = SectionedGroup("kvbench", sections={"Everyday": ("sweep",)})
    for name in ("sweep", "mine"):
        group.add_command(click.Command(name, help=f"Do {name}."))
    with click.Context(group) as ctx:
        assert sections(group.get_help(ctx)) == {"Options": ["--help"], "Everyday": ["sweep"], OTHERS: ["mine"]}


def every_command(group, *path):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, *path, name)
        else:
            yield (*path, name), command


REQUESTS = {path: command for path, command in every_command(cli) if isinstance(command, RequestCommand)}


@pytest.mark.parametrize("path", REQUESTS, ids=" ".join)
def test_help_all_shows_every_option_with_each_of_its_names(run, path):
    code, out, _ = run(*path, "--help-all")
    assert code == 0
    shown = {word.strip(",") for line in out.splitlines() for word in line.split()[:4] if word.startswith("-")}
    for option in (each for each in REQUESTS[path].params if isinstance(each, RequestOption)):
        assert option.help and set(option.opts) <= shown, option.opts
    rare = [option for option in REQUESTS[path].params if getattr(option, "rare", False)]
    usual = run(*path, "--help")[1]
    assert (f"All options: kvbench {' '.join(path)} --help-all" in usual.splitlines()[-1]) == bool(rare)
    words = [word for words in sections(usual).values() for word in words]
    assert not {option.opts[0] for option in rare} & set(words)
    assert path not in (("sweep",), ("load",)) or len(words) <= 22


def request(name, *words):
    command, kind = {"sweep": (sweep, SweepRequest), "load": (load, LoadRequest)}[name]
    return request_in(command.make_context(name, [*words]), kind)


def test_a_request_holds_what_the_line_says(monkeypatch):
    for name in ("NO_CALIBRATION", "NO_QUALITY", "WAIT_IDLE"):
        monkeypatch.delenv(f"KVBENCH_{name}", raising=False)
    assert request("sweep") == SweepRequest() and request("load") == LoadRequest()
    words = ["tiny.yaml", "--max-concurrency", "8,32", "--vary", "page_size=16,32", "--vary", "layout=paged,contiguous"]
    made = request("sweep", *words, "--wait-idle", "0", "--resume", "--endpoint-type", "chat", "-o", "load.repeats=2")
    stated = {
        "workload": "tiny.yaml", "concurrency": (8, 32), "vary": ("page_size=16,32", "layout=paged,contiguous"),
        "wait_idle_minutes": 0.0, "resume": "latest", "endpoint_type": "chat", "overrides": ("load.repeats=2",),
    }  # fmt: skip
    assert made == SweepRequest(**stated) and made.changes == ("load.repeats=2", "load.endpoint=chat")
    assert set(made.given) == set(stated) and made.typed("wait_idle_minutes") == "--wait-idle"
    assert made.part(Answers) == Answers(concurrency=made.concurrency, vary=made.vary)
    made = request("load", "--base-url", "URL", "--request-rate", "inf", "--goodput", "ttft:200", "tpot:50", "--master")
    assert made == LoadRequest(url="URL", request_rate=math.inf, goodput=("ttft:200 tpot:50",), master=True)


def test_help_imports_nothing_heavy():
    code = "import sys; from kvbench.cli.main import main\ntry:\n main(['--help'])\nexcept SystemExit: pass\n"
    heavy = "{'torch', 'pandas', 'numpy', 'transformers', 'numba', 'gevent', 'pydantic', 'rich'}"
    code += f"print('HEAVY', sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "HEAVY []" in done.stdout


SWEEP = ("sweep", "tiny.yaml")
PROMPTS = ("--input-len", "5", "--output-len", "5", "--concurrency", "1")
LOAD = ("load", "tiny.yaml", *NOBODY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("sweep",), ["workload is missing", "--input-len"]),
        ((*SWEEP, "-o", f"model.config={'x' * 5000}"), ["'xxx", "too long"]),
        ((*SWEEP, "-o", "load.num_requests=10000001"), ["load.num_requests", "10000000"]),
        (("sweep", "nothing.yaml"), ["'nothing.yaml'"]),
        ((*SWEEP, "--only", "pagd*"), ["'pagd*'", "paged-p16-c1, contiguous-c1"]),
        ((*SWEEP, "-o", "engine.page_sizes=8"), ["'page_sizes'", "'page_size'"]),
        ((*SWEEP, "-o", "engine.kv_budget=1KiB"), ["1024", "kv_budget"]),
        ((*SWEEP, "-o", "nonsense"), ["key=value"]),
        ((*SWEEP, "-o", "engine.kv_budget=1.5"), ["1.5", "'128MiB'"]),
        ((*SWEEP, "--profile", "tpu"), ["'tpu'"]),
        ((*SWEEP, "--port", "70000"), ["--port", "70000"]),
        ((*SWEEP, "--start-timeout", "nan", "--dry-run"), ["nan is not a finite number"]),
        ((*SWEEP, "--dry-run", "--output-dir", "tiny.yaml/results"), ["tiny.yaml", "--output-dir"]),
        ((*SWEEP, "--resume"), ["no incomplete run of 'tiny'"]),
        (("sweep", "--resume", "nowhere"), ["'nowhere'"]),
        (("sweep", "--resume"), ["workload is missing"]),
        ((*SWEEP, "--force"), ["--force goes with --resume"]),
        ((*SWEEP, "--serve-cmd", "a 'b"), ["--serve-cmd", "quotes"]),
        ((*SWEEP, "--serve-cmd", "/nowhere/server --x"), ["--serve-cmd", "'/nowhere/server'"]),
        ((*SWEEP, "--target", "localhost:8000"), ["'localhost:8000'", "http://"]),
        (("load", "tiny.yaml", "--url", "nope"), ["--url 'nope' is not a URL"]),
        (("load", "tiny.yaml"), ["--url is missing"]),
        (("load", *NOBODY), ["workload is missing", "--input-len"]),
        (("plan",), ["a model", "a workload", "--input-len"]),
        (("sweep", "--resume", "run", "--vary", "page_size=1,2"), ["--vary", "begun"]),
        (("load", *NOBODY, "--input-len", "5"), ["--output-len is missing"]),
        ((*SWEEP, "--vary", "page=3"), ["'page'", "'page_size'"]),
        ((*SWEEP, "--concurrency", "0"), ["--concurrency", "'0'"]),
        ((*SWEEP, "-o", "sweep={page_size: [8, 8]}"), ["tiny.yaml: sweep.page_size names 8 twice: leave one out"]),
        ((*SWEEP, "-o", "sweep={page_size: [16, null]}"), ["names 16 twice (null is the default, 16)"]),
        (("init", "my.yaml", *PROMPTS, "--vary", "pagesize=8,16"), ["did you mean 'page_size'?"]),
        (("init", "my.yaml", *PROMPTS, "--vary", "foo=8,16"), ["'foo' is not an engine setting", "page_size"]),
        ((*SWEEP, "-o", "load.mode=opn"), ["load.mode: 'opn' is not allowed; give 'closed' or 'open'"]),
        (("init", "tiny.yaml", "--input-len", "5"), ["tiny.yaml is there already"]),
        (("init", "nowhere/my.yaml"), ["nowhere/my.yaml"]),
        (("help", "nothing"), ["'nothing'"]),
        ((*LOAD, "--preset", "vlm"), ["--preset 'vlm'"]),
        ((*LOAD, "--at", "c9"), ["'c9'", "c1"]),
        pytest.param(("dev", "bench-engine", "--sides", "nope"), ["--sides", "'nope'"], marks=pytest.mark.full),
        (("report", "."), ["manifest.json"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, named):
    code, out, err = run(*arguments)
    assert code == 2 and err.startswith("error: ")
    assert "Traceback" not in out + err and "something unexpected" not in err
    assert all(words in err for words in named)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


ASKED = ("--input-len", "600", "--output-len", "150", "--concurrency", "20", "--vary", "page_size=16,32")


def test_init_writes_a_workload_that_sweep_and_plan_take(run, tmp_path):
    code, out, _ = run("init", "my.yaml", *ASKED, "--vary", "kv_cache_dtype=auto,fp8", "--profile", "cpu")
    text = (tmp_path / "my.yaml").read_text()
    assert code == 0 and "my.yaml" in out and len(text.splitlines()) < 25
    code, out, _ = run("sweep", "my.yaml", "--dry-run", "--profile", "cpu")
    assert not (tmp_path / "results").exists()
    assert code == 0 and "3 configurations, 3 cells" in out and "15,000 tokens" in out and "1 of 4" in out
    code, out, _ = run("sweep", *ASKED, "--design", "full", "--vary", "kv_cache_dtype=auto,fp8", "--dry-run")
    assert code == 0 and "4 configurations, 4 cells" in out and "4 cells, 8 server launches, 8 loads" in out
    assert not (tmp_path / "results").exists()


def test_init_asks_on_a_terminal(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("300\n20:40\n4\nlayout=paged,contiguous\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, _, _ = run("init", "my.yaml", "--profile", "cpu")
    loaded = load_workload("my.yaml", profile="cpu")
    assert code == 0 and loaded.sweep == {"layout": ("paged", "contiguous")} and loaded.load.concurrency == (4,)
    assert loaded.load.prompts.classes[0].output_tokens.high == 40


def test_help_knows_the_keys_of_a_workload_and_every_command(run):
    code, out, _ = run("help", "workload")
    assert code == 0 and "`design`" in out and "`kv_cache_dtype`" in out
    assert run("help", "plan")[:2] == run("plan", "--help")[:2]
    code, out, _ = run("help", "workload", "--json-schema")
    assert code == 0 and json.loads(out)["properties"]["load"]


def test_dry_run_of_a_resumed_run_shows_what_is_left_of_its_plan(run, tmp_path):
    workload = load_workload("tiny.yaml", profile="cpu")
    _, blocks = plan_sweep(workload, ["paged-p16-c1"])
    manifest = new_manifest(Manifest, workload, blocks, capacity={}, only=["paged*"])
    begun = RunFolder(tmp_path / "run")
    write_json(begun.manifest_path, manifest)
    for repeat in (1, 3):
        done = {"invalid_reasons": [], "wall_s": 1.0, "server_start_s": 1.0, "metrics": {}}
        write_json(begun.load("paged-p16-c1", repeat) / DONE, done)
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run("sweep", "--resume", begun.path, "--dry-run")
    assert code == 0 and "2 finished loads" in out and "1 cell, 1 server launch, 1 load," in out
    assert "repeat 2: paged-p16: c1" in out and "contiguous" not in out
    assert run("sweep", "--resume", begun.path, "--dry-run", "--only", "paged*")[1] == out
    for words in ((), ("--dry-run",)):
        code, _, err = run("sweep", "--resume", begun.path, "--only", "contiguous*", *words)
        assert code == 2 and all(word in err for word in ("'contiguous*'", "paged-p16-c1"))
    assert sorted(tmp_path.rglob("*")) == before


def test_doctor_shows_what_this_machine_has_and_the_details_all(run):
    code, out, _ = run("doctor")
    assert code == 0 and "load average" in out and "ready: " in out and "transformers" not in out
    code, out, _ = run("dev", "doctor")
    assert code == 0 and "load average" in out and "ready: " in out and "transformers" in out


@pytest.mark.parametrize(
    ("fast", "amx", "said"),
    [(True, True, "fast: AMX"), (True, False, "fast: AVX512-BF16"), (False, False, "slow: neither")],
)
def test_doctor_tells_how_the_engine_computes_bfloat16_on_this_cpu(run, monkeypatch, fast, amx, said):
    monkeypatch.setattr("kvbench_kernels.numba_bf16.has_bf16", lambda: fast)
    monkeypatch.setattr("kvbench_kernels.numba_memory.has_amx", lambda: amx)
    assert said in run("dev", "doctor")[1]


def test_unknown_errors_are_a_sentence_and_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(errors.tempfile, "gettempdir", lambda: str(tmp_path))

    def broken():
        raise ZeroDivisionError("oops")

    assert run_guarded.guarded(broken) == 4
    err = capsys.readouterr().err
    (log,) = tmp_path.glob("kvbench-error-*.log")
    assert "oops" in err and str(log) in err and "Traceback" not in err
    assert "Traceback" in log.read_text() and "in broken" in log.read_text()


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("x"), 2), (MeasurementError("x"), 4), (KeyboardInterrupt(), 130)]
)
def test_errors_have_their_exit_codes(capsys, error, code):
    def fail():
        raise error

    assert run_guarded.guarded(fail) == code


def test_a_command_whose_output_nobody_reads_did_not_succeed(run):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvbench", "plan", "tiny.yaml"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and b"Traceback" not in done.stderr


def test_summaries_fit_80_columns_uncut(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("dev",), ("gate",), ("accept",), ("history",), ("trace",)):
        rows = run(*group, "--help")[1].partition("Show this message and exit.\n")[2].splitlines()
        rows = [row for row in rows if re.match("  ", row) and "Exit codes" not in row and not row.split()[0].isdigit()]
        assert rows and all(len(row) <= 80 and row.endswith(".") and not row.endswith("...") for row in rows), rows


@pytest.mark.parametrize("arguments", [(), ("trace",)])
def test_a_group_alone_prints_its_help_and_no_error(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2 and err.startswith("Usage: kvbench") and "Show this message" in err and "error:" not in err


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("load", "--endpoint-type", "x"), None),
        (("load", "--concurency", "1"), "'--concurrency'"),
        (("swep",), "'sweep'"),
        (("tun",), "'dev tune'"),
        (("dev", "tun"), "'tune'"),
        (("zzzzz",), None),
        (("plan", "--gpu", "mi300", "Qwen3-32B"), "MI300X"),
        (("sweep", "tony.yaml"), "tiny.yaml"),
    ],
)
def test_suggestions_are_near_or_none(run, arguments, near):
    code, _, err = run(*arguments)
    assert code == 2 and ("id you mean" in err) == (near is not None) and (near or "") in err, err
