"""Which calibration a load needs. Each is measured once and kept in the folder of the sweep or load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.calibration.calibrate import (
    ATTEMPTS,
    DEFAULT_ITL_MS,
    CalibrationSettings,
    ClientCalibration,
    calibrate,
    machine_key,
)
from kvbench.common.files import read_json, write_json
from kvbench.load.validity import RATE_MARGIN

FILE = "calibration.json"
_SIZES = (4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)  # streams of one process, and at most so many in all
_FULL_STREAMS = 256  # of one process with more, chunks are as many a second, until a load shows how many they are


@dataclass(frozen=True)
class ClientLoad:
    """The load on the client: ``streams`` at once and chunks a second (None: not known), over ``processes``."""

    streams: int
    processes: int = 1
    events_per_s: float | None = None
    tls: bool = False

    def covered_by(self, settings: CalibrationSettings) -> bool:
        """Whether a client calibrated with ``settings`` has kept up with at least as much."""
        return self.streams <= settings.streams and (self.events_per_s or 0.0) <= RATE_MARGIN * settings.events_per_s


def settings_for(demand: ClientLoad) -> CalibrationSettings:
    """At least what is needed, in steps, so that a sweep's many loads need few calibrations.

    Streams a process are rounded up to 4, 16, 64, 256, 512 and so on, 8,192 in all; chunks a second, where they are
    known to be more than 20 ms of ITL make, to half powers of 2.
    """
    share = -(-demand.streams // demand.processes)
    streams = min(demand.processes * next((size for size in _SIZES if share <= size), _SIZES[-1]), _SIZES[-1])
    rate = min(streams, demand.processes * _FULL_STREAMS) * 1000 / DEFAULT_ITL_MS
    if demand.events_per_s is not None and demand.events_per_s > RATE_MARGIN * rate:
        rate = 2 ** (math.ceil(2 * math.log2(demand.events_per_s / RATE_MARGIN)) / 2)
    return CalibrationSettings(streams, streams * 1000 / rate, demand.processes, tls=demand.tls)


@dataclass(frozen=True)
class Calibrator:
    """Calibrates the client before a load, once per machine and settings. ``wanted`` False: nothing is measured.

    ``folder``: of a sweep or a load; its calibration.json keeps what was measured. Only a calibration that the client
    passed is used again: one that failed in all its attempts has one more before each further load, and by --resume.
    ``say``: progress for the user; ``warn``: warnings, which are to be read later, too. ``check``: called before a load
    is begun with a new calibration, with the seconds that it takes; may raise.
    """

    folder: Path
    wanted: bool = True
    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    check: Callable[[float], None] = lambda seconds: None

    def __call__(self, demand: ClientLoad, before: ClientCalibration | None = None) -> ClientCalibration | None:
        """The calibration for ``demand``: ``before``, if that is enough; None where none is wanted.

        Raises MeasurementError.
        """
        if not self.wanted:
            return None
        if before is not None and demand.covered_by(before.settings):
            return before
        settings = settings_for(demand)
        calibration = self._at(settings, again=before is not None)
        if demand.covered_by(settings):
            return calibration
        too_much = (
            f"the load had up to {demand.streams} streams at once, and the client can be calibrated at "
            f"{settings.streams} at most; use fewer."
        )
        return dataclasses.replace(calibration, reasons=(*calibration.reasons, too_much))

    def _at(self, settings: CalibrationSettings, again: bool) -> ClientCalibration:
        """A stored good calibration, else a new one. ``again``: the load needed more than was expected before it."""
        stored = _stored(self.folder)
        same = [c for c in stored if (c.machine, c.settings) == (machine_key(), settings)]
        failed = [c for c in same if c.reasons]
        if good := [c for c in same if not c.reasons]:
            return good[-1]
        where = f"{settings.streams} streams{' through TLS' if settings.tls else ''}"
        why = "again, as the load needed more than expected, " if again else ""
        at = f"{where} of {settings.itl_ms:.4g} ms ITL"
        if not again:  # else it judges what is measured already
            self.check(settings.seconds + 2)
        self.say(f"calibrating the load client {why}at {at} (about {settings.seconds + 2:.0f} s, once)")
        new = calibrate(settings, attempts=1 if failed else ATTEMPTS)
        for reason in new.reasons:
            self.warn(f"loads of {where} will be invalid: {reason}")
        if new.reasons and (disturbed := [each.disturbed for each in new.attempts if each.disturbed]):
            self.warn(f"while the client was calibrated {disturbed[-1]}: stop what runs there and try again")
        kept = [c for c in stored if c not in failed] if new.reasons else stored
        write_json(self.folder / FILE, [c.to_json() for c in (*kept, new)])
        return new

    def facts(self) -> dict[str, Any]:
        """For a manifest: what was measured so far, or that it was left out."""
        return {"left_out": not self.wanted, "measured": [c.to_json() for c in _stored(self.folder)]}


def passed_since(folder: Path, failed: ClientCalibration) -> bool:
    """Whether the client later passed what it had failed before a load of the run in ``folder``."""
    return any(
        not each.reasons
        and (each.machine, each.settings) == (failed.machine, failed.settings)
        and each.taken != failed.taken
        for each in _stored(folder)
    )


def _stored(folder: Path) -> list[ClientCalibration]:
    if not (folder / FILE).is_file():
        return []
    try:
        return [ClientCalibration.from_json(row) for row in read_json(folder / FILE)]
    except (KeyError, TypeError, ValueError):  # of another version: measured anew
        return []
