"""The folder of a comparison: a run folder of each side and workload, the pairs as their repeats.

results/compare/<UTC time>-<git short sha>/
  manifest.json                                 what is compared, how, on what; kind "compare"
  base/<workload>/cells/<cell id>/loads/<pair>/ one load, as in a sweep's folder; candidate/ the same
  set-aside/                                    loads of attempts that were no measurement, kept for reading
  pairs.csv                                     one row a pair, cell and metric
  verdict.json junit.xml summary.md ...         what kvbench/gate/verdict/outputs.py writes
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.gate.timing.plan import SIDES, Match
from kvbench.runs.folder import DONE, MANIFEST, RunFolder

KIND = "compare"
FORMAT = 1


def is_comparison(path: Path) -> bool:
    """Whether the folder's manifest says that it is one of a comparison."""
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else None
    return isinstance(manifest, dict) and manifest.get("kind") == KIND


@dataclass(frozen=True)
class CompareFolder:
    """Paths of one comparison. ``stored``: by side, the run that was measured before, where that is compared."""

    path: Path
    stored: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> CompareFolder:
        """The comparison that lies there. Raises UsageError."""
        stored = cls(path).manifest().get("stored") or {}
        return cls(path, {side: Path(run) for side, run in stored.items()})

    @property
    def manifest_path(self) -> Path:
        return self.path / MANIFEST

    def manifest(self) -> dict[str, Any]:
        """Raises UsageError when it is none of a comparison, or of another format."""
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
        """The command that goes on with it, from where we are."""
        return shlex.join(["kvbench", subcommand, "--resume", os.path.relpath(self.path)])

    def run_lock(self) -> AbstractContextManager[None]:
        """Only one process may work in a folder."""
        return RunFolder(self.path).locked()

    def remove_unmeasured(self) -> bool:
        """Removes the folder of a comparison that has neither a load nor a verdict; whether it had none."""
        if any(self.path.rglob(DONE)) or (self.path / "verdict.json").exists():
            return False
        shutil.rmtree(self.path)
        return True

    def run(self, side: str, workload: str) -> RunFolder:
        return RunFolder(self.stored.get(side) or self.path / side / workload)

    def is_whole(self, match: Match, pair: int) -> bool:
        """Whether both sides of the pair are there and are measurements."""
        return all(
            self.is_measured(side, match.workload, cell.cell_id, pair) for side in SIDES for cell in match.cells(side)
        )

    def is_measured(self, side: str, workload: str, cell_id: str, pair: int) -> bool:
        """Whether that load is finished, and valid."""
        run = self.run(side, workload)
        return run.is_done(cell_id, pair) and bool(read_json(run.load(cell_id, pair) / DONE)["valid"])

    def loads(self, match: Match, side: str, pair: int) -> Iterator[dict[str, Any]]:
        """done.json of each finished load of one side."""
        run = self.run(side, match.workload)
        for cell in match.cells(side):
            if run.is_done(cell.cell_id, pair):
                yield read_json(run.load(cell.cell_id, pair) / DONE)

    def set_aside(self, match: Match, pair: int) -> None:
        """Out of the way, and kept: what there is of a pair that is to be measured anew, its servers' logs too."""
        for side in SIDES:
            run, configuration = self.run(side, match.workload), match.of(side)
            kept = self.path / "set-aside" / side / match.workload
            for cell in match.cells(side):
                load = run.load(cell.cell_id, pair)
                for found in (load, load.with_name(f"failed-{pair}")):
                    _keep(found, kept / cell.cell_id, str(pair))
                _keep(run.server_log(f"{configuration.config_id}-{cell.load.load_id}-{pair}"), kept / "logs")
            _keep(run.server_log(f"{configuration.config_id}-{pair}"), kept / "logs")


def _keep(found: Path, folder: Path, name: str | None = None) -> None:
    """Moves what is there into ``folder``, under its name and a number."""
    if not found.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    stem = name or found.stem
    found.rename(next(p for n in itertools.count(1) if not (p := folder / f"{stem}-{n}{found.suffix}").exists()))
