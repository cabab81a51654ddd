"""The command line: help like a manual, quick to start, and a sentence with exit code 2 for bad input."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from kvbench.cli.main import cli, main
from kvbench.common import packages as house
from kvbench.common.errors import MeasurementError, UsageError

COMMANDS = (
    "sweep",
    "load",
    "report",
    "plan",
    "cache-sim",
    "tune",
    "doctor",
    "serve",
    "bench-engine",
    "mock-server",
    "calibrate-client",
    "trace",
    "compare",
    "calibrate",
    "gate",
    "accept",
    "history",
    "quality",
)
WORKLOAD = {
    "name": "tiny",
    "model": {"config": "llama-32m"},
    "engine": {"layout": "paged", "page_size": 16, "kv_budget": "65MiB", "max_model_len": 256, "max_num_seqs": 8},
    "sweep": {"layout": ["contiguous"]},
    "load": {
        "concurrency": [1],
        "num_requests": 4,
        "prompts": {
            "kind": "synthetic",
            "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 8}],
        },
    },
}


@pytest.fixture
def workload(tmp_path, monkeypatch):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(WORKLOAD))
    monkeypatch.setenv("COLUMNS", "100")
    return str(path)


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of ``kvbench arguments`` in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_help_lists_every_command_and_the_exit_codes(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert re.findall(r"^    (\d+) ", out, re.MULTILINE) == ["0", "1", "2", "3", "4", "5", "130"]
    assert set(cli.commands) == set(COMMANDS)
    said = " ".join(out.split())
    assert "`load --output-dir DIR --resume`" in said and "`sweep --resume [RUN_DIR]`" in said
    assert "nothing leaves this machine unless you say so" in said and "--bind-host" in said


@pytest.mark.parametrize(
    "name",
    [
        "sweep", "load", "report", "plan", "cache-sim", "tune", "doctor", "mock-server", "calibrate-client", "compare",
        "calibrate", "quality",
    ],
)  # fmt: skip
def test_each_help_tells_purpose_files_and_exit_codes(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert "Exit codes:" in out and ("Files written" in out or "No files are written" in out)
    assert name == "doctor" or "Example" in out


def test_sweep_help_keeps_its_examples_on_lines_of_their_own(capsys):
    _, out, _ = run(capsys, "sweep", "--help")
    lines = [line.strip() for line in out.splitlines()]
    assert "kvbench sweep workloads/mixed.yaml --resume" in lines
    assert "130  interrupted; go on with the printed --resume command" in lines


def test_help_imports_nothing_heavy():
    code = "import sys; from kvbench.cli.main import main\ntry:\n main(['--help'])\nexcept SystemExit: pass\n"
    heavy = "{'torch', 'pandas', 'numpy', 'transformers', 'numba', 'gevent', 'pydantic', 'rich'}"
    code += f"print('HEAVY', sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["workload file is missing"]),
        (["nothing.yaml"], ["no workload file 'nothing.yaml'"]),
        (["W", "--only", "pagd*"], ["'pagd*'", "the cells are paged-p16-c1, contiguous-c1"]),
        (["W", "-o", "engine.page_size=0"], ["page_size", "0", "at least 1"]),
        (["W", "-o", "engine.page_sizes=8"], ["'page_sizes'", "did you mean 'page_size'"]),
        (["W", "-o", "engine.kv_budget=1KiB"], ["1024", "smaller than one sequence", "raise kv_budget"]),
        (["W", "-o", "engine.max_model_len=99999999"], ["99999999", "llama-32m"]),
        (["W", "-o", "nonsense"], ["key=value"]),
        (["W", "--profile", "tpu"], ["no profile 'tpu'"]),
        (["W", "--repeats", "0"], ["--repeats", "0"]),
        (["W", "--seed", "x"], ["--seed", "'x'"]),
        (["W", "--port", "70000"], ["--port", "70000"]),
        (["W", "--bogus"], ["--bogus"]),
        (["W", "--resume"], ["no incomplete run of 'tiny'"]),
        (["W", "--resume", "nowhere"], ["no run folder 'nowhere'"]),
        (["--resume", "nowhere"], ["no run folder 'nowhere'"]),
        (["--resume"], ["workload file is missing"]),
        (["W", "--force"], ["--force goes with --resume"]),
        (["W", "-o", "engine.kv_budget=1.5"], ["1.5", "'128MiB'"]),
        (["W", "--serve-cmd", "a 'b"], ["--serve-cmd", "mend the quotes"]),
        (["W", "--serve-cmd", " "], ["--serve-cmd", "no program"]),
        (["W", "--serve-cmd", "/nowhere/server --x"], ["--serve-cmd", "no program '/nowhere/server'"]),
        (["W", "--target", "localhost:8000"], ["'localhost:8000'", "http://"]),
        (["W", "--target", "http://[::1"], ["'http://[::1'", "http://127.0.0.1:8000"]),
        (["W", "--target", "http://127.0.0.1:99999"], ["'http://127.0.0.1:99999'"]),
        (["W", "--target", "http://"], ["'http://'"]),
        (["W", "--target", "http://127.0.0.1:1", "--serve-cmd", "x"], ["--target and --serve-cmd"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, workload, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "sweep", *[workload if a == "W" else a for a in arguments])
    assert code == 2
    assert err.startswith("error: ") and "Traceback" not in out + err
    for word in words:
        assert word in err
    assert not (tmp_path / "results").exists()


def test_dry_run_and_plan_launch_nothing(capsys, workload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "sweep", workload, "--dry-run", "--profile", "cpu")
    assert code == 0 and "2 cells, 6 server launches, 6 loads" in out
    code, out, _ = run(capsys, "plan", workload, "--profile", "cpu")
    assert code == 0
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in out.splitlines()
        if "│" in line
    }
    # 65 MiB at 16,384 bytes a token, less the page table: 259 pages of 16, or a slab with 16 reservations of 256
    assert rows["paged-p16"] == ["65.0", "16,384", "16", "259", "4,144", "1.0", "16"]
    assert rows["contiguous"] == ["65.0", "16,384", "256", "16", "4,159", "0.1", "16"]
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sides", "nope"], ["--sides", "'nope'"]),
        (["--page-size", "0"], ["page_size cannot be 0"]),
        (["--kv-budget", "x"], ["'x' is not a size"]),
        (["--kv-budget", "1.5"], ["'1.5'", "fraction of a byte"]),
        (["--model", "nowhere"], ["nowhere"]),
        (["--requests", "0"], ["--requests cannot be 0"]),
    ],
)
def test_bad_input_of_bench_engine_is_one_sentence_and_exit_code_2(capsys, arguments, words):
    code, _, err = run(capsys, "bench-engine", *arguments)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and "unexpected" not in err
    for word in words:
        assert word in err


def test_help_of_bench_engine_has_an_example_and_exit_codes(capsys):
    code, out, _ = run(capsys, "bench-engine", "--help")
    assert code == 0
    assert "kvbench bench-engine --" in " ".join(out.split()) and "Exit codes" in out
    assert "Exit codes: 0 " in cli.commands["bench-engine"].help and "Example" in cli.commands["bench-engine"].help


def test_report_help_names_every_file_it_writes(capsys):
    _, out, _ = run(capsys, "report", "--help")
    assert all(name in out for name in ("report.html", "report.md", "summary.csv"))


def test_report_of_no_run(capsys, tmp_path):
    code, _, err = run(capsys, "report", str(tmp_path))
    assert code == 2 and str(tmp_path) in err


def test_load_names_the_loads_there_are(capsys, workload):
    code, _, err = run(capsys, "load", workload, "--url", "http://127.0.0.1:1", "--at", "c9")
    assert code == 2 and "'c9'" in err and "c1" in err


@pytest.mark.parametrize("url", ["nope", "http://[::1", "http://h:x", "ftp://h"])
def test_load_refuses_what_is_no_url(capsys, workload, url):
    code, _, err = run(capsys, "load", workload, "--url", url)
    assert code == 2 and err.startswith(f"error: --url {url!r} is not a URL") and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("load", "W", "--url", "http://127.0.0.1:9", "--find-max-rate", "p95_ttft<=1s", "--run-seconds", "inf"),
        ("load", "W", "--url", "http://127.0.0.1:9", "--find-max-rate", "p95_ttft<=1s", "--run-seconds", "nan"),
        ("sweep", "W", "--start-timeout", "nan", "--dry-run"),
    ],
)
def test_seconds_are_numbers(capsys, workload, words):
    code, _, err = run(capsys, *[workload if word == "W" else word for word in words])
    assert code == 2 and "is not a finite number" in err


def test_serve_help_comes_from_the_server(capsys):
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0 and "--kv-budget" in out and "usage: kvbench serve" in out


def test_unknown_errors_are_a_sentence_and_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(house.tempfile, "gettempdir", lambda: str(tmp_path))

    def broken():
        raise ZeroDivisionError("oops")

    assert house.guarded(broken) == 4
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

    assert house.guarded(fail) == code


def test_a_foreign_kernels_package_is_named(capsys, tmp_path):
    other = tmp_path / "site" / "kernels"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(other.parent)!r})\n"
    code += "from kvbench.cli.main import main; main(['plan', 'x.yaml'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert str(other) in done.stderr and "virtual environment of its own" in done.stderr
    assert house.foreign_package("kernels") is None and house.foreign_package("engine") is None
