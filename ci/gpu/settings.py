"""Part ``settings``: engine time of each setting against paged KV of page 16, same KV bytes, on Llama-3.1-8B's shape.

A sitting is a baseline and engines that each differ from it in one setting, in turns step by step under one load
(kvbench/lockstep/sitting.py). The simulator's predictions for the same design are on disk before anything is measured.
Every sitting has up to two launches, the last one as many as time allows; figures are kept after each launch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci.gpu.commands import PROFILES, WORKLOAD, run_kvbench
from ci.gpu.part import PartReport, number_text, part_parser
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.files import read_json
from kvbench.common.packages import REPOSITORY
from kvbench.lockstep.process import EngineFailedError
from kvbench.lockstep.sitting import METRICS, MOST_LAUNCHES, Sitting
from kvbench.runs.aggregate import flatten
from kvbench.runs.engine_time import EFFECTS, FOLDER
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.metric_names import value_of
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import capacities, plan_sweep
from kvbench.workload.file import load_workload

GIB = 2**30
WEIGHTS_BYTES, SPARE_BYTES, ENGINE_BYTES = 15 * GIB, 3 * GIB, 3 * GIB // 2  # engine: graphs and workspace
MIB_STEP = 100
LAUNCHES = 2
PREDICTION_SECONDS = 60.0
ONE_LAUNCH_SECONDS = 110.0  # approximate; kept for each of the sittings that follow
END_SECONDS = 8.0  # time to stop the engines
SLOTS = "kv_slot_steps_total_"
LONGEST = 3  # a sitting's first launch may take so many times its limit
TINY_DEVICE = "H200"  # simulated where there is no GPU

# All 64 users begin at once and each sends one request.
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
class SettingsGroup:
    """Settings that are measured in one sitting. ``sweep``: values by setting; ``budget_mib``: KV of each engine."""

    name: str
    load: str
    overrides: tuple[str, ...]
    sweep: Mapping[str, tuple[Any, ...]]
    budget_mib: int = 16400

    def fit(self, free_bytes: int) -> SettingsGroup:
        """Returns the group with the largest budget with which all engines fit a card; they share the weights."""
        engines = 1 + sum(map(len, self.sweep.values()))
        room = (free_bytes - WEIGHTS_BYTES - SPARE_BYTES) / engines - ENGINE_BYTES
        return replace(self, budget_mib=min(self.budget_mib, int(room / 2**20) // MIB_STEP * MIB_STEP))

    @property
    def words(self) -> list[str]:
        """The settings over the workload's, as ``key=value``."""
        budget, sweep = f"engine.kv_budget={self.budget_mib}MiB", f"sweep={json.dumps(self.sweep)}"
        return [*self.overrides, "engine.max_num_seqs=64", budget, sweep]


# In 7,000 MiB 43 of the 64 long answers fit, so that there is something to swap.
FP8, INT8, INT4 = "fp8_e4m3", "int8_per_token_head", "int4_per_token_head"
GROUPS = (
    SettingsGroup("memory", "mixed lengths, 64 users", MIXED,
               {"layout": ("contiguous",), "enable_prefix_caching": (True,)}),
    SettingsGroup("decode", "256 tokens in, 1,024 out, 64 users", DECODE_HEAVY,
               {"layout": ("contiguous",), "kv_cache_dtype": (FP8, INT8, INT4), "preemption_mode": ("swap",)}, 7000),
    SettingsGroup("format", "mixed lengths, 64 users", MIXED, {"kv_cache_dtype": (FP8,), "page_size": (1, 64, 256)}),
)  # fmt: skip
TINY = (
    SettingsGroup("memory", "4 requests (tiny)", TINY_LOAD, {"layout": ("contiguous",)}, 49),
    SettingsGroup("format", "4 requests (tiny)", TINY_LOAD, {"kv_cache_dtype": (INT8,), "page_size": (64,)}, 97),
)


def metrics_of(load: Path) -> dict[str, float | None]:
    """Reads what a sitting compares from the folder of one load."""
    values = flatten(read_json(load / DONE)["metrics"])
    return {metric: value_of(values, metric) for metric in METRICS}


def means(
    effects: Mapping[str, Mapping[str, Any]], cell: str, first: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Returns the values of a cell as means over the launches.

    ``first``: the values of the first launch, for a cell that was compared with none.
    """
    of_cell = {name: effect["value"] for name, effect in effects.get(cell, {}).items()}
    of_base = {name: effect["base"] for against in effects.values() for name, effect in against.items()}
    return {name: (of_cell or of_base).get(name, value) for name, value in first.items()}


def memory_use(load: Path) -> dict[str, float]:
    """Reads means over the steps of a load: sequences that decode, and the share of KV slots that hold tokens."""
    counters = read_json(load / "counters.json")
    slots = {key: value for key, value in counters.items() if key.startswith(SLOTS)}
    return {
        "decoding": counters["scheduled_tokens_total_decode"] / counters["steps_total"],
        "kv_usage": slots[f"{SLOTS}tokens"] / sum(slots.values()),
        "preemptions": counters["num_preemptions_total"],
    }


class GroupRun:
    """A group on this machine: its design, the simulated ratios by cell, and the launches in ``folder``."""

    def __init__(self, group: SettingsGroup, args: Any, report: PartReport):
        self.group, self.report = group, report
        self.profile = PROFILES[args.device]
        self.folder = args.scratch / "settings" / group.name
        self.workload = load_workload(REPOSITORY / WORKLOAD, profile=self.profile, overrides=group.words)
        self.design, _ = plan_sweep(self.workload, check=check_configuration)
        self.base = next(cell.cell_id for cell in self.design.cells if cell.configuration.is_baseline)
        self.predicted: dict[str, dict[str, float]] = {}

    def predict(self, device: str) -> None:
        """Simulates the same design on ``device`` and keeps the ratios to the baseline."""
        name, folder = self.group.name, self.folder / "simulated"
        words = ["sweep", WORKLOAD, "--profile", self.profile, "--simulate", "--device", device, "--repeats", "1"]
        words += ["--no-report", "--no-quality", "--output-dir", str(folder)]
        run_kvbench([*words, *(part for word in self.group.words for part in ("-o", word))], PREDICTION_SECONDS)
        cells = {load.parents[1].name: metrics_of(load) for load in folder.glob("*/*/cells/*/loads/1")}
        if (base := cells.pop(self.base, None)) is None:
            self.report.skip(f"predictions of {name}", f"its baseline was not simulated on {device}: see the log")
            cells = {}
        for cell, metrics in cells.items():
            self.predicted[cell] = {m: value / base[m] for m, value in metrics.items() if value and base[m]}
        self.report.put(predictions=self.report.data.get("predictions", {}) | {name: self.predicted}, simulated=device)

    def measure(self, limit_s: float, launches: int) -> None:
        """Runs at most ``launches`` launches within ``limit_s``."""

        def is_enough(done: int) -> bool:
            self.put_down()
            return done >= launches

        name = self.group.name
        try:
            sitting = Sitting(
                RunFolder(self.folder), self.workload, self.design, capacities(self.design, check_configuration),
                limit_s / LONGEST, limit_s, lambda text: print(text() if callable(text) else text, flush=True),
                lambda: None, is_enough, "the part's time",
            )  # fmt: skip
            for note in sitting.execute().notes:
                self.report.skip(name, note)
            self.put_down()
        except Exception as error:  # whatever one sitting raises, the next ones are still worth running
            if isinstance(error, (MeasurementError, UsageError)) and not isinstance(error, EngineFailedError):
                self.report.skip(name, f"in {limit_s:.0f} s: {error}")
            else:
                self.report.error(name, error)

    def put_down(self) -> None:
        """Replaces rows and table by those of all launches so far."""
        measured, group = read_json(self.folder / FOLDER / EFFECTS), self.group
        effects: dict[str, dict[str, Any]] = {self.base: {}}
        for effect in measured["effects"]:
            effects.setdefault(effect["cell"], {})[effect["metric"]] = effect
        rows = []
        for cell in self.design.cells:
            if cell.cell_id in effects:  # else it had no room, and a note says so
                load = self.folder / FOLDER / "cells" / cell.cell_id / "loads" / "1"
                rows.append(
                    {"sitting": group.name, "load": group.load, "kv_budget_mib": group.budget_mib,
                     "cell": cell.cell_id, "setting": cell.configuration.label, "launches": measured["launches"],
                     **means(effects, cell.cell_id, metrics_of(load)), **memory_use(load),
                     "effects": effects[cell.cell_id], "predicted": self.predicted.get(cell.cell_id, {})}
                )  # fmt: skip
        others = [row for row in self.report.data["rows"] if row["sitting"] != group.name]
        self.report.data["rows"] = [*others, *rows]
        self.report.data["headline"] = f"{sum(bool(row['effects']) for row in [*others, *rows])} comparisons"
        title = f"Engine time of settings: {group.load}, {group.budget_mib:,} MiB of KV each ({group.name})"
        ratios = ("of paged (95 %)", f"predicted, {self.report.data['simulated']}")
        columns = ["setting", "tokens/s", *ratios, "p95 TTFT ms", *ratios, "p95 ITL ms", *ratios, "decoding",
                   "KV with tokens", "preempted", "launches"]  # fmt: skip
        self.report.table(title, columns, [table_row(row) for row in rows])


def table_row(row: Mapping[str, Any]) -> list[str]:
    """A row of the summary's table."""
    cells = [row["setting"]]
    for metric, digits in (("output_throughput", 0), ("p95_ttft_ms", 0), ("p95_itl_ms", 1)):
        effect = row["effects"].get(metric)
        cells += [number_text(row[metric], f",.{digits}f"), ratio(effect) if effect else "–",
                  number_text(row["predicted"].get(metric), ".3f")]  # fmt: skip
    launches = f"{row['launches']}{' (its own scatter alone)' if row['launches'] == 1 else ''}"
    return [*cells, f"{row['decoding']:.1f}", f"{row['kv_usage']:.0%}", f"{row['preemptions']:.0f}", launches]


def ratio(effect: Mapping[str, Any]) -> str:
    """Writes an effect as `1.234 (1.200 to 1.270)`."""
    low, high = effect["low"], effect["high"]
    return f"{effect['ratio']:.3f}" + (f" ({low:.3f} to {high:.3f})" if low and high and math.isfinite(high) else "")


def main() -> int:
    """Runs the part; 1 if a sitting failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    device = (read_json(args.facts) if args.facts and args.facts.is_file() else {}).get("device", {})
    free = device.get("memory_free_bytes", 0)
    runs = []
    for group in TINY if args.tiny else (group.fit(free) for group in GROUPS):
        if group.budget_mib > 0:
            runs.append(GroupRun(group, args, report))
        else:
            report.skip(group.name, f"its engines have no room in {free / GIB:.0f} GiB")
    for run in runs:
        run.predict(device.get("name", TINY_DEVICE))
    for left, run in zip(range(len(runs), 0, -1), runs, strict=True):
        seconds = max(1.0, report.time_left - END_SECONDS)
        limit_s = max(seconds / left, seconds - (left - 1) * ONE_LAUNCH_SECONDS)
        run.measure(limit_s, LAUNCHES if left > 1 or args.tiny else MOST_LAUNCHES)
    if not report.data["rows"]:
        report.put(not_run="no sitting ended a launch")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
