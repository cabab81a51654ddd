"""Measures each kind of delta at known times: the load client against the mock server, 16 streams at once.

python -m tests.benchmarks.delta_kinds [--requests 96] [--only chat]

A row for each endpoint and script of deltas: the errors [ms] of TTFT, TTFO and TPOT against the moments at which the
mock server sent each chunk, median and 99th percentile over the requests. Last, how late the mock itself was against
its schedule. Exit code 1 where a median is beyond 0.5 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.calibration.mock.process import MockProcess
from kvbench.load import launch
from kvbench.load.endpoints import Dialect
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestSpec, write_requests

TTFT, ITL, TOKENS, USERS = 60.0, 10.0, 24, 16
SCRIPTS = {  # deltas: the first chunk with a token, and the first with output
    "text": (0, 0), "role,text": (1, 1), "empty:3,text": (0, 3), "refusal": (0, 0), "tool_calls": (0, 0),
    "reasoning_content:8,text": (0, 8), "reasoning:8,text": (0, 8), "reasoning_details:8,text": (0, 8),
    "reasoning_content:8,tool_calls": (0, 8), "hidden:8,text": (0, 0), "held:2,text": (0, 0),
}  # fmt: skip
LACKS = {"completions": ("reasoning", "refusal", "tool_calls", "role"), "messages": ("refusal", "empty", "role")}
LACKS["responses"] = ("role",)


LIMIT_MS = 0.5


def errors(url: str, endpoint: str, deltas: str, split: int, count: int, folder: Path) -> list[np.ndarray]:
    """Errors [ms] of TTFT, TTFO and TPOT, and of the mock's first chunk. [4] of float64 [requests]"""
    requests = [RequestSpec(i, "a", None, f"{endpoint} {deltas} {split} {i}", TOKENS) for i in range(count)]
    write_requests(folder / "requests.jsonl", requests)
    model = f"mock?ttft_ms={TTFT:g}&itl_ms={ITL:g}&deltas={deltas}" + (f"&split={split}" if split else "")
    dialect = Dialect(token_id_prompts=False).at(endpoint)
    spec = LoadSpec(
        base_url=url, model=model, mode="closed", concurrency=USERS, timeout_s=60.0,
        requests_file=str(folder / "requests.jsonl"), out_dir=str(folder), dialect=dialect,
    )  # fmt: skip
    launch.drive(spec, total=count, limit_s=120.0, on_progress=lambda *of: None)
    rows = pd.read_parquet(folder / "requests.parquet")
    assert rows["ok"].all(), rows["error"].dropna().iloc[0]
    with urllib.request.urlopen(f"{url}/stamps", timeout=10) as answer:
        stamps = {stamp["prompt"]: stamp for stamp in json.load(answer)}
    zero = json.loads((folder / "load.json").read_text())["zero_perf_counter"]
    own = [stamps[requests[index].prompt] for index in rows["index"]]
    sends = np.array([stamp["sends"] for stamp in own]) - zero
    dues = np.array([stamp["due"] for stamp in own]) - zero
    first, output = (sends[:, chunk] for chunk in SCRIPTS[deltas])
    span = (rows["last"] - rows["first"]).to_numpy() - (sends[:, -1] - first)
    of_first, of_output = rows["first"] - first, rows["first_output"] - output
    return [np.asarray(e) * 1e3 for e in (of_first, of_output, span / (TOKENS - 1), sends[:, 0] - dues[:, 0])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--only", help="one endpoint")
    options = parser.parse_args()
    worst = 0.0
    print("| endpoint | deltas | TTFT, ms | TTFO, ms | TPOT, ms | the mock's |\n|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as scratch, MockProcess(Path(scratch), {}) as url:
        for endpoint in ("completions", "chat", "responses", "messages"):
            if options.only in (None, endpoint):
                scripts = [name for name in SCRIPTS if not any(word in name for word in LACKS.get(endpoint, ()))]
                for deltas, split in [*((name, 0) for name in scripts), ("text", 1)]:
                    apart = errors(url, endpoint, deltas, split, options.requests, Path(scratch))
                    worst = max(worst, *(abs(float(np.median(e))) for e in apart[:-1]))
                    cells = [f"{np.median(e):+.2f} ({np.quantile(np.abs(e), 0.99):.2f})" for e in apart]
                    print(f"| {endpoint} | {deltas}{', byte by byte' * split} | {' | '.join(cells)} |", flush=True)
    return int(worst > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
