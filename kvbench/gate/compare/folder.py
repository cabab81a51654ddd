"""The folder of a comparison: a run folder of each side and workload, the pairs as their repeats.

results/compare/<UTC time>-<git short sha>/
  manifest.json                                 what is compared, how, on what; kind "compare"
  base/<workload>/cells/<cell id>/loads/<pair>/ one load, as in a sweep's folder; candidate/ the same
  set-aside/                                    loads and logs of attempts that failed
  served.json                                   the rounds of the served check (kvbench/gate/compare/served_check.py)
  pairs.csv                                     a row for each pair, cell and metric
  verdict.json junit.xml summary.md ...         what kvbench/gate/verdict/outputs.py writes
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.gate.timing.plan import SIDES, Match, cell_rows
from kvbench.runs.folder import DONE, MANIFEST, RunFolder, move_numbered

KIND = "compare"
FORMAT = 1


def is_comparison(path: Path) -> bool:
    """Whether the folder is of a comparison."""
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else None
    return isinstance(manifest, dict) and manifest.get("kind") == KIND


@dataclass(frozen=True)
class CompareFolder:
    """Paths of one comparison. ``stored``: the stored run of each side, if such runs are compared.

    A cell is a row of the manifest's ``cells``: name, workload, turn, and by side the cell's id.
    """

    path: Path
    stored: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> CompareFolder:
        """The comparison in ``path``. Raises UsageError."""
        stored = cls(path).manifest().get("stored") or {}
        return cls(path, {side: Path(run) for side, run in stored.items()})

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST

    def manifest(self) -> dict[str, Any]:
        """Raises UsageError when it is not of a comparison, or of another format."""
        manifest = read_json(self.manifest_path)
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
            raise UsageError(f"{self.path} is not the folder of a comparison: give one such as results/compare/<time>")
        if manifest.get("format") != FORMAT:
            raise UsageError(
                f"{self.path} has the format {manifest.get('format')!r}, and this kvbench reads {FORMAT}: use the "
                "kvbench that measured it, or measure again"
            )
        return manifest

    def resume_command(self, subcommand: str) -> str:
        """The command that goes on with it, from the current folder."""
        return shlex.join(["kvbench", subcommand, "--resume", os.path.relpath(self.path)])

    def locked(self) -> AbstractContextManager[None]:
        """Only one process may work in a folder."""
        return RunFolder(self.path).locked()

    def run(self, side: str, workload: str) -> RunFolder:
        return RunFolder(self.stored.get(side) or self.path / side / workload)

    def load(self, cell: Mapping[str, Any], side: str, pair: int) -> Path:
        return self.run(side, cell["workload"]).load(cell[side], pair)

    def done(self, cell: Mapping[str, Any], side: str, pair: int) -> dict[str, Any] | None:
        """done.json of a load, None if it is not finished."""
        is_done = self.run(side, cell["workload"]).is_done(cell[side], pair)
        return read_json(self.load(cell, side, pair) / DONE) if is_done else None

    def is_whole(self, cells: Sequence[Mapping[str, Any]], pair: int) -> bool:
        """Whether all loads of the pair are finished and valid, on both sides."""
        loads = (self.done(cell, side, pair) for cell in cells for side in SIDES)
        return all(done is not None and done["valid"] for done in loads)

    def whole_pairs(self, cells: Sequence[Mapping[str, Any]]) -> int:
        """How many pairs are whole, from the first on."""
        return next(n for n in itertools.count() if not cells or not self.is_whole(cells, n + 1))

    def set_aside(self, match: Match, pair: int) -> None:
        """Moves the loads and logs of a pair, which is measured again, to set-aside/."""
        for side in SIDES:
            run, config_id = self.run(side, match.workload), match.of(side).config_id
            kept = self.path / "set-aside" / side / match.workload
            logs = [f"{config_id}-{pair}", *(f"{config_id}-{cell.load.load_id}-{pair}" for cell in match.cells(side))]
            for cell in cell_rows([match]):
                load = self.load(cell, side, pair)
                for found in (load, load.with_name(f"failed-{pair}")):
                    if found.exists():
                        move_numbered(found, kept / cell[side])
            for log in map(run.server_log, logs):
                if log.exists():
                    move_numbered(log, kept / "logs")

    def remove_unmeasured(self) -> bool:
        """Removes a folder that has neither a load nor a verdict; returns whether it did."""
        return not (self.path / "verdict.json").exists() and RunFolder(self.path).remove_unmeasured()
