"""From the folder of a comparison to its verdict; run once more on a stored folder it gives the same, or another
policy's.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.errors import UsageError
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.same_server import cache_notes
from kvbench.gate.compare.values import no_first_pair, read_counters, read_values, whole_pairs
from kvbench.gate.compare.void_findings import void_findings
from kvbench.gate.policy import Policy
from kvbench.gate.timing.explain import moved_between, where_it_went
from kvbench.gate.timing.judge import Judgement, findings_of, judge, sentence
from kvbench.gate.timing.pairs import PairTable, hypotheses
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.rules import CELL, OVERALL, TimingRules
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, worst


def table_of(values: Mapping[str, np.ndarray], manifest: Mapping[str, Any], rules: TimingRules) -> PairTable:
    """The pairs as the statistics take them; ``values`` as ``read_values`` gives them."""
    names = [cell["name"] for cell in manifest["cells"]]
    classes = [rules.class_of(name) for name in names]
    return PairTable.from_values(values[BASE], values[CANDIDATE], names, classes, rules.metrics)


def look_points(rules: TimingRules, early: Sequence[int] = ()) -> list[int]:
    """After how many pairs each look was or will be taken.

    ``early``: where a comparison was ended by its clock. Each such look has spent the alpha of the one that it came
    before: when the comparison goes on, that one is left out. One after so few pairs that their smallest p, 2^-pairs,
    decides nothing has spent none.
    """
    before, points = 0, []
    for look in rules.looks:
        could = [n for n in sorted(early) if 2.0**-n <= max(look.alpha, look.alpha_pass)]
        points.append(next((n for n in could if before < n <= look.pairs), look.pairs))
        before = look.pairs
    return points


def look_at(table: PairTable, rules: TimingRules, early: Sequence[int] = ()) -> Judgement:
    """The first look that decides, else the last that there are pairs for: what a run that stopped there had said."""
    judgement = None
    for index, pairs in enumerate(look_points(rules, early)):
        if index and table.pairs <= rules.looks[index - 1].pairs:
            break
        judgement = judge(table.first(min(pairs, table.pairs)), rules, index)
        if judgement.outcome != INCONCLUSIVE:
            break
    assert judgement is not None, "rules without a look"
    return judgement


def conclude(
    folder: CompareFolder,
    manifest: Mapping[str, Any],
    policy: Policy,
    *,
    pairs: int | None = None,
) -> Verdict:
    """The verdict on the first ``pairs`` pairs (None: all that are whole), and on what could not be measured.

    Raises UsageError where a metric of the policy cannot be compared.
    """
    rules = policy.timing
    there = whole_pairs(folder, manifest)
    measured = there if pairs is None else min(pairs, there)
    facts = _facts(manifest) | policy.facts() | {"pairs": measured}
    notes = [*manifest.get("notes", ()), *cache_notes(manifest)]
    notes += [f"base and candidate differ: {d}" for d in manifest["differences"]]
    stopped = manifest.get("stopped")
    extra = void_findings(manifest)
    made = {"base": manifest["base"], "candidate": manifest["candidate"], "reproduce": manifest["reproduce"]}
    if not measured or not manifest["cells"]:
        outcome = worst([f.outcome for f in extra])
        said = extra[0].sentence if extra else f"nothing was compared: {no_first_pair(folder, manifest)}"
        notes += [f"{stopped}."] if stopped else []
        return Verdict("compare", outcome, said, extra, **made, notes=tuple(notes), facts=facts)
    values = read_values(folder, manifest, rules.metrics, range(1, measured + 1))
    try:
        table = table_of(values, manifest, rules)
    except ValueError as error:
        raise UsageError(f"{folder.path}: {error}") from None
    judgement = look_at(table, rules, manifest["early_looks"])
    values = {side: array[: judgement.pairs] for side, array in values.items()}
    facts |= {"pairs": judgement.pairs, "look": judgement.look.pairs, "alpha": judgement.look.alpha}
    findings = (*extra, *findings_of(judgement, values[BASE], values[CANDIDATE]))
    moved, where = (), ""
    if judgement.outcome == FAIL:
        counters = read_counters(folder, manifest, judgement.pairs)
        moved = moved_between(counters, findings)
        where = where_it_went(moved, findings, counters)
    outcome = worst([judgement.outcome, *(f.outcome for f in extra)])
    said = extra[0].sentence if extra and outcome != judgement.outcome else sentence(judgement)
    if stopped and manifest["void"] is None and outcome == INCONCLUSIVE:  # more time may settle it
        said = f"{stopped}. {said}"
        notes.append(f"go on with: {_more_time(folder, manifest, max(0, rules.looks[-1].pairs - measured))}")
    elif stopped:
        notes.append(f"{stopped}.")
    if doubt := manifest.get("doubt"):  # in the sentence itself: who reads no further must see it
        said = f"{said} ({doubt})"
    if where:
        notes.insert(0, where)
    notes += judgement.notes
    return Verdict("compare", outcome, said, findings, **made, moved=moved, notes=tuple(notes), facts=facts)


def finished_verdict(folder: CompareFolder, policy: Policy) -> Verdict | None:
    """The verdict of a comparison that no further pair would change by the policy that it was measured with."""
    manifest = folder.manifest()
    if manifest["status"] != "complete":
        return None
    verdict = conclude(folder, manifest, policy)
    return verdict if manifest["stopped"] is None or verdict.outcome in (FAIL, PASS) else None


def _more_time(folder: CompareFolder, manifest: Mapping[str, Any], pairs: int) -> str:
    """The command that goes on, with minutes for so many further pairs."""
    minutes = math.ceil(pairs * max(manifest["seconds"]) / 60) if manifest.get("seconds") else None
    return folder.resume_command(manifest["subcommand"]) + (f" --max-minutes {minutes}" if minutes else "")


def judge_again(path: Path, policy: Policy, *, force: bool = False) -> tuple[Verdict, Path]:
    """The verdict on a finished comparison, and the folder that its files go to: its own, or one beside them.

    By ``policy``, or by the rules that it was measured with where ``policy`` comes from no file. Raises UsageError for
    a comparison that is not finished or is being measured, and where base and candidate differ in what must be equal,
    unless ``force``.
    """
    folder = CompareFolder.open(path)
    with folder.run_lock() if os.access(path, os.W_OK) else nullcontext():
        manifest = folder.manifest()
        if manifest.get("status") == "incomplete":
            raise UsageError(
                f"{path} is not finished, and a look at the pairs so far would spend what a later look may err: go on "
                f"with `{folder.resume_command(manifest['subcommand'])}`"
            )
        own = Policy.from_json(manifest["policy"]) if manifest.get("policy") else policy  # older ones have none
        policy = policy if policy.source else own
        verdict = judge_folder(folder, manifest, policy, force=force)
    if own.digest == policy.digest:
        return verdict, path
    again = shlex.join(["kvbench", "gate", str(path), "--policy", str(policy.source)])
    note = f"judged again by {policy.source}, and not by the policy that it was measured with"
    verdict = replace(verdict, reproduce=again, notes=(note, *verdict.notes))
    return verdict, path / f"judged-{policy.source.stem}"


def judge_folder(folder: CompareFolder, manifest: Mapping[str, Any], policy: Policy, *, force: bool = False) -> Verdict:
    """The verdict on a stored comparison. Raises UsageError where the sides differ, unless ``force``."""
    if manifest["differences"] and not force:
        raise UsageError(f"base and candidate differ: {'; '.join(manifest['differences'])}; --force judges them so")
    return conclude(folder, manifest, policy)


def pair_line(folder: CompareFolder, manifest: Mapping[str, Any], policy: Policy, pair: int) -> str:
    """What one pair says, overall: each metric's change. For the progress of a run; it decides nothing."""
    rules = policy.timing
    try:
        table = table_of(read_values(folder, manifest, rules.metrics, [pair]), manifest, rules)
    except ValueError as error:
        return str(error)
    tested = hypotheses(table)
    ratios = tested.log_ratio()[0]
    one_cell = len(manifest["cells"]) == 1
    return ", ".join(
        f"{h.metric.title} {100 * np.expm1(ratio):+.1f} %"
        for h, ratio in zip(tested.each, ratios, strict=True)
        if h.level == (CELL if one_cell else OVERALL)
    )


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    cpu = manifest.get("cpu") or {}
    return {
        "started": manifest.get("started"),
        "ended": manifest.get("ended"),
        "machine": f"{cpu.get('model')}, {cpu.get('cores')} cores",
        "gpus": [gpu.get("name") for gpu in manifest.get("gpus") or ()],
        "order_seed": manifest["order_seed"],
        "voids": len(manifest["voids"]),
    }
