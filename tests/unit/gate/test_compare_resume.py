"""What ``kvbench compare`` keeps of a comparison, how it is gone on with, and what is left where it cannot be judged.

No server is launched: measuring is replaced, everything before and after it is real.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json, write_json
from kvbench.gate.compare import environments, lanes
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.manifest import pinned, reproduce_command
from kvbench.gate.compare.side_text import parse_side
from kvbench.gate.compare.sides import open_side
from kvbench.gate.verdict.verdict import Verdict
from kvbench.workload.file import load_workload
from tests.support.compare_folders import write_load
from tests.support.git_repo import make_repo
from tests.support.sweep_parts import TINY

SIDES = ("page_size=16", "page_size=32")
WORDS = ("--workload", "tiny.yaml", "--policy", "gates.yaml", "--profile", "cpu")


def test_it_is_gone_on_with_by_what_it_began_with_whatever_the_files_hold_now(compare, tmp_path, monkeypatch):
    code, folder, err = compare(*SIDES, *WORDS)
    assert code == 130, err
    changed = TINY | {"load": TINY["load"] | {"num_requests": 60}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "gates.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, other, err = compare("--resume", str(folder))
    assert (code, other) == (130, None), err
    (note,) = [note for note in read_json(folder / "manifest.json")["notes"] if "is not what it was" in note]
    assert note.startswith(str(tmp_path / "tiny.yaml"))
    first, second = compare.begun
    assert [lane.sides["base"].workload.load_points for lane in first.lanes] == [
        lane.sides["base"].workload.load_points for lane in second.lanes
    ]
    assert second.lanes[0].sides["candidate"].workload.engine["page_size"] == 32
    assert second.policy.timing == first.policy.timing and second.pairs == 10
    assert Path(second.manifest["options"]["workloads"][0]) == tmp_path / "tiny.yaml"
    assert "--policy gates.yaml" in second.manifest["reproduce"]  # as it was given
    assert "page_size=16 page_size=32 " in second.manifest["reproduce"]


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("git", {"sha": "2" * 40, "short_sha": "2222222"}, "commit (1111111 then, 2222222 now)"),
        ("cpu", {"model": "another"}, "processor model (a processor then, another now)"),
        ("versions", {"torch": "3"}, "torch (2 then, 3 now)"),
        ("gpus", [{"name": "another GPU", "driver_version": "1"}], "GPUs (a GPU with driver 1 then, another GPU"),
    ],
)
def test_other_conditions_need_force_which_is_kept(compare, here, section, change, said):
    _, folder, _ = compare(*SIDES, *WORDS)
    here[section] = {**here[section], **change} if isinstance(change, dict) else change
    code, _, err = compare("--resume", str(folder))
    assert code == 2 and said in err and "--force" in err
    assert compare("--resume", str(folder), "--force")[0] == 130
    assert len(compare.begun) == 2 and compare.begun[-1].force
    manifest = read_json(folder / "manifest.json")
    assert said in " ".join(manifest["notes"]) and manifest["resumed"][0]["differences"]
    # What is printed to go on with has no --force: it is kept.
    assert compare(*shlex.split(compare.begun[-1].resume_command())[2:])[0] == 130
    assert compare.begun[-1].force


def test_a_build_that_is_another_one_needs_force(compare):
    _, folder, _ = compare(*SIDES, *WORDS)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"base": manifest["base"] | {"environment": "before"}})
    code, _, err = compare("--resume", str(folder))
    assert code == 2 and "base has another environment than before" in err
    write_json(folder / "manifest.json", manifest | {"candidate": manifest["candidate"] | {"changes": "before"}})
    code, _, err = compare("--resume", str(folder))
    assert code == 2 and "candidate is a working tree whose files have changed" in err


def test_other_cells_are_refused_whatever_is_forced(compare):
    _, folder, _ = compare(*SIDES, *WORDS)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"cells": manifest["cells"][:1]})
    code, _, err = compare("--resume", str(folder), "--force")
    assert code == 2 and "other cells" in err and len(compare.begun) == 1


def test_two_at_once_are_refused_before_anything_is_opened(compare, monkeypatch):
    _, folder, _ = compare(*SIDES, *WORDS)
    monkeypatch.setattr(
        "kvbench.gate.compare.command.open_lanes", lambda *_: pytest.fail("opened beside another kvbench")
    )
    with CompareFolder(folder).run_lock():
        code, _, err = compare("--resume", str(folder))
    assert code == 2 and "is being written by another kvbench" in err


def test_the_folder_is_locked_while_it_is_measured_and_free_afterwards(compare):
    def measure(comparison):
        with pytest.raises(UsageError, match="being written"), comparison.folder.run_lock():
            pass

    _, folder, _ = compare(*SIDES, *WORDS, measure=measure)
    with CompareFolder(folder).run_lock():
        pass


def test_what_cannot_be_judged_leaves_a_verdict_for_ci(compare, monkeypatch, tmp_path):
    error, code = MeasurementError("a full disk"), 4
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))

    def fails(comparison):
        raise error

    left, folder, err = compare(*SIDES, *WORDS, measure=fails)
    assert left == code and str(error) in err
    verdict = read_json(folder / "verdict.json")
    assert (verdict["outcome"], verdict["exit_code"], verdict["sentence"]) == ("invalid", code, str(error))
    assert verdict["base"]["text"] == "page_size=16" and verdict["reproduce"].startswith("kvbench compare page_size")
    assert str(error) in ET.parse(folder / "junit.xml").find(".//error").get("message")
    assert str(error) in (tmp_path / "step.md").read_text()


def test_bad_input_leaves_no_verdict_and_nothing_at_all_where_nothing_was_measured(compare):
    def refused(comparison):
        raise UsageError("the URL does not serve")

    assert compare(*SIDES, *WORDS, measure=refused)[:2] == (2, None)

    def unlike(comparison):
        path = comparison.folder.run("base", "tiny").load("paged-p16-c2", 1)
        write_load(path, "paged-p16-c2", (1.0, 1.0, 1.0))
        raise UsageError("dtype differs")

    code, folder, err = compare(*SIDES, *WORDS, measure=unlike)
    assert code == 2 and "dtype differs" in err
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "base", "manifest.json"]
    _, begun, _ = compare(*SIDES, *WORDS)
    assert compare("--resume", str(begun), measure=refused)[0] == 2 and begun.is_dir()  # it was there before


WIDE = 101.0  # throughput of a candidate whose pairs scatter too much to be judged


def end(comparison, pairs, stopped=None, candidate=100.0):
    """As if so many pairs had been measured."""
    for cell, side in itertools.product(comparison.manifest["cells"], ("base", "candidate")):
        for pair in range(1, pairs + 1):
            path = comparison.folder.run(side, cell["workload"]).load(cell[side], pair)
            noise = 1 + 0.001 * (pair * 7 % 5) + (candidate == WIDE) * 0.3 * ((pair + (side == "base")) % 2)
            write_load(path, cell[side], ((candidate if side == "candidate" else 100.0) * noise, 100.0 * noise, 10.0))
    comparison.manifest["seconds"] = [30.0] * pairs
    return comparison._conclude(stopped)


@pytest.mark.parametrize(
    ("pairs", "stopped", "candidate", "code"),
    [(10, None, 50.0, 1), (10, None, 100.0, 0), (10, None, WIDE, 3), (8, "--max-minutes 1 were over", 50.0, 1)],
)
def test_going_on_with_a_finished_comparison_shows_its_verdict_and_opens_nothing(
    compare, monkeypatch, pairs, stopped, candidate, code
):
    left, folder, err = compare(*SIDES, *WORDS, measure=lambda each: end(each, pairs, stopped, candidate))
    assert left == code, err
    verdict = read_json(folder / "verdict.json")
    monkeypatch.setattr(
        "kvbench.gate.compare.command.open_lanes", lambda *_: pytest.fail("opened though it is finished")
    )
    assert compare("--resume", str(folder))[0] == code
    assert read_json(folder / "verdict.json") == verdict


def test_a_comparison_that_the_clock_ended_says_so_first_and_how_it_goes_on(compare):
    stopped = "--max-minutes 1 were over after 2 of up to 10 pairs"
    code, folder, _ = compare(*SIDES, *WORDS, measure=lambda each: end(each, 2, stopped))
    verdict = read_json(folder / "verdict.json")
    assert (code, verdict["exit_code"]) == (3, 3) and verdict["sentence"].startswith(f"{stopped}. ")
    (way,) = [note for note in verdict["notes"] if note.startswith("go on with: ")]
    words = shlex.split(way.removeprefix("go on with: "))
    assert words == ["kvbench", "compare", "--resume", f"results/compare/{folder.name}", "--max-minutes", "4"]
    assert compare(*words[2:])[0] == 130 and len(compare.begun) == 1  # it is not finished


def test_what_cannot_be_changed_is_called_as_it_was_given(compare):
    _, folder, _ = compare(*SIDES, *WORDS)
    for words, name in ((WORDS[:2], "--workload"), (("-o", "seed=4"), "-o"), (SIDES, "BASE")):
        code, _, err = compare(*words, "--resume", str(folder))
        assert code == 2 and f"error: {name} cannot change" in err


def test_a_build_that_fails_leaves_a_verdict_for_ci(compare, tmp_path, monkeypatch):
    make = environments._make_venv
    monkeypatch.setattr(environments, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repo = make_repo(tmp_path / "repo", {"serve.py": ""})
    how = ("--repo", str(repo), "--build-cmd", "false", "--serve-cmd", "{python} serve.py {port}")
    code, folder, err = compare("main", "HEAD", *WORDS, *how)
    assert code == 4, err
    verdict = read_json(folder / "verdict.json")
    assert verdict["outcome"] == "invalid" and "false" in verdict["sentence"]
    assert (verdict["base"]["name"], verdict["candidate"]["name"]) == ("main", "HEAD")


def test_the_verdict_is_shown_though_it_cannot_be_written(compare, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device", "pairs.csv")

    monkeypatch.setattr("kvbench.gate.compare.command.write_pairs", no_room)
    shown = []
    monkeypatch.setattr(
        "kvbench.gate.compare.command.print_verdict", lambda verdict, console: shown.append(verdict.sentence)
    )
    code, _, err = compare(*SIDES, *WORDS, measure=lambda _: Verdict("compare", "fail", "it is slower"))
    assert code == 4 and "free some space" in err and shown == ["it is slower"]


@pytest.fixture
def workload(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"sweep": {}}))
    return load_workload(tmp_path / "tiny.yaml", profile="cpu")


def test_a_side_is_kept_in_a_way_that_means_one_thing(tmp_path, workload, monkeypatch):
    """Of texts that need a prefix it is kept in the command, too."""
    monkeypatch.chdir(tmp_path)
    for text, kept, shown in (
        ("page_size=16", "set:page_size=16", "page_size=16"),
        (f"cmd:{sys.executable}", f"cmd:{sys.executable}", f"cmd:{sys.executable}"),
        ("http://127.0.0.1:9", "url:http://127.0.0.1:9", "http://127.0.0.1:9"),
    ):
        side = open_side(parse_side(text), workload, {})
        assert pinned(side) == kept
        assert parse_side(kept).text == side.side.text
        assert reproduce_command({}, {"base": side, "candidate": side}, "compare").split() == [
            "kvbench", "compare", shown, shown,
        ]  # fmt: skip


class Opened:
    """A side whose launches are counted, and can fail."""

    name, needs_first_launch, build = "cmd", True, None

    def __init__(self, fails):
        self.fails, self.launched = fails, []

    def first_launch(self, settings, log):
        self.launched.append(settings)
        if self.fails:
            raise MeasurementError("the server ended with code 1")


def test_a_first_launch_that_fails_is_left_to_the_pairs(tmp_path, workload):
    designs = lanes.make_design(workload.engine, {"layout": ["contiguous"]}, workload.load_points, "one_at_a_time")
    matches = lanes.match_designs("tiny", designs, designs)
    for fails in (True, False):
        opened, said = {side: Opened(fails) for side in ("base", "candidate")}, []
        lanes.Lane("tiny", opened, matches, {}).warm(tmp_path, said.append)
        for side in opened.values():  # each configuration: what is swept compiles, too
            assert side.launched == [match.base.settings for match in matches] and len(side.launched) == 2
        assert sum("ended with code 1" in line for line in said) == (4 if fails else 0)
    unused = {side: Opened(False) for side in ("base", "candidate")}
    lanes.Lane("tiny", unused, (), {}).warm(tmp_path, said.append)
    assert not unused["base"].launched


def test_a_build_is_kept_as_its_commit(tmp_path, workload, monkeypatch):
    make = environments._make_venv
    monkeypatch.setattr(environments, "_make_venv", lambda env, log, pip: make(env, log, pip=False))
    repo = make_repo(tmp_path / "other", {"setup.py": "", "serve.py": ""})
    options = {"repo": repo, "serve_cmd": "{python} serve.py {port}"}
    with Builds(tmp_path / "b", build_cmd="true") as builds:
        clean = open_side(parse_side("main", repo), workload, options, builds)
        assert pinned(clean) == clean.build.commit.sha[:12]
        (repo / "serve.py").write_text("changed")
        changed = open_side(parse_side(".", repo), workload, options, builds)
        assert pinned(changed) == "ref:."
