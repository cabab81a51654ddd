"""The folder of ``kvbench load``: incomplete from its first moment, complete at the end, and nobody else's."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from kvbench.common.errors import UsageError
from kvbench.loadtest.folder import METRICS, open_folder
from kvbench.runs.work import work_in


@contextmanager
def opened(path, manifest, *, resume):
    path.mkdir(parents=True, exist_ok=True)
    with work_in(path, "", print):
        yield open_folder(path, manifest, resume=resume)


def manifest(**more):
    same = {
        "workload": {"load": {"num_requests": 4}},
        "load": {"load_id": "c2"},
        "target": {"url": "u"},
        "search": None,
    }
    return (
        {
            "kind": "load",
            "status": "incomplete",
            "git": {"sha": "1", "dirty": False},
            "versions": {},
            "cpu": {},
            "gpus": [],
        }
        | same
        | more
    )


def stored(path):
    return json.loads((path / "manifest.json").read_text())


def test_a_folder_is_incomplete_until_it_is_finished(tmp_path):
    path = tmp_path / "new" / "out"
    with opened(path, manifest(), resume=False) as folder:
        assert stored(path)["status"] == "incomplete" and not folder.resumed
        folder.finish(valid=True)
        assert stored(path)["status"] == "complete" and stored(path)["ended"] and stored(path)["valid"]


def test_a_failure_leaves_it_incomplete_and_resume_goes_on(tmp_path):
    with pytest.raises(ZeroDivisionError), opened(tmp_path / "out", manifest(), resume=False):
        raise ZeroDivisionError
    assert stored(tmp_path / "out")["status"] == "incomplete"
    with opened(tmp_path / "out", manifest(), resume=True) as folder:
        assert folder.resumed


def test_a_folder_that_holds_something_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"is not empty \(it holds thesis.txt\)"),
        opened(tmp_path, manifest(), resume=False),
    ):
        pass
    with pytest.raises(UsageError, match="is not empty"), opened(tmp_path, manifest(), resume=True):
        pass  # --resume is no way to write into another's folder
    assert sorted(p.name for p in tmp_path.iterdir()) in (["thesis.txt"], [".lock", "thesis.txt"])
    (tmp_path / "manifest.json").write_text('{"kind": "sweep"}')
    with pytest.raises(UsageError, match="is not the folder of a load"), opened(tmp_path, manifest(), resume=True):
        pass


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("workload", {"load": {"num_requests": 5}}, "workload.load.num_requests"),
        ("target", {"url": "v"}, "target.url"),
        ("load", {"load_id": "c3"}, "load.load_id"),
        ("search", {"slo": "p95_ttft<=1ms"}, "search"),
    ],
)
def test_another_load_is_not_resumed(tmp_path, key, value, named):
    with opened(tmp_path / "out", manifest(), resume=False):
        pass
    with (
        pytest.raises(UsageError, match=f"differs in {named}"),
        opened(tmp_path / "out", manifest(**{key: value}), resume=True),
    ):
        pass


def test_a_load_is_not_resumed_by_another_number_of_clients(tmp_path):
    alone, three = ({"processes": None, "workers": n} for n in (None, 3))
    with opened(tmp_path / "out", manifest(sharing=three), resume=False):
        pass
    said = "was begun with --master --expect-workers 3, and this command is without --master or --processes"
    with pytest.raises(UsageError, match=said), opened(tmp_path / "out", manifest(sharing=alone), resume=True):
        pass
    with opened(tmp_path / "out", manifest(sharing=three), resume=True) as folder:
        assert folder.resumed
    two = alone | {"processes": 2}
    with (
        pytest.raises(UsageError, match="--processes 2: give"),
        opened(folder.path, manifest(sharing=two), resume=True),
    ):
        pass
    with opened(tmp_path / "old", manifest(), resume=False):
        pass  # a manifest that does not tell
    with opened(tmp_path / "old", manifest(sharing=two), resume=True) as folder:
        assert folder.resumed


def test_of_many_differences_a_few_are_named(tmp_path):
    with opened(tmp_path / "out", manifest(), resume=False):
        pass
    other = manifest(workload={"load": dict.fromkeys("abcdefgh", 1)})
    said = r"differs in workload.load.a, workload.load.b, workload.load.c and 6 more: give"
    with pytest.raises(UsageError, match=said), opened(tmp_path / "out", other, resume=True):
        pass


def test_runs_of_other_conditions_are_not_mixed_but_a_load_that_left_nothing_is_begun_anew(tmp_path):
    later = manifest(git={"sha": "2", "short_sha": "2", "dirty": False})
    with opened(tmp_path / "out", manifest(), resume=False) as folder:
        pass
    (folder.path / "requests-0123abcd.jsonl").write_text("of the first time")
    with opened(tmp_path / "out", later | {"command": ["again"], "started": "2026"}, resume=True):
        told = stored(tmp_path / "out")  # nothing of the first time is left, so it is told of this one
        assert told["git"]["sha"] == "2" and told["command"] == ["again"] and told["started"] == "2026"
        assert told["status"] == "incomplete" and not list(folder.path.glob("requests-*"))
    with opened(tmp_path / "out", manifest(), resume=True):
        assert stored(tmp_path / "out")["git"]["sha"] == "1"
    (folder.run(1, "r4") / METRICS).write_text("{}")
    with (
        pytest.raises(UsageError, match="begun under other conditions than now: commit"),
        opened(tmp_path / "out", later, resume=True),
    ):
        pass
    with opened(tmp_path / "out", manifest(command=["again"]), resume=True):
        assert "command" not in stored(tmp_path / "out")  # its finished run is of the first time
    with opened(tmp_path / "out", manifest(), resume=True) as folder:
        folder.finish()
    with opened(tmp_path / "out", later, resume=True) as folder:
        assert folder.manifest["status"] == "complete" and stored(tmp_path / "out")["git"]["sha"] == "1"


def test_an_invalid_load_is_put_aside_whole_and_a_new_one_begun(tmp_path):
    path = tmp_path / "out"
    for number in (1, 2):
        with opened(path, manifest(started=str(number)), resume=number > 1) as folder:
            (path / METRICS).write_text(str(number))
            (path / "calibration.json").write_text("{}")
            folder.finish(valid=False)
    assert (path / "invalid-1" / METRICS).read_text() == "1" and stored(path / "invalid-1")["started"] == "1"
    with opened(path, manifest(started="3"), resume=True) as folder:
        assert folder.aside == path / "invalid-2" and not folder.resumed
        assert sorted(p.name for p in path.iterdir()) == [".lock", "invalid-1", "invalid-2", "manifest.json"]
        assert (stored(path)["started"], stored(path)["status"]) == ("3", "incomplete")
        folder.finish(valid=True)
    assert sorted(p.name for p in folder.aside.iterdir()) == ["calibration.json", "manifest.json", METRICS]
    with opened(path, manifest(), resume=True) as folder:
        assert folder.resumed and folder.aside is None  # a valid one is not measured again


def test_putting_aside_that_was_cut_short_is_gone_on_with(tmp_path):
    path = tmp_path / "out"
    with opened(path, manifest(), resume=False) as folder:
        (path / METRICS).write_text("1")
        folder.finish(valid=False)
    (path / ".invalid").mkdir()
    (path / ".invalid" / "load.json").write_text("moved before the end")
    with opened(path, manifest(), resume=True) as folder:
        assert {p.name for p in folder.aside.iterdir()} == {"load.json", METRICS, "manifest.json"}


def test_a_finished_folder_holds_nothing_that_nobody_needs(tmp_path):
    with opened(tmp_path / "out", manifest(), resume=False) as folder:
        (folder.path / "client.log").write_text("")
        run = folder.run(1, "r4")
        (run / "client.log").write_text("it said something")
        folder.finish(valid=True)
    assert sorted(p.name for p in folder.path.iterdir()) == [".lock", "manifest.json", "runs"]
    assert (run / "client.log").read_text() == "it said something"


def test_a_search_of_which_no_run_told_anything_is_begun_anew_under_any_conditions(tmp_path):
    later = manifest(git={"sha": "2", "short_sha": "2", "dirty": False})
    with opened(tmp_path / "out", manifest(), resume=False) as folder:
        (folder.run(1, "r4") / METRICS).write_text('{"trial": {"cause": "invalid"}}')
    with opened(tmp_path / "out", later, resume=True) as folder:
        assert stored(folder.path)["git"]["sha"] == "2" and list(folder.finished_runs()) == []
        (folder.run(1, "r4") / METRICS).write_text('{"trial": {"cause": null}}')
    third = manifest(git={"sha": "3", "short_sha": "3", "dirty": False})
    with pytest.raises(UsageError, match="other conditions"), opened(tmp_path / "out", third, resume=True):
        pass


def test_two_commands_do_not_share_a_folder(tmp_path):
    with (
        opened(tmp_path, manifest(), resume=False),
        pytest.raises(UsageError, match="being written by another"),
        opened(tmp_path, manifest(), resume=True),
    ):
        pass


def test_a_run_that_was_cut_short_leaves_no_trace_in_the_next_one(tmp_path):
    with opened(tmp_path / "out", manifest(), resume=False) as folder:
        first = folder.run(1, "r4")
        (first / METRICS).write_text('{"a": 1}')
        (folder.run(2, "r8") / "requests.parquet").write_text("half")
        second = folder.run(2, "r2")
        assert list(second.iterdir()) == [] and not (second.parent / "02-r8").exists()
        assert [(path, kept) for path, kept in folder.finished_runs()] == [(first, {"a": 1})]
