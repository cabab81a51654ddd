"""The claims of claims.yaml with their judges, and what is measured for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.claims import judges
from kvbench.claims.judges import UNDECIDED, ClaimVerdict
from kvbench.claims.kernel_cost import KernelCost, measure_kernel_cost
from kvbench.claims.measure import WorkloadFacts
from kvbench.claims.served import ServedFacts, measure_served
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import WORKLOADS as SHIPPED_WORKLOADS
from kvbench.common.parsing import read_yaml
from kvbench.common.plugins import add_plugins
from kvbench.workload.file import Workload, load_workload

WORKLOADS = SHIPPED_WORKLOADS / "claims"
OTHERS = {"served": measure_served, "paging-cost": measure_kernel_cost}
"""Measurements without a workload: functions of (folder, on_cpu, say, check)."""
ClaimFacts = WorkloadFacts | KernelCost | ServedFacts
"""What a judge looks at."""


@dataclass(frozen=True)
class Claim:
    """A claim of claims.yaml, which documents the fields, or one that another package adds.

    judge: the name of a function in judges.py; of another package's claim the function
    workloads: another package's workload files, by the names in `measured`
    """

    name: str
    says: str
    source: str
    measured: Sequence[str]
    judge: str | Callable[..., ClaimVerdict] = ""
    published: Sequence[float] = ()
    counted: bool = False
    any_engine: bool = False
    workloads: Mapping[str, Path] = field(default_factory=dict)

    @property
    def _judge(self) -> Callable[..., ClaimVerdict]:
        if callable(self.judge):
            return self.judge
        return getattr(judges, self.judge or self.name.replace("-", "_"))

    @property
    def rule(self) -> str:
        return self._judge.__doc__ or ""

    def verdict(self, findings: Mapping[str, ClaimFacts]) -> ClaimVerdict:
        """Judges it by what was found in each measurement; undecided where a configuration took no part."""
        try:
            return self._judge(*self.published, *(findings[name] for name in self.measured))
        except MeasurementError as error:
            return ClaimVerdict(UNDECIDED, "", str(error))


_FILE = read_yaml(Path(__file__).with_name("claims.yaml"))
CLAIMS = {name: Claim(name, **row) for name, row in _FILE["claims"].items()}
add_plugins(CLAIMS, "claims", Claim)
_USED = [name for claim in CLAIMS.values() for name in claim.measured if name not in OTHERS]
MEASUREMENTS = {name: {"workload": name, "overrides": [], **_FILE["measurements"].get(name, {})} for name in _USED}
"""Name -> the workload's file, and what is set over its values."""
_OTHER_FILES = {name: file for claim in CLAIMS.values() for name, file in claim.workloads.items()}


def chosen(names: Sequence[str], target: str | None = None) -> tuple[Claim, ...]:
    """The claims of these names, all without any, that ``target`` (None: the built-in engine) can tell.

    Raises UsageError for a name that is not known, or a claim that this engine cannot tell.
    """
    if unknown := [name for name in names if name not in CLAIMS]:
        raise UsageError(f"no claim is called {unknown[0]!r}: there are {', '.join(CLAIMS)}")
    possible = [claim for claim in CLAIMS.values() if target is None or claim.any_engine]
    if impossible := [name for name in names if CLAIMS[name] not in possible]:
        others = ", ".join(claim.name for claim in possible)
        raise UsageError(f"{impossible[0]} is measured on the built-in engine only; {target} can tell {others}")
    return tuple(claim for claim in possible if not names or claim.name in names)


def workload_of(measurement: str, profile: str | None) -> Workload:
    """Loads the workload of a measurement. Raises UsageError."""
    row = MEASUREMENTS[measurement]
    file = _OTHER_FILES.get(measurement, WORKLOADS / f"{row['workload']}.yaml")
    return load_workload(file, profile=profile, overrides=tuple(row["overrides"]))


def workloads_of(claims: Sequence[Claim], profile: str | None) -> dict[str, Workload]:
    """Measurement -> its workload. Raises UsageError."""
    names = (name for claim in claims for name in claim.measured if name in MEASUREMENTS)
    return {name: workload_of(name, profile) for name in dict.fromkeys(names)}
