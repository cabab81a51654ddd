"""The folder of ``kvbench load``: incomplete from its first moment, complete at the end, and nobody else's."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from kvbench.common.errors import UsageError
from kvbench.runs.work import work_in
from kvbench.sweep.load_folder import METRICS, LoadManifest, open_folder


@contextmanager
def opened(path, manifest=None, *, resume=True):
    path.mkdir(parents=True, exist_ok=True)
    with work_in(path, "", print):
        yield open_folder(path, manifest or load_manifest(), resume=resume)


@pytest.fixture
def out(tmp_path):
    """The folder of a load that was begun."""
    with opened(tmp_path / "new" / "out", resume=False):
        pass
    return tmp_path / "new" / "out"


def load_manifest(sha="1", **more):
    conditions = {"git": {"sha": sha, "short_sha": sha, "dirty": False}, "versions": {}, "cpu": {}, "gpus": []}
    same = {"workload": {"load": {"num_requests": 4}}, "load": {"load_id": "c2"}, "target": {"url": "u"}}
    sharing = {"processes": None, "workers": None}
    known = {"kind": "load", "status": "incomplete", "search": None, "sharing": sharing}
    return LoadManifest(**known | conditions | same | more)


def new_run(folder, number, name, kept):
    path = folder.run(number, name)
    path.mkdir(parents=True)
    (path / METRICS).write_text(kept)
    return path


def stored(path):
    return json.loads((path / "manifest.json").read_text())


def test_a_folder_is_incomplete_until_it_is_finished(out):
    assert stored(out)["status"] == "incomplete"
    with pytest.raises(ZeroDivisionError), opened(out):
        raise ZeroDivisionError
    assert stored(out)["status"] == "incomplete"
    with opened(out) as folder:
        assert not folder.finished
        log = folder.run(1, "r4") / "client.log"
        log.parent.mkdir(parents=True)
        log.write_text("it said something")
        (out / "client.log").write_text("")
        folder.finish(valid=True)
    assert (stored(out)["status"], stored(out)["valid"]) == ("complete", True) and stored(out)["ended"]
    assert [p.relative_to(out).as_posix() for p in out.rglob("client.log")] == ["runs/01-r4/client.log"]  # not empty
    with opened(out, load_manifest("2")) as folder:
        assert folder.finished and stored(out)["git"]["sha"] == "1"


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_holds_something_is_refused_and_left_as_it_was(tmp_path, resume):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.txt"), opened(tmp_path, resume=resume):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {"thesis.txt"}
    (tmp_path / "manifest.json").write_text('{"kind": "sweep"}')
    with pytest.raises(UsageError, match=str(tmp_path)), opened(tmp_path, resume=resume):
        pass


def test_a_load_that_is_not_finished_is_begun_anew_under_any_conditions_and_removes_only_its_own_files(out):
    own = ("metrics.json", "requests-0123abcd.jsonl", "requests-1.parquet", "runs/01-r4/load.json")
    for name in (*own, "calibration.json", "notes.txt", "invalid-1/metrics.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"metrics": {}}')
    (out / "elsewhere").symlink_to(out.parent)
    with opened(out, load_manifest("2", command=["again"], started="2026")):
        left = {p.name for p in out.iterdir()} - {".lock"}
    assert left == {"manifest.json", "calibration.json", "notes.txt", "invalid-1", "elsewhere"}
    found = stored(out)
    assert (found["git"]["sha"], found["command"], found["started"]) == ("2", ["again"], "2026")


@pytest.mark.parametrize("found", ["refused", "wrong_answers", None])
def test_a_finding_is_not_measured_away(out, found):
    with opened(out) as folder:
        folder.finish(valid=False, **{found: "said"} if found else {})
    with opened(out) as folder:
        assert folder.finished == bool(found)


def test_runs_are_read_in_the_order_of_their_numbers_also_where_the_client_was_the_limit(out):
    names, trial = ["02-r1", "11-r4", "100-r2"], {"rate": 4, "met": None, "cause": "the client was the limit"}
    for name in names:
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / METRICS).write_text('{"metrics": {}}')
    (out / "runs" / "11-r4" / METRICS).write_text(json.dumps({"valid": False, "metrics": {}, "trial": trial}))
    with opened(out) as folder:
        assert [path.name for path, _ in folder.finished_runs()] == names


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("workload", {"load": {"num_requests": 5}}, "workload.load.num_requests"),
        ("workload", {"load": dict.fromkeys("abcdefgh", 1)}, "workload.load.c and 6 more"),
        ("target", {"url": "v"}, "target.url"),
        ("search", {"slo": "p95_ttft<=1ms"}, "search"),
        ("sharing", {"processes": None, "workers": 3}, "sharing.workers"),
    ],
)
def test_another_load_is_not_resumed(out, key, value, named):
    with pytest.raises(UsageError, match=named), opened(out, load_manifest(**{key: value})):
        pass


def test_an_invalid_load_is_measured_again(out):
    with opened(out) as folder:
        (out / METRICS).write_text('{"metrics": {}}')
        folder.finish(valid=False)
    with opened(out, load_manifest(started="2")) as folder:
        assert not folder.finished and not (out / METRICS).exists()
        assert (stored(out)["started"], stored(out)["status"]) == ("2", "incomplete")


def test_a_search_goes_on_from_valid_runs_under_the_conditions_they_were_measured_in(out):
    with opened(out) as folder:
        new_run(folder, 1, "r4", '{"metrics": {}, "trial": {"rate": 4, "met": null, "cause": "invalid"}}')
    with opened(out, load_manifest("2")) as folder:
        assert stored(out)["git"]["sha"] == "2" and list(folder.finished_runs()) == []
        new_run(folder, 1, "r4", '{"valid": true, "metrics": {}}')
    with pytest.raises(UsageError, match="commit"), opened(out, load_manifest("3")):
        pass
    with opened(out, load_manifest("2", command=["again"])) as folder:
        assert "command" not in stored(out)  # its finished run is of the first time
        assert [kept.valid for _, kept in folder.finished_runs()] == [True]


def test_two_commands_do_not_share_a_folder(out):
    with opened(out), pytest.raises(UsageError, match=str(out)), opened(out):
        pass


def test_a_run_that_was_cut_short_leaves_no_trace_in_the_next_one(out):
    with opened(out) as folder:
        first = new_run(folder, 1, "r4", '{"repeat": 1, "metrics": {}}')
        half = folder.run(2, "r8")
        for path in (half, half.with_name("failed-2")):
            path.mkdir()
        second = folder.run(2, "r2")
        assert [path.name for path in second.parent.iterdir()] == ["01-r4"]
        assert [(path, kept.repeat) for path, kept in folder.finished_runs()] == [(first, 1)]
