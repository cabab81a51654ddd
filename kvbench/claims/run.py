"""Measures claims one workload after another and judges each as soon as its workloads are there.

    results/claims/<UTC time>-<git short sha>/
      claims.json                       every verdict, with what it was measured on
      report.html  report.md            the same to read
      measured/<measurement>/           launches and requests of one workload

A claim that cannot be measured is undecided, and says why; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.claims.catalogue import CLAIMS, MEASUREMENTS, OTHERS, Claim
from kvbench.claims.judges import UNDECIDED, VERDICTS, Verdict
from kvbench.claims.measure import Measured, all_narrow, measure
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.common.machine import environment
from kvbench.common.packages import REPOSITORY
from kvbench.common.text import clock
from kvbench.workload.file import Workload, default_profile

WORKLOADS = REPOSITORY / "workloads" / "claims"
FILE, FORMAT = "claims.json", 1
_LEAST_S = 10.0  # of time left, for one more measurement


def chosen(names: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of these names, all without any. Raises UsageError for a name that is not known."""
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise UsageError(f"no claim is called {name!r}: there are {', '.join(known)}")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)


def workloads_of(claims: Sequence[Claim], profile: str | None) -> dict[str, Workload]:
    """Measurement -> its workload. Raises UsageError."""
    names = (name for claim in claims for name in claim.measurements if name not in OTHERS)
    return {name: MEASUREMENTS[name].load(WORKLOADS, profile) for name in dict.fromkeys(names)}


@dataclass
class ClaimsRun:
    """``folder``: of the results; ``workloads``: as ``workloads_of`` returns them; ``minutes``: for all claims.

    ``show``: replaces the status line, by a text or by what a function returns whenever it is shown; ``say``: prints a
    line; ``check``: called twice a second, may raise.
    """

    folder: Path
    claims: Sequence[Claim]
    workloads: Mapping[str, Workload]
    minutes: float
    profile: str | None
    show: Callable[[Any], None]
    say: Callable[[str], None]
    check: Callable[[], None]
    _found: dict[str, Any] = field(default_factory=dict)  # measurement -> Measured, or of OTHERS its facts
    _failed: dict[str, str] = field(default_factory=dict)  # measurement -> why
    _verdicts: dict[str, Verdict] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=lambda: {"claims": []})  # of claims.json

    def execute(self) -> dict[str, Any]:
        """Returns the content of claims.json, which is there after each claim."""
        began, started = time.monotonic(), utc_now()
        names = list(dict.fromkeys(name for claim in self.claims for name in claim.measurements))
        profile = self.profile or default_profile()
        engines = [each.engine for each in self.workloads.values()]
        self.result["engines"] = {
            name: sorted({str(engine[name]) for engine in engines if engine.get(name) is not None})
            for name in ("model", "load_format", "dtype", "num_threads")
        }
        self.result |= {"format": FORMAT, "finished": False, "started": started, "profile": profile, **environment()}
        for number, name in enumerate(names, 1):
            left_s = 60 * self.minutes - (time.monotonic() - began)
            if left_s > _LEAST_S:  # the first launches may take three times the limit
                limit_s = min(2 * left_s / (len(names) - number + 2), left_s / 3)
                self._measure(name, self.workloads.get(name), f"{number} of {len(names)}: {name}", limit_s)
            else:
                self._failed[name] = f"the {self.minutes:g} minutes were over before it was measured (--minutes)"
            self._judge(name)
            self._store(time.monotonic() - began, finished=number == len(names))
        return self.result

    def _measure(self, name: str, workload: Workload | None, title: str, limit_s: float) -> None:
        def show(text: str | Callable[[], str]) -> None:
            self.show(f"{title}: {text}" if isinstance(text, str) else lambda: f"{title}: {text()}")

        self.show(title)
        folder = self.folder / "measured" / name
        try:
            if workload is None:
                on_cpu = self.result["profile"] == "cpu"
                self._found[name] = OTHERS[name](folder, on_cpu, show, self.check)
                return
            self._found[name] = measure(
                MEASUREMENTS[name],
                workload,
                folder,
                limit_s=limit_s,
                exact=all(claim.counted for claim in self._claims_on(name)),
                is_enough=lambda measured: self._is_enough(name, measured),
                show=show,
                check=self.check,
            )
        except (MeasurementError, UsageError) as error:
            self._failed[name] = str(error)

    def _is_enough(self, name: str, measured: Measured) -> bool:
        """Whether no claim is undecided that needs nothing else, and for the others all intervals are narrow."""
        found = {**self._found, name: measured}
        for claim in self._claims_on(name):
            if claim.counted:
                continue
            if all(each in found for each in claim.measurements):
                if _verdict(claim, found).word == UNDECIDED:
                    return False
            elif not all_narrow(measured):
                return False
        return True

    def _claims_on(self, name: str) -> list[Claim]:
        return [claim for claim in self.claims if name in claim.measurements]

    def _judge(self, name: str) -> None:
        """The claims whose last measurement was ``name``."""
        for claim in self._claims_on(name):
            if all(n in self._found or n in self._failed for n in claim.measurements):
                failed = [self._failed[n] for n in claim.measurements if n in self._failed]
                verdict = Verdict(UNDECIDED, "", failed[0]) if failed else _verdict(claim, self._found)
                self._verdicts[claim.name] = verdict
                reason = f" ({verdict.reason})" if verdict.reason else ""
                self.say(f"{claim.name}: {verdict.word}{reason}. {verdict.evidence}")

    def _store(self, seconds: float, finished: bool) -> None:
        self.result |= {"finished": finished, "seconds": seconds, "ended": utc_now()}
        self.result["claims"] = [
            {
                "name": claim.name,
                "says": claim.says,
                "source": claim.source,
                "rule": claim.rule,
                "verdict": verdict.word,
                "evidence": verdict.evidence,
                "reason": verdict.reason,
                "measured": {name: self._launches(name) for name in claim.measurements},
            }
            for claim in self.claims
            if (verdict := self._verdicts.get(claim.name)) is not None
        ]
        write_json(self.folder / FILE, self.result)

    def _launches(self, name: str) -> int | None:
        found = self._found.get(name)
        return found.launches if isinstance(found, Measured) else None


def _verdict(claim: Claim, found: Mapping[str, Any]) -> Verdict:
    try:
        return claim.judge(found)
    except MeasurementError as error:
        return Verdict(UNDECIDED, "", str(error))


def read_claims(path: Path) -> dict[str, Any]:
    """claims.json of a folder or the file itself. Raises UsageError."""
    file = path / FILE if path.is_dir() else path
    found = read_json(file) if file.is_file() else None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(f"{path} holds no {FILE} of `kvbench claims`: give the folder of such a run")
    return found


def summary(result: Mapping[str, Any]) -> str:
    """9 held, 5 did not hold, 2 depends, 1 undecided; 14:12."""
    words = [claim["verdict"] for claim in result["claims"]]
    counts = [f"{words.count(word)} {word}" for word in VERDICTS if word in words]
    return f"{', '.join(counts)}; {clock(result['seconds'])}"
