"""The runner around the parts: whatever a part does, there is a summary that says so, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ci.gpu import __main__ as runner_module
from ci.gpu import against, record, summary
from ci.gpu.environment import PartEnvironment
from ci.gpu.parts import Part
from ci.gpu.summary import FAILED, PASSED, SKIPPED, PartEnd
from tests.support.sweep_parts import alive, wait_until

WRITE = """
import json, sys
def write(**data):
    base = {"headline": "", "rows": [], "skipped": [], "failures": [], "tables": []}
    json.dump(base | data, open(sys.argv[sys.argv.index("--out") + 1], "w"))
"""


@dataclass(frozen=True)
class Scripted(Part):
    """A part that is a few lines of Python."""

    code: str = ""

    def command(self, python: str) -> list[str]:
        return [python, "-c", WRITE + self.code]


def scripted(name: str, code: str, **values) -> Scripted:
    return Scripted(name, "none", f"what {name} does", 1.0, 1.0, needs=("json",), code=code, **values)


@pytest.fixture(autouse=True)
def scripted_parts_need_what_they_say(monkeypatch):
    monkeypatch.setattr(Part, "needed", lambda self, device: self.needs)


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run the command with these parts; what lies in its OUTDIR is written there before."""
    out = tmp_path / "out"

    def of(*parts: Part, **before: str) -> Path:
        out.mkdir(exist_ok=True)
        for name, text in before.items():
            (out / name.replace("_", ".")).write_text(text)
        chosen = [replace(part, full_s=60.0) for part in parts]
        monkeypatch.setattr(runner_module, "select_parts", lambda names, quick: chosen)
        monkeypatch.setattr(runner_module.signal, "signal", lambda number, handler: None)
        assert runner_module.main([str(out), "--device", "cpu", "--tiny"]) == 0
        return out

    return of


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run parts for at most ``seconds``: their outcomes by name, and the summary."""
    monkeypatch.setattr(runner_module, "GRACE_S", 0.5)
    monkeypatch.setattr(runner_module, "LEAST_S", 0.2)
    monkeypatch.setattr("ci.gpu.children.STOP_GRACE_S", 0.5)

    def of(*parts: Part, seconds: float = 60.0) -> tuple[dict[str, PartEnd], str]:
        args, _ = runner_module.parse([str(tmp_path / "out"), "--device", "cpu", "--tiny"])
        args.outdir.mkdir(exist_ok=True)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        manifest = record.begin(vars(args))
        runner = runner_module.Runner(
            args, scratch, PartEnvironment(), time.monotonic() + seconds + runner_module.SUMMARY_S
        )
        runner.run(list(parts))
        record.finish(manifest, PartEnvironment(), runner.outcomes, 1.0)
        summary.write_results(args.outdir, scratch, manifest, runner.outcomes)
        return {o.name: o for o in runner.outcomes}, (args.outdir / "summary.md").read_text()

    return of


def test_how_parts_end(run, capsys):
    outcomes, text = run(
        scripted("good", "write(headline='all well')"),
        scripted("wrong", "write(failures=[{'what': 'case x', 'reason': 'off by one'}]); sys.exit(1)"),
        scripted("dead", "print('one\\ntwo\\nlast\\nwords'); sys.exit(7)"),
        scripted("nothing to do", "write(not_run='no such command')"),
        replace(scripted("poor", ""), needs=("json", "no_such_module")),
        scripted("after", "write(headline='ran all the same')"),
    )
    assert {name: o.status for name, o in outcomes.items()} == {
        "good": PASSED, "wrong": FAILED, "dead": FAILED, "nothing to do": SKIPPED, "poor": SKIPPED, "after": PASSED
    }  # fmt: skip
    assert outcomes["wrong"].reason == "case x: off by one"
    assert outcomes["dead"].reason == "ended with code 7: two / last / words"
    assert capsys.readouterr().out.startswith("will be skipped: poor, not installed: no_such_module (see")
    assert outcomes["poor"].line.startswith("SKIPPED poor: not installed: no_such_module")
    for words in ("all well", "off by one", "two / last / words", "no such command", "ran all the same"):
        assert words in text


@pytest.mark.parametrize("hangs", [True, False])
def test_a_part_leaves_nothing_running_and_keeps_what_it_had(run, tmp_path, hangs):
    pid = tmp_path / "pid"
    code = (
        "import subprocess, time, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "write(rows=[{'case': 'measured before'}])\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
    )
    part = scripted("slow", code + "time.sleep(600)\n" * hangs, result="kernels.json")
    outcomes, text = run(part, scripted("next", "write()"), seconds=16.5 if hangs else 60.0)
    outcome = outcomes["slow"]
    assert outcome.status == (FAILED if hangs else PASSED) and ("stopped after" in text) is hangs
    assert outcome.data["rows"] == [{"case": "measured before"}]
    assert "measured before" in (tmp_path / "out" / "kernels.json").read_text()
    wait_until(lambda: not alive(int(pid.read_text())))


def test_what_was_measured_is_on_disk_while_a_part_runs_and_before_the_next_one_begins(main, monkeypatch, tmp_path):
    """A run that is killed leaves what it had, and a summary."""
    monkeypatch.setattr("ci.gpu.children.MEANWHILE_S", 0.2)
    out = tmp_path / "out"
    files = [str(out / name) for name in ("summary.md", "kernels.json")]
    look = f"print(*(open(file).read() for file in {files}))\n"
    wait = f"import os, time\nwhile not all(map(os.path.exists, {files})): time.sleep(0.05)\n"
    slow = scripted("slow", "write(rows=[{'case': 'x', 'us': 2.5}])\n" + wait + look, result="kernels.json")
    log = (main(slow, scripted("next", look)) / "log.txt").read_text()
    while_it_ran, afterwards = log.split("| slow | FAILED |")[1].split("| slow | passed |")
    assert "had not ended" in while_it_ran
    assert all('"us": 2.5' in text for text in (while_it_ran, afterwards))


def test_nothing_of_an_earlier_run_is_left_to_be_taken_for_this_ones(main, capsys):
    out = main(scripted("good", "write()"), sweep_log="mine", engine_json="old", tuned_json="old")
    assert {path.name for path in out.iterdir()} == {"sweep.log", "manifest.json", "summary.md", "log.txt"}
    assert "# no GPU" in capsys.readouterr().out


def test_what_the_gpu_did_over_a_part_is_recorded(run, monkeypatch):
    readings = iter([{"at": 10.0, "energy_j": 100.0}, {"at": 12.0, "energy_j": 1300.0, "throttled_by_heat_s": 9.0}])
    monkeypatch.setattr(runner_module, "read_state", lambda: next(readings))
    outcomes, text = run(scripted("good", "write(headline='all well')"))
    assert outcomes["good"].device == {"power_w": 600.0} and "| 600 | – | all well |" in text


@pytest.mark.parametrize("host", ["same", "another", None])
def test_runs_on_one_host_are_compared_and_others_are_not(tmp_path, host):
    (tmp_path / "manifest.json").write_text(json.dumps({"device": {"host": host}}))
    rows = [{"case": "decode", "us": 200.0}, {"case": "gone", "us": 1.0}]
    rows += [{"case": "shape", "kernel": kernel, "us": us} for kernel, us in (("ours", 10.0), ("theirs", 30.0))]
    (tmp_path / "kernels.json").write_text(json.dumps({"kernels": {"rows": rows}}))
    (tmp_path / "engine.json").write_text(json.dumps({"job": {"rows": [{"run": "run 0", "output_tokens_per_s": 4e4}]}}))
    newer = [
        {"case": "decode", "us": 150.0},
        {"case": "new", "us": 1.0},
        {"case": "shape", "kernel": "ours", "us": 20.0},
    ]
    now = [
        PartEnd("kernels", "x", PASSED, data={"rows": newer}),
        PartEnd("job", "x", PASSED, data={"rows": [{"run": "run 0", "output_tokens_per_s": 5e4}]}),
    ]
    lines = against.lines(against.read_run(tmp_path), {"device": {"host": "same"}}, now)
    shown = [line for line in lines if any(name in line for name in ("decode", "run 0", "ours", "theirs"))]
    if host == "same":
        assert [line.split(" | ")[1:] for line in shown] == [
            ["200", "150", "0.750 |"], ["10", "20", "2.000 |"], ["40,000", "50,000", "1.250 |"]
        ]  # fmt: skip
        assert not any("gone" in line or "new" in line for line in lines)
    else:
        assert not shown and "Not compared" in "".join(lines)


def test_a_part_does_not_outlive_a_runner_that_is_killed(tmp_path):
    """Else it would hold the GPU in the next run."""
    pid = tmp_path / "pid"
    part = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    runner = (
        "import os, sys; from pathlib import Path; from ci.gpu.children import OnlyChild; "
        f"OnlyChild().run([sys.executable, '-c', {part!r}], Path({str(tmp_path / 'log')!r}), 600, '.', os.environ)"
    )
    process = subprocess.Popen([sys.executable, "-c", runner])
    wait_until(lambda: pid.is_file() and pid.read_text())
    process.kill()
    process.wait()
    wait_until(lambda: not alive(int(pid.read_text())))


def test_results_name_no_folder_of_this_machine(folders):
    out, scratch = folders
    reason = f"File {scratch}/tiny.json, {summary.REPOSITORY}/engine/x.py"
    outcome = PartEnd(
        "job", "x", FAILED, reason, result="engine.json", data={"rows": [{"model": f"{scratch}/tiny.json"}]}
    )
    (scratch / "job.log").write_text(reason)
    summary.write_results(out, scratch, manifest_of(), [outcome])
    for path in out.iterdir():
        assert str(scratch) not in path.read_text() and str(summary.REPOSITORY) not in path.read_text()
    assert "tiny.json, engine/x.py" in (out / "summary.md").read_text()


def test_without_time_a_part_is_not_begun(run):
    outcomes, _ = run(scripted("late", "write()"), seconds=0.0)
    assert outcomes["late"].status == SKIPPED and outcomes["late"].reason.startswith("no time left")


def test_an_interruption_ends_in_a_summary(run, monkeypatch):
    real = runner_module.OnlyChild.run

    def interrupted(self, command, *rest):
        if any("# stop here" in word for word in command):
            raise KeyboardInterrupt
        return real(self, command, *rest)

    monkeypatch.setattr(runner_module.OnlyChild, "run", interrupted)
    outcomes, text = run(
        scripted("first", "write()"), scripted("second", "write()  # stop here"), scripted("third", "write()")
    )
    assert [o.status for o in outcomes.values()] == [PASSED, FAILED, SKIPPED]
    assert "stopped from outside" in text


def manifest_of(**values) -> dict:
    arguments = {"device": "cuda", "quick": False, "commit": None, **values}
    return {"arguments": arguments, "started": "2026-01-01T00:00:00Z", "notes": []}


@pytest.fixture
def folders(tmp_path):
    """Of results, and of what the parts wrote."""
    made = tmp_path / "out", tmp_path / "scratch"
    for folder in made:
        folder.mkdir()
    return made


def test_files_are_few_and_small(folders, monkeypatch):
    assert len(summary.FILES) <= 8 and summary.MAX_BYTES <= 16 * 2**20
    out, scratch = folders
    monkeypatch.setattr(summary, "MAX_BYTES", 4000)
    monkeypatch.setattr(summary, "LOG_BYTES_A_PART", 500)
    (scratch / "report.html").write_text("x" * 5000)
    (scratch / "summary.csv").write_text("a,b\n")
    (scratch / "tuned.json").write_text("as kvbench dev tune wrote it")
    (scratch / "big.log").write_text("y" * 3000 + "the end")
    rows = [{"case": str(i), "value": i} for i in range(500)]
    outcomes = [
        PartEnd("big", "much", PASSED, result="kernels.json", data={"rows": rows}),
        PartEnd("small", "little", PASSED, result="engine.json", data={"rows": rows[:1]}),
        PartEnd("tune", "x", PASSED, result="tuned.json"),
    ]
    summary.write_results(out, scratch, manifest_of(), outcomes)
    assert {path.name for path in out.iterdir()} == {
        "engine.json", "log.txt", "manifest.json", "summary.csv", "summary.md", "tuned.json"
    }  # fmt: skip
    assert all(path.stat().st_size <= 4000 for path in out.iterdir())
    text = (out / "summary.md").read_text()
    assert "kernels.json" in text and "report.html" in text
    log = (out / "log.txt").read_text()
    assert "the end" in log and "[...]" in log and log.count("y") < 600
    assert (out / "tuned.json").read_text() == "as kvbench dev tune wrote it"


def test_tables_of_one_kind_are_put_together_and_pipes_do_not_break_them():
    table = {"title": "Speed", "columns": ["model", "tok/s"]}
    outcomes = [
        PartEnd("a", "x", PASSED, data={"tables": [table | {"rows": [["m|1", "5"]]}]}),
        PartEnd("b", "x", PASSED, data={"tables": [table | {"rows": [["m2", "6"]]}]}),
    ]
    text = summary.render(manifest_of(), outcomes, [])
    assert text.count("## Speed") == 1 and "| m\\|1 | 5 |\n| m2 | 6 |" in text


def test_the_summary_says_what_kind_of_run_it_was():
    assert "No figure here is of a GPU" in summary.render(manifest_of(device="cpu"), [], [])
    quick = summary.render(manifest_of(quick=True), [], [])
    assert "Quick run" in quick and "No figure here is of a GPU" not in quick


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "OUTDIR"),
        (["OUT", "--part", "kernel"], "there is no part 'kernel': the parts are facts, check"),
        (["OUT", "--tiny"], "--device cpu and --tiny go together"),
        (["OUT", "--device", "cpu"], "--device cpu and --tiny go together"),
        (["OUT", "--wheels", "nowhere"], "is no folder"),
        (["OUT", "--time-limit", "3"], "too short"),
        (["OUT", "--time-limit", "nan"], "too short"),
        (["FILE"], "is a file"),
        (["OUT", "--entry", "peer"], "invalid choice: 'peer'"),
        (["OUT", "--entry", "before-after", "--part", "kernels"], "before-after has no part 'kernels'"),
        (["OUT", "--against", "FULL"], "FULL is no result of ci/gpu.sh"),
        (["FULL"], "holds other files (mine.csv)"),
    ],
)
def test_bad_arguments_end_with_code_2_and_a_reason(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    Path("FULL").mkdir()
    Path("FULL/mine.csv").touch()
    Path("FULL/summary.md").touch()
    with pytest.raises(SystemExit) as ended:
        runner_module.parse(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not Path("OUT").exists()


def test_an_earlier_run_may_be_overwritten_and_a_log_may_lie_beside_it(tmp_path):
    for name in ("summary.md", "kernels.json", "run.log", "nohup.out", "notes.txt"):
        (tmp_path / name).touch()
    args, parts = runner_module.parse([str(tmp_path), "--quick"])
    assert args.quick and parts[0].name == "facts"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert runner_module.main([str(tmp_path / "file" / "out"), "--device", "cpu", "--tiny"]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_no_torch_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert "cannot import torch (No module named torch)" in runner_module.no_gpu()
    (tmp_path / "python").write_text(
        '#!/bin/sh\necho \'a warning\'\necho \'{"torch": "2.11.0", "cuda": "13.0", "available": true}\'\n'
    )
    assert runner_module.no_gpu() is None


def test_sources_hash_follows_the_sources_and_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    (tmp_path / "engine").mkdir()
    hashes = []
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (tmp_path / "engine" / "a.py").write_text(text)
        hashes.append(record.sources_hash(tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]
    assert record.git_state(tmp_path) == {"sha": None, "dirty": None}


def test_the_manifest_has_names_and_no_paths(tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "manifest.json").write_text(json.dumps({"device": {"host": "same", "name": "a GPU"}}))
    words = ["--wheels", str(tmp_path), "--against", str(earlier), "--quick"]
    args, _ = runner_module.parse([str(tmp_path / "found"), *words])
    told = json.dumps(record.begin(vars(args)))
    assert str(tmp_path.parent) not in told and "a GPU" not in told
    arguments = json.loads(told)["arguments"]
    assert [arguments[name] for name in ("outdir", "wheels", "against")] == ["found", tmp_path.name, "earlier"]
