"""A side of ``ci.gpu.turns``: kvbench's engine on nano-vllm's job and on steps of a given number of tokens.

The engine is whatever ``engine`` and ``kernels`` the import path has first: this tree's, or another commit's.
"""

from __future__ import annotations

import time
from typing import Any

from ci.gpu.engine_job import TEMPERATURE, TINY_SEQUENCES, WARM_UP_TOKENS, quantiles, run_job, shortened, tiny_model
from ci.gpu.nano_shape import NUM_SEQUENCES, Job, draw_job
from ci.gpu.part import Planned, Report
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Request, SamplingParams

MODEL = "qwen3-0.6b"
KV_BYTES = 32 * 2**30  # more than the job ever holds (276,793 tokens of 112 KiB), and two such fit a GPU of 80 GB
DECODING = 192  # sequences that decode in every measured step
CONTEXT = 512  # tokens of their prompts
STEPS, SETTLE = 60, 8  # measured, and before them
STEP_TOKENS = {"decode only": 0, "steps of 512": 512, "steps of 2048": 2048}  # 0: no prompts


def report_job(report: Report, job: Job, output_lengths: list[int], seconds: float, **facts: Any) -> None:
    """Adds a row of a whole job, or a failure where a request brought another number of tokens than it asked for."""
    tokens = sum(output_lengths)
    if output_lengths != list(job.output_lengths):
        report.fail("job", f"{tokens:,} output tokens came where {job.output_tokens:,} were asked for")
        return
    report.row(case="job", seconds=seconds, output_tokens_per_s=tokens / seconds, **facts)


class EngineTurns:
    """The job, and steady steps: decodes alone, or with one whole prompt a step that fills it up."""

    workers = 1

    def __init__(self, args: Any):
        self.args = args
        self.job = draw_job(TINY_SEQUENCES, 8, 32) if args.tiny else draw_job()
        self.decoding, self.context = (2, 8) if args.tiny else (DECODING, CONTEXT)
        self.steps = 4 if args.tiny else STEPS
        self.engine: Engine | None = None

    def plan(self) -> list[Planned]:
        """Loading first."""
        return [Planned(name) for name in ("load", "job", *STEP_TOKENS)]

    def run(self, name: str, report: Report) -> None:
        """One case."""
        if name == "load":
            self._load(report)
            return
        assert self.engine is not None, "a side that did not load is asked nothing more"
        if name == "job":
            self._run_job(report)
        else:
            self._run_steps(name, STEP_TOKENS[name] // (64 if self.args.tiny else 1), report)

    def _load(self, report: Report) -> None:
        """Builds the engine, and runs the whole job once with short outputs."""
        tiny, started = self.args.tiny, time.perf_counter()
        self.engine = build_engine(
            EngineConfig(
                model=str(tiny_model(self.args.scratch)) if tiny else MODEL,
                load_format="dummy",
                dtype="float32" if self.args.device == "cpu" else "bfloat16",
                device=self.args.device,
                kv_budget=4 * 2**20 if tiny else KV_BYTES,
                max_model_len=64 if tiny else 2048,
                max_num_seqs=4 if tiny else NUM_SEQUENCES,
                max_num_batched_tokens=64 if tiny else 8192,
            )
        )
        run_job(self.engine, shortened(self.job, WARM_UP_TOKENS), "warm-up")
        report.put(
            load_seconds=time.perf_counter() - started,
            async_scheduling=self.engine.config.async_scheduling,
            max_num_batched_tokens=self.engine.config.max_num_batched_tokens,
            page_size=self.engine.config.page_size,
        )

    def _run_job(self, report: Report) -> None:
        """The whole job. Its time begins before the first request is added, as vLLM's generate() does."""
        started = time.perf_counter()
        result = run_job(self.engine, self.job, f"job-{started}")
        seconds = time.perf_counter() - started
        report_job(report, self.job, result.output_lengths, seconds, steps=len(result.step_seconds))

    def _run_steps(self, name: str, tokens: int, report: Report) -> None:
        """Steady steps of ``tokens`` tokens; 0: of the decoding sequences alone."""
        engine, vocab = self.engine, self.engine.model_info.vocab_size
        prompt = max(0, tokens - self.decoding)
        for index in range(self.decoding):
            self._add(f"decoding-{index}", tuple((index * 131 + i * 31) % vocab for i in range(self.context)), 10**6)
        settling = -(-self.decoding * self.context // engine.config.max_num_batched_tokens) + SETTLE
        seconds = []
        for number in range(settling + self.steps):
            if number == settling:
                before = engine.stats()
            if prompt and number >= settling - SETTLE // 2:
                self._add(f"prompt-{number}", tuple((number * 17 + i * 7) % vocab for i in range(prompt)), 1)
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        after = engine.stats()
        for index in range(self.decoding):
            engine.abort(f"decoding-{index}")
        while engine.has_work():
            engine.step()
        scheduled = [stats.prefill_tokens_scheduled + stats.decode_tokens_scheduled for stats in (before, after)]
        step_ms = quantiles(seconds[-self.steps :], 1e3)
        report.row(
            case=name, step_ms=step_ms["p50"], step_ms_p90=step_ms["p90"],
            tokens_a_step=(scheduled[1] - scheduled[0]) / self.steps,
            replayed_share=(after.replayed_steps - before.replayed_steps) / self.steps,
            **{f"{phase}_ms": 1e3 * (value - before.phase_seconds[phase]) / self.steps
               for phase, value in after.phase_seconds.items()},
        )  # fmt: skip

    def _add(self, name: str, prompt: tuple[int, ...], tokens: int) -> None:
        room = self.engine.config.max_model_len or 2048
        params = SamplingParams(max_tokens=min(tokens, room - len(prompt)), temperature=TEMPERATURE, ignore_eos=True)
        self.engine.add_request(Request(name, prompt, params))


CASES = EngineTurns
