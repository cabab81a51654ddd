"""Measures claims one workload after another and judges each as soon as its workloads are there.

    results/claims/<UTC time>-<git short sha>/
      claims.json                       every verdict, with what it was measured on
      report.html  report.md            the same to read
      measured/<measurement>/           launches and requests of one workload

A claim that cannot be measured is undecided, and says why; the others go on.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.claims.catalogue import OTHERS, Claim, ClaimFacts
from kvbench.claims.judges import UNDECIDED, ClaimVerdict
from kvbench.claims.kernel_cost import MOST_TIMINGS, KernelCost
from kvbench.claims.measure import NARROW, WorkloadFacts, measure
from kvbench.claims.results import FILE, ClaimResult, ClaimsResult, Engines
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import utc_now
from kvbench.common.machine import environment
from kvbench.common.records import write_record
from kvbench.lockstep.sitting import MOST_LAUNCHES
from kvbench.targets.choose import NOT_THE_BASELINE, ChosenTarget, choose_target
from kvbench.targets.options import TargetOptions
from kvbench.workload.design import Design
from kvbench.workload.file import Workload

_LEAST_S = 15.0  # of each measurement, however little time is left


@dataclass
class ClaimsRun:
    """Measures claims and judges each as soon as its measurements are there.

    ``folder``: of the results; ``workloads``: as ``workloads_of`` returns them; ``minutes``: for all claims.
    ``show``: replaces the status line, by a text or by what a function returns whenever it is shown; ``say``: prints a
    line; ``check``: called twice a second, may raise. ``engine``: what is measured, without a target the built-in
    engine. ``result``: the content of claims.json, which is there after each claim.
    """

    folder: Path
    claims: Sequence[Claim]
    workloads: Mapping[str, Workload]
    minutes: float
    profile: str
    show: Callable[[Any], None]
    say: Callable[[str], None]
    check: Callable[[], None]
    engine: TargetOptions = field(default_factory=TargetOptions)
    result: ClaimsResult | None = None
    _measured: dict[str, ClaimFacts] = field(default_factory=dict)  # measurement -> what judges look at
    _failed: dict[str, str] = field(default_factory=dict)  # measurement -> why
    _seconds: dict[str, float] = field(default_factory=dict)  # measurement that is no sitting -> how long it took
    _ended: set[str] = field(default_factory=set)  # measurements that cannot go on
    _targets: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closes them
    _notes: list[str] = field(default_factory=list)  # on what an engine cannot have
    _title: str = ""  # of the status line
    _verdicts: dict[str, ClaimVerdict] = field(default_factory=dict)

    def execute(self) -> ClaimsResult:
        """Measures and judges all claims; claims.json is there from the beginning and after each measurement."""
        with self._targets:
            return self._execute()

    def _execute(self) -> ClaimsResult:
        began, started = time.monotonic(), utc_now()
        shares = Counter(name for claim in self.claims for name in claim.measured)  # a claim more, a share more
        names = sorted(shares, key=lambda name: name not in OTHERS and not self._is_counted(name))
        settings = [workload.engine for workload in self.workloads.values()]
        values = {name: {str(engine[name]) for engine in settings if name in engine} for name in Engines.model_fields}
        begun = ClaimsResult(
            claims=(),
            engines=Engines(**{name: tuple(sorted(texts - {"None"})) for name, texts in values.items()}),
            finished=False,
            started=started,
            profile=self.profile,
            target=self.engine.target,
            target_python=self.engine.target_python,
            target_args=self.engine.target_args,
            seconds=0.0,
            ended=started,
            **environment(),
        )
        self._store(begun)

        def judge(name: str, finished: bool) -> None:
            self._judge(name)
            judged = {"claims": tuple(self._results()), "finished": finished, "ended": utc_now()}
            judged["notes"] = tuple(self._notes)
            if self.engine.target:
                judged["engine_versions"] = self._engine_versions()
            self._store(begun.model_copy(update=judged | {"seconds": time.monotonic() - began}))

        for number, name in enumerate(names, 1):
            left_s = 60 * self.minutes - (time.monotonic() - began)
            share = shares[name] / (sum(shares[later] for later in names[number - 1 :]) + 1)
            limit_s = max(share * left_s, _LEAST_S)
            self._measure(name, f"{number} of {len(names)}: {name}", limit_s)
            judge(name, number == len(names))
        while again := self._next_to_go_on(60 * self.minutes - (time.monotonic() - began)):
            name, limit_s = again
            self._go_on(name, limit_s)
            judge(name, True)
        assert self.result is not None
        return self.result

    def _next_to_go_on(self, left_s: float) -> tuple[str, float] | None:
        """Returns a measurement of an undecided claim with the seconds that more of it takes, at most ``left_s``.

        It is the one with the fewest launches or timings, and of these the shortest.
        """
        ways: list[tuple[int, float, str]] = []  # launches, seconds, measurement
        for name in {name for claim in self.claims if self._is_undecided(claim) for name in claim.measured}:
            facts = self._measured.get(name)
            if isinstance(facts, WorkloadFacts) and facts.launches < MOST_LAUNCHES:
                ways.append((facts.launches, facts.sitting.round_s, name))
            elif isinstance(facts, KernelCost) and facts.timings < MOST_TIMINGS:
                ways.append((facts.timings, self._seconds[name], name))
        fitting = (way for way in ways if way[1] <= left_s and way[2] not in self._ended)
        _, seconds, name = min(fitting, default=(0, 0.0, ""))
        return (name, seconds) if name else None

    def _is_undecided(self, claim: Claim) -> bool:
        return self._verdicts[claim.name].word == UNDECIDED

    def _is_counted(self, name: str) -> bool:
        """Tests whether all claims on a measurement rest on exact counts."""
        return all(claim.counted for claim in self._claims_on(name))

    def _go_on(self, name: str, limit_s: float) -> None:
        """Measures more of what left a claim undecided; a failure leaves what is there."""
        facts = self._measured[name]
        self._title = f"{name}, again"
        try:
            if isinstance(facts, WorkloadFacts):
                facts.more(limit_s)
            else:
                folder = self.folder / "measured" / name  # has the earlier timings
                self._measured[name] = OTHERS[name](folder, self.profile == "cpu", self._show, self.check)
        except (MeasurementError, UsageError) as error:
            self._ended.add(name)
            self.say(f"{name} was not measured further: {error}")

    def _store(self, result: ClaimsResult) -> ClaimsResult:
        self.result = result
        write_record(self.folder / FILE, result)
        return result

    def _show(self, text: str | Callable[[], str]) -> None:
        title = self._title
        self.show(f"{title}: {text}" if isinstance(text, str) else lambda: f"{title}: {text()}")

    def _measure(self, name: str, title: str, limit_s: float) -> None:
        self._title, began = title, time.monotonic()
        self.show(title)
        folder = self.folder / "measured" / name
        try:
            if name in OTHERS:
                self._measured[name] = OTHERS[name](folder, self.profile == "cpu", self._show, self.check)
                self._seconds[name] = time.monotonic() - began
                return
            target, design = self._chosen_for(name)
            self._measured[name] = measure(
                name,
                target,
                design,
                folder,
                limit_s=limit_s,
                exact=self._is_counted(name),
                is_enough=partial(self._is_enough, name),
                show=self._show,
                check=self.check,
            )
        except (MeasurementError, UsageError) as error:
            self._failed[name] = str(error)

    def _engine_versions(self) -> Mapping[str, str]:
        """Returns what the engine of any measurement so far says of its versions."""
        facts = (measured for measured in self._measured.values() if isinstance(measured, WorkloadFacts))
        return next((measured.sitting.versions for measured in facts if measured.sitting.versions), {})

    def _chosen_for(self, name: str) -> tuple[ChosenTarget, Design]:
        """Returns the engine of a measurement and what it runs.

        Raises MeasurementError where the engine cannot have what the claim is about.
        """
        workload = self.workloads[name]
        target = choose_target(workload, self.engine)
        self._targets.callback(target.close)
        if any(target.workload.engine.get(setting) != workload.engine.get(setting) for setting in workload.sweep):
            raise MeasurementError(next(note for note in target.notes if note.startswith(NOT_THE_BASELINE)))
        design, _ = target.plan()
        for note in (f"{name}: {note}" for note in design.notes):
            self._notes.append(note)
            self.say(note)
        return target, design

    def _is_enough(self, name: str, measured: WorkloadFacts) -> bool:
        """Tests whether each claim is decided that needs nothing else, and all intervals are narrow for the others."""
        measurements = {**self._measured, name: measured}
        for claim in self._claims_on(name):
            if claim.counted:
                continue
            if all(measurement in measurements for measurement in claim.measured):
                if claim.verdict(measurements).word == UNDECIDED:
                    return False
            elif any(measured.speed(**beside.varied).half_width > NARROW for beside in measured.took_part()):
                return False
        return True

    def _claims_on(self, name: str) -> list[Claim]:
        return [claim for claim in self.claims if name in claim.measured]

    def _judge(self, name: str) -> None:
        """Judges the claims whose measurements with ``name`` are there; prints verdicts that are new or changed."""
        for claim in self._claims_on(name):
            if all(measurement in self._measured or measurement in self._failed for measurement in claim.measured):
                failed = [self._failed[measurement] for measurement in claim.measured if measurement in self._failed]
                verdict = ClaimVerdict(UNDECIDED, "", failed[0]) if failed else claim.verdict(self._measured)
                before, self._verdicts[claim.name] = self._verdicts.get(claim.name), verdict
                if before is None or before.word != verdict.word:
                    reason = f" ({verdict.reason})" if verdict.reason else ""
                    self.say(f"{claim.name}: {verdict.word}{reason}. {verdict.evidence}")

    def _results(self) -> Iterator[ClaimResult]:
        for claim in self.claims:
            if (verdict := self._verdicts.get(claim.name)) is None:
                continue
            yield ClaimResult(
                name=claim.name,
                says=claim.says,
                source=claim.source,
                rule=claim.rule,
                verdict=verdict.word,
                evidence=verdict.evidence,
                reason=verdict.reason,
                measured={name: getattr(self._measured.get(name), "launches", None) for name in claim.measured},
            )
