"""Part ``engine-<model>``: the nano-vllm batch job through the engine in process, random weights, no server.

Output tokens/s are those of the whole job, from the first step to the last token, prefill included, as nano-vllm's
benchmark counts them. Every request must bring exactly the tokens that it asked for. The floor is worked out from the
bandwidth and the matrix rate that the part `facts` measured in the same sitting.

Part ``variants``: the same prompts with short outputs, through engines that differ in one setting, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ci.gpu.busy import profile_device
from ci.gpu.device_state import change, read_state
from ci.gpu.nano_shape import NUM_SEQUENCES, ModelCost, NanoJob, draw_job, floor_seconds, model_cost
from ci.gpu.part import Planned, Report, read_ceilings
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.attention import FUSION
from engine.model.spec import DTYPE_BYTES, find_model
from engine.sequence import Request, SamplingParams

TINY_SEQUENCES = 4
VARIANT_OUTPUT = 128  # most output tokens of a prompt in a variant's run
JOB_SECONDS = 3600.0  # a case of this part stops itself when the part's time is over
TEMPERATURE = 0.6  # nano-vllm's
WARM_UP_TOKENS = 24  # output tokens a prompt in the unmeasured run, which has all the prompts
PROFILED_PROMPT, PROFILED_STEPS = 256, 40
PROFILE = "profile of decode"

VARIANTS: dict[str, dict[str, Any]] = {  # settings of the engine that differ from the main job's; the first: none
    "as it is": {},
    "CUDA graphs off": {"cuda_graphs": False},
    "fused layers off": {"fused_layers": False},
    "FP8 KV": {"kv_cache_dtype": "fp8_e4m3"},
    "torch_compile": {"torch_compile": True},
}

TINY_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 10_001,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JobResult:
    """One run of a job. Times in seconds from before the first request is added, as nano-vllm's benchmark counts."""

    seconds: float
    first_token: list[float]  # per request
    finished: list[float]
    output_lengths: list[int]
    step_seconds: list[float]
    phases: dict[str, float]
    preemptions: int


def run_job(engine: Engine, job: NanoJob, name: str, ends: float = math.inf) -> JobResult:
    """Submit all of ``job`` at once and step until nothing is left, or until ``ends`` (time.monotonic).

    Requests that run then are aborted, which the result's ``output_lengths`` show. ``name`` keeps request ids apart.
    """
    vocab = engine.model_info.vocab_size
    count = len(job.prompts)
    first, finished, lengths = [0.0] * count, [0.0] * count, [0] * count
    started = time.perf_counter()
    for index, (prompt, wanted) in enumerate(zip(job.prompts, job.output_lengths, strict=True)):
        params = SamplingParams(max_tokens=wanted, temperature=TEMPERATURE, ignore_eos=True)
        engine.add_request(Request(f"{name}-{index}", tuple(token % vocab for token in prompt), params))
    before, steps = engine.stats(), []
    last = time.perf_counter()
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
    """Computes the cost of the loaded model, with the KV as the engine stores it."""
    text, config = find_model(model).text_config, engine.config
    dtype = "float32" if config.device == "cpu" else config.dtype
    embedding = text["vocab_size"] * text["hidden_size"]
    tied = bool(text.get("tie_word_embeddings"))
    parameters = engine.model_info.num_parameters
    return model_cost(parameters, embedding, tied, DTYPE_BYTES[dtype], engine.capacity.bytes_per_slot)


class WarningsAreFailures(logging.Handler):
    """Turns the engine's warnings, such as decode without CUDA graphs, into failures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.report: Report | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Adds one failure a record."""
        if self.report is not None:
            self.report.fail(record.name, record.getMessage())


class EngineJob:
    """Measured runs and a profile on one engine, which the first case of a process builds; or the variants."""

    workers = 1  # nothing else may run on the device

    def __init__(self, args: Any):
        own = argparse.ArgumentParser()
        own.add_argument("--model", required=True, help="a config that ships with the engine")
        own.add_argument("--variants", action="store_true", help="short runs of engines that differ in a setting")
        asked = own.parse_args(args.own)
        self.args, self.variants = args, asked.variants
        self.job = draw_job(TINY_SEQUENCES, 8, 32) if args.tiny else draw_job()
        if self.variants:
            self.job = shortened(self.job, VARIANT_OUTPUT)
        self.shown_model = asked.model
        self.model = str(tiny_model(args.scratch)) if args.tiny else asked.model
        self.engine: Engine | None = None
        self.load_seconds = 0.0
        self._warnings = WarningsAreFailures()
        package = build_engine.__module__.partition(".")[0]  # kvbench_engine, of earlier commits engine
        logging.getLogger(package).addHandler(self._warnings)

    def plan(self) -> list[Planned]:
        """Lists runs before the profile; each variant alone, so that none finds another's memory taken."""
        if self.variants:
            return [Planned(name, None, JOB_SECONDS) for name in VARIANTS]
        runs = 1 if self.args.quick or self.args.tiny else 2
        names = [f"run {number}" for number in range(runs)] + [PROFILE] * (self.args.device == "cuda")
        return [Planned(name, seconds=JOB_SECONDS) for name in names]

    def run(self, name: str, report: Report) -> None:
        """Runs one case; the engine is there afterwards."""
        self.report = self._warnings.report = report
        if self.variants:
            if not self._settings_are_known(name):
                return
            self.engine = None
            self.load(**VARIANTS[name])
        elif self.engine is None:
            self.load()
        if name == PROFILE:
            self.profile()
        else:
            self.measure(name)

    def _settings_are_known(self, name: str) -> bool:
        settings = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(VARIANTS[name]) - settings):
            self.report.skip(name, f"this engine has no setting {', '.join(unknown)}")
        elif self.args.device == "cpu" and VARIANTS[name].get("torch_compile"):
            self.report.skip(name, "on a CPU it takes minutes and a C++ compiler")
        else:
            return True
        return False

    def load(self, **settings: Any) -> None:
        """Build the engine, which differs from the job's own in ``settings``, and warm it up."""
        tiny = self.args.tiny
        started = time.perf_counter()
        self.engine = build_engine(
            EngineConfig(
                model=self.model,
                load_format="dummy",
                dtype="float32" if self.args.device == "cpu" else "bfloat16",
                device=self.args.device,
                max_model_len=64 if tiny else 2048,
                max_num_seqs=4 if tiny else NUM_SEQUENCES,
                max_num_batched_tokens=128 if tiny else 8192,
                **({"kv_budget": 4 * 2**20} if tiny else {}) | settings,
            )
        )
        self.load_seconds = time.perf_counter() - started
        if not self.variants:
            self.report.put(
                load_seconds=self.load_seconds, cuda_graphs=self.engine.executor.forward.replays_graphs,
                engine_config=dataclasses.asdict(self.engine.config), capacity=dataclasses.asdict(self.engine.capacity),
            )  # fmt: skip
        self.warm_up()

    def warm_up(self) -> None:
        """Runs all prompts once, with short outputs, not measured."""
        assert self.engine is not None
        run_job(self.engine, shortened(self.job, WARM_UP_TOKENS), "warm-up")

    def measure(self, name: str) -> None:
        """Measures one run of the job: a row, or a failure that says what is missing."""
        assert self.engine is not None
        job, before = self.job, read_state()
        result = run_job(self.engine, job, name, time.monotonic() + self.report.time_left)
        device = change(before, read_state())
        if result.output_lengths != list(job.output_lengths):
            done, took = sum(result.output_lengths), result.seconds
            self.report.fail(
                name,
                f"{done:,} of {job.output_tokens:,} output tokens in {took:.1f} s ({done / took:,.0f} tokens/s): "
                "stopped for want of time, or the engine did not bring what was asked for",
            )
            return
        variant = name if self.variants else None
        self.report.row(run=name, variant=variant, device=device, **self._figures(result))
        if self.args.device == "cuda" and not self.variants:
            self.report.put(peak_memory_bytes=torch.cuda.max_memory_allocated())

    def _figures(self, result: JobResult) -> dict[str, Any]:
        assert self.engine is not None
        job, ceilings = self.job, read_ceilings(self.args.facts)
        flops = ceilings.get("matmul_bf16_tflop_per_s") or ceilings.get("matmul_fp32_tflop_per_s")
        figures: dict[str, Any] = {
            "model": self.shown_model,
            "load_seconds": self.load_seconds,
            "layers": str(getattr(self.engine.executor.model, FUSION, "as transformers has them")),
            "longest_output": max(job.output_lengths),
            "sequences": len(job.prompts),
            "input_tokens": job.input_tokens,
            "output_tokens": job.output_tokens,
            "seconds": result.seconds,
            "output_tokens_per_s": job.output_tokens / result.seconds,
            "total_tokens_per_s": (job.input_tokens + job.output_tokens) / result.seconds,
            "ttft_ms": quantiles(result.first_token, 1e3),
            "e2el_ms": quantiles(result.finished, 1e3),
            "step_ms": quantiles(result.step_seconds, 1e3),
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

    def profile(self) -> None:
        """Profiles decode of as many sequences as the job has, and nothing else."""
        assert self.engine is not None
        engine, vocab = self.engine, self.engine.model_info.vocab_size
        before = -(-NUM_SEQUENCES * PROFILED_PROMPT // engine.config.max_num_batched_tokens) + 8
        params = SamplingParams(max_tokens=before + PROFILED_STEPS + 8, temperature=TEMPERATURE, ignore_eos=True)
        for index in range(NUM_SEQUENCES):
            prompt = tuple((index * 131 + i * 31) % vocab for i in range(PROFILED_PROMPT))
            engine.add_request(Request(f"profile-{index}", prompt, params))
        for _ in range(before):
            engine.step()
        profile = profile_device(engine.step, PROFILED_STEPS)
        if profile.busy_share is None:
            self.report.skip(PROFILE, "the profiler saw nothing run on the device")
            return
        self.report.put(
            busy_share_in_decode=profile.busy_share, profiled=f"{self.shown_model}, {NUM_SEQUENCES} sequences",
            kernels_of_a_decode_step=profile.kernels, other_kernels_us=profile.other_us,
            kernels_a_decode_step=profile.count,
        )  # fmt: skip
        while engine.has_work():
            engine.step()


CASES = EngineJob


def shortened(job: NanoJob, longest: int) -> NanoJob:
    """Shortens the outputs to at most ``longest`` tokens; the prompts stay."""
    return dataclasses.replace(job, output_lengths=tuple(min(longest, wanted) for wanted in job.output_lengths))


def quantiles(values: list[float], scale: float) -> dict[str, float]:
    """Returns p50, p90, p99 and the most of ``values``, each times ``scale``."""
    ordered = sorted(values)
    picked = statistics.quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
    return {name: picked[i] * scale for name, i in (("p50", 49), ("p90", 89), ("p99", 98))} | {
        "max": ordered[-1] * scale
    }


def tiny_model(folder: Path) -> Path:
    """Writes the config of a model that a CPU runs in seconds."""
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY_CONFIG), encoding="utf-8")
    return path
