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
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.timing.noise import FEWEST_PAIRS, RunnerNoise, noise_of, warnings_of
from kvbench.gate.timing.rules import TimingRules

FOLDER = Path("ci/noise")


def runner_class(facts: Mapping[str, Any]) -> str:
    """A name made of processor, cores and GPUs; ``facts`` as of ``kvbench.common.machine.environment``."""
    cpu, gpus = facts["cpu"], [gpu["name"] for gpu in facts["gpus"]]
    words = [str(cpu["model"]), f"{cpu['cores']} cores", *sorted(set(gpus)), *([f"x{len(gpus)}"] if gpus else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def store_noise(folder: CompareFolder, rules: TimingRules, request: CompareRequest, say: Callable[[str], None]) -> int:
    """Stores the noise that the pairs of a calibration show, and prints it. The command's exit code."""
    manifest = folder.manifest()
    cells = manifest.cells
    write_pairs(folder, manifest, rules.metrics)
    pairs = folder.whole_pairs(cells)
    rest = f"{pairs} of {request.pairs} pairs were measured. Go on with --resume {folder.path}"
    if pairs < FEWEST_PAIRS:
        say(f"no noise is stored: {rest}")
        return EXIT_INVALID
    noise = noise_of(read_table(folder, cells, rules, range(1, pairs + 1)), rules)
    name = request.runner_class or runner_class(environment())
    facts = {"runner_class": name, "side": manifest.base.name, "workloads": tuple(manifest.workloads)}
    facts |= {"started": manifest.started, "ended": manifest.ended, "method": manifest.method}
    path = request.store / f"{name}.json"
    write_record(path, noise.model_copy(update=facts))
    last = rules.looks[-1].pairs
    for line in noise.each:
        seen = line.detectable[last]
        say(
            f"{line.metric} {', '.join(line.stands_for)}: pairs scatter by {100 * line.sd:.2g} % (sd); a slowdown of "
            f"{'no size' if seen is None else f'{100 * seen:.2g} %'} is seen in {last} pairs"
        )
    for warning in warnings_of(noise, rules):
        say(f"warning: {warning}")
    say(f"stored: {path}")
    if pairs < request.pairs:
        say(rest)
    return EXIT_INVALID if manifest.void else EXIT_OK  # given up, or ended by --max-minutes


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
        raise UsageError(f"{path} is no noise of a runner ({error}): write one with `kvbench dev calibrate`") from None
    if set(noise.workloads) != set(workloads):
        return [
            f"what this runner can show of {', '.join(workloads)} is not known: {path.name} is its noise under "
            f"{', '.join(noise.workloads)}; `kvbench dev calibrate` measures it"
        ]
    if noise.method != method:
        return [
            f"what this runner can show with --method {method} is not known: {path.name} is its noise with --method "
            f"{noise.method}; `kvbench dev calibrate` measures it"
        ]
    return [f"{text} (noise of {path.name})" for text in warnings_of(noise, rules)]
