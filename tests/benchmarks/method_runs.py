"""How sharp pairs in turns (lockstep) are beside launched pairs, in equal minutes on the same machine.

    python -m tests.benchmarks.method_runs OUT --minutes 40 -- page_size=32 \\
        --workload workloads/ci_timing.yaml -o 'load.num_requests=[48]'

Measures one side against itself by several methods in turn (``kvbench dev calibrate``, in rounds, so that all meet the
same weather), each for its share of the minutes, and writes OUT/pairs.csv (every pair) and OUT/README.md: by method and
metric how far one pair scatters, and the standard error that equal minutes leave; and whether the throughputs of
launches have one speed or two. What was begun is gone on with: rounds that OUT holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from kvbench.common.machine import environment
from kvbench.gate.timing.modes import two_speeds

METHODS = {"lockstep": 1.0, "launched": 1.0}  # shares of the minutes
MOST_PAIRS = 20  # of one round: what `kvbench dev calibrate` allows
_LIMIT_S = 7200


def measure(
    out: Path, method: str, number: int, minutes: float, words: Sequence[str], limit_s: float = _LIMIT_S
) -> None:
    """One round of one method, unless it is there. SystemExit where it leaves no pairs."""
    folder = out / f"{method}-{number}"
    if list(folder.glob("compare/*/pairs.csv")):
        return
    command = [sys.executable, "-m", "kvbench", "dev", "calibrate", *words, "--method", method]
    command += ["--pairs", str(MOST_PAIRS), "--max-minutes", str(minutes), "--order-seed", str(number)]
    with (out / "log.txt").open("ab") as log:
        subprocess.run(
            [*command, "--output-dir", str(folder), "--store", str(folder)],
            stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False,
        )  # fmt: skip
    if not list(folder.glob("compare/*/pairs.csv")):
        raise SystemExit(f"round {number} of {method} left no pairs: see {out / 'log.txt'}")


def read_pairs(out: Path) -> pd.DataFrame:
    """Every pair of every round: method, round, seconds that it took, and what pairs.csv says of it."""
    parts = []
    for path in sorted(out.glob("*/compare/*/pairs.csv")):
        method, _, number = path.parts[-4].rpartition("-")
        seconds = json.loads((path.parent / "manifest.json").read_text())["seconds"]
        pairs = pd.read_csv(path)
        pairs.insert(0, "method", method)
        pairs.insert(1, "round", int(number))
        pairs["seconds"] = [seconds[pair - 1] for pair in pairs["pair"]]
        parts.append(pairs)
    return pd.concat(parts, ignore_index=True)


def precision(pairs: pd.DataFrame, minutes: float) -> pd.DataFrame:
    """A row a metric and method: pairs, seconds a pair, mean and SD of the log ratios, and what ``minutes`` leave.

    ``sd_low``, ``sd_high``: 95 % bounds of the SD. ``standard_error``: SD / sqrt(pairs in ``minutes``).
    Of several cells a pair has the mean of their log ratios.
    """
    rows = []
    of_pairs = pairs.groupby(["metric", "method", "round", "pair"], as_index=False)[["log_ratio", "seconds"]].mean()
    for (metric, method), of in of_pairs.groupby(["metric", "method"]):
        ratios, n, seconds = of["log_ratio"].to_numpy(float), len(of), float(of["seconds"].mean())
        sd = float(ratios.std(ddof=1)) if n > 1 else np.nan
        low, high = (sd * np.sqrt((n - 1) / stats.chi2.ppf(q, n - 1)) if n > 1 else np.nan for q in (0.975, 0.025))
        error = sd / np.sqrt(60 * minutes / seconds)
        rows.append((metric, method, n, seconds, float(ratios.mean()), sd, low, high, error))
    columns = ["metric", "method", "pairs", "pair_s", "mean", "sd", "sd_low", "sd_high", "standard_error"]
    return pd.DataFrame(rows, columns=columns)


def launch_throughputs(pairs: pd.DataFrame) -> np.ndarray:
    """The mean output tokens/s of each launched server over its cells."""
    of = pairs[(pairs["method"] == "launched") & (pairs["metric"] == "output_throughput")]
    return of.groupby(["round", "pair"])[["base", "candidate"]].mean().to_numpy(float).ravel()


def speeds(launches: np.ndarray) -> str:
    """Says whether launches, tokens/s, have two speeds (kvbench/gate/timing/modes.py)."""
    split = two_speeds(np.log(launches))
    if split is None:
        return "no two speeds found"
    return f"two speeds, {np.expm1(split.gap):.0%} apart: {split.slower.sum()} of {len(launches)} launches are slower"


def report(pairs: pd.DataFrame, minutes: float, words: Sequence[str]) -> str:
    """README.md."""
    cpu, table = environment()["cpu"], precision(pairs, minutes)
    lines = [
        "# Pairs in turns beside launched pairs",
        "",
        f"`python -m tests.benchmarks.method_runs`: one side against itself, methods in turn; "
        f"`kvbench dev calibrate {' '.join(words)}`. Machine: {cpu['model']}, {cpu['cores']} cores.",
        "",
        f"| metric | method | pairs | s a pair | mean | SD of one pair (95 %) | standard error after {minutes:g} min |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.metric} | {row.method} | {row.pairs} | {row.pair_s:.0f} | {100 * np.expm1(row.mean):+.2f} % | "
        f"{100 * row.sd:.2f} % ({100 * row.sd_low:.2f} to {100 * row.sd_high:.2f}) | {100 * row.standard_error:.2f} % |"
        for row in table.itertuples()
    ]
    for metric, of in table.groupby("metric"):
        by_method = of.set_index("method")
        for method in by_method.index.difference(["launched"]) if "launched" in by_method.index else ():
            launched, other = by_method.loc["launched"], by_method.loc[method]
            sharper = launched.standard_error / other.standard_error
            low, high = sharper / np.sqrt(stats.f.ppf((0.975, 0.025), launched.pairs - 1, other.pairs - 1))
            lines += ["", f"{metric}: {method} are {sharper:.2f} times as sharp (95 %: {low:.2f} to {high:.2f})."]
    launches = np.sort(launch_throughputs(pairs))
    if len(launches):
        values = ", ".join(f"{x:,.0f}" for x in launches)
        lines += ["", f"Output tokens/s of {len(launches)} launches: {values} ({speeds(launches)})."]
    return "\n".join(lines) + "\n"


def _shares(text: str) -> dict[str, float]:
    """Read shares by method from ``launched=2,lockstep=1``."""
    return {method: float(share or 1) for method, _, share in (part.partition("=") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=40.0, help="in all")
    parser.add_argument("--methods", type=_shares, default=METHODS, help="with shares (default: lockstep=1,launched=1)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("words", nargs="+", help="side and options of kvbench dev calibrate, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    methods, minutes_a_share = list(options.methods), options.minutes / options.rounds / sum(options.methods.values())
    for number in range(1, options.rounds + 1):
        for method in methods if number % 2 else methods[::-1]:
            measure(options.out, method, number, minutes_a_share * options.methods[method], options.words)
            pairs = read_pairs(options.out)
            pairs.to_csv(options.out / "pairs.csv", index=False)
            text = report(pairs, options.minutes / len(methods), options.words)
            (options.out / "README.md").write_text(text)
            print(text, flush=True)


if __name__ == "__main__":
    main()
