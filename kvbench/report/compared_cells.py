"""Cells of any runs beside each other: how they differ, which of them may be compared, and by how much they differ.

Pure functions of groups of cells; in each group all are compared with the first. Within one run ratios are paired by
repeat, since the repeats met the same requests and machine; between two runs the repeats are independent (Welch).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.common.stats import welch_interval
from kvbench.report.comparisons import marked, median
from kvbench.report.provenance import target
from kvbench.runs.model import NOT_OF_REQUESTS, WRONG, MeasuredCell, Run
from kvbench.runs.ratios import FEWEST, HIGHER, LEVEL, LOWER, SAME, UNCLEAR, paired_ratio
from kvbench.workload.settings import applies, effective, setting_title, value_words

FEWEST_SIDES, MOST_SIDES = 2, 6  # cells in a group
_LETTERS = "ABCDEF"
BUILT_IN = "the built-in engine"
_SAID_ELSEWHERE = ("model", "seed", "kv_budget")  # settings that have a fact of their own


@dataclass(frozen=True)
class Side:
    """One cell of a group. ``letter``: its short name in tables and figures."""

    letter: str
    run: Run
    cell: MeasuredCell

    @property
    def title(self) -> str:
        return f"{self.cell.name}, {self.cell.load.short}"


Group = tuple[Side, ...]


@dataclass(frozen=True)
class ComparedMetric:
    """``name``: of ``MeasuredCell.per_repeat``, "latency.percentile"; empty: the throughput."""

    title: str
    name: str
    higher_is_better: bool

    def value(self, cell: MeasuredCell) -> tuple[float | None, bool]:
        """Median over the repeats of a throughput; a latency's percentile over the samples of all repeats.

        Also whether that is a percentile of too few samples.
        """
        if not self.name:
            return median(cell.throughput()), False
        metric, which = self.name.split(".")
        return cell.percentile(metric, which)

    def is_steady(self, cell: MeasuredCell) -> bool:
        """Tests whether its value is of the steady window."""
        return cell.has_steady_latency if self.name else cell.has_steady

    def per_repeat(self, cell: MeasuredCell, steady: bool) -> dict[int, float]:
        return cell.latency(self.name, steady) if self.name else cell.throughput(steady)


METRICS = (
    ComparedMetric("output tokens/s", "", True),
    ComparedMetric("p95 TTFT", "ttft_ms.p95", False),
    ComparedMetric("p50 TPOT", "tpot_ms.p50", False),
    ComparedMetric("p95 ITL", "itl_ms.p95", False),
)


@dataclass(frozen=True)
class RatioToFirst:
    """One metric of a cell over the first cell's.

    ``interval``: 95 %, None from fewer than 3 repeats. ``basis``: how it was made. ``verdict``: as in runs/ratios.py.
    """

    metric: ComparedMetric
    ratio: float
    interval: tuple[float, float] | None
    basis: str
    verdict: str

    @property
    def mark(self) -> str:
        """better, worse, or empty where that is not decided."""
        if self.verdict not in (HIGHER, LOWER):
            return ""
        return "better" if (self.verdict == HIGHER) == self.metric.higher_is_better else "worse"

    def __str__(self) -> str:
        """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1."""
        return marked(self.ratio, self.verdict)

    @property
    def bounds(self) -> str:
        """1.52–1.80; why there is no interval where there is none."""
        if self.interval is None:
            return self.basis
        return "–".join(words.ratio(end)[:-1] for end in self.interval)


def one_group(cells: Sequence[tuple[Run, MeasuredCell]]) -> tuple[Group, ...]:
    """Two to six cells, each with a letter of its own. Raises UsageError for fewer, more, or one of them twice."""
    if not FEWEST_SIDES <= len(cells) <= MOST_SIDES:
        raise UsageError(
            f"{words.plural(len(cells), 'cell')} cannot be put side by side: choose {FEWEST_SIDES} to {MOST_SIDES}"
        )
    if len({(run.folder, cell.cell_id) for run, cell in cells}) < len(cells):
        raise UsageError("a cell cannot be put beside itself: choose each once")
    return (tuple(Side(letter, run, cell) for letter, (run, cell) in zip(_LETTERS, cells, strict=False)),)


def groups_of(*runs: Run) -> tuple[Group, ...]:
    """A group for each cell of the first run that two to six runs all have, the highest load first.

    Cells match by name, or those of different targets, whose names differ, by load and settings (``_alike``).

    Raises:
        UsageError: too few or many runs, one of them twice, or they share no cell.
    """
    if not FEWEST_SIDES <= len(runs) <= MOST_SIDES:
        raise UsageError(
            f"{words.plural(len(runs), 'run')} cannot be put side by side: give {FEWEST_SIDES} to {MOST_SIDES}"
        )
    folders = [run.folder.resolve() for run in runs]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise UsageError(f"{twice} cannot be put beside itself: give each run once")
    first, *others = runs
    found = []
    for cell in first.by_load:
        matching = [_matching(first, cell, other) for other in others]
        if all(matching):
            sides = zip(_LETTERS, runs, (cell, *matching), strict=False)
            found.append(tuple(Side(letter, run, each) for letter, run, each in sides))
    if not found:
        cells = [f"{run.folder} has {words.and_more([c.cell_id for c in run.cells], 4) or 'none'}" for run in runs]
        raise UsageError(
            f"the runs share no measured cell ({'; '.join(cells)}): put cells of other names side by side in "
            "`kvbench view`"
        )
    return tuple(found)


def _matching(first: Run, cell: MeasuredCell, other: Run) -> MeasuredCell | None:
    """The cell of ``other`` that stands for ``cell`` of ``first``: of that name, else the only one that is alike.

    A cell that is alike to several cells of ``first`` stands for none of them, whichever run is given first.
    """
    named = next((each for each in other.cells if each.cell_id == cell.cell_id), None)
    if named or target(first) == target(other):
        return named
    names = _varied(first) | _varied(other)
    found = [each for each in other.cells if _alike(cell, each, names)]
    if len(found) != 1 or sum(_alike(each, found[0], names) for each in first.cells) != 1:
        return None
    return found[0]


def _varied(run: Run) -> set[str]:
    """Settings in which the run's cells differ."""
    names = {name for cell in run.cells for name in cell.settings}
    return {name for name in names if len({str(cell.settings.get(name)) for cell in run.cells}) > 1}


def _alike(a: MeasuredCell, b: MeasuredCell, names: Iterable[str]) -> bool:
    """Whether both have the same load and the same value of each of ``names`` that both engines have."""
    if (a.load, a.load.label) != (b.load, b.load.label):
        return False
    shared = a.settings.keys() & b.settings.keys() & set(names)
    return all(a.settings[name] == b.settings[name] for name in shared)


def named(side: Side, group: Group) -> str:
    """The letter, with the engine where those of the group differ: "B vLLM 0.32.0"."""
    engines = [target(each.run) or BUILT_IN for each in group]
    return f"{side.letter} {engines[group.index(side)]}" if len(set(engines)) > 1 else side.letter


def facts(side: Side, settings: Iterable[str] = ()) -> dict[str, str]:
    """What a cell was measured with, as text by name: the machine, the code, the requests, the settings.

    ``settings``: further ones, at the built-in engine's default where the cell leaves them out.
    """
    run, cell = side.run, side.cell
    server = (run.manifest.get("servers") or {}).get(cell.config_id) or {}
    names = sorted({*cell.settings, *(settings if run.is_built_in else ())}.difference(_SAID_ELSEWHERE))
    names = [name for name in names if applies(name, cell.settings)]
    return run_facts(run, server) | _known(
        {
            "load": cell.load.label,
            "requests a repeat": _requests_sent(cell),
            "repeats": len(cell.repeats),
            **_requests(run),
            "KV budget": words.data_size(cell.capacity.get("kv_budget_bytes")),
            "KV capacity": words.kv_capacity(cell.capacity),
            **{setting_title(name): value_words(name, effective(cell.settings, name)) for name in names},
        }
    )


def run_facts(run: Run, server: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a run was measured with, as text by name. ``server``: what one of its servers reported."""
    manifest = run.manifest
    git = manifest.get("git") or {}
    versions = {**(manifest.get("versions") or {}), **((server or {}).get("versions") or {})}
    changes = " with uncommitted changes" if git.get("dirty") else ""
    return _known(
        {
            "workload": run.workload,
            "target": target(run) or BUILT_IN,
            "times": f"{run.clock} ({run.simulated.get('cost_model')})" if run.simulated else run.clock,
            "model": _model(run),
            "weights": (manifest.get("model") or {}).get("weights_fingerprint"),
            "device": manifest.get("device"),
            **({} if run.simulated else _machine(manifest)),
            "profile": manifest.get("profile"),
            "commit": git.get("short_sha") and f"{git['short_sha']}{changes}",
            **{f"version of {name}": version for name, version in versions.items()},
        }
    )


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    cpu, gpus = manifest.get("cpu") or {}, manifest.get("gpus") or ()
    return {
        "processor": _processor(cpu) if cpu else None,
        "memory": words.data_size(manifest.get("memory_bytes")),
        "GPUs": " + ".join(str(gpu.get("name")) for gpu in gpus),
        "GPU driver": ", ".join(sorted({str(gpu.get("driver_version")) for gpu in gpus})),
        "operating system": manifest.get("os"),
    }


def _known(found: Mapping[str, Any]) -> dict[str, str]:
    """As text, without what is not known."""
    return {name: str(value) for name, value in found.items() if value not in (None, "", "–")}


def _model(run: Run) -> str:
    model = run.manifest.get("model") or run.spec.get("model") or {}
    return str(model.get("name") or model.get("config") or model.get("path") or "")


def _processor(cpu: Mapping[str, Any]) -> str:
    return f"{cpu.get('model')}, {words.plural(cpu['cores'], 'core')}" if cpu.get("cores") else str(cpu.get("model"))


def _requests(run: Run) -> dict[str, str]:
    """What the requests are drawn from: dotted keys of the workload's load, and the seed."""
    seed = (run.manifest.get("seeds") or {}).get("workload", run.spec.get("seed"))
    load = {key: value for key, value in run.load_section.items() if key not in NOT_OF_REQUESTS}
    return {"seed": str(seed), **_flat(load, "load.")}


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _requests_sent(cell: MeasuredCell) -> str:
    """48; 47 to 50 where the repeats differ."""
    sent = sorted({int(r.metrics.get("completed") or 0) + int(r.metrics.get("failed") or 0) for r in cell.repeats})
    return " to ".join(dict.fromkeys(map(str, (sent[0], sent[-1])))) if sent else ""


def differences(groups: Sequence[Group]) -> list[tuple[str, tuple[str, ...]]]:
    """(fact, its value on each side) for each fact in which the sides of a group differ.

    Of several groups, a difference that only some of them have is named with their cells.
    """
    found: dict[tuple[str, tuple[str, ...]], list[Group]] = {}
    for group in groups:
        settings = {name for side in group for name in side.cell.settings}
        every = [facts(side, settings) for side in group]
        for name in dict.fromkeys(name for each in every for name in each):
            values = tuple(each.get(name, "–") for each in every)
            if len(set(values)) > 1:
                found.setdefault((name, values), []).append(group)
    return [
        (name if len(of) == len(groups) else f"{name} ({words.and_more([group[0].title for group in of], 2)})", values)
        for (name, values), of in found.items()
    ]


def obstacles(first: Side, other: Side) -> list[str]:
    """Why no ratio of two cells is shown; empty where one is."""
    found = []
    for side in (first, other):
        if side.cell.doubt == "invalid":
            reason = (side.cell.invalid_reasons or ("no reason recorded",))[0]
            found.append(f"{side.letter} is an invalid measurement ({reason.rstrip('.')})")
        elif side.cell.doubt == WRONG:
            found.append(f"{side.letter} answered canaries wrongly ({side.cell.wrong_answers[0]})")
        elif side.cell.doubt == "refused":
            found.append(f"the server of {side.letter} refused requests, so it did less work")
    a, b = facts(first), facts(other)
    for what, *names in (
        ("clock", "times"),
        ("machine", "processor", "GPUs"),
        ("device", "device"),
        ("model", "model"),
    ):
        if values := _differing(a, b, names):
            found.append(f"another {what}: {values}")
    if (first.cell.load, first.cell.load.label) != (other.cell.load, other.cell.load.label):
        found.append(f"another load: {first.cell.load.label} and {other.cell.load.label}")
    else:
        ours, theirs = _requests(first.run), _requests(other.run)
        keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
        keys += ["the requests sent (their hashes)"] if _other_hashes(first.cell, other.cell) else []
        keys += ["requests a repeat"] if _requests_sent(first.cell) != _requests_sent(other.cell) else []
        if keys:
            found.append(f"other requests: {words.and_more(keys, 4)}")
    return found


def _other_hashes(a: MeasuredCell, b: MeasuredCell) -> bool:
    """Whether both know the requests of some repeat, and they are not the same."""
    ours, theirs = ({r.repeat: r.requests_sha256 for r in cell.repeats if r.requests_sha256} for cell in (a, b))
    return any(ours[repeat] != theirs[repeat] for repeat in ours.keys() & theirs.keys())


def _differing(a: Mapping[str, str], b: Mapping[str, str], names: Sequence[str]) -> str:
    """Both values of the first fact that differs; empty where none does."""
    pairs = ((a.get(name, "none"), b.get(name, "none")) for name in names)
    return next((f"{x} and {y}" for x, y in pairs if x != y), "")


def not_compared(groups: Sequence[Group]) -> list[str]:
    """A sentence for each kind of reason for which pairs have no ratio, with the pairs it holds for.

    Reasons that differ in their numbers only are of one kind; the first is given.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    pairs = [(group, side) for group in groups for side in group[1:]]
    for group, side in pairs:
        which = side.title if len(groups) > 1 else f"{side.letter} against {group[0].letter}"
        which = f"{side.letter} {which}" if len(groups) > 1 and len(group) > FEWEST_SIDES else which
        for reason in obstacles(group[0], side):
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", reason), []).append((reason, which))
    found = []
    for of in kinds.values():
        several = len(of) == len(pairs) > 1
        found.append(
            f"No ratio of {'any pair' if several else words.and_more([which for _, which in of])}: {of[0][0]}."
        )
    return found


def ratios(first: Side, other: Side) -> list[RatioToFirst]:
    """The ratio of each metric that both cells have; empty where the cells must not be compared."""
    if obstacles(first, other):
        return []
    found = []
    for metric in METRICS:
        steady = all(metric.is_steady(side.cell) for side in (first, other))
        a, b = (metric.per_repeat(side.cell, steady) for side in (first, other))
        made = _paired(metric, a, b) if first.run.folder == other.run.folder else _welch(metric, a, b)
        found += [made] if made else []
    return found


def _paired(metric: ComparedMetric, a: Mapping[int, float], b: Mapping[int, float]) -> RatioToFirst | None:
    r = paired_ratio(b, a)
    if r is None:
        return None
    basis = f"paired by repeat, {r.n} repeats" if r.ci else _too_few(r.n)
    return RatioToFirst(metric, r.median, r.ci, basis, r.verdict)


def _welch(metric: ComparedMetric, a: Mapping[int, float], b: Mapping[int, float]) -> RatioToFirst | None:
    """Of the geometric means; level where the whole interval lies within 5 % of 1."""
    old, new = (np.log([value for value in values.values() if value > 0]) for values in (a, b))
    fewest = min(len(old), len(new))
    if not fewest:
        return None
    ratio = math.exp(float(new.mean() - old.mean()))
    if fewest < FEWEST:
        return RatioToFirst(metric, ratio, None, _too_few(fewest), UNCLEAR)
    low, high = (math.exp(end) for end in welch_interval(old, new))
    verdict = SAME if low >= 1 - LEVEL and high <= 1 + LEVEL else UNCLEAR if low <= 1 <= high else ""
    verdict = verdict or (HIGHER if low > 1 else LOWER)
    return RatioToFirst(metric, ratio, (low, high), f"Welch, {len(old)} and {len(new)} repeats", verdict)


def _too_few(repeats: int) -> str:
    return f"{words.plural(repeats, 'repeat')}: no interval"


def headline(groups: Sequence[Group]) -> str:
    """How output tokens/s changed, in one sentence."""
    found = [(side, _throughput(group[0], side)) for group in groups for side in group[1:]]
    left = [side.letter for side, ratio in found if ratio is None]
    if len(groups) > 1:
        first, *others = groups[0]
        said = "; ".join(
            f"{named(side, groups[0])} {_calls([ratio for of, ratio in found if of.letter == side.letter])}"
            for side in others
        )
        clock = first.cell.clock
        return f"Output tokens/s as {clock} against {named(first, groups[0])} in {len(groups)} cells: {said}."
    known = [(side.letter, ratio) for side, ratio in found if ratio]
    parts = [f"{letter} {_ratio_words(ratio)}" for letter, ratio in known]
    parts += [f"no ratio of {words.listing(left)}"] if left else []
    bare = [letter for letter, ratio in known if ratio.interval is None]
    too_few = f" (of {words.listing(bare)} too few repeats for an interval)" if bare else ""
    return f"Output tokens/s as {groups[0][0].cell.clock} against A, {groups[0][0].title}: {', '.join(parts)}{too_few}."


def _calls(found: Sequence[RatioToFirst | None]) -> str:
    """higher in 2, not told apart in 1 (0.98x to 1.32x), no ratio in 1."""
    verdicts = [ratio.verdict for ratio in found if ratio]
    names = {HIGHER: "higher", LOWER: "lower", SAME: "level", UNCLEAR: "not told apart"}
    calls = ", ".join(f"{name} in {count}" for verdict, name in names.items() if (count := verdicts.count(verdict)))
    values = sorted(ratio.ratio for ratio in found if ratio)
    if len(values) > 1:
        calls += f" ({words.ratio(values[0])} to {words.ratio(values[-1])})"
    none = found.count(None)
    return ", ".join(filter(None, (calls, none and f"no ratio in {none}")))


def _throughput(first: Side, side: Side) -> RatioToFirst | None:
    return next((ratio for ratio in ratios(first, side) if not ratio.metric.name), None)


def _ratio_words(ratio: RatioToFirst) -> str:
    if ratio.interval is None:
        return words.ratio(ratio.ratio)
    called = {SAME: "level, ", UNCLEAR: "not told apart, "}.get(ratio.verdict, "")
    return f"{called}{words.ratio(ratio.ratio)} ({ratio.bounds})"
