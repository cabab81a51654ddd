"""The folder of a comparison and its manifest: a run folder of each side and workload, the pairs as repeats.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.records import Record, read_record, write_record
from kvbench.gate.compare.request import TYPED, StoredRequest
from kvbench.gate.policy import StoredPolicy
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import CANDIDATE, SIDES, Match, PairedCell
from kvbench.runs.folder import DONE, MANIFEST, RunFolder, move_numbered
from kvbench.runs.results import Environment, LoadResult, Resumed, ServerCounters
from kvbench.runs.server_info import ServerInfo

KIND = "compare"
LOCKSTEP, LAUNCHED, STORED_RUNS = "lockstep", "launched", "stored runs"
TWINS = "twins"  # of older comparisons: they are judged, and not gone on with
_WAY_OUT = "use the kvbench that measured it, or measure again"


class SideFacts(Record):
    """A side as it was given; of a git ref its commit and build, of a stored run its manifest.

    ``environment``: a digest of the installed versions; ``target``: as in a run's manifest.
    """

    model_config = ConfigDict(extra="allow")

    kind: str = ""
    text: str = ""
    name: str = ""
    sha: str | None = None
    changes: str | None = None
    build: str | None = None
    environment: str | None = None
    command: Any = None
    simulated: Any = None


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt at a pair that failed, and the ``reasons`` by side.

    ``pair``: 0 for the served check. ``faults``: the reasons that are the server's own fault. ``first``: the side that
    was launched first. ``resume``: how often the comparison had been resumed; each time attempts are counted from 1.
    """

    pair: int
    attempt: int
    turn: str
    first: str
    reasons: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    resume: int = 0

    @property
    def where(self) -> str:
        """The place in words: ``pair 3 of mixed/paged``."""
        return say("conclude.attempt_of", self.pair > 0, pair=self.pair, turn=self.turn)

    @property
    def blamed(self) -> str | None:
        """The side whose server failed while nothing else went wrong on either side."""
        failed = [side for side in SIDES if self.reasons[side]]
        return failed[0] if len(failed) == 1 and len(self.reasons[failed[0]]) == len(self.faults[failed[0]]) else None

    def __str__(self) -> str:
        rows = [(side, reason) for side in SIDES for reason in self.reasons[side]]
        return "; ".join(say("conclude.reason", side=side, reason=reason) for side, reason in rows)


@dataclass(frozen=True)
class GivenUp:
    """The part of a pair that could not be measured."""

    pair: int
    turn: str


class LockstepFacts(Record):
    """The choices of the first pair, which hold for all pairs.

    turn_lengths: steps of a turn, by match; times: how often a pair computes a load, by cell
    turn_steps: of all matches, in a comparison of an older version
    """

    turn_lengths: Mapping[str, int] = {}
    times: Mapping[str, int] = {}
    turn_steps: int | None = None


class GivenWorkload(Record):
    """A workload as it was given, before the sides' own settings."""

    workload: dict[str, Any]
    profile: str | None = None


class CompareState(Environment):
    """The state of a comparison: what is compared, on what, and what was measured. Every step replaces it by another.

    manifest.json is its file. A running comparison writes it and reads it only to be resumed.

    given: the workloads before the sides' own settings
    order: by pair and match, the side that went first; order_seed: what it is drawn from
    stored: by side, the run of a comparison of stored runs
    servers: by side and configuration, what the first server of it said of itself
    apart: by match, the sides whose loads had a server each, since their prefix cache could not be emptied
    differences: what should be equal on both sides and is not, with --force; doubt: why the probabilities may not hold
    voids: attempts at pairs that were no measurement; void: what was given up; stopped: why it ended early
    seconds: that each pair took; pair_s: how long one more is expected to take, 0 where that is not known
    early_looks: the numbers of pairs after which --max-minutes ended it
    """

    model_config = ConfigDict(extra="allow")
    FORMAT: ClassVar[int] = 1

    kind: Literal["compare"] = KIND
    status: Literal["incomplete", "complete"] = "complete"
    subcommand: str
    method: str = LAUNCHED
    command: tuple[str, ...] = ()
    reproduce: str
    base: SideFacts
    candidate: SideFacts
    workloads: Mapping[str, Mapping[str, Any]] = {}
    given: tuple[GivenWorkload, ...] = ()
    cells: tuple[PairedCell, ...]
    order_seed: int
    order: Mapping[str, Mapping[str, str]] = {}
    options: StoredRequest = StoredRequest()
    policy: StoredPolicy | None = None
    stored: Mapping[str, Path] = {}
    servers: Mapping[str, Mapping[str, ServerInfo]] = {}
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str | None = None
    resumed: tuple[Resumed, ...] = ()
    voids: tuple[FailedAttempt, ...] = ()
    void: GivenUp | None = None
    seconds: tuple[float, ...] = ()
    pair_s: float = 0.0
    pairs: int = 0
    early_looks: tuple[int, ...] = ()
    apart: Mapping[str, tuple[str, ...]] = {}
    lockstep: LockstepFacts | None = None
    stopped: str | None = None
    started: str | None = None
    ended: str | None = None

    def of(self, side: str) -> SideFacts:
        return self.candidate if side == CANDIDATE else self.base

    def but(self, **changes: Any) -> Self:
        """Returns the state with these fields changed."""
        return self.model_copy(update=changes)

    def with_notes(self, notes: Iterable[str]) -> Self:
        """Adds the notes that it does not have yet."""
        return self.but(notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def with_first_side(self, pair: int, turn: str, side: str) -> Self:
        """Notes which side of a pair went first."""
        return self.but(order={**self.order, str(pair): {**self.order.get(str(pair), {}), turn: side}})

    def to_json(self) -> dict[str, Any]:
        """Returns all fields for the file, those too that nothing has set yet."""
        own = CompareState.model_fields.keys() - Environment.model_fields.keys()
        return Record.to_json(self.but(**{name: getattr(self, name) for name in own}))


def is_comparison(path: Path) -> bool:
    manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else None
    return isinstance(manifest, dict) and manifest.get("kind") == KIND


@dataclass(frozen=True)
class CompareFolder:
    """Paths of one comparison. ``stored``: the stored run of each side, if such runs are compared."""

    path: Path
    stored: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> CompareFolder:
        """The comparison in ``path``. Raises UsageError."""
        return cls(path, cls(path).state().stored)

    def state(self) -> CompareState:
        """Reads the manifest. Raises UsageError where it is of no comparison, damaged, or of another format."""
        if (self.path / MANIFEST).is_file() and not is_comparison(self.path):
            raise UsageError(f"{self.path} is not the folder of a comparison: give one such as results/compare/<time>")
        return read_record(CompareState, self.path / MANIFEST, _WAY_OUT)

    def write(self, state: CompareState) -> None:
        write_record(self.path / MANIFEST, state)

    def resume_command(self, subcommand: str) -> str:
        """The command that goes on with it, from the current folder."""
        return shlex.join(["kvbench", *TYPED[subcommand].split(), "--resume", os.path.relpath(self.path)])

    def locked(self) -> AbstractContextManager[None]:
        """Locks the folder for the block: only one process may work in it."""
        return RunFolder(self.path).locked()

    def run(self, side: str, workload: str) -> RunFolder:
        return RunFolder(self.stored.get(side) or self.path / side / workload)

    def load(self, cell: PairedCell, side: str, pair: int) -> Path:
        return self.run(side, cell.workload).load(cell.on(side), pair)

    def done(self, cell: PairedCell, side: str, pair: int) -> LoadResult | None:
        """Reads the done.json of a load; None if it is not finished."""
        is_done = self.run(side, cell.workload).is_done(cell.on(side), pair)
        return read_record(LoadResult, self.load(cell, side, pair) / DONE, _WAY_OUT) if is_done else None

    def counters(self, cell: PairedCell, side: str, pair: int) -> Mapping[str, float | None]:
        """The server's counters over a load. Raises UsageError."""
        path = self.load(cell, side, pair) / "counters.json"
        return read_record(ServerCounters, path, _WAY_OUT).model_extra or {}

    def is_whole(self, cells: Sequence[PairedCell], pair: int) -> bool:
        """Tests whether all loads of the pair are finished and valid, on both sides."""
        loads = (self.done(cell, side, pair) for cell in cells for side in SIDES)
        return all(done is not None and done.valid for done in loads)

    def whole_pairs(self, cells: Sequence[PairedCell]) -> int:
        """Counts the pairs that are whole, from the first on."""
        return next(n for n in itertools.count() if not cells or not self.is_whole(cells, n + 1))

    def set_aside(self, match: Match, pair: int) -> None:
        """Moves the loads and logs of a pair, which is measured again, to set-aside/."""
        for side in SIDES:
            run, config_id = self.run(side, match.workload), match.of(side).config_id
            kept = self.path / "set-aside" / side / match.workload
            logs = [f"{config_id}-{pair}", *(f"{config_id}-{cell.load.load_id}-{pair}" for cell in match.cells(side))]
            for cell in match.paired_cells:
                load = self.load(cell, side, pair)
                for folder in (load, load.with_name(f"failed-{pair}")):
                    if folder.exists():
                        move_numbered(folder, kept / cell.on(side))
            for log in map(run.server_log, logs):
                if log.exists():
                    move_numbered(log, kept / "logs")

    def remove_unmeasured(self) -> bool:
        """Removes a folder that has neither a load nor a verdict; returns whether it did."""
        return not (self.path / "verdict.json").exists() and RunFolder(self.path).remove_unmeasured()
