"""Part ``engine-<model>``: the nano-vllm batch job through the engine in process, random weights, no server.

Output tokens/s are those of the whole job, from the first step to the last token, prefill included, as nano-vllm's
benchmark counts them. Every request must bring exactly the tokens that it asked for. The floor is worked out from the
bandwidth and the matrix rate that the part `facts` measured in the same sitting.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ci.gpu.busy import SmiSampler, profiled_busy_share
from ci.gpu.nano_shape import NUM_SEQUENCES, Job, ModelCost, draw_job, floor_seconds, model_cost
from ci.gpu.part import PartReport, attempt, part_parser, read_ceilings, sentence
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.spec import DTYPE_BYTES, find_model
from engine.sequence import Request, SamplingParams

QUICK_SEQUENCES, TINY_SEQUENCES = 64, 4
TEMPERATURE = 0.6  # nano-vllm's
WARM_UP_TOKENS = 24  # output tokens a prompt in the unmeasured run, which has all the prompts
BUSY_SEQUENCES, BUSY_STEPS = 64, 40

TINY_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 10_001,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JobResult:
    """One run of a job. Times in seconds from the moment at which all requests are there."""

    seconds: float
    first_token: list[float]  # per request
    finished: list[float]
    output_lengths: list[int]
    step_seconds: list[float]
    phases: dict[str, float]
    preemptions: int


def run_job(engine: Engine, job: Job, name: str, ends: float = math.inf) -> JobResult:
    """Submit all of ``job`` at once and step until nothing is left, or until the clock (time.monotonic) says ``ends``:
    what runs then is aborted, and the result's ``output_lengths`` show it. ``name`` keeps request ids apart."""
    vocab = engine.model_info.vocab_size
    count = len(job.prompts)
    first, finished, lengths = [0.0] * count, [0.0] * count, [0] * count
    for index, (prompt, wanted) in enumerate(zip(job.prompts, job.output_lengths, strict=True)):
        params = SamplingParams(max_tokens=wanted, temperature=TEMPERATURE, ignore_eos=True)
        engine.add_request(Request(f"{name}-{index}", tuple(token % vocab for token in prompt), params))
    before, steps = engine.stats(), []
    started = last = time.perf_counter()
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
        for output in outputs:
            index = int(output.request_id.rsplit("-", 1)[1])
            if output.token_ids and not lengths[index]:
                first[index] = now - started
            lengths[index] += len(output.token_ids)
            finished[index] = now - started
        if time.monotonic() > ends:
            for index in range(count):
                engine.abort(f"{name}-{index}")
    after = engine.stats()
    phases = {phase: after.phase_seconds[phase] - before.phase_seconds[phase] for phase in after.phase_seconds}
    preemptions = after.num_preemptions - before.num_preemptions
    return JobResult(last - started, first, finished, lengths, steps, phases, preemptions)


def cost_of(engine: Engine, model: str) -> ModelCost:
    """From the loaded model; the KV as the engine stores it."""
    text, config = find_model(model).text_config, engine.config
    dtype = "float32" if config.device == "cpu" else config.dtype
    embedding = text["vocab_size"] * text["hidden_size"]
    tied = bool(text.get("tie_word_embeddings"))
    parameters = engine.model_info.num_parameters
    return model_cost(parameters, embedding, tied, DTYPE_BYTES[dtype], engine.capacity.bytes_per_slot)


class WarningsAreFailures(logging.Handler):
    """What the engine only warns of, such as decode without CUDA graphs, is a failure where it is to be measured."""

    def __init__(self, report: PartReport):
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """One failure a record."""
        self._report.fail(record.name, record.getMessage())


class EngineJob:
    """The stages of the part; ``report`` gets a row a measured run."""

    def __init__(self, report: PartReport, args: Any):
        self.report, self.args = report, args
        if args.tiny:
            self.job = draw_job(TINY_SEQUENCES, 8, 32)
        else:
            self.job = draw_job(QUICK_SEQUENCES if args.quick else NUM_SEQUENCES)
        self.model = str(_tiny_model(args.scratch)) if args.tiny else args.model
        self.engine: Engine | None = None

    def load(self) -> None:
        """Build the engine; what it came to is in the report."""
        tiny = self.args.tiny
        started = time.perf_counter()
        self.engine = build_engine(
            EngineConfig(
                model=self.model,
                load_format="dummy",
                dtype="float32" if self.args.device == "cpu" else "bfloat16",
                device=self.args.device,
                kv_budget=4 * 2**20 if tiny else None,
                max_model_len=64 if tiny else 2048,
                max_num_seqs=4 if tiny else NUM_SEQUENCES,
                max_num_batched_tokens=32 if tiny else 8192,
            )
        )
        self.report.data["load_seconds"] = time.perf_counter() - started
        self.report.data["cuda_graphs"] = self.engine.executor.forward.replays_graphs
        self.report.data["engine_config"] = dataclasses.asdict(self.engine.config)
        self.report.data["capacity"] = dataclasses.asdict(self.engine.capacity)
        self.report.save()

    def warm_up(self) -> None:
        """All prompts once, with short outputs, not measured."""
        assert self.engine is not None
        short = tuple(min(WARM_UP_TOKENS, wanted) for wanted in self.job.output_lengths)
        started = time.perf_counter()
        run_job(self.engine, dataclasses.replace(self.job, output_lengths=short), "warm-up")
        self.report.data["warm_up_seconds"] = time.perf_counter() - started

    def measure(self, run: int) -> None:
        """One run of the job: a row, or a failure that says what is missing."""
        assert self.engine is not None
        job = self.job
        with SmiSampler(self.args.device == "cuda") as sampler:
            result = run_job(self.engine, job, f"run{run}", time.monotonic() + self.report.time_left)
        if result.output_lengths != list(job.output_lengths):
            done, took = sum(result.output_lengths), result.seconds
            self.report.fail(
                f"run {run}",
                f"{done:,} of {job.output_tokens:,} output tokens in {took:.1f} s ({done / took:,.0f} tokens/s): "
                "stopped for want of time, or the engine did not bring what was asked for",
            )
            return
        self.report.row(run=run, **self._figures(result), nvidia_smi=sampler.summary)

    def _figures(self, result: JobResult) -> dict[str, Any]:
        assert self.engine is not None
        job, ceilings = self.job, read_ceilings(self.args.facts)
        flops = ceilings.get("matmul_bf16_tflop_per_s") or ceilings.get("matmul_fp32_tflop_per_s")
        figures: dict[str, Any] = {
            "model": self.args.model,
            "sequences": len(job.prompts),
            "input_tokens": job.input_tokens,
            "output_tokens": job.output_tokens,
            "seconds": result.seconds,
            "output_tokens_per_s": job.output_tokens / result.seconds,
            "total_tokens_per_s": (job.input_tokens + job.output_tokens) / result.seconds,
            "ttft_ms": _quantiles(result.first_token, 1e3),
            "e2el_ms": _quantiles(result.finished, 1e3),
            "step_ms": _quantiles(result.step_seconds, 1e3),
            "steps": len(result.step_seconds),
            "preemptions": result.preemptions,
            "phase_seconds": result.phases,
            "output_lengths": result.output_lengths,
        }
        if ceilings.get("read_gb_per_s") and flops:
            floor = floor_seconds(job, cost_of(self.engine, self.model), ceilings["read_gb_per_s"] * 1e9, flops * 1e12)
            figures["floor_seconds"] = floor
            figures["floor_tokens_per_s"] = job.output_tokens / floor["total"]
            figures["share_of_floor"] = floor["total"] / result.seconds
        return figures

    def busy(self) -> None:
        """Decode of 64 sequences and nothing else, under the profiler."""
        assert self.engine is not None
        engine, vocab = self.engine, self.engine.model_info.vocab_size
        wanted = BUSY_STEPS * 2 + 64
        params = SamplingParams(max_tokens=wanted, temperature=TEMPERATURE, ignore_eos=True)
        for index in range(BUSY_SEQUENCES):
            prompt = tuple((index * 131 + i * 31) % vocab for i in range(256))
            engine.add_request(Request(f"busy-{index}", prompt, params))
        prompts = BUSY_SEQUENCES * 256
        for _ in range(-(-prompts // engine.config.max_num_batched_tokens) + 8):
            engine.step()
        share = profiled_busy_share(engine.step, BUSY_STEPS)
        self.report.data["busy_share_in_decode"] = share
        self.report.data["busy_share_sequences"] = BUSY_SEQUENCES
        if share is None:
            self.report.skip("busy share in decode", "the profiler saw nothing run on the device")
        while engine.has_work():
            engine.step()


def _quantiles(values: list[float], scale: float) -> dict[str, float]:
    ordered = sorted(values)
    picked = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return {name: picked[i] * scale for name, i in (("p50", 49), ("p90", 89), ("p99", 98))} | {
        "max": ordered[-1] * scale
    }


def _tiny_model(folder: Path) -> Path:
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
    return path


def summarise(report: PartReport, label: str) -> None:
    """One table row a run, and the headline."""
    columns = [
        "model",
        "sequences",
        "output tok/s",
        "floor tok/s",
        "share",
        "TTFT p50 / max ms",
        "step p50 ms",
        "busy %",
    ]
    rows = []
    for row in report.data["rows"]:
        busy = report.data.get("busy_share_in_decode")
        rows.append(
            [
                row["model"] + label,
                str(row["sequences"]),
                f"{row['output_tokens_per_s']:,.0f}",
                f"{row['floor_tokens_per_s']:,.0f}" if "floor_tokens_per_s" in row else "–",
                f"{row['share_of_floor']:.2f}" if "share_of_floor" in row else "–",
                f"{row['ttft_ms']['p50']:,.0f} / {row['ttft_ms']['max']:,.0f}",
                f"{row['step_ms']['p50']:.2f}",
                "–" if busy is None else f"{100 * busy:.0f}",
            ]
        )
    report.table("Batch job of nano-vllm's shape (256 sequences in full), engine in process", columns, rows)
    if rows:
        best = max(report.data["rows"], key=lambda row: row["output_tokens_per_s"])
        report.data["headline"] = (
            f"{best['output_tokens_per_s']:,.0f} output tok/s, {best['sequences']} sequences{label}"
        )
        report.save()


def main() -> int:
    """The part; 1 if a run failed."""
    parser = part_parser(__doc__)
    parser.add_argument("--model", required=True, help="a config that ships with the engine")
    args = parser.parse_args()
    report = PartReport(args.out, args.seconds)
    logging.getLogger("engine").addHandler(WarningsAreFailures(report))
    job = EngineJob(report, args)
    label = " (tiny shape)" if args.tiny else f" ({QUICK_SEQUENCES} of {NUM_SEQUENCES}, quick)" if args.quick else ""
    try:
        job.load()
        job.warm_up()
    except Exception as error:
        report.fail(f"engine with {args.model}", sentence(error))
        raise
    for run in range(1 if args.quick or args.tiny else 2):
        attempt(report, f"run {run}", lambda number=run: job.measure(number))
        summarise(report, label)
    if args.device == "cuda":
        attempt(report, "busy share in decode", job.busy)
        summarise(report, label)
    if args.device == "cuda":
        report.data["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        report.save()
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
