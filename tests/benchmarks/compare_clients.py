"""The same server measured by ``kvbench load``, ``vllm bench serve`` and GuideLLM, in turn, in one sitting.

    python tests/benchmarks/compare_clients.py URL MODEL_DIR --vllm-python P [--guidellm P] [--runs 4] --out FOLDER

URL: a vLLM server of MODEL_DIR that nobody else uses. Every run sends other prompts of 128 tokens and asks for 64, with
16 requests at a time; the order turns from run to run. Beside each client's figures stand the server's own means of the
same run, from its /metrics, and the CPU seconds of the client's processes: of the whole command, and per 1,000 output
tokens between its first send and its last chunk. Writes FOLDER/clients.json and a table, clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvbench.common import processes
from kvbench.common.errors import EXIT_INVALID
from kvbench.common.foreign_cpu import tree_cpu_s
from kvbench.targets.prometheus import parse_metrics

REQUESTS, CONCURRENCY, INPUT, OUTPUT = 128, 16, 128, 64
_SERVER = ("time_to_first_token_seconds", "inter_token_latency_seconds")
_HITS = "prefix_cache_hits_total"
_SAMPLE_S, _LIMIT_S = 0.2, 600
_MAX_HIT_SHARE = 0.01
_VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main;"
    "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args())"
)  # the `vllm` command wants the metadata of a package of that name, which CPU builds lack


@dataclass(frozen=True)
class Run:
    """One client's run, ``valid`` False where kvbench found it disturbed.

    Times in ms; ``begin`` and ``end`` [s, perf_counter]: of its requests.
    ``server_*``: what the server says of the same requests. ``command_cpu_s``: of all the command's processes.
    """

    client: str
    seed: int
    valid: bool
    output_tokens_per_s: float
    ttft_mean_ms: float
    tpot_mean_ms: float
    server_ttft_mean_ms: float
    server_tpot_mean_ms: float
    begin: float
    end: float
    output_tokens: int
    cpu_s_per_1000_tokens: float
    command_cpu_s: float


def vllm_bench(args: argparse.Namespace, seed: int) -> tuple[list[str], Path]:
    out = args.out / f"vllm-{seed}.json"
    return [
        args.vllm_python, "-c", _VLLM_BENCH, "--backend", "openai", "--base-url", args.url,
        "--endpoint", "/v1/completions", "--model", args.model, "--dataset-name", "random",
        "--num-prompts", str(REQUESTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT),
        "--max-concurrency", str(CONCURRENCY), "--num-warmups", "0", "--ready-check-timeout-sec", "0",
        "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--save-result", "--save-detailed",
        "--result-dir", str(args.out), "--result-filename", out.name,
    ], out  # fmt: skip


def guidellm(args: argparse.Namespace, seed: int) -> tuple[list[str], Path]:
    out = args.out / f"guidellm-{seed}.json"
    return [
        args.guidellm, "run", "--backend", f"kind=openai_http,target={args.url},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "--seed", f"kind=static,value={seed}", "--tokenizer", f"kind=huggingface_auto,model={args.model}",
        "--output", f"kind=json,path={out}", "--disable-console",
    ], out  # fmt: skip


def kvbench_load(args: argparse.Namespace, seed: int) -> tuple[list[str], Path]:
    out = args.out / f"kvbench-{seed}"
    classes = [{"name": "random", "share": 1.0, "prompt_tokens": INPUT, "output_tokens": OUTPUT}]
    workload = {
        "name": "clients",
        "model": {"path": args.model},
        "engine": {"layout": "paged", "kv_budget": "1GiB", "max_model_len": 2048},
        "load": {
            "mode": "closed", "concurrency": [CONCURRENCY], "num_requests": [REQUESTS], "repeats": 1,
            "cache_state": "cold", "prompts": {"kind": "synthetic", "classes": classes},
        },
    }  # fmt: skip
    path = args.out / "workload.yaml"
    path.write_text(json.dumps(workload))
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]  # vLLM does not tell it
    return [
        sys.executable, "-m", "kvbench", "load", str(path), "--url", args.url, "--preset", "vllm", "--seed", str(seed),
        "--vocab-size", str(vocab), "--num-warmups", "0", "--output-dir", str(out),
    ], out  # fmt: skip


def read_vllm(out: Path) -> tuple[float, float, float, float, float, int]:
    told = json.loads(out.read_text())
    begin = min(told["start_times"])
    ends = np.add(np.add(told["start_times"], told["ttfts"]), [sum(gaps) for gaps in told["itls"]])
    return (
        told["output_throughput"], told["mean_ttft_ms"], told["mean_tpot_ms"],
        begin, float(ends.max()), told["total_output_tokens"],
    )  # fmt: skip


def read_guidellm(out: Path) -> tuple[float, float, float, float, float, int]:
    """``tpot``: its inter_token_latency_ms, as its time_per_output_token_ms includes TTFT."""
    told = json.loads(out.read_text())["benchmarks"][0]
    metrics, begin, end = told["metrics"], told["start_time"], told["end_time"]
    tokens = REQUESTS * metrics["output_token_count"]["successful"]["mean"]
    shift = time.perf_counter() - time.time()
    latencies = (metrics[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return tokens / (end - begin), *latencies, begin + shift, end + shift, round(tokens)


def read_kvbench(out: Path) -> tuple[float, float, float, float, float, int]:
    told, load = (json.loads((out / f"{name}.json").read_text()) for name in ("metrics", "load"))
    begin = load["zero_perf_counter"]
    return (
        told["output_throughput"], told["mean_ttft_ms"], told["mean_tpot_ms"], begin, begin + told["duration"],
        told["total_output_tokens"],
    )  # fmt: skip


CLIENTS = {
    "kvbench load": (kvbench_load, read_kvbench),
    "vllm bench serve": (vllm_bench, read_vllm),
    "GuideLLM": (guidellm, read_guidellm),
}


def server_sums(url: str) -> dict[str, float]:
    """The sums and counts of the server's own TTFT and time between tokens, and the prompt tokens its cache had."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        found = parse_metrics(answer.read().decode(), 0.0).counters
    names = [f"{name}_{part}" for name in _SERVER for part in ("sum", "count")]
    return {name: found[name] for name in (*names, _HITS)}


def run_watched(command: list[str], log: Path) -> tuple[int, np.ndarray, float]:
    """Runs it; its exit code, its processes' CPU seconds so far against time [samples, 2], and in the end."""
    samples: list[tuple[float, float]] = []
    done = threading.Event()
    before = os.times()
    with log.open("wb") as file:
        process = processes.launch(command, stdout=file, stderr=subprocess.STDOUT, env={"HF_HUB_OFFLINE": "1"})
        process.watch()  # a client's own workers outlive it when it is killed

        def watch() -> None:
            while not done.wait(_SAMPLE_S):
                cpu = tree_cpu_s(process.pid)
                if cpu is not None:
                    samples.append((time.perf_counter(), cpu))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = process.wait(timeout=_LIMIT_S)
            after = os.times()
        finally:
            done.set()
            watcher.join()
            processes.stop(process)
    if code not in (0, EXIT_INVALID):
        raise SystemExit(f"{command[0]} ... ended with exit code {code}: see {log}")
    total = after.children_user + after.children_system - before.children_user - before.children_system
    return code, np.array(samples), total


def measure(client: str, seed: int, args: argparse.Namespace) -> Run:
    """One run of one client."""
    command_of, read = CLIENTS[client]
    command, out = command_of(args, seed)
    before = server_sums(args.url)
    code, cpu, total = run_watched(command, args.out / f"{client.split()[0]}-{seed}.log")
    change = {name: value - before[name] for name, value in server_sums(args.url).items()}
    if (sent := change[f"{_SERVER[0]}_count"]) != REQUESTS:
        raise SystemExit(f"the server answered {sent:g} requests while {client} sent {REQUESTS}: who else uses it?")
    if change[_HITS] > _MAX_HIT_SHARE * REQUESTS * INPUT:
        raise SystemExit(
            f"the server's prefix cache had {change[_HITS]:g} of {client}'s prompt tokens: it had less to do"
        )
    speed, ttft, tpot, begin, end, tokens = read(out)
    spent = float(np.interp(end, *cpu.T) - np.interp(begin, *cpu.T))
    ttft_server, tpot_server = (1000 * change[f"{name}_sum"] / change[f"{name}_count"] for name in _SERVER)
    return Run(
        client, seed, code == 0, speed, ttft, tpot, ttft_server, tpot_server,
        begin, end, tokens, spent / tokens * 1000, total,
    )  # fmt: skip


def table(runs: list[Run]) -> str:
    """Markdown: means of the valid runs, with the lowest and the highest."""
    columns = {
        "output tok/s": "output_tokens_per_s",
        "mean TPOT [ms]": "tpot_mean_ms",
        "the server's own": "server_tpot_mean_ms",
        "mean TTFT [ms]": "ttft_mean_ms",
        "the server's own ": "server_ttft_mean_ms",
        "client CPU s per 1,000 tokens": "cpu_s_per_1000_tokens",
        "CPU s of the whole command": "command_cpu_s",
    }
    lines = ["| client | " + " | ".join(c.strip() for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for client in dict.fromkeys(run.client for run in runs):
        its = [run for run in runs if run.client == client]
        valid = [run for run in its if run.valid]
        note = "" if len(valid) == len(its) else f" ({len(valid)} of {len(its)} runs valid)"
        cells = []
        for name in columns.values():
            values = [getattr(run, name) for run in valid] or [float("nan")]
            cells.append(f"{statistics.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
        lines.append(f"| {client}{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", help="the folder of the model that is served, with its tokenizer")
    parser.add_argument("--vllm-python", required=True, help="the python of an environment with vLLM")
    parser.add_argument("--guidellm", help="the guidellm command; left out without it")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True)
    order = [name for name in CLIENTS if name != "GuideLLM" or args.guidellm]
    runs: list[Run] = []
    measure("kvbench load", 100, args)  # the server's first requests are slower
    for number in range(args.runs):
        for client in order[number % len(order) :] + order[: number % len(order)]:
            runs.append(measure(client, 101 + number, args))
            print(runs[-1], flush=True)
            (args.out / "clients.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
    (args.out / "clients.md").write_text(table(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
