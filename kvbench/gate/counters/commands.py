"""The commands of the counter gate that a verdict names."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

WORKLOAD, LOCK = Path("workloads/ci_counters.yaml"), Path("ci/counters.lock.json")


@dataclass(frozen=True)
class Commands:
    """The gate again, the gate for one scenario, and the acceptance. Files that are the default are left out."""

    workload: Path = WORKLOAD
    lock: Path = LOCK
    only: tuple[str, ...] = ()

    @property
    def gate(self) -> str:
        return self._command("gate", *(word for glob in self.only for word in ("--only", glob)))

    def one(self, name: str) -> str:
        return self._command("gate", "--only", name)

    @property
    def accept(self) -> str:
        return f'{self._command("accept")} --reason "..."'

    def _command(self, verb: str, *options: str) -> str:
        files = [str(self.workload)] if self.workload != WORKLOAD else []
        files += ["--lock", str(self.lock)] if self.lock != LOCK else []
        return shlex.join(["kvbench", verb, "counters", *files, *options])
