"""Which machines have the same noise, and where the noise of a class of them is kept: ci/noise/<class>.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.gate.timing.noise import RunnerNoise, warnings_of
from kvbench.gate.timing.rules import TimingRules

FOLDER = Path("ci/noise")


def runner_class(environment: Mapping[str, Any]) -> str:
    """A name made of processor, cores and GPUs; ``environment`` as of ``kvbench.common.machine.environment``."""
    cpu, gpus = environment["cpu"], [gpu["name"] for gpu in environment.get("gpus") or ()]
    words = [str(cpu["model"]), f"{cpu['cores']} cores", *sorted(set(gpus)), *([f"x{len(gpus)}"] if gpus else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def store_noise(path: Path, noise: RunnerNoise, facts: Mapping[str, Any]) -> None:
    """``facts``: what was measured (``workloads``, by name), on what and when."""
    write_json(path, {**noise.to_json(), **facts})


def noise_notes(path: Path, workloads: Collection[str], rules: TimingRules) -> list[str]:
    """What stored noise says of the limits of ``rules`` for a comparison of these workloads.

    Of others than it was measured with it says nothing. Raises UsageError for a file that holds none.
    """
    noise, known = _stored_noise(path)
    if set(known) != set(workloads):
        return [
            f"what this runner can show of {', '.join(workloads)} is not known: {path.name} is its noise under "
            f"{', '.join(known)}; `kvbench calibrate` measures it"
        ]
    return [f"{text} (noise of {path.name})" for text in warnings_of(noise, rules)]


def _stored_noise(path: Path) -> tuple[RunnerNoise, list[str]]:
    """The noise, and the workloads that it was measured with."""
    data = read_json(path)
    try:
        return RunnerNoise.from_json(data), list(data["workloads"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is no noise of a runner ({error}): write one with `kvbench calibrate`") from None
