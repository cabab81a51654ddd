"""Measures each kind of delta at known times: the load client against the mock server, 16 streams at once.

python -m tests.benchmarks.delta_kinds [--requests 96] [--only chat]

A row for each endpoint and script of deltas: the errors [ms] of TTFT, TTFO and TPOT against the schedule that the mock
server was told, median and 99th percentile over the requests. On a quiet machine the medians are below 0.5 ms.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.calibration.mock.process import MockProcess
from kvbench.load import launch
from kvbench.load.dialect import Dialect
from kvbench.metrics.latency import request_latencies
from kvbench.requests.request import RequestSpec, write_requests

TTFT, ITL, TOKENS, USERS = 60.0, 10.0, 24, 16
SCRIPTS = {  # deltas: tokens before the first chunk, and before the first output
    "text": (0, 0), "role,text": (1, 1), "empty:3,text": (0, 3), "refusal": (0, 0), "tool_calls": (0, 0),
    "reasoning_content:8,text": (0, 8), "reasoning:8,text": (0, 8), "reasoning_details:8,text": (0, 8),
    "reasoning_content:8,tool_calls": (0, 8), "hidden:8,text": (8, 8), "held:2,text": (0, 0),
}  # fmt: skip
LACKS = {"completions": ("reasoning", "refusal", "tool_calls", "role"), "messages": ("refusal", "empty", "role")}
LACKS["responses"] = ("role",)


def errors(url: str, endpoint: str, deltas: str, split: int, count: int, folder: Path) -> list[str]:
    """The row's cells: measured minus told."""
    requests = [RequestSpec(i, "a", None, f"w{i} a b c", TOKENS) for i in range(count)]
    write_requests(folder / "requests.jsonl", requests)
    model = f"mock?ttft_ms={TTFT:g}&itl_ms={ITL:g}&deltas={deltas}" + (f"&split={split}" if split else "")
    dialect = Dialect(token_id_prompts=False).at(endpoint)
    spec = {
        "base_url": url, "model": model, "mode": "closed", "concurrency": USERS, "timeout_s": 60.0,
        "requests_file": str(folder / "requests.jsonl"), "out_dir": str(folder), "dialect": dialect.model_dump(),
    }  # fmt: skip
    launch.drive(spec, total=count, limit_s=120.0, on_progress=lambda *of: None, check=lambda: None)
    rows = pd.read_parquet(folder / "requests.parquet")
    assert rows["ok"].all(), rows["error"].dropna().iloc[0]
    first, output = SCRIPTS[deltas]
    told = {"ttft_ms": TTFT + first * ITL, "ttfo_ms": TTFT + output * ITL, "tpot_ms": ITL}
    if deltas.startswith("held"):  # its text comes with the third chunk: 22 chunks for 24 tokens
        told["tpot_ms"] = ITL * (TOKENS - 3) / (TOKENS - 1)
    if deltas.startswith("role"):  # a role takes a moment of the schedule
        told["tpot_ms"] = ITL
    measured = request_latencies(rows)
    apart = {name: measured[name].to_numpy() - value for name, value in told.items()}
    return [f"{np.median(e):+.2f} ({np.quantile(np.abs(e), 0.99):.2f})" for e in apart.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--only", help="one endpoint")
    options = parser.parse_args()
    print("| endpoint | deltas | TTFT, ms | TTFO, ms | TPOT, ms |\n|---|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as scratch, MockProcess(Path(scratch), {}) as url:
        for endpoint in ("completions", "chat", "responses", "messages"):
            if options.only in (None, endpoint):
                scripts = [name for name in SCRIPTS if not any(word in name for word in LACKS.get(endpoint, ()))]
                for deltas, split in [*((name, 0) for name in scripts), ("text", 1)]:
                    cells = errors(url, endpoint, deltas, split, options.requests, Path(scratch))
                    print(f"| {endpoint} | {deltas}{', byte by byte' * split} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
