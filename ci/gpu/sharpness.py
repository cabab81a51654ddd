"""Part ``sharpness``: how far pairs of equal sides scatter on this device, launched and in lockstep.

`kvbench calibrate` measures them (see tests/benchmarks/twin_runs.py); a launched pair starts two servers: its load is
short. What is kept: every pair, the scatter by metric and method, and whether throughputs of launches have two modes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import TimeoutExpired

import numpy as np

from ci.gpu.part import PartReport, part_parser
from tests.benchmarks.twin_runs import TWO_MODES, bimodality, launch_throughputs, measure, precision, read_pairs

SHARES = {"lockstep": 0.25, "launched": 0.75}  # of the part's time
TINY_SECONDS = 160.0
EQUAL_MINUTES = 5.0  # for which standard errors are told
END_SECONDS = 10.0  # to stop servers and write pairs
WORKLOAD = ("--workload", "workloads/ci_timing.yaml", "--no-calibration")
FULL = (
    "page_size=16", *WORKLOAD, "--profile", "gpu", "-o", "model.config=qwen3-0.6b", "-o", "load.concurrency=[16]",
    "-o", "load.num_requests=[64]", "-o", "load.processes=4",  # one client process would be too busy with such a model
)  # fmt: skip
TINY = ("page_size=16", *WORKLOAD, "--profile", "cpu", "-o", "load.num_requests=[6]")


def put_down(report: PartReport, folder: Path, method: str) -> None:
    """Put all pairs so far in the place of those before. ``method``: the one that was measured last."""
    pairs = read_pairs(folder)
    if method not in set(pairs["method"]):
        report.skip(f"{method} pairs", "none was whole in its time: see the log")
        return
    report.data["rows"] = pairs.to_dict("records")
    scatter = precision(pairs, EQUAL_MINUTES)
    launches = np.sort(launch_throughputs(pairs))
    coefficient, chance = bimodality(launches)
    report.put(precision=scatter.to_dict("records"), launches_tokens_per_s=launches.tolist(), bimodality=coefficient,
               bimodality_of_normal_samples=chance)  # fmt: skip
    shown = []
    for row in scatter.itertuples():
        sd, error = f"{row.sd:.2%} ({row.sd_low:.2%} to {row.sd_high:.2%})", f"{row.standard_error:.2%}"
        figures = [sd, error] if row.pairs > 1 else ["–", "–"]
        shown.append([row.metric, row.method, str(row.pairs), f"{row.pair_s:.0f}", *figures])
    report.table("Pairs of equal sides", ["metric", "method", "pairs", "s a pair", "sd of a pair (95 %)",
                                          f"standard error after {EQUAL_MINUTES:g} min"], shown)  # fmt: skip
    report.put(headline=f"{pairs.groupby(['method', 'pair']).ngroups} pairs")
    if not len(launches):
        return
    shape = ["–", "–"] if np.isnan(coefficient) else [f"{coefficient:.2f}", f"{chance:.0%}"]
    modes = [str(len(launches)), " ".join(f"{value:,.0f}" for value in launches), *shape]
    columns = ["launches", "output tokens/s", f"bimodality coefficient (two modes: above {TWO_MODES:.2f})",
               "normal samples with as much"]  # fmt: skip
    report.table("Launched servers", columns, [modes])


def main() -> int:
    """The part; 1 if something failed."""
    args = part_parser(__doc__).parse_args()
    report = PartReport(args.out, args.seconds)
    folder = args.scratch / "sharpness"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = min(report.time_left, TINY_SECONDS) if args.tiny else report.time_left
    for method, share in SHARES.items():
        own = min(share * seconds, report.time_left) - END_SECONDS
        try:
            measure(folder, method, 1, own / 60, TINY if args.tiny else FULL, own + END_SECONDS)
        except (SystemExit, TimeoutExpired) as error:
            report.skip(f"{method} pairs", str(error))
        else:
            put_down(report, folder, method)
    if not report.data["rows"]:
        report.put(not_run="no pair was whole in its time")
    print((folder / "log.txt").read_text(encoding="utf-8", errors="replace"))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
