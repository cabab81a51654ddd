"""The instruments of a sweep: how each chooses what it measures, and how one is found by its name."""

from __future__ import annotations

from dataclasses import replace

from kvbench.common.errors import UsageError, say
from kvbench.common.plugins import find_plugin
from kvbench.measure.instrument import Instrument
from kvbench.runs.results import Manifest
from kvbench.sweep.requests import MachineOptions, SweepRequest
from kvbench.targets.choose import ChosenTarget
from kvbench.workload.file import Workload

HTTP, SIMULATED = "http", "simulated"


class SweepInstrument:
    """An instrument for sweeps, with the choice of what it measures; a subclass may choose other targets.

    instrument: the class whose `measure` runs each load
    """

    def __init__(self, instrument: type[Instrument]) -> None:
        self.instrument = instrument

    def profile(self, request: SweepRequest) -> str | None:
        """Names the workload's profile that is measured; None: the machine's."""
        return request.profile

    def choose(self, workload: Workload, request: SweepRequest, stored: Manifest, begun: bool) -> ChosenTarget:
        """Chooses the target of a new run, or of one that was begun. Raises UsageError."""
        from kvbench.targets.choose import choose

        for name in request.part(MachineOptions).stated:
            option = request.typed(name)
            raise UsageError(f"{option} goes with --simulate only: simulate, or leave {option} out")
        if workload.simulate:
            say(f"note: {workload.name} is measured here; its section `simulate` counts with --simulate only")
        target = choose(workload, request, stored)
        named = request.instrument or stored.instrument
        return replace(target, manifest=target.manifest.model_copy(update={"instrument": named})) if named else target


def chosen_instrument(request: SweepRequest, stored: Manifest) -> SweepInstrument:
    """Finds the instrument of a new run, or of one that was begun, in the entry points ``kvbench.instruments``.

    Raises UsageError where none has this name, or where the run was begun with another one.
    """
    option = "--simulate" if request.simulate else "--instrument"
    asked = SIMULATED if request.simulate else request.instrument
    if request.simulate and request.instrument not in (None, SIMULATED):
        raise UsageError(f"--simulate measures with --instrument {SIMULATED}: leave one of the two out")
    begun_with = stored.instrument or (SIMULATED if stored.simulated else HTTP)
    if stored.started and asked and asked != begun_with:
        raise UsageError(
            f"{option} cannot go on with a run that was begun with --instrument {begun_with}: leave it out, or start a "
            "new run without --resume"
        )
    name = asked or begun_with
    plugin = find_plugin("instruments", name, option, _is_instrument)
    return plugin if isinstance(plugin, SweepInstrument) else SweepInstrument(plugin)


def _is_instrument(plugin: object) -> bool:
    return isinstance(plugin, SweepInstrument) or (isinstance(plugin, type) and issubclass(plugin, Instrument))
