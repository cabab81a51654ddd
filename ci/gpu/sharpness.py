"""Parts ``launched-pairs``, ``lockstep-pairs`` and ``vllm-pairs``: how far pairs of equal sides scatter on this device.

`kvbench dev calibrate` measures them (see tests/benchmarks/method_runs.py); a launched pair starts two servers, so its
load is short. The part keeps every pair, the scatter by metric, and whether launches have two speeds. Two engines of
vLLM have 8 GiB of KV each and keep their CUDA graphs; in a tiny run transformers stands for vLLM.
"""

from __future__ import annotations

import sys
from subprocess import TimeoutExpired

import numpy as np
import pandas as pd

from ci.gpu.part import PartReport, part_parser
from tests.benchmarks.method_runs import launch_throughputs, measure, precision, read_pairs, speeds

METHODS = ("launched", "lockstep")
TINY_SECONDS = 100.0
EQUAL_MINUTES = 5.0  # comparisons of this length get standard errors
END_SECONDS = 30.0  # time to stop servers and write pairs
WORKLOAD = ("--workload", "workloads/ci_timing.yaml", "--no-calibration")
FULL = (
    "page_size=16", *WORKLOAD, "--profile", "gpu", "-o", "model.config=qwen3-0.6b", "-o", "load.concurrency=[16]",
    "-o", "load.num_requests=[128]", "-o", "load.processes=4",  # one client process would be too busy with such a model
)  # fmt: skip
TINY = ("page_size=16", *WORKLOAD, "--profile", "cpu", "-o", "load.num_requests=[6]")
_ENGINE = ("--target-python", sys.executable, "--target")
VLLM = (*FULL, "-o", "engine.kv_budget=8GiB", *_ENGINE, "vllm")
TINY_VLLM = (*TINY, *_ENGINE, "transformers")


def keep_pairs(report: PartReport, pairs: pd.DataFrame) -> None:
    """Adds every pair, and the tables of their scatter and of the launches."""
    report.data["rows"] = pairs.to_dict("records")
    scatter = precision(pairs, EQUAL_MINUTES)
    launches = np.sort(launch_throughputs(pairs))
    report.put(precision=scatter.to_dict("records"), launches_tokens_per_s=launches.tolist())
    shown = [
        [row.metric, row.method, str(row.pairs), f"{row.pair_s:.0f}",
         f"{row.sd:.2%} ({row.sd_low:.2%} to {row.sd_high:.2%})" if row.pairs > 1 else "–",
         f"{row.standard_error:.2%}" if row.pairs > 1 else "–"]
        for row in scatter.itertuples()
    ]  # fmt: skip
    report.table("Pairs of equal sides", ["metric", "method", "pairs", "s a pair", "sd of a pair (95 %)",
                                          f"standard error after {EQUAL_MINUTES:g} min"], shown)  # fmt: skip
    report.put(headline=f"{pairs['pair'].nunique()} pairs")
    if len(launches):
        values = " ".join(f"{value:,.0f}" for value in launches)
        shape = speeds(launches)
        report.put(speeds_of_launches=shape)
        columns = ["launches", "output tokens/s", "speeds"]
        report.table("Launched servers", columns, [[str(len(launches)), values, shape]])


def main() -> int:
    """Runs the part; 1 if something failed."""
    parser = part_parser(__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--vllm", action="store_true", help="of vLLM, and not of kvbench's engine")
    args = parser.parse_args()
    report = PartReport(args.out, args.seconds)
    folder = args.scratch / f"{args.method}-pairs"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = min(report.time_left, TINY_SECONDS) if args.tiny else report.time_left
    try:
        words = (FULL, TINY, VLLM, TINY_VLLM)[2 * args.vllm + args.tiny]
        measure(folder, args.method, 1, (seconds - END_SECONDS) / 60, words, seconds)
        pairs = read_pairs(folder)
        if pairs.empty:
            report.put(not_run="no pair was valid: the log says why, such as other programs' work beside it")
        else:
            keep_pairs(report, pairs)
    except (SystemExit, TimeoutExpired) as error:
        report.put(not_run=str(error))
    print((folder / "log.txt").read_text(encoding="utf-8", errors="replace"))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
