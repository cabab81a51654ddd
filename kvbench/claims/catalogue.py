"""The claims of claims.yaml with their judges, and what is measured for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.claims import judges
from kvbench.claims.judges import UNDECIDED, ClaimVerdict
from kvbench.claims.kernel_cost import KernelCost, measure_kernel_cost
from kvbench.claims.measure import WorkloadFacts
from kvbench.claims.served import ServedFacts, measure_served
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.packages import REPOSITORY
from kvbench.common.parsing import read_yaml
from kvbench.workload.file import Workload, load_workload

WORKLOADS = REPOSITORY / "workloads" / "claims"
OTHERS = {"served": measure_served, "paging-cost": measure_kernel_cost}
"""Measurements without a workload: functions of (folder, on_cpu, say, check)."""
ClaimFacts = WorkloadFacts | KernelCost | ServedFacts
"""What a judge looks at."""


@dataclass(frozen=True)
class Claim:
    """A claim of claims.yaml, which documents the fields."""

    name: str
    says: str
    source: str
    measured: Sequence[str]
    judge: str = ""
    published: Sequence[float] = ()
    counted: bool = False

    @property
    def _judge(self) -> Callable[..., ClaimVerdict]:
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
CLAIMS = tuple(Claim(name, **row) for name, row in _FILE["claims"].items())
_USED = [name for claim in CLAIMS for name in claim.measured if name not in OTHERS]
MEASUREMENTS = {name: {"workload": name, "overrides": [], **_FILE["measurements"].get(name, {})} for name in _USED}
"""Name -> the workload's file, and what is set over its values."""


def chosen(names: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of these names, all without any. Raises UsageError for a name that is not known."""
    every = [claim.name for claim in CLAIMS]
    if unknown := [name for name in names if name not in every]:
        raise UsageError(f"no claim is called {unknown[0]!r}: there are {', '.join(every)}")
    return tuple(claim for claim in CLAIMS if not names or claim.name in names)


def workload_of(measurement: str, profile: str | None) -> Workload:
    """Loads the workload of a measurement. Raises UsageError."""
    row = MEASUREMENTS[measurement]
    return load_workload(WORKLOADS / f"{row['workload']}.yaml", profile=profile, overrides=tuple(row["overrides"]))


def workloads_of(claims: Sequence[Claim], profile: str | None) -> dict[str, Workload]:
    """Measurement -> its workload. Raises UsageError."""
    names = (name for claim in claims for name in claim.measured if name in MEASUREMENTS)
    return {name: workload_of(name, profile) for name in dict.fromkeys(names)}
