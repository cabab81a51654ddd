"""Part ``settings``: engine time of each setting against paged KV of page 16, same KV bytes, on Llama-3.1-8B's shape.

A sitting is a baseline and engines that each differ from it in one setting, in turns step by step under one load
(kvbench/lockstep/sitting.py). The simulator's predictions for the same design are on disk before anything is measured.
Every sitting has two launches, the last one as many as time allows; figures are kept after each launch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.gpu.commands import ROOT, newest_run, run_kvbench
from ci.gpu.part import PartReport, part_parser
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json
from kvbench.lockstep.sitting import METRICS, Sitting
from kvbench.runs.aggregate import flatten
from kvbench.runs.engine_time import EFFECTS, FOLDER
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.metric_names import value_of
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import capacities, plan_sweep
from kvbench.workload.file import load_workload

WORKLOAD = "workloads/mixed.yaml"
GIB = 2**30
WEIGHTS_BYTES, SPARE_BYTES, ENGINE_BYTES = 15 * GIB, 3 * GIB, 3 * GIB // 2  # an engine's: graphs and workspace
MIB_STEP, LEAST_MIB = 100, 2000
LAUNCHES = 2
PREDICTION_SECONDS = 60.0
END_SECONDS = 8.0  # to stop the engines
SLOTS = "kv_slot_steps_total_"
LONGEST = 3  # a sitting's first launch may take so many times its limit
TINY_DEVICE = "H200"  # simulated where there is no GPU

MIXED = ("load.concurrency=[64]", "load.num_requests=[64]")
DECODE_HEAVY = (
    "load.concurrency=[64]", "load.num_requests=[64]", "engine.max_model_len=2048",
    "load.prompts={kind: synthetic, classes: "
    "[{name: decode heavy, share: 1, prompt_tokens: [256, 256], output_tokens: [1024, 1024]}]}",
)  # fmt: skip
TINY_LOAD = (
    "load.concurrency=[4]", "load.num_requests=[4]",
    "load.prompts={kind: synthetic, classes: [{name: tiny, prompt_tokens: [8, 16], output_tokens: [16, 16]}]}",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One sitting. ``sweep``: values by setting, each beside the baseline; ``budget_mib``: of each engine, at most."""

    name: str
    load: str
    overrides: tuple[str, ...]
    sweep: Mapping[str, tuple[Any, ...]]
    budget_mib: int = 16400

    @property
    def engines(self) -> int:
        """The baseline's among them."""
        return 1 + sum(map(len, self.sweep.values()))

    def words(self, budget_mib: int) -> list[str]:
        """``key=value`` over the workload's."""
        swept = {name: list(values) for name, values in self.sweep.items()}
        return [*self.overrides, "engine.max_num_seqs=64", f"engine.kv_budget={budget_mib}MiB",
                f"sweep={json.dumps(swept)}"]  # fmt: skip


FP8, INT8, INT4 = "fp8_e4m3", "int8_per_token_head", "int4_per_token_head"
COMPARISONS = (
    Comparison("memory", "mixed lengths, 64 users", MIXED,
               {"layout": ("contiguous",), "enable_prefix_caching": (True,)}),
    Comparison("decode", "256 tokens in, 1,024 out, 64 users", DECODE_HEAVY,
               {"layout": ("contiguous",), "kv_cache_dtype": (FP8, INT4), "page_size": (1, 256),
                "preemption_mode": ("swap",)}, 7000),
    Comparison("format", "mixed lengths, 64 users", MIXED,
               {"kv_cache_dtype": (FP8, INT8, INT4), "page_size": (1, 64, 256)}),
)  # fmt: skip
TINY = (
    Comparison("memory", "4 requests (tiny)", TINY_LOAD, {"layout": ("contiguous",)}, 97),
    Comparison("format", "4 requests (tiny)", TINY_LOAD, {"kv_cache_dtype": (INT8,), "page_size": (64,)}, 97),
)


def budget_mib(engines: int, most: int, free_bytes: int) -> int:
    """MiB of KV for each of ``engines`` that share the weights on a card with ``free_bytes``, ``most`` at most."""
    room = (free_bytes - WEIGHTS_BYTES - SPARE_BYTES) / engines - ENGINE_BYTES
    return min(most, int(room / 2**20) // MIB_STEP * MIB_STEP)


def simulate(words: list[str], profile: str, device: str, folder: Path) -> dict[str, dict[str, float | None]]:
    """The metrics of a sitting's cells on a simulated ``device``; empty where that failed, which the log explains."""
    command = ["sweep", WORKLOAD, "--profile", profile, "--simulate", "--device", device, "--repeats", "1",
               "--no-report", "--no-quality", "--output-dir", str(folder)]  # fmt: skip
    run_kvbench([*command, *(part for word in words for part in ("-o", word))], PREDICTION_SECONDS)
    run = newest_run(folder)
    return {path.parents[2].name: metrics_of(path) for path in run.glob(f"cells/*/loads/1/{DONE}")} if run else {}


def metrics_of(done: Path) -> dict[str, float | None]:
    """What a sitting compares, of one load."""
    values = flatten(read_json(done)["metrics"])
    return {metric: value_of(values, metric) for metric in METRICS}


def memory_use(counters: Mapping[str, float]) -> dict[str, float]:
    """Means over the steps of a load: sequences that decode, and the share of the KV slots that hold tokens."""
    slots = {key: value for key, value in counters.items() if key.startswith(SLOTS)}
    return {
        "decoding": counters["scheduled_tokens_total_decode"] / counters["steps_total"],
        "kv_usage": slots[f"{SLOTS}tokens"] / sum(slots.values()),
        "preemptions": counters["num_preemptions_total"],
    }


class Measurement:
    """One comparison as it is run with a budget, and what has come of it.

    ``predicted``: the ratio to the baseline of each metric, by cell; empty before ``predict``.
    """

    def __init__(self, comparison: Comparison, budget_mib: int, args: Any, report: PartReport):
        self.name, self.load, self.budget_mib = comparison.name, comparison.load, budget_mib
        self.words = comparison.words(budget_mib)
        self.profile = "gpu" if args.device == "cuda" else "cpu"
        self.folder = args.scratch / "settings" / comparison.name
        self.predicted: dict[str, dict[str, float]] = {}
        self._report, self._device = report, ""
        self._workload = load_workload(ROOT / WORKLOAD, profile=self.profile, overrides=self.words)
        self._design, _ = plan_sweep(self._workload, check=check_configuration)
        self._base = next(cell.cell_id for cell in self._design.cells if cell.configuration.is_baseline)

    def predict(self, device: str) -> None:
        """Simulate the same design on ``device`` and keep the ratios."""
        metrics, self._device = simulate(self.words, self.profile, device, self.folder / "simulated"), device
        base = metrics.pop(self._base, {})
        self.predicted = {
            cell: {name: value / base[name] for name, value in values.items() if value and base.get(name)}
            for cell, values in metrics.items()
        }
        if not self.predicted:
            self._report.skip(f"predictions of {self.name}", f"nothing was simulated on {device}: see the log")
        self._report.put(predictions={**self._report.data.get("predictions", {}), self.name: self.predicted})

    def measure(self, limit_s: float, launches: int | None) -> None:
        """Run at most ``launches`` launches (None: as many as there is time for) within ``limit_s``."""

        def is_enough(done: int) -> bool:
            self.put_down()
            return launches is not None and done >= launches

        sitting = Sitting(
            RunFolder(self.folder), self._workload, self._design, capacities(self._design, check_configuration),
            limit_s / LONGEST, limit_s, lambda text: print(text if isinstance(text, str) else text(), flush=True),
            lambda: None, is_enough, "the part's time",
        )  # fmt: skip
        try:
            notes = sitting.execute()["notes"]
        except (MeasurementError, UsageError) as error:
            self._report.skip(self.name, str(error))
            return
        for note in notes:
            self._report.skip(self.name, note)
        self.put_down()

    def put_down(self) -> None:
        """Rows and table of the launches that are there, in the place of those before."""
        effects = read_json(self.folder / FOLDER / EFFECTS)
        by_cell: dict[str, dict[str, Any]] = {}
        for effect in effects["effects"]:
            by_cell.setdefault(effect["cell"], {})[effect["metric"]] = effect
        rows = [row for row in self._report.data["rows"] if row["sitting"] != self.name]
        shown = []
        for cell in self._design.cells:
            measured = by_cell.get(cell.cell_id, {})
            if not measured and cell.cell_id != self._base:
                continue  # no room, or refused: a note says so
            load = self.folder / FOLDER / "cells" / cell.cell_id / "loads" / "1"
            row = {
                "sitting": self.name, "load": self.load, "kv_budget_mib": self.budget_mib, "cell": cell.cell_id,
                "setting": cell.configuration.label, "launches": effects["launches"], **metrics_of(load / DONE),
                **memory_use(read_json(load / "counters.json")), "effects": measured,
                "predicted": self.predicted.get(cell.cell_id, {}),
            }  # fmt: skip
            rows.append(row)
            shown.append(table_row(row))
        self._report.data["rows"] = rows
        self._report.data["headline"] = f"{sum('effects' in row and bool(row['effects']) for row in rows)} comparisons"
        columns = ["setting", "tokens/s", "ratio (95 %)", f"predicted, {self._device}", "p95 TTFT ms", "ratio (95 %)",
                   "predicted", "p95 ITL ms", "ratio (95 %)", "predicted", "decoding", "KV with tokens", "preempted",
                   "launches"]  # fmt: skip
        title = f"Engine time of settings: {self.load}, {self.budget_mib:,} MiB of KV each ({self.name})"
        self._report.table(title, columns, shown)


def table_row(row: Mapping[str, Any]) -> list[str]:
    """A row of the summary's table."""
    cells = [row["setting"]]
    for metric, digits in (("output_throughput", 0), ("p95_ttft_ms", 0), ("p95_itl_ms", 1)):
        effect, value, predicted = row["effects"].get(metric), row[metric], row["predicted"].get(metric)
        cells += ["–" if value is None else f"{value:,.{digits}f}", ratio(effect) if effect else "–",
                  "–" if predicted is None else f"{predicted:.3f}"]  # fmt: skip
    launches = f"{row['launches']}{' (its own scatter alone)' if row['launches'] == 1 else ''}"
    return [*cells, f"{row['decoding']:.1f}", f"{row['kv_usage']:.0%}", f"{row['preemptions']:.0f}", launches]


def ratio(effect: Mapping[str, Any]) -> str:
    """1.234 (1.200 to 1.270)"""
    low, high = effect["low"], effect["high"]
    return f"{effect['ratio']:.3f}" + (f" ({low:.3f} to {high:.3f})" if low and high and math.isfinite(high) else "")


def main() -> int:
    """The part; 1 if something failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    device = (read_json(args.facts) if args.facts.is_file() else {}).get("device", {})
    name, free = device.get("name", TINY_DEVICE), device.get("memory_free_bytes", 0)
    measurements = []
    for comparison in TINY if args.tiny else COMPARISONS:
        most = comparison.budget_mib
        budget = most if args.tiny else budget_mib(comparison.engines, most, free)
        if budget < min(LEAST_MIB, most):
            report.skip(comparison.name, f"{free / GIB:.0f} GiB are free, too few for {comparison.engines} engines")
        else:
            measurements.append(Measurement(comparison, budget, args, report))
    for measurement in measurements:
        measurement.predict(name)
    for left, measurement in zip(range(len(measurements), 0, -1), measurements, strict=True):
        share = 2 / (left + 1)  # half of the time for the first of three, and what it leaves for the others
        measurement.measure((report.time_left - END_SECONDS) * share, None if left == 1 and not args.tiny else LAUNCHES)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
