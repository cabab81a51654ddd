"""How often canaries catch planted errors of the KV cache, and how often they alarm without one.

python -m tests.benchmarks.canary_runs [--runs 50] [--seeds 20] > tests/benchmarks/canary_runs.md
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Iterator

from kvbench_engine.config import KV_CACHE_DTYPES
from tests.support.kv_mutants import MUTANTS
from tests.support.pressed import alarms, pressed

MODES = (
    {"layout": "contiguous"},
    {"layout": "contiguous", "preemption_mode": "swap"},
    {"preemption_mode": "recompute"},
    {"preemption_mode": "recompute", "enable_prefix_caching": True},
    {"preemption_mode": "swap"},
    {"preemption_mode": "swap", "enable_prefix_caching": True},
)
PAGE_SIZES = (16, 4, 64, 8, 32)
COUNT = 120  # canaries of a run, and a quarter as many other requests


def mutants(seeds: int) -> Iterator[str]:
    """A table row for each planted error."""
    yield "| error | runs that alarm | noticed first by | noticed by | steps until then, median |"
    yield "|---|---|---|---|---|"
    for name, (plant, settings) in MUTANTS.items():
        caught, first, all_checks, steps = 0, Counter[str](), Counter[str](), []
        for seed in range(1, seeds + 1):
            with plant() as fired:
                run = pressed(seed, COUNT, **settings)
            if fired.times and alarms(run, str(settings.get("kv_cache_dtype", "auto"))):
                caught += 1
                first[run.caught_by[0]] += 1
                all_checks.update(run.caught_by)
                steps.append(run.findings[0].place.step)
        told = (", ".join(f"{check} {count}" for check, count in each.most_common()) for each in (first, all_checks))
        median = f"{statistics.median(steps):.0f}" if steps else ""
        yield f"| {name} | {caught} of {seeds} | {' | '.join(told)} | {median} |"


def clean(runs: int) -> Iterator[str]:
    """A table row for each KV dtype."""
    yield "| KV dtype | runs | alarms | wrong answers | of | preemptions | swapped pages | evicted pages |"
    yield "|---|---|---|---|---|---|---|---|"
    setups = itertools.islice(itertools.cycle(itertools.product(MODES, KV_CACHE_DTYPES)), runs)
    found: dict[str, list[float]] = {}
    for number, (mode, dtype) in enumerate(setups):
        paged = {} if "layout" in mode else {"page_size": PAGE_SIZES[number // 5 % len(PAGE_SIZES)]}
        run = pressed(100 + number, COUNT, kv_cache_dtype=dtype, **mode, **paged)
        counted = [run.counters[name] for name in ("preemptions", "swapped_pages", "evicted_pages")]
        row = [1, alarms(run, dtype), run.wrong, run.asked, *counted]
        found[dtype] = [a + b for a, b in zip(found.get(dtype, [0] * len(row)), row, strict=True)]
    for dtype, row in found.items():
        yield f"| {dtype} | {' | '.join(f'{value:.0f}' for value in row)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="without an error")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each error")
    given = parser.parse_args()
    sys.stdout.write(
        "# What canaries catch at a full KV pool\n\n`python -m tests.benchmarks.canary_runs`: kvbench-tiny on a CPU, "
        f"{COUNT} canaries and {COUNT // 4} other requests a run, about 4 s each on one quiet core. The errors: "
        "`tests/support/kv_mutants.py`.\n\n"
        "## Planted errors\n\n"
    )
    for line in mutants(given.seeds):
        print(line, flush=True)
    print("\n## Without an error\n")
    for line in clean(given.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
