"""The whole gate on the built-in engine, over and over: how often it fails a commit against itself, and how often it
catches one whose decode steps take a little longer.

    python -m tests.benchmarks.gate_runs OUT --runs 20

Runs ``kvbench compare`` for A/A and for the slowed commits in turn, so that all meet the same machine, and writes
OUT/runs.csv (one row a run, with every number of its verdict's overall findings), OUT/pairs.csv (every pair of every
run) and OUT/README.md (the table, exact bounds, the machine). A slowed commit is HEAD with a busy wait of 5 or 2 % of
the forward pass after each step that only decodes; it lies in the repository as a commit without a branch, which git
forgets by itself. Runs that OUT/runs.csv holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from kvbench.common.machine import environment
from kvbench.common.packages import REPOSITORY

FILE = "engine/execution/executor.py"
BEFORE = """        logits = self.forward(inputs.ids, inputs.positions, inputs.step, inputs.last_tokens)
        times.append(time.perf_counter())
"""
AFTER = """        logits = self.forward(inputs.ids, inputs.positions, inputs.step, inputs.last_tokens)
        if all(num_tokens == 1 for _, num_tokens in items):
            until = time.perf_counter() + {share} * (time.perf_counter() - times[-1])
            while time.perf_counter() < until:
                pass
        times.append(time.perf_counter())
"""
SAME = "A/A"
COLUMNS = ("kind", "run", "outcome", "exit_code", "pairs", "minutes", "voids", "order_seed", "sentence")
METRICS = ("output_throughput", "p95_ttft_ms", "p95_itl_ms")
_LIMIT_S = 3600


def _git(*words: str, data: str | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        ["git", *words], cwd=REPOSITORY, input=data, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def slowed_commit(base: str, share: float) -> str:
    """A commit on top of ``base`` whose decode steps take ``share`` longer; no branch, no checkout is touched."""
    text = _git("show", f"{base}:{FILE}") + "\n"
    if text.count(BEFORE) != 1:
        raise SystemExit(f"{FILE} has changed: mend BEFORE and AFTER in {Path(__file__).name}")
    blob = _git("hash-object", "-w", "--stdin", data=text.replace(BEFORE, AFTER.format(share=share)))
    with tempfile.TemporaryDirectory() as scratch:
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        _git("read-tree", base, env=env)
        _git("update-index", "--cacheinfo", f"100644,{blob},{FILE}", env=env)
        tree = _git("write-tree", env=env)
    who = {}
    for role in ("AUTHOR", "COMMITTER"):  # always the same, so that it is the same commit each time
        who |= {f"GIT_{role}_NAME": "gate-runs", f"GIT_{role}_EMAIL": "gate-runs@localhost"}
        who[f"GIT_{role}_DATE"] = "2000-01-01T00:00:00Z"
    return _git("commit-tree", tree, "-p", base, "-m", f"decode {share:.0%} slower, on purpose", env=who)


def run_gate(base: str, candidate: str, seed: int, out: Path, words: list[str]) -> dict[str, Any]:
    """One whole comparison; its verdict with how long it took."""
    known = set(out.glob("compare/*"))
    command = [sys.executable, "-m", "kvbench", "compare", base, candidate, "--order-seed", str(seed)]
    began = time.monotonic()
    with (out / "log.txt").open("ab") as log:
        subprocess.run(
            [*command, "--output-dir", str(out), *words], stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S
        )
    made = sorted(set(out.glob("compare/*")) - known)
    if len(made) != 1 or not (made[0] / "verdict.json").is_file():
        raise SystemExit(f"a comparison left no verdict: see {out / 'log.txt'}")
    return json.loads((made[0] / "verdict.json").read_text()) | {"minutes": (time.monotonic() - began) / 60}


def row_of(kind: str, run: int, verdict: dict[str, Any]) -> dict[str, Any]:
    facts = verdict["facts"]
    row = {"kind": kind, "run": run, "outcome": verdict["outcome"], "exit_code": verdict["exit_code"]}
    row |= {"pairs": facts["pairs"], "minutes": round(verdict["minutes"], 2), "voids": facts["voids"]}
    row |= {"order_seed": facts["order_seed"], "sentence": verdict["sentence"]}
    for finding in verdict["findings"]:
        if finding["metric"] in METRICS:
            row[finding["metric"]] = f"{finding['change']:.5f}"
            row[f"{finding['metric']}_p"] = f"{finding['p']:.5f}"
    return row


def read_table(path: Path) -> pd.DataFrame:
    """As text, so that a number is written again as it was; an empty cell is an empty text."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def pairs_of(out: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """Every pair that the verdicts of ``rows`` are from, with kind and run in front."""
    folders = {}
    for path in sorted(out.glob("compare/*/verdict.json")):  # by time: a run that was begun anew has its latest folder
        folders[str(json.loads(path.read_text())["facts"]["order_seed"])] = path.parent
    parts = []
    for row in rows.itertuples():
        pairs = read_table(folders[row.order_seed] / "pairs.csv")
        pairs.insert(0, "kind", row.kind)
        pairs.insert(1, "run", row.run)
        parts.append(pairs[pairs.pair.astype(int) <= int(row.pairs)])
    return pd.concat(parts)


def scatter_table(pairs: pd.DataFrame) -> Iterator[str]:
    """Per metric: the mean change of all runs of a kind, and by how much one pair scatters around its run's mean."""
    yield from ("| what | metric | mean change | SD of one pair |", "|---|---|--:|--:|")
    for kind, metric in itertools.product(pairs.kind.unique(), METRICS):
        of = pairs[(pairs.kind == kind) & (pairs.metric == metric)]
        if len(of):
            by_run = of.log_ratio.astype(float).groupby(of.run)
            sd = math.sqrt(by_run.var(ddof=0).mul(by_run.size()).sum() / (len(of) - by_run.ngroups))
            yield f"| {kind} | {metric} | {math.expm1(by_run.mean().mean()):+.1%} | {sd:.1%} |"


def write_report(out: Path, rows: pd.DataFrame, pairs: pd.DataFrame, base: str, words: list[str]) -> None:
    """README.md: counts with exact 95 % bounds, the scatter of the pairs, and every run."""
    cpu = environment()["cpu"]
    lines = [
        "# The gate, run on its own engine",
        "",
        f"`python -m tests.benchmarks.gate_runs`: `kvbench compare` of commit {base[:12]} with itself (A/A) and with "
        f"the same commit whose decode steps take longer, in turn; options `{' '.join(words)}`. Machine: "
        f"{cpu['model']}, {cpu['cores']} cores, no GPU.",
        "",
        "| what | runs | FAIL | PASS | INCONCLUSIVE | INVALID | share of FAIL, exact 95 % bounds | pairs, mean | min |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, of in rows.groupby("kind"):
        counts = [(of.outcome == each).sum() for each in ("fail", "pass", "inconclusive", "invalid")]
        low, high = stats.binomtest(int(counts[0]), len(of)).proportion_ci(0.95, method="exact")
        mean_pairs, minutes = of.pairs.astype(int).mean(), of.minutes.astype(float).mean()
        cells = (kind, len(of), *counts, f"{low:.0%} to {high:.0%}", f"{mean_pairs:.1f}", f"{minutes:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *scatter_table(pairs)]
    heads = ("what", "run", "verdict", "pairs", "throughput", "p95 TTFT", "p95 ITL", "smallest p")
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for _, row in rows.iterrows():
        changes = [f"{100 * float(row[m]):+.1f} %" if row[m] else "" for m in METRICS]
        p = min((float(row[f"{m}_p"]) for m in METRICS if row[f"{m}_p"]), default=float("nan"))
        cells = (row.kind, row.run, row.outcome.upper(), row.pairs, *changes, f"{p:.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    (out / "README.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.05, 0.02], help="by which decode steps are slowed"
    )
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--max-minutes", type=float, help="no run is begun after that")
    parser.add_argument("words", nargs="*", help="options of kvbench compare, after --")
    options = parser.parse_args()
    words = options.words or ["--workload", "workloads/ci_timing.yaml"]
    base = _git("rev-parse", options.base)
    kinds = {SAME: base} | {f"{share:.0%} slower": slowed_commit(base, share) for share in options.shares}
    options.out.mkdir(parents=True, exist_ok=True)
    table, began = options.out / "runs.csv", time.monotonic()
    fields = [*COLUMNS, *(f"{metric}{end}" for metric in METRICS for end in ("", "_p"))]
    rows = read_table(table) if table.is_file() else pd.DataFrame(columns=fields)
    for run in range(1, options.runs + 1):
        for number, (kind, candidate) in enumerate(kinds.items()):
            if ((rows.kind == kind) & (rows.run == str(run))).any():
                continue
            if options.max_minutes and time.monotonic() - began > 60 * options.max_minutes:
                return
            seed = len(kinds) * run + number
            verdict = run_gate(base, candidate, seed, options.out, words)
            row = {key: str(value) for key, value in row_of(kind, run, verdict).items()}
            rows.loc[len(rows)] = [row.get(field, "") for field in fields]
            rows.to_csv(table, index=False)
            pairs = pairs_of(options.out, rows)
            pairs.to_csv(options.out / "pairs.csv", index=False)
            write_report(options.out, rows, pairs, base, words)
            print(f"{kind} {run}: {row['outcome']} after {row['pairs']} pairs, {row['minutes']} min", flush=True)


if __name__ == "__main__":
    main()
