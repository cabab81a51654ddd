"""The noise of a class of machines: measured by ``kvbench dev calibrate``, kept in ci/noise/<class>.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kvbench.common.errors import EXIT_INVALID, EXIT_OK, UsageError
from kvbench.common.files import read_json
from kvbench.common.machine import environment
from kvbench.common.records import write_record
from kvbench.gate.compare.conclude import read_table, write_pairs
from kvbench.gate.compare.folder import CompareFolder, CompareState
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.sentences import say
from kvbench.gate.timing.noise import FEWEST_PAIRS, RunnerNoise, noise_of, warnings_of
from kvbench.gate.timing.rules import TimingRules

FOLDER = Path("ci/noise")


def runner_class(facts: Mapping[str, Any]) -> str:
    """A name made of processor, cores and GPUs; ``facts`` as of ``kvbench.common.machine.environment``."""
    cpu, gpus = facts["cpu"], [gpu["name"] for gpu in facts["gpus"]]
    words = [str(cpu["model"]), f"{cpu['cores']} cores", *sorted(set(gpus)), *([f"x{len(gpus)}"] if gpus else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def store_noise(
    folder: CompareFolder,
    state: CompareState,
    rules: TimingRules,
    request: CompareRequest,
    tell: Callable[[str], None],
) -> int:
    """Stores the noise that the pairs of a calibration show, and prints it. The command's exit code."""
    cells = state.cells
    write_pairs(folder, state, rules.metrics)
    pairs = folder.whole_pairs(cells)
    rest = say("noise.rest", pairs=pairs, wanted=request.pairs, folder=folder.path)
    if pairs < FEWEST_PAIRS:
        tell(say("noise.not_stored", rest=rest))
        return EXIT_INVALID
    noise = noise_of(read_table(folder, cells, rules, range(1, pairs + 1)), rules)
    name = request.runner_class or runner_class(environment())
    facts = {"runner_class": name, "side": state.base.name, "workloads": tuple(state.workloads)}
    facts |= {"started": state.started, "ended": state.ended, "method": state.method}
    path = request.store / f"{name}.json"
    write_record(path, noise.model_copy(update=facts))
    last = rules.looks[-1].pairs
    for line in noise.each:
        seen = line.detectable[last]
        seen = say("noise.seen", seen is not None, percent=100 * (seen or 0.0))
        levels = ", ".join(line.stands_for)
        tell(say("noise.line", metric=line.metric, levels=levels, sd=100 * line.sd, seen=seen, last=last))
    for warning in warnings_of(noise, rules):
        tell(say("noise.warning", text=warning))
    tell(say("noise.stored", path=path))
    if pairs < request.pairs:
        tell(rest)
    return EXIT_INVALID if state.void else EXIT_OK  # given up, or ended by --max-minutes


def noise_notes(request: CompareRequest, workloads: Collection[str], method: str, rules: TimingRules) -> list[str]:
    """Notes what the stored noise of this class of machines says of the limits of ``rules``.

    Measured with other workloads, or by another method, it says nothing. Raises UsageError for a file that holds no
    noise.
    """
    path = request.noise or FOLDER / f"{request.runner_class or runner_class(environment())}.json"
    if not path.is_file():
        return []
    try:
        noise = RunnerNoise.parse(read_json(path))
        if not noise.workloads:
            raise ValueError("it names no workload")
    except ValueError as error:
        raise UsageError(say("noise.no_noise", path=path, error=error)) from None
    if set(noise.workloads) != set(workloads):
        names = {"workloads": ", ".join(workloads), "measured": ", ".join(noise.workloads), "file": path.name}
        return [say("noise.other_workloads", **names)]
    if noise.method != method:
        return [say("noise.other_method", method=method, measured=noise.method, file=path.name)]
    return [say("noise.of_file", text=text, file=path.name) for text in warnings_of(noise, rules)]
