"""Workers on other machines watch their own while they stream: of a machine that only leads, nothing follows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common.foreign_cpu import CpuReading, Server, contention_reasons, machine_report, read_cpu, server_at


class OwnMachine:
    """A worker's view of its machine, from ``begin`` to ``end``. ``report``: as ``contention.machine_report``."""

    def __init__(self, base_url: str) -> None:
        self._server: Server = server_at(base_url)
        self._begun: CpuReading | None = None
        self.report: dict[str, Any] | None = None

    def begin(self) -> None:
        """Right before the first request."""
        self._begun = self._read()

    def end(self) -> None:
        """Right after the last stream."""
        self.report = machine_report(self._begun, self._read(), self._server)

    def _read(self) -> CpuReading | None:
        found = read_cpu(self._server, os.getpid())
        return found and dataclasses.replace(found, own_s=0.0)  # this process is the client


@dataclass(frozen=True)
class Seen:
    """What one process of the load saw of its machine. ``boot``: which machine that is (None: not known)."""

    name: str
    boot: str | None
    report: Mapping[str, Any]


def without_ours(workers: Sequence[Seen], leader: str | None, leader_cores: float) -> list[dict[str, Any]]:
    """The workers' reports; what the load's other processes used on the same machine is not foreign to it.

    ``leader``: the boot id of the machine that leads, on which the master used ``leader_cores``.
    """
    reports = []
    for worker in workers:
        report = dict(worker.report)
        if report["foreign_cpu_cores"] is not None and worker.boot is not None:
            beside = [w.report["client_cpu_cores"] or 0.0 for w in workers if w is not worker and w.boot == worker.boot]
            ours = sum(beside) + (leader_cores if worker.boot == leader else 0.0)
            report["foreign_cpu_cores"] = max(0.0, report["foreign_cpu_cores"] - ours)
        reports.append(report)
    return reports


def machine_reasons(names: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why single workers' machines make the load invalid, one sentence each."""
    return [f"{name}: {x}" for name, report in zip(names, reports, strict=True) for x in contention_reasons(report)]


def worst_machine(names: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of the machine that was disturbed most, with whose it is (``of``)."""

    def disturbed(k: int) -> tuple[int, float, float]:
        report = reports[k]
        over = len(contention_reasons(report))
        return over, report["foreign_cpu_cores"] or 0.0, report["steal_share"] or 0.0

    worst = max(range(len(reports)), key=disturbed)
    return {**reports[worst], "of": names[worst]}
