"""Runs kvbench commands for parts: from the repository, for a limited time, interrupted as by Ctrl-C.

Part ``quality``: what the configurations of workloads/mixed.yaml change in the answers of kvbench-tiny. Part
``claims``: the verdict on one claim. Rows are what their JSON files say.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ci.gpu.part import PartReport, part_parser
from kvbench.common.packages import REPOSITORY

END_GRACE_S = 10.0  # time to stop servers and close the run
WORKLOAD = "workloads/mixed.yaml"
PROFILES = {"cuda": "gpu", "cpu": "cpu"}  # of a workload, by a part's device
QUALITY_SWEEP = "{kv_cache_dtype: [auto, fp8_e4m3, int8_per_token_head, int4_per_token_head]}"


def run_kvbench(words: list[str], seconds: float) -> tuple[int, bool]:
    """Runs a command and returns its exit code and whether it had to be interrupted."""
    process = subprocess.Popen([sys.executable, "-m", "kvbench", *words], cwd=REPOSITORY)
    try:
        return process.wait(timeout=seconds), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=END_GRACE_S), True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(), True


def words_of(args: argparse.Namespace, folder: Path, seconds: float) -> list[str]:
    """Returns the command and its options; a tiny run has the quality of the baseline alone."""
    profile = ["--profile", PROFILES[args.device]]
    if args.command == "claims":
        minutes = f"{seconds / 60:.2f}"
        return ["claims", "--only", args.claim, *profile, "--minutes", minutes, "--output-dir", str(folder)]
    words = ["quality", WORKLOAD, *profile, "--output", str(folder / "quality.json")]
    return [*words, "-o", f"sweep={'{}' if args.tiny else QUALITY_SWEEP}"]


def keep_quality(report: PartReport, data: dict[str, Any]) -> None:
    """Adds a row for each configuration, the control first, and keeps the rest as the part's own values."""
    configurations = {"control (A/A)": data.pop("control"), **data.pop("configurations")}
    report.put(**data)
    shown = []
    for name, figures in configurations.items():
        report.row(configuration=name, **figures)
        greedy, passkey, pool = figures["greedy"], figures["passkey"], figures.get("full_pool")
        shown.append(
            [name, f"{figures['mean']:.2g} ({figures['mean_low']:.2g} to {figures['mean_high']:.2g})",
             f"{figures['perplexity_change']:+.2%}", f"{greedy['agree']} of {greedy['answers']}",
             f"{passkey['right']} of {passkey['asked']}", f"{pool['agree']} of {pool['answers']}" if pool else "–",
             "; ".join(figures.get("outside", ())) or "within"]
        )  # fmt: skip
    columns = ["configuration", "mean KLD", "perplexity", "equal answers", "passkeys", "equal, full pool", "limits"]
    report.table(f"Answers of {data['model']} on {data['facts']['device']}", columns, shown)
    outside = sum(bool(figures.get("outside")) for figures in configurations.values())
    report.put(headline=f"{len(shown) - 1} configurations, {outside} outside the limits")


def keep_claims(report: PartReport, data: dict[str, Any]) -> None:
    """Adds a row for each claim."""
    for claim in data["claims"]:
        report.row(**claim)
    shown = [[claim["name"], claim["verdict"], claim["evidence"], claim["reason"]] for claim in data["claims"]]
    report.table("Claims", ["claim", "verdict", "evidence", "reason"], shown)
    report.put(headline="; ".join(f"{claim['name']}: {claim['verdict']}" for claim in data["claims"]))


RESULTS = {"quality": ("quality.json", keep_quality), "claims": ("claims/*/claims.json", keep_claims)}
EXIT_UNDECIDED = 3  # of claims


def main() -> int:
    """Runs the part; 1 if the command failed."""
    parser = part_parser(__doc__)
    parser.add_argument("command", choices=RESULTS)
    parser.add_argument("--claim", default="paging-cost")
    args = parser.parse_args()
    report = PartReport(args.out, args.seconds)
    folder = args.scratch / args.command
    folder.mkdir(parents=True, exist_ok=True)
    seconds = max(1.0, report.time_left - END_GRACE_S)
    code, interrupted = run_kvbench(words_of(args, folder, seconds), seconds)
    result, keep = RESULTS[args.command]
    for path in folder.glob(result):
        keep(report, json.loads(path.read_text(encoding="utf-8")))
    if interrupted:
        report.put(not_run=f"kvbench {args.command} did not end in {seconds:.0f} s")
    elif code not in (0, EXIT_UNDECIDED) or not report.data["rows"]:
        report.fail(f"kvbench {args.command}", f"ended with code {code}: see the log")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
