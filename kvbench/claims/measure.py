"""Measures the workloads of the claims in engine time, and answers what their judges ask.

<run>/measured/<measurement>/lockstep/     launches of one workload (kvbench/lockstep/sitting.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.common.errors import MeasurementError
from kvbench.common.files import read_json
from kvbench.effects.comparison import Comparison
from kvbench.lockstep.intervals import (
    EARLY_CONFIDENCE,
    FEWEST_LAUNCHES,
    FEWEST_POOLED,
    POOLED,
    LaunchRatio,
    effect,
    effect_of_values,
    for_other_requests,
    pooled_effects,
    with_confidence,
)
from kvbench.lockstep.sitting import Sitting, throughput_ratios, values_of_requests
from kvbench.metrics.latency import QUANTILES, request_latencies
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import Capacity
from kvbench.targets.choose import ChosenTarget
from kvbench.workload.design import Configuration, Design, capacities, normalise
from kvbench.workload.settings import Settings, effective

NARROW = 0.08  # half width of an interval beyond which more launches are not worth their time
_OPEN_LIMIT_S = 120.0


@dataclass
class WorkloadFacts:
    """The facts of one workload after ``launches`` launches. Its load is closed loop, of one concurrency.

    A configuration is named by the settings in which it differs from the baseline; none: the baseline.
    early: whether intervals are of ``EARLY_CONFIDENCE`` where launches are too few to stop at 95 %.
    """

    design: Design
    capacity: Mapping[str, Capacity]
    sitting: Sitting
    launches: int = 0
    early: bool = False
    _ratios: dict[tuple[str, str], list[LaunchRatio]] = field(default_factory=dict)

    def more(self, limit_s: float) -> None:
        """Measures further launches, for ``limit_s`` seconds. Raises MeasurementError where not even one succeeds."""
        before, self.sitting.limit_s = self.launches, self.sitting.elapsed_s + limit_s
        self.launches = self.sitting.execute().launches or 0
        if self.launches == before:
            raise MeasurementError(self.sitting.notes[-1])

    def find(self, **settings: Any) -> Configuration:
        """The configuration with these settings, and the baseline's otherwise."""
        wanted = normalise({**self.design.configurations[0].settings, **settings})
        return next(
            configuration
            for configuration in self.design.configurations
            if all(effective(configuration.settings, key) == value for key, value in wanted.items())
        )

    def capacity_of(self, **settings: Any) -> Capacity:
        """The capacity of a configuration's KV budget."""
        return self.capacity[self.find(**settings).config_id]

    def took_part(self) -> list[Configuration]:
        """The configurations beside the baseline that have a load of every launch."""
        return [beside for beside in self.design.configurations[1:] if self._stored(beside) is not None]

    def _stored(self, configuration: Configuration) -> list[Path] | None:
        cell = next(cell for cell in self.design.cells if cell.configuration is configuration)
        folders = self.sitting.loads_of(cell.cell_id, self.launches)
        return folders if all((folder / DONE).is_file() for folder in folders) else None

    def loads(self, configuration: Configuration) -> list[Path]:
        """The folders of its loads, one a launch. Raises MeasurementError where it took no part to the end."""
        if (folders := self._stored(configuration)) is None:
            reasons = [note for note in self.sitting.notes if note.startswith(configuration.label)]
            raise MeasurementError(reasons[0] if reasons else f"{configuration.label} was not measured")
        return folders

    def launch_ratios(self, to: Settings, against: Settings | None = None) -> list[LaunchRatio]:
        """Computes the output tokens/s of ``to`` over those ``against`` (None: the baseline) in each launch."""
        base, other = self.find(**(against or {})), self.find(**to)
        key = (base.config_id, other.config_id)
        if len(self._ratios.get(key, ())) != self.launches:
            self._ratios[key] = throughput_ratios(self.loads(base), self.loads(other))
        return self._ratios[key]

    def speed(self, **to: Any) -> Comparison:
        """The ratio of output tokens/s to the baseline's, with the noise that all configurations have in common."""
        if self.launches < 2:
            return self.ratio(to)
        subject = self.find(**to)
        self.loads(subject)  # raises where it took no part
        kin = {configuration.config_id: self.launch_ratios(configuration.varied) for configuration in self.took_part()}
        y = {name: [launch.log_ratio for launch in ratios] for name, ratios in kin.items()}
        effects = pooled_effects({name: effect(ratios, self.sitting.at_once) for name, ratios in kin.items()}, y)
        return self._careful(effects[subject.config_id])

    def ratio(self, to: Settings, against: Settings | None = None) -> Comparison:
        """The ratio of output tokens/s of ``to`` to those ``against`` (None: the baseline), by its own noise."""
        return self._careful(effect(self.launch_ratios(to, against), self.sitting.at_once))

    def _careful(self, ratio: Comparison) -> Comparison:
        fewest = FEWEST_POOLED if ratio.basis == POOLED else FEWEST_LAUNCHES + (len(self.design.configurations) == 2)
        return with_confidence(ratio, EARLY_CONFIDENCE) if self.early and self.launches < fewest else ratio

    def tpots(self, cls: str, quantile: float, **settings: Any) -> list[float]:
        """A quantile of the TPOT [ms] of one class of requests in each launch."""
        tables = [pd.read_parquet(load / "requests.parquet") for load in self.loads(self.find(**settings))]
        return [float(request_latencies(rows[rows["class"] == cls])["tpot_ms"].quantile(quantile)) for rows in tables]

    def p95(self, metric: str, **to: Any) -> Comparison:
        """The ratio of a p95 (``ttft`` or ``itl``) to the baseline's, for other requests of the same kind, too."""
        name, quantile = f"p95_{metric}_ms", QUANTILES["p95"]
        pair = (self.find(), self.find(**to))
        values = [[values_of_requests(name, load) for load in self.loads(configuration)] for configuration in pair]
        p95s = [[float(np.quantile(np.concatenate(launch), quantile)) for launch in launches] for launches in values]
        ratio = effect_of_values(*p95s, name, self.sitting.at_once)
        if self.launches < 2:
            return ratio
        return self._careful(for_other_requests(ratio, values[0][0], values[1][0], quantile))

    def counters(self, **settings: Any) -> Mapping[str, float]:
        """The counters of the engine, the same in every launch."""
        return read_json(self.loads(self.find(**settings))[0] / "counters.json")

    def slots(self, **settings: Any) -> Mapping[str, float]:
        """Slots by what they held (tokens, waste, cached, free, fragmented, pinned), summed over the steps."""
        prefix = "kv_slot_steps_total_"
        return {k.removeprefix(prefix): v for k, v in self.counters(**settings).items() if k.startswith(prefix)}

    def steps(self, **settings: Any) -> tuple[int, float, float]:
        """The number of steps that the load took, and their mean output tokens and milliseconds."""
        rows = pd.read_parquet(self.loads(self.find(**settings))[0] / "steps.parquet")
        return len(rows), float(rows["output_tokens"].mean()), 1000 * float(rows["seconds"].mean())

    def shared(self, **settings: Any) -> float:
        """The share of the pages of all sequences, over all steps, that need no memory since they are shared."""
        counted = self.counters(**settings)
        return 1 - counted["kv_page_steps_total_physical"] / counted["kv_page_steps_total_logical"]

    def batched(self, **settings: Any) -> float:
        """The sequences that decode in a step, on average until no request waits for its first token any more."""
        load = self.loads(self.find(**settings))[0]
        steps, requests = (pd.read_parquet(load / f"{name}.parquet") for name in ("steps", "requests"))
        last = float(requests["first"].max())
        return float(steps["decode_tokens"][steps["seconds"].cumsum() <= last].mean())

    def tokens_held(self, **settings: Any) -> int:
        return int(self.capacity_of(**settings).capacity_tokens)


def measure(
    name: str,
    target: ChosenTarget,
    design: Design,
    folder: Path,
    *,
    limit_s: float,
    exact: bool,
    is_enough: Callable[[WorkloadFacts], bool],
    show: Callable[[Any], None],
    check: Callable[[], None],
) -> WorkloadFacts:
    """Launches until ``is_enough`` (asked from the third on) or the time is over.

    exact: only what is counted matters, which one launch tells. While there are fewer launches than intervals.py asks
    for, intervals of ``EARLY_CONFIDENCE`` have to be enough: a few launches that happen to agree would stop too soon (a
    group-sequential test with strict early looks, after Haybittle 1971 and Peto et al. 1976).
    Raises MeasurementError, UsageError.
    """
    assert target.stepped is not None  # the command line has checked it
    capacity = capacities(design, target.check)
    sitting = Sitting(
        RunFolder(folder), target.workload, design, capacity, limit_s, _OPEN_LIMIT_S, show, check, option="--minutes",
        forked=target.manifest.is_built_in, stepped=target.stepped,
    )  # fmt: skip
    if exact:
        sitting.most_at_once = 1
    measured = WorkloadFacts(design, capacity, sitting)

    def enough(launches: int) -> bool:
        measured.launches, measured.early = launches, True
        decided = exact or (launches >= FEWEST_POOLED and is_enough(measured))
        measured.early = False
        return decided

    sitting.is_enough = enough
    if reason := sitting.why_not():
        raise MeasurementError(f"{name}: {reason}")
    measured.launches = sitting.execute().launches or 0
    return measured
