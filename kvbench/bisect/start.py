"""Makes the search that the options ask for: both ends, the workload and the metric, from refs or stored results."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.bisect.checks import By
from kvbench.bisect.history import INSTALL, make_package_repository, versions_between
from kvbench.bisect.options import BisectOptions
from kvbench.bisect.search import STATE, Search, SearchState
from kvbench.bisect.sentences import say
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.files import read_json, utc_now
from kvbench.common.git import try_git
from kvbench.common.packages import find_file
from kvbench.common.records import read_record
from kvbench.gate.compare.builds import WORKING_TREE, find_commit
from kvbench.gate.compare.folder import CompareFolder, GivenWorkload
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.counters import WORKLOAD
from kvbench.metrics.definitions import THROUGHPUT, figure
from kvbench.runs.folder import MANIFEST, RunFolder, create_run
from kvbench.runs.manifest import stored_workload
from kvbench.workload.file import Workload, load_workload

_OF_AN_EXECUTION = ("resume", "max_minutes")
_IN_A_VERDICT = ("workloads", "by", "method", "profile", "overrides", "seed")  # options that it answers
_NOT_TAKEN_OVER = dict.fromkeys(("max_minutes", "policy", "noise", "pairs", "runner_class", "order_seed"))


_NOT_OF: Mapping[str, Sequence[str]] = {  # options of what a search by another way does not do
    "counters": (
        "target", "serve_cmd", "preset", "target_args", "target_python", "method", "package", "start_timeout",
        "profile", "overrides", "seed",
    ),
    **dict.fromkeys(("start", "capacity", "answers"), ("metric", "method", "order_seed")),
}  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """Both ends of the range as refs, and what a stored result says should be looked for."""

    good: str
    bad: str
    request: CompareRequest
    workloads: tuple[Workload, ...] = ()
    by: By = "timing"
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
    if wrong := [name for name in options.given if name in _NOT_OF.get(ends.by, ())]:
        raise UsageError(say("start.not_of", option=options.typed(wrong[0]), by=ends.by))
    if ends.by == "counters":
        workloads = tuple(str(find_file(Path(name)).resolve()) for name in ends.request.workloads or (WORKLOAD,))
        ends = replace(ends, request=ends.request.model_copy(update={"workloads": workloads}))
    elif not ends.workloads:
        raise UsageError(say("start.no_workload"))
    if ends.by != "timing" and len(ends.request.workloads) > 1:
        raise UsageError(say("start.one_workload", by=ends.by))
    if ends.by == "timing":
        with as_usage_error():
            figure(ends.metric or THROUGHPUT)
    if options.package:
        if not (options.target or options.serve_cmd):
            raise UsageError(say("package.no_target"))
        versions = versions_between(options.package, ends.good, ends.bad)
        folder = create_run(options.output_dir, "bisect", options.package).path
        repo = (folder / "versions").resolve()
        shas = make_package_repository(repo, options.package, versions)
        request = ends.request.model_copy(update={"repo": repo, "build_cmd": options.build_cmd or INSTALL})
        good, bad, ends = shas[versions[0]], shas[versions[-1]], replace(ends, request=request)
        skipped = tuple(shas[version] for version in options.skip if version in shas)
    else:
        if WORKING_TREE in (ends.good, ends.bad):
            raise UsageError(say("start.working_tree"))
        first, last = (find_commit(ends.request.repository, ref) for ref in (ends.good, ends.bad))
        skipped = tuple(find_commit(first.repo, ref).sha for ref in options.skip)
        repo, good, bad = first.repo, first.sha, last.sha
        if good == bad:
            raise UsageError(say("start.same", good=ends.good, bad=ends.bad, sha=good[:10]))
        folder = create_run(options.output_dir, "bisect", bad[:7]).path
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
    good, bad = options.good, options.bad
    if options.package and good and not bad and ".." in good:
        good, _, bad = good.partition("..")
    if good and not bad and (Path(good) / "verdict.json").is_file():
        return _ends_of_verdict(options, request, Path(good))
    if not good or not bad:
        raise UsageError(say("start.two_ends" if not good else "start.one_end", folder=good))
    given = {"profile": options.profile, "overrides": options.overrides, "seed": options.seed}
    workloads = () if options.by == "counters" else tuple(load_workload(path, **given) for path in options.workloads)
    refs = []
    for end in (good, bad):
        if not (Path(end) / MANIFEST).is_file():
            if Path(end).is_dir() and end != WORKING_TREE:
                raise UsageError(say("start.no_run", folder=end))
            refs.append(end)
            continue
        manifest = RunFolder(Path(end)).manifest()
        if not manifest.git.sha or manifest.git.dirty:
            raise UsageError(say("start.no_commit", folder=end))
        refs.append(manifest.git.sha)
        workloads = workloads or (stored_workload(manifest),)
    return Ends(refs[0], refs[1], request, workloads, options.by, options.metric)


def _ends_of_verdict(options: BisectOptions, request: CompareRequest, folder: Path) -> Ends:
    """Takes what failed in a stored verdict: its sides, its workload, the metric and cell of its worst finding."""
    if answered := [name for name in options.given if name in _IN_A_VERDICT]:
        raise UsageError(say("start.in_verdict", option=options.typed(answered[0]), folder=folder))
    verdict: Mapping[str, Any] = read_json(folder / "verdict.json")
    failed = [finding for finding in verdict["findings"] if finding["outcome"] == "fail"]
    if not failed:
        raise UsageError(say("start.nothing_failed", folder=folder, outcome=verdict["outcome"]))
    if verdict["kind"] == "counters":
        # The lock is committed with what it counts, so the last commit that changed it counts as it says.
        bad, lock = verdict["candidate"].get("sha"), verdict["base"].get("name", "")
        good = try_git(request.repository, "log", "-1", "--format=%H", bad, "--", lock) if bad else None
        if not good or verdict["candidate"].get("dirty"):
            raise UsageError(say("start.no_refs", folder=folder))
        scenarios = tuple(finding["id"].partition("/")[2] for finding in failed)
        request = request.model_copy(update={"only": options.only or scenarios})
        return Ends(good, bad, request, (), "counters", options.metric)
    state = CompareFolder.open(folder).state()
    if not state.base.sha or not state.candidate.sha or state.candidate.changes or state.base.changes:
        raise UsageError(say("start.no_refs", folder=folder))
    timed = [finding for finding in failed if finding.get("metric") and finding["suite"] != "served"]
    if not timed and not options.metric:
        raise UsageError(say("start.no_timing", folder=folder, failed=failed[0]["sentence"]))
    worst = min(timed, key=lambda finding: (finding["suite"] != "cell", finding["p"])) if timed else failed[0]
    named = f"/{worst['id']}/" if worst["suite"] == "cell" else ""
    cells = tuple(cell.base for cell in state.cells if f"/{cell.name}/" in named)
    changes = _NOT_TAKEN_OVER | {"only": options.only or cells or state.options.only, "output_dir": options.output_dir}
    workloads = tuple(map(stored_workload, state.given))
    request, metric = state.options.model_copy(update=changes), options.metric or worst.get("metric")
    return Ends(state.base.sha, state.candidate.sha, request, workloads, "timing", metric)
