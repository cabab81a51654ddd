"""Runs parts whose engines stay alive in processes of their own and take turns.

So all of them meet the same machine.

``peer-job``: kvbench and vLLM on nano-vllm's job. ``before-after``: two commits of the engine on that job, on steps
that only decode, and on steps of 512 to 8,192 tokens. Every side computes a case once a turn; who begins changes from
turn to turn. A side that fails takes no more part. Standard library only: this process never touches the device.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ci.gpu.isolated import PLAN_SECONDS, CaseProcess, ProcessEnded
from ci.gpu.part import PartReport, part_parser
from kvbench.common.packages import REPOSITORY

LOAD = "load"  # the case that each side has first: building its engine
LOAD_SHARE = 0.75  # share of the time left after which a side that does not load is given up
CASE_S = 60.0  # a case that takes longer counts as hung
TURNS = 6  # turns of a pair, over all its launches
FIGURES = {  # figures of a row in the table: title and digits
    "output_tokens_per_s": ("output tokens/s", 0), "replayed_share": ("share replayed from graphs", 2),
    "median_step_ms": ("ms a step, median", 3),
    **{f"{phase}_ms": (f"of it {phase}, mean", 3) for phase in ("schedule", "prepare", "execute", "sample", "output")},
}  # fmt: skip


@dataclass(frozen=True)
class EngineSide:
    """An engine by its ``name``: a module with ``CASES``. ``folder``: its packages come from there first."""

    name: str
    module: str
    folder: str = ""


@dataclass(frozen=True)
class Pair:
    """Two sides, the first being the base. ``launches``: of both, one after the other."""

    sides: tuple[EngineSide, EngineSide]
    launches: int


PAIRS = {
    "peers": Pair(
        (EngineSide("kvbench", "ci.gpu.engine_turns"), EngineSide("vLLM", "ci.gpu.vllm_job")), 1
    ),  # vLLM compiles for a minute
    "before-after": Pair(
        (EngineSide("before", "ci.gpu.engine_turns", ".bring/before"), EngineSide("after", "ci.gpu.engine_turns")), 2
    ),
}


class Launch:
    """One process a side, asked for the same cases in turns. ``number``: of the launch, from 0."""

    def __init__(self, pair: Pair, report: PartReport, arguments: list[str], number: int):
        self._pair, self._report, self._number = pair, report, number
        self._shape = "tiny shape" if "--tiny" in arguments else "Qwen3-0.6B's shape"
        self._processes = {side.name: CaseProcess(_command(side, arguments), _environment(side)) for side in pair.sides}
        self._lock = threading.Lock()  # sides load at the same time
        self._took: dict[str, float] = {}  # by case, the longest time on any side [s]

    def run(self, turns: int) -> None:
        """Loads both sides at the same time, then measures until ``turns`` or the time are over."""
        try:
            with ThreadPoolExecutor(len(self._processes)) as pool:
                plans = dict(zip(self._processes, pool.map(self._load, list(self._processes)), strict=True))
            names = [name for name, plan in plans.items() if plan]
            cases = [case for case in plans[names[0]] if all(case in plans[name] for name in names)] if names else []
            for turn, case in itertools.product(range(turns), cases):
                names = self._measure(turn, case, names)
        finally:
            for process in self._processes.values():
                process.stop(ask=False)

    def _load(self, name: str) -> list[str]:
        """Builds the side's engine and returns the cases that it can measure; none where it failed."""
        try:
            seconds = LOAD_SHARE * self._report.time_left
            (answer,) = self._processes[name].ask({}, PLAN_SECONDS, time.monotonic() + seconds)
            loaded = self._ask(name, LOAD, {}, seconds)
        except ProcessEnded as ended:
            self._add("failures", {"what": f"{name}: {LOAD}", "reason": str(ended)})
            return []
        return [case["name"] for case in answer["plan"] if case["name"] != LOAD] if loaded else []

    def _measure(self, turn: int, case: str, names: list[str]) -> list[str]:
        """Asks the sides of ``names`` for one case; returns those that can be asked again."""
        place = {"launch": self._number + 1, "turn": turn + 1}
        if self._report.time_left < 1.2 * self._took.get(case, 0.0) * len(names):
            what = f"{case}, launch {self._number + 1}, turn {turn + 1}"
            self._add("skipped", {"what": what, "reason": "no time left"})
            return names
        left, ends = list(names), time.monotonic() + self._report.time_left
        for name in names[:: 1 if (turn + self._number) % 2 == 0 else -1]:
            started = time.monotonic()
            try:
                self._ask(name, case, place, min(CASE_S, ends - started))
            except ProcessEnded as ended:
                self._add("failures", {"what": f"{name}: {case}", "reason": str(ended)})
                left.remove(name)
            self._took[case] = max(self._took.get(case, 0.0), time.monotonic() - started)
        summarise(self._report, [side.name for side in self._pair.sides], self._shape)
        return left

    def _ask(self, name: str, case: str, place: dict[str, int], seconds: float) -> bool:
        """Runs a case on one side, keeps what it adds under the side's name, and tells whether the case succeeded.

        Raises:
            ProcessEnded: the side's process is gone, or took too long.
        """
        succeeded, latest = True, time.monotonic() + seconds
        for answer in self._processes[name].ask({"case": case, "ends": latest}, seconds, latest):
            if "add" not in answer:
                continue
            kind, value = answer["add"], answer["value"]
            succeeded = succeeded and not (kind == "failures" and value["what"] == case)
            if kind == "rows":
                self._add(kind, {"side": name, "case": case, **place, **value})
            elif kind == "data":
                self._add(kind, {f"{name}: {key}": fact for key, fact in value.items()})
            else:
                self._add(kind, {**value, "what": f"{name}: {value['what']}"})
        return succeeded

    def _add(self, kind: str, value: dict[str, Any]) -> None:
        with self._lock:
            self._report.add(kind, value)


def _command(side: EngineSide, arguments: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "ci.gpu.worker", side.module, *arguments]


def _environment(side: EngineSide) -> dict[str, str]:
    paths = [str(REPOSITORY / side.folder)] if side.folder else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", str(REPOSITORY))])}


def ratios(rows: list[dict[str, Any]], figure: str, base: str, other: str) -> list[float]:
    """Divides the figure of ``other`` by that of ``base`` in every turn that both have."""
    by_turn = {(row["side"], row["launch"], row["turn"]): row[figure] for row in rows}
    pairs = [(value, by_turn.get((other, *place))) for (side, *place), value in by_turn.items() if side == base]
    return [theirs / value for value, theirs in pairs if theirs is not None and value]


def summarise(report: PartReport, names: list[str], shape: str) -> None:
    """Makes one table row a case and figure: each side's median, and the ratio of the sides in each turn."""
    measured, shown = report.data["rows"], []
    for case, figure in itertools.product(dict.fromkeys(row["case"] for row in measured), FIGURES):
        rows = [row for row in measured if row["case"] == case and figure in row]
        if not rows:
            continue
        title, digits = FIGURES[figure]
        cells = []
        for name in names:
            values = [row[figure] for row in rows if row["side"] == name]
            cells.append(f"{statistics.median(values):,.{digits}f}" if values else "–")
        turns = ratios(rows, figure, *names)
        ratio = f"{statistics.median(turns):.3f} ({min(turns):.3f} to {max(turns):.3f})" if turns else "–"
        shown.append([case, title, *cells, ratio, str(len(turns))])
    base, other = names
    medians = [f"{name}{' ' + commit[:10] if (commit := report.data.get(f'{name}: commit')) else ''}" for name in names]
    columns = [
        "case",
        "figure (median)",
        *medians,
        f"{other} over {base} in each turn: median (least to most)",
        "turns",
    ]
    report.table(f"Engines in turns, {shape}", columns, shown)
    if shown:
        report.data["headline"] = f"{shown[0][0]}: {base} {shown[0][2]}, {other} {shown[0][3]} {shown[0][1]}"
    report.save()


def main() -> int:
    """Runs the part; 1 if a side failed."""
    parser = part_parser(__doc__)
    parser.add_argument("--pair", choices=PAIRS, required=True, help="which engines")
    args, _ = parser.parse_known_args()
    report, pair, took = PartReport(args.out, args.seconds), PAIRS[args.pair], 0.0
    for side in pair.sides:
        if side.folder and not (REPOSITORY / side.folder).is_dir():
            reason = f"{side.folder} is not there: fill it with ci/gpu/bring.sh {args.pair}"
            if not args.tiny:
                report.put(not_run=reason)
                return 0
            report.skip(side.name, f"{reason}; this tree's engine stands in for it")
        commit = REPOSITORY / side.folder / "COMMIT"
        if side.folder and commit.is_file():
            report.put(**{f"{side.name}: commit": commit.read_text(encoding="utf-8").strip()})
    for number in range(pair.launches):
        if report.time_left < took:
            report.skip(f"launch {number + 1}", "no time left")
            break
        started = time.monotonic()
        Launch(pair, report, sys.argv[1:], number).run(TURNS // pair.launches)
        took = time.monotonic() - started
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
