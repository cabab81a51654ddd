"""`kvbench gate RESULTS`: the absolute limits of a policy on a sweep's run, or a comparison judged again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.text import listing, plural
from kvbench.gate.compare.stored_policy import digest, policy_of
from kvbench.gate.limits.judge import SUITE, judge_limits
from kvbench.gate.policy import Policy
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Verdict, worst
from kvbench.quality.result import QualityResult, read_quality, told
from kvbench.runs.folder import MANIFEST, RunFolder
from kvbench.runs.model import Run
from kvbench.runs.read import read_run

_NAMED = 5  # cells in one sentence


@dataclass(frozen=True)
class Judged:
    """``folder``: where the files of the verdict belong, unless the user says where."""

    verdict: Verdict
    folder: Path


def gate_results(results: Path, policy: Policy, *, force: bool = False) -> Judged:
    """The verdict on a folder. ``force``: also where what is compared does not come from the same code and versions.

    A comparison is judged by its own rules where ``policy`` comes from no file.

    Raises:
        UsageError: it is no folder of a sweep or of a comparison, or a sweep's without a policy; a comparison is not
            finished, or is being measured.
    """
    manifest = results / MANIFEST
    told = read_json(manifest) if manifest.is_file() else {}
    if isinstance(told, Mapping) and told.get("kind") == "compare":
        return _gate_comparison(results, policy, force=force)
    return Judged(_gate_sweep(results, policy, force=force), results)


def _gate_comparison(results: Path, policy: Policy, *, force: bool) -> Judged:
    """Under the folder's lock, where it can be written; by another policy, the files go beside those of its own."""
    from kvbench.gate.compare.conclude import judge_folder

    with RunFolder(results).locked() if os.access(results, os.W_OK) else nullcontext():
        manifest = read_json(results / MANIFEST)
        if manifest.get("status") == "incomplete":
            words = ["kvbench", str(manifest.get("subcommand", "compare")), "--resume", str(results)]
            raise UsageError(
                f"{results} is not finished, and a look at the pairs so far would spend what a later look may err: go "
                f"on with `{shlex.join(words)}`"
            )
        own = policy_of(manifest["policy"]) if manifest.get("policy") else None
        if policy.source is None and own is not None:
            policy = own
        verdict = judge_folder(results, policy, force=force)
    if own is None or digest(own) == digest(policy):
        return Judged(verdict, results)
    again = shlex.join(["kvbench", "gate", str(results), "--policy", str(policy.source)])
    note = f"judged again by {policy.source}, and not by the policy that it was measured with"
    verdict = replace(verdict, reproduce=again, notes=(note, *verdict.notes))
    return Judged(verdict, results / f"judged-{policy.source.stem}")


def _gate_sweep(results: Path, policy: Policy, *, force: bool) -> Verdict:
    if policy.source is None:
        raise UsageError(f"{results} is the run of a sweep, which only limits can judge: give --policy ci/gates.yaml")
    try:
        run = read_run(results)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
    return judge_run(run, policy, read_quality(results), force=force)


def judge_run(run: Run, policy: Policy, quality: QualityResult | None, *, force: bool = False) -> Verdict:
    """The verdict of the policy's limits on one run; without a limit or a cell it is ``empty``."""
    if not policy.limits:
        said = f"nothing was compared: {policy.source} has no limits; write some under limits:"
        return _verdict(run, policy, EMPTY, said, ())
    if not run.cells:
        said = f"nothing was compared: {run.folder} has no finished cell; go on with `{_resume(run)}`"
        return _verdict(run, policy, EMPTY, said, ())
    doubt = None if quality is None or force else _other_code(run, quality)
    findings = (*_of_run(run), *judge_limits(run, policy.limits, quality, doubt))
    outcome = worst([finding.outcome for finding in findings])
    notes = [*_unjudged(run, findings), *([] if quality is None else [quality.note])]
    return _verdict(run, policy, outcome, _sentence(run, outcome, findings), findings, notes)


def _of_run(run: Run) -> list[Finding]:
    """What is wrong with the run as a whole."""
    wrong = []
    if run.missing:
        wrong.append(f"{plural(len(run.missing), 'cell')} without a finished load ({_some(run.missing)})")
    if run.short:
        wrong.append(f"too few repeats ({_some(run.short)})")
    if not wrong and run.status != "complete":
        wrong.append(f"its status is {run.status}")
    if wrong:
        said = f"the run is incomplete: {' and '.join(wrong)}; go on with `{_resume(run)}`"
        return [_run_finding(run, "complete run", said, run.problems)]
    if run.problems:
        return [_run_finding(run, "readable run", f"the run has problems: {run.problems[0]}", run.problems[1:])]
    return []


def _run_finding(run: Run, what: str, sentence: str, details: Sequence[str]) -> Finding:
    title = f"{what} of {run.workload}"
    return Finding(f"{SUITE}/{run.workload}/{what}", SUITE, title, INVALID, sentence, details=tuple(details))


def _unjudged(run: Run, findings: Sequence[Finding]) -> list[str]:
    """Invalid cells that no limit was about: not judged, and not to be overlooked either."""
    said = " ".join(finding.id for finding in findings)
    silent = [cell.cell_id for cell in run.cells if not cell.valid and f"/{cell.cell_id}" not in said]
    return [f"no limit holds these cells, whose measurement is invalid: {_some(silent)}"] if silent else []


def _other_code(run: Run, quality: QualityResult) -> str | None:
    """Why a KLD does not belong to the run: it was measured with other code, versions or weights."""
    different = quality.differs_from(run.manifest)
    if not different:
        return None
    return (
        f"measured with another {listing(list(different))} than the run ({told(different)}): run `kvbench quality "
        f"{run.folder}` with what the run has, measure the run again with what is here, or take it all the same with "
        "--force"
    )


def _sentence(run: Run, outcome: str, findings: Sequence[Finding]) -> str:
    broken, invalid = ([f for f in findings if f.outcome == kind] for kind in (FAIL, INVALID))
    if outcome == PASS:
        return f"all {plural(len(findings), 'limit')} hold on {plural(len(run.cells), 'cell')} of {run.workload}"
    if outcome == FAIL:
        first = f"{len(broken)} of {plural(len(findings), 'limit')} of {run.workload} broken: {broken[0].sentence}"
    else:
        first = f"{len(invalid)} of {plural(len(findings), 'limit')} could not be judged: {invalid[0].sentence}"
    return first


def _verdict(
    run: Run, policy: Policy, outcome: str, sentence: str, findings: Sequence[Finding], notes: Sequence[str] = ()
) -> Verdict:
    manifest = run.manifest
    git, cpu, command = (manifest.get(key) or {} for key in ("git", "cpu", "command"))
    facts = {
        "workload": run.workload,
        "cells": len(run.cells),
        "repeats": max((len(cell.repeats) for cell in run.cells), default=0),
        "device": manifest.get("device"),
        "machine": cpu.get("model") if isinstance(cpu, Mapping) else None,
        "started": manifest.get("started"),
        "ended": manifest.get("ended"),
        "measured_by": shlex.join(map(str, command)) if command else None,
        "policy": str(policy.source) if policy.source else None,
    }
    policy_words = ["--policy", str(policy.source)] if policy.source else []
    return Verdict(
        "limits",
        outcome,
        sentence,
        tuple(findings),
        candidate={"name": f"{run.workload}/{run.folder.name}", "sha": git.get("sha"), "command": facts["measured_by"]},
        reproduce=shlex.join(["kvbench", "gate", str(run.folder), *policy_words]),
        notes=tuple(notes),
        facts={key: value for key, value in facts.items() if value is not None},
    )


def _resume(run: Run) -> str:
    return shlex.join(["kvbench", "sweep", "--resume", str(run.folder)])


def _some(names: Sequence[Any]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(str, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
