"""``kvbench compare`` without servers: what it keeps, how it is resumed, stored runs, and what is left of failures.

Measuring is replaced; everything before and after it is real.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from kvbench.cli import main as cli
from kvbench.common.errors import Interrupted, MeasurementError, UsageError
from kvbench.common.files import read_json, write_json
from kvbench.gate.compare import builds, clock, manifest, run
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.run import ComparisonRun
from kvbench.gate.compare.sides import PairedWorkload
from kvbench.gate.verdict.verdict import Verdict
from kvbench.targets.builtin import BuiltinTarget
from kvbench.workload.file import load_workload
from tests.support.compare_folders import HERE, POLICY, stored_run, write_load
from tests.support.git_repo import make_repo
from tests.support.sweep_parts import TINY

SIDES = ("page_size=16", "page_size=32")
EXECUTE = ComparisonRun.execute
WORDS = ("--workload", "tiny.yaml", "--policy", "gates.yaml", "--profile", "cpu", "--method", "launched")


@pytest.fixture
def here(monkeypatch):
    """The machine and the code, to be changed."""
    now = json.loads(json.dumps(HERE))
    monkeypatch.setattr(manifest, "environment", lambda: json.loads(json.dumps(now)))
    return now


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd, here):
    """Runs the command: (exit code, its folder, its output). ``begun``: the comparisons that would have measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "gates.yaml").write_text(POLICY)
    begun = []

    def interrupted(comparison):
        begun.append(comparison)
        comparison.write("incomplete")

    def command(*words, measure=interrupted, subcommand="compare"):
        monkeypatch.setattr(ComparisonRun, "execute", measure)
        known = set(tmp_path.glob("results/compare/*"))
        with pytest.raises(SystemExit) as left:
            cli.main([subcommand, *words])
        new = set(tmp_path.glob("results/compare/*")) - known
        return left.value.code, new.pop() if new else None, "".join(capfd.readouterr())

    command.begun = begun
    return command


@pytest.fixture
def opens_nothing(monkeypatch):
    return lambda: monkeypatch.setattr(run, "open_workloads", lambda *_: pytest.fail("opened"))


@pytest.fixture
def swept(tmp_path):
    (tmp_path / "swept.yaml").write_text(yaml.safe_dump(TINY))
    return load_workload(tmp_path / "swept.yaml", profile="cpu")


def test_it_is_resumed_by_what_it_began_with_whatever_the_files_hold_now(compare, tmp_path, monkeypatch):
    code, folder, err = compare(*SIDES, *WORDS)
    assert code == 130, err
    changed = TINY | {"load": TINY["load"] | {"num_requests": 60}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "gates.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, other, err = compare("--resume", str(folder))
    assert (code, other) == (130, None), err
    first, second = compare.begun
    points = [each.workloads[0].sides["base"].choice.workload.load_points for each in compare.begun]
    assert points[0] == points[1]
    assert second.workloads[0].sides["candidate"].choice.workload.engine["page_size"] == 32
    assert second.policy.timing == first.policy.timing and second.pairs == 10
    assert Path(second.state.options.workloads[0]) == tmp_path / "tiny.yaml"
    assert "page_size=16 page_size=32 " in second.state.reproduce
    assert "--policy gates.yaml" in second.state.reproduce  # as it was given


def test_what_the_policy_misses_is_said_and_what_cannot_be_changed_is_called_as_it_was_given(compare, tmp_path):
    (tmp_path / "classes.yaml").write_text("timing: {classes: {small: '*-c2', large: ['*-c64', 'other/*']}}")
    _, folder, said = compare(*SIDES, *WORDS, "--policy", "classes.yaml")
    (note,) = [note for note in read_json(folder / "manifest.json")["notes"] if "class" in note]
    assert "'large'" in note and "(*/*-c64, other/*)" in note and note in said
    for words, name in ((WORDS[:2], "--workload"), (("-o", "seed=4"), "-o"), (SIDES, "BASE")):
        code, _, err = compare(*words, "--resume", str(folder))
        assert code == 2 and f"error: {name} cannot change" in err


def test_other_conditions_need_force_which_is_kept(compare, here):
    _, folder, _ = compare(*SIDES, *WORDS)
    here["git"] |= {"sha": "2" * 40, "short_sha": "2222222"}
    said = "commit (1111111 then, 2222222 now)"
    code, _, err = compare("--resume", str(folder))
    assert code == 2 and said in err and "--force" in err
    assert compare("--resume", str(folder), "--force")[0] == 130
    assert len(compare.begun) == 2 and compare.begun[-1].request.force
    kept = read_json(folder / "manifest.json")
    assert said in " ".join(kept["notes"]) and kept["resumed"][0]["differences"]
    # What is printed to go on with has no --force: it is kept.
    assert compare(*shlex.split(compare.begun[-1].folder.resume_command("compare"))[2:])[0] == 130
    assert compare.begun[-1].request.force


def test_another_build_needs_force_and_other_cells_are_refused_with_it(compare):
    _, folder, _ = compare(*SIDES, *WORDS)
    kept = read_json(folder / "manifest.json")
    for change, words, said in (
        ({"base": kept["base"] | {"environment": "before"}}, (), "base has another environment"),
        ({"candidate": kept["candidate"] | {"changes": "before"}}, (), "candidate is a working tree"),
        ({"cells": kept["cells"][:1]}, ("--force",), "other cells"),
    ):
        write_json(folder / "manifest.json", kept | change)
        code, _, err = compare("--resume", str(folder), *words)
        assert code == 2 and said in err
    assert len(compare.begun) == 1


def test_an_older_comparison_by_twins_is_judged_and_not_gone_on_with(compare, opens_nothing):
    _, folder, _ = compare(*SIDES, *WORDS, measure=lambda comparison: end(comparison, 10))
    opens_nothing()
    for status, resumed in (("complete", 0), ("incomplete", 2)):
        kept = read_json(folder / "manifest.json")
        write_json(folder / "manifest.json", kept | {"method": "twins", "status": status})
        code, _, said = compare("--resume", str(folder))
        assert code == resumed and ("start a new comparison" in said) == (resumed == 2), said


def raises(error):
    def measure(comparison):
        raise error

    return measure


def test_what_cannot_be_judged_leaves_a_verdict_for_ci(compare, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    code, folder, err = compare(*SIDES, *WORDS, measure=raises(MeasurementError("a full disk")))
    assert code == 4 and "a full disk" in err
    verdict = read_json(folder / "verdict.json")
    assert (verdict["outcome"], verdict["exit_code"], verdict["sentence"]) == ("invalid", code, "a full disk")
    assert verdict["base"]["text"] == "page_size=16" and verdict["reproduce"].startswith("kvbench compare page_size")
    assert "a full disk" in ET.parse(folder / "junit.xml").find(".//error").get("message")
    assert "a full disk" in (tmp_path / "step.md").read_text()
    with monkeypatch.context() as patch:  # the verdict is shown though the pairs cannot be written
        patch.setattr(run, "write_pairs", Mock(side_effect=OSError(28, "No space left on device", "pairs.csv")))
        code, folder, err = compare(*SIDES, *WORDS, measure=lambda _: Verdict("compare", "fail", "it is slower"))
    assert code == 4 and "pairs.csv" in err and read_json(folder / "verdict.json")["sentence"] == "it is slower"
    make = builds._make_venv
    monkeypatch.setattr(builds, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repo = make_repo(tmp_path / "repo", {"serve.py": ""})
    how = ("--repo", str(repo), "--build-cmd", "false", "--serve-cmd", "{python} serve.py {port}")
    code, folder, err = compare("main", "HEAD", *WORDS, *how)
    verdict = read_json(folder / "verdict.json")
    assert (code, verdict["outcome"]) == (4, "invalid") and "false" in verdict["sentence"], err
    assert (verdict["base"]["name"], verdict["candidate"]["name"]) == ("main", "HEAD")


@pytest.mark.parametrize(
    ("error", "code"), [(Interrupted("SIGTERM"), 130), (OSError(28, "No space left on device"), 4)]
)
def test_an_interruption_and_a_full_disk_leave_a_folder_that_can_be_resumed(compare, monkeypatch, error, code):
    monkeypatch.setattr(PairedWorkload, "compile", Mock(side_effect=error))
    left, folder, said = compare(*SIDES, *WORDS, measure=EXECUTE)
    assert left == code and f"kvbench compare --resume results/compare/{folder.name}" in said
    assert read_json(folder / "manifest.json")["status"] == "incomplete"
    assert (folder / "verdict.json").exists() == (code == 4)


def test_bad_input_leaves_no_verdict_and_nothing_at_all_where_nothing_was_measured(compare, opens_nothing):
    refused = raises(UsageError("the URL does not serve"))
    assert compare(*SIDES, *WORDS, measure=refused)[:2] == (2, None)

    def unlike(comparison):
        path = comparison.folder.run("base", "tiny").load("paged-p16-c2", 1)
        write_load(path, "paged-p16-c2", (1.0, 1.0, 1.0))
        with pytest.raises(UsageError, match="being written"), comparison.folder.locked():
            pass
        raise UsageError("dtype differs")

    code, folder, err = compare(*SIDES, *WORDS, measure=unlike)
    assert code == 2 and "dtype differs" in err
    assert sorted(path.name for path in folder.iterdir()) == ["base", "manifest.json"]
    _, begun, _ = compare(*SIDES, *WORDS)
    assert compare("--resume", str(begun), measure=refused)[0] == 2 and begun.is_dir()  # it was there before
    opens_nothing()
    with CompareFolder(begun).locked():
        code, _, err = compare("--resume", str(begun))
    assert code == 2 and "another kvbench" in err


WIDE = 101.0  # throughput of a candidate whose pairs scatter too much to be judged


def end(comparison, pairs, stopped=None, candidate=100.0):
    """As if so many pairs had been measured."""
    for cell, side in itertools.product(comparison.state.cells, ("base", "candidate")):
        for pair in range(1, pairs + 1):
            noise = 1 + 0.001 * (pair * 7 % 5) + (candidate == WIDE) * 0.3 * ((pair + (side == "base")) % 2)
            values = ((candidate if side == "candidate" else 100.0) * noise, 100.0 * noise, 10.0)
            write_load(comparison.folder.load(cell, side, pair), cell.on(side), values)
    comparison.state = comparison.state.but(seconds=(30.0,) * pairs)
    return comparison.finish(stopped)


@pytest.mark.parametrize(
    ("pairs", "stopped", "candidate", "code"),
    [(10, None, 100.0, 0), (10, None, WIDE, 3), (8, "--max-minutes 1 were over", 50.0, 1)],
)
def test_resuming_a_finished_comparison_shows_its_verdict_and_opens_nothing(
    compare, opens_nothing, pairs, stopped, candidate, code
):
    left, folder, err = compare(*SIDES, *WORDS, measure=lambda each: end(each, pairs, stopped, candidate))
    assert left == code, err
    verdict = read_json(folder / "verdict.json")
    opens_nothing()
    assert compare("--resume", str(folder))[0] == code
    assert read_json(folder / "verdict.json") == verdict


class Machine:
    """In place of servers and loads: they take no real time, and the comparison's clock says that they took some.

    ``launch``, ``side`` [s]: a first launch; one side of a configuration in a pair. ``long``, ``invalid``: the numbers
    of the sides, in the order in which they run, that never end, and those that are no measurement.
    """

    STEP = 5.0

    def __init__(self, monkeypatch):
        self.launch, self.side, self.long, self.invalid = 0.0, 0.0, (), ()
        self.now, self.sides = 0.0, 0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        monkeypatch.setattr(run, "monotonic", lambda: self.now)
        monkeypatch.setattr(BuiltinTarget, "start", lambda target, settings, log: self.spend(self.launch, target.check))
        monkeypatch.setattr(run, "BlockRunner", self.runner)
        monkeypatch.setattr(run, "with_compared_requests", lambda folder, state, *_, **__: state)

    def spend(self, seconds, check):
        until = self.now + seconds
        while self.now < until:
            check()
            self.now = min(until, self.now + self.STEP)

    def runner(self, instrument):
        listener, folder, check = instrument.job.listener, instrument.job.folder, instrument.job.check

        def run_block(block):
            self.sides += 1
            listener.load_started(block.cells[0], block.repeat, 6)
            self.spend(1e6 if self.sides in self.long else self.side, check)
            listener.load_progress(1, 6, 0, self.side)
            reasons = ["another program ran"] if self.sides in self.invalid else []
            for cell in block.cells:
                path = folder.load(cell.cell_id, block.repeat)
                write_load(path, cell.cell_id, (100.0, 100.0, 10.0), valid=not reasons, invalid_reasons=reasons)

        return SimpleNamespace(run_block=run_block, failures=[])


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def timed(compare, machine):
    """``compare`` on ``Machine`` with one configuration: exit code, folder, verdict, output, seconds that it took."""

    def command(*words, **of):
        for name, value in of.items():
            setattr(machine, name, value)
        began = machine.now
        begin = () if "--resume" in words else (*SIDES, *WORDS, "-o", "sweep={}")
        code, folder, said = compare(*begin, *words, measure=EXECUTE)
        folder = folder or Path(words[words.index("--resume") + 1])
        return code, folder, read_json(folder / "verdict.json"), said, machine.now - began

    return command


def test_work_is_expected_to_take_its_longest_time_so_far_and_the_first_counts_only_alone():
    took = {"pair": [90.0, 30.0, 40.0], "launch": [5.0]}
    known = clock.Clock(took=took)
    assert [known.expected_s(work, 7.0) for work in ("pair", "launch", "unknown")] == [40.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("of", "ended_after", "pairs", "says"),
    [
        ({"launch": 40.0, "side": 60.0}, 80 + 240, 2, "after 2 of up to 10 pairs"),  # a third would end at 440
        ({"launch": 1e6}, 365, 0, "still being launched"),  # cut
        ({"launch": 200.0}, 200, 0, "still being launched"),  # a second would end at 400
        ({"launch": 100.0}, 200, 0, "after 0 of up to 10 pairs"),  # two launches more would end at 400
        ({"launch": 60.0, "side": 130.0}, 120 + 130, 0, "pair 1 was cut"),  # the other side would end at 380
        ({"side": 60.0, "long": (4,)}, 365, 1, "after 1 of up to 10 pairs: pair 2 was cut"),
        ({"launch": 40.0, "side": 60.0, "invalid": (3,)}, 320, 1, "pair 2 was cut"),  # not measured again
        ({"launch": 40.0, "side": 30.0, "invalid": (1, 3)}, 80 + 240, 2, "after 2 of"),  # pair 1 three times, and 2
        ({"side": 30.0, "invalid": range(99)}, 180, 0, None),  # given up in time, after three attempts
    ],
)
def test_nothing_begins_that_would_not_end_in_time_and_what_runs_on_is_cut(timed, of, ended_after, pairs, says):
    code, folder, verdict, said, took = timed("--max-minutes", "6", "--force", **of)
    assert (took, verdict["facts"]["pairs"]) == (ended_after, pairs), said
    assert read_json(folder / "manifest.json")["status"] == "complete"
    if says is None:
        assert (code, verdict["outcome"]) == (4, "invalid")
        return
    assert (code, verdict["outcome"]) == (3, "inconclusive") and says in verdict["sentence"]
    assert ("was cut" in verdict["sentence"]) == ("was cut" in says)
    assert verdict["sentence"].startswith("--max-minutes 6 were over ")
    assert [note for note in verdict["notes"] if note.startswith("go on with: ")]


def test_what_the_time_cut_is_gone_on_with_and_what_was_measured_is_kept(timed, machine):
    _, folder, verdict, *_ = timed("--max-minutes", "6", "--force", launch=100.0, side=90.0)
    (way,) = [note for note in verdict["notes"] if note.startswith("go on with: ")]
    words = shlex.split(way.removeprefix("go on with: "))[2:]
    assert words[-2:] == ["--max-minutes", "34"]  # 10 pairs of two launches each, which is all that is known
    *_, verdict, said, took = timed(*words)
    assert (verdict["facts"]["pairs"], took) == (10, 200 + 1800), said  # policy: one look, after 10
    code, folder, verdict, *_ = timed("--max-minutes", "9", "--force")
    assert (code, verdict["facts"]["pairs"]) == (3, 1)
    _, _, verdict, _, took = timed("--resume", str(folder))
    assert (verdict["facts"]["pairs"], took) == (10, 200 + 9 * 180)  # the first pair is not measured again
    *_, verdict, _, took = timed(launch=100.0, side=1000.0)
    assert (verdict["facts"]["pairs"], took) == (10, 20_200)  # no limit: everything


@pytest.mark.parametrize(
    ("of", "minutes", "done", "enough_for"),
    [
        ({"launch": 30.0}, 4, 0, 3),  # the launches alone, known before the first pair
        ({"launch": 1.0, "side": 90.0}, 6, 1, 2),  # though the others took half as long as the first
        ({"launch": 1.0, "side": 35.5}, 6, None, 0),  # 2 + 5 x 71 s: a fifth pair, which may pass
    ],
)
def test_too_little_time_for_any_verdict_is_refused_as_soon_as_it_is_known(
    compare, machine, of, minutes, done, enough_for
):
    vars(machine).update(of)
    words = ("--max-minutes", str(minutes))
    code, folder, said = compare(*SIDES, *WORDS, "-o", "sweep={}", *words, measure=EXECUTE)
    if done is None:
        assert code == 0 and "are enough for" not in said
        return
    assert code == 2 and f"--max-minutes {minutes} are enough for about {enough_for} pairs" in said
    assert "passes with fewer than 5 or fails with fewer than 7" in said and "--force" in said
    assert (folder is None) == (done == 0) and f"pair {done + 1} of" not in said
    if folder is not None:
        assert f"--resume {os.path.relpath(folder)}" in said and not (folder / "verdict.json").exists()
        assert compare("--resume", str(folder), "--max-minutes", "0.5", measure=EXECUTE)[0] == 2
        code, _, said = compare("--resume", str(folder), "--max-minutes", "0.5", "--force", measure=EXECUTE)
        assert code == 3 and "note: --max-minutes" in said
        assert compare("--resume", str(folder), measure=EXECUTE)[0] == 0


def test_calibrate_stores_the_noise_of_its_pairs_and_is_resumed_by_calibrate(compare, tmp_path):
    words = ("page_size=16", *WORDS, "--store", "noise", "--runner-class", "here", "--pairs", "6")
    code, folder, said = compare(*words, subcommand="calibrate", measure=lambda each: end(each, 2))
    assert code == 4 and "2 of 6 pairs" in said
    assert read_json(folder / "manifest.json")["reproduce"].startswith("kvbench dev calibrate page_size=16 --workload")
    code, _, said = compare("--resume", str(folder))
    assert code == 2 and "kvbench dev calibrate" in said
    code, _, said = compare(*words, subcommand="calibrate", measure=lambda each: end(each, 6))
    assert code == 0 and read_json(tmp_path / "noise" / "here.json")["pairs"] == 6, said


# --- runs that were measured before


def test_stored_runs_are_paired_by_what_they_measured(compare, tmp_path, swept):
    runs = [stored_run(tmp_path / n, swept, [v] * 8, cells="contiguous") for n, v in (("a", 100.0), ("b", 80.0))]
    code, folder, err = compare(*(f"run:{each.name}" for each in runs))  # with --only
    assert code == 1, err
    verdict, kept = read_json(folder / "verdict.json"), read_json(folder / "manifest.json")
    assert "order was not random" in verdict["sentence"] and verdict["facts"]["pairs"] == 8
    assert len(kept["cells"]) == 1 and kept["options"]["base"] == f"run:{tmp_path / 'a'}"
    for port, value in ((8001, 100.0), (8002, 80.0)):  # of running servers
        of = dataclasses.replace(swept, engine={"target": f"http://127.0.0.1:{port}"}, sweep={})
        stored_run(tmp_path / str(port), of, [value] * 8)
    code, folder, err = compare("run:8001", "run:8002")
    assert code == 1, err
    (cell,) = read_json(folder / "manifest.json")["cells"]
    assert (cell["name"], cell["base"], cell["candidate"]) == ("tiny/target-c2", "target-c2", "target-c2")


def test_stored_runs_that_are_no_measurement_or_of_other_servers_or_requests_are_not_judged(compare, tmp_path, swept):
    def run(name, values=(100.0,) * 4, **more):
        return str(stored_run(tmp_path / name, swept, values, **more))

    empty, good, bad, part = run("empty", []), run("a"), run("b", invalid=(1,)), run("c", invalid=(3,))
    code, folder, _ = compare(empty, empty)
    missing = f"{empty}/cells/paged-p16-c2/loads/1/done.json"
    assert code == 5 and missing in read_json(folder / "verdict.json")["sentence"]
    code, _, err = compare(good, good, *WORDS)
    assert code == 2 and "--workload" in err
    code, folder, err = compare(good, bad)
    assert code == 4 and "repeat 1 of " in err and "others used the machine" in err
    assert read_json(folder / "verdict.json")["outcome"] == "invalid"
    code, folder, err = compare(good, part)
    assert code == 3 and any("repeat 3 of " in note for note in read_json(folder / "verdict.json")["notes"]), err
    one, two = (run(dtype, resolved={"dtype": dtype}) for dtype in ("float32", "bfloat16"))
    for each in (one, two):
        for path in Path(each).glob("cells/*/loads/2/done.json"):
            write_json(path, read_json(path) | {"requests_sha256": each})
    code, folder, err = compare(one, two)
    assert (code, folder) == (2, None)
    assert "dtype (float32 and bfloat16)" in err and "requests of tiny/" in err
    code, folder, _ = compare(one, two, "--force")
    assert code == 3 and any("dtype" in note for note in read_json(folder / "verdict.json")["notes"])
