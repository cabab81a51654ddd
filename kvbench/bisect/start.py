"""Makes the search that the options ask for: both ends, the workload and the metric, from refs or stored results."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.bisect.history import INSTALL, make_package_repository, versions_between
from kvbench.bisect.options import BisectOptions
from kvbench.bisect.search import STATE, Search, SearchState
from kvbench.bisect.sentences import say
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.files import read_json, utc_now
from kvbench.common.packages import find_file
from kvbench.common.records import read_record
from kvbench.gate.compare.builds import WORKING_TREE, find_commit
from kvbench.gate.compare.folder import CompareFolder, GivenWorkload
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.counters import LOCK
from kvbench.gate.counters.lock import read_lock
from kvbench.metrics.definitions import THROUGHPUT, figure
from kvbench.runs.folder import MANIFEST, RunFolder, create_run
from kvbench.workload.file import Workload, load_workload, resolve

_OF_AN_EXECUTION = ("resume", "max_minutes")


@dataclass(frozen=True)
class Ends:
    """Both ends of the range as refs, and what a stored result says should be looked for."""

    good: str
    bad: str
    request: CompareRequest
    workloads: tuple[Workload, ...] = ()
    by: str = "timing"
    metric: str | None = None


def start(options: BisectOptions) -> int:
    """Runs ``kvbench bisect``. Raises UsageError for what cannot be searched."""
    limit_s = (options.max_minutes or math.inf) * 60
    if options.resume is not None:
        if changing := [name for name in options.given if name not in _OF_AN_EXECUTION]:
            raise UsageError(say("start.fixed", option=options.typed(changing[0]), folder=options.resume))
        state = read_record(SearchState, options.resume / STATE, say("start.no_search"))
        return Search(options.resume, state, Console(), limit_s).run()
    ends = _ends(options)
    if not ends.workloads and ends.by != "counters":
        raise UsageError(say("start.no_workload"))
    if ends.by == "timing":
        with as_usage_error():
            figure(ends.metric or THROUGHPUT)
    if options.package:
        return _search_package(options, ends, limit_s)
    repo = ends.request.repository
    if WORKING_TREE in (ends.good, ends.bad):
        raise UsageError(say("start.working_tree"))
    good, bad = (find_commit(repo, ref) for ref in (ends.good, ends.bad))
    skipped = tuple(find_commit(repo, ref).sha for ref in options.skip)
    if good.sha == bad.sha:
        raise UsageError(say("start.same", good=ends.good, bad=ends.bad, sha=good.sha[:10]))
    folder = create_run(options.output_dir, "bisect", bad.sha[:7]).path
    return _search(options, ends, folder, good.repo, good.sha, bad.sha, limit_s, skipped)


def _search_package(options: BisectOptions, ends: Ends, limit_s: float) -> int:
    """Searches the versions of a package, which become commits of a repository in the search's folder."""
    versions = versions_between(str(options.package), ends.good, ends.bad)
    folder = create_run(options.output_dir, "bisect", str(options.package)).path
    repo = (folder / "versions").resolve()
    shas = make_package_repository(repo, str(options.package), versions)
    command = options.build_cmd or INSTALL
    ends = replace(ends, request=ends.request.model_copy(update={"repo": repo, "build_cmd": command}))
    return _search(options, ends, folder, repo, shas[versions[0]], shas[versions[-1]], limit_s, ())


def _search(
    options: BisectOptions, ends: Ends, folder: Path, repo: Path, good: str, bad: str, limit_s: float,
    skipped: tuple[str, ...],
) -> int:  # fmt: skip
    state = SearchState(
        request=ends.request.for_any_folder("", ""),
        by=ends.by,
        repo=repo,
        good=good,
        bad=bad,
        metric=ends.metric or (THROUGHPUT if ends.by == "timing" else None),
        first_parent=options.first_parent,
        paths=options.paths,
        skipped=skipped,
        given=tuple(GivenWorkload(workload=dict(w.resolved), profile=w.profile) for w in ends.workloads),
        reproduce=shlex.join(["kvbench", *sys.argv[1:]]),
        started=utc_now(),
    )
    return Search(folder, state, Console(), limit_s).run()


def _ends(options: BisectOptions) -> Ends:
    """Reads both ends. Raises UsageError where one is missing, or a stored result has nothing to search for."""
    names = [field.name for field in fields(options) if field.name in CompareRequest.model_fields]
    request = CompareRequest(**{name: getattr(options, name) for name in names if name not in _OF_AN_EXECUTION})
    given = {"profile": options.profile, "overrides": options.overrides, "seed": options.seed}
    workloads = tuple(load_workload(path, **given) for path in options.workloads)
    if options.good and not options.bad:
        return _ends_of_verdict(options, request, Path(options.good))
    if not options.good or not options.bad:
        raise UsageError(say("start.two_ends"))
    refs = []
    for end in (options.good, options.bad):
        if not (Path(end) / MANIFEST).is_file():
            refs.append(end)
            continue
        manifest = RunFolder(Path(end)).manifest()
        if not manifest.git.sha:
            raise UsageError(say("start.no_commit", folder=end))
        refs.append(manifest.git.sha)
        workloads = workloads or (resolve(manifest.workload, profile=manifest.profile or "cpu", source=None),)
    return Ends(refs[0], refs[1], request, workloads, options.by, options.metric)


def _ends_of_verdict(options: BisectOptions, request: CompareRequest, folder: Path) -> Ends:
    """Takes what failed in a stored verdict: its sides, its workload, the metric and cell of its worst finding."""
    path = folder / "verdict.json"
    if not path.is_file():
        raise UsageError(say("start.one_end", folder=folder))
    verdict: Mapping[str, Any] = read_json(path)
    failed = [finding for finding in verdict["findings"] if finding["outcome"] == "fail"]
    if not failed:
        raise UsageError(say("start.nothing_failed", folder=folder, outcome=verdict["outcome"]))
    if verdict["kind"] == "counters":
        lock = read_lock(find_file(LOCK))
        good = lock.accepted[-1].git.removesuffix("-dirty") if lock else ""
        scenarios = tuple(finding["id"].partition("/")[2] for finding in failed)
        request = request.model_copy(update={"only": options.only or scenarios})
        return Ends(good, verdict["candidate"]["sha"], request, (), "counters", options.metric)
    state = CompareFolder.open(folder).state()
    good, bad = state.base.sha, state.candidate.sha
    if not good or not bad or state.candidate.changes or state.base.changes:
        raise UsageError(say("start.no_refs", folder=folder))
    timed = [finding for finding in failed if finding.get("metric")]
    worst = max(timed or failed, key=lambda finding: (finding["suite"] == "cell", -(finding.get("p") or 1.0)))
    cells = tuple({cell.base for cell in state.cells if worst["suite"] == "cell" and cell.base in worst["id"]})
    changes = {"only": options.only or cells or state.options.only, "output_dir": options.output_dir}
    stored = state.options.model_copy(update=changes)
    workloads = tuple(resolve(given.workload, profile=given.profile or "cpu", source=None) for given in state.given)
    return Ends(good, bad, stored, workloads, "timing", options.metric or worst.get("metric"))
