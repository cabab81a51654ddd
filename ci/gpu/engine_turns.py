"""A side of ``ci.gpu.turns``: kvbench's engine on nano-vllm's job and on steady steps of a given number of tokens.

The engine is whatever ``engine`` and ``kernels`` the import path has first: this tree's, or another commit's.
"""

from __future__ import annotations

import argparse
import time
import zlib
from typing import Any

from ci.gpu.engine_job import TEMPERATURE, EngineJob, quantiles
from ci.gpu.part import Planned, Report
from ci.gpu.turns import LOAD
from engine.sequence import Request, SamplingParams

MODEL = "qwen3-0.6b"
KV_BYTES = 30 * 2**30  # more than the job ever holds (276,793 tokens of 112 KiB), and two such fit a GPU of 80 GB
DECODING, CONTEXT = 192, 512  # sequences that decode in every measured step, and the tokens of their prompts
STEPS, SETTLE = 60, 8  # measured steps, and steps before them
STEP_TOKENS = {"decode only": 0, "steps of 512": 512, "steps of 2048": 2048, "steps of 8192": 8192}  # 0: no prompts


class EngineTurns(EngineJob):
    """The job, and steps that decode alone or beside whole prompts, as few as fill the step up."""

    def __init__(self, args: Any):
        super().__init__(argparse.Namespace(**{**vars(args), "own": ["--model", MODEL]}))
        self.decoding, self.context, self.steps = (2, 8, 4) if args.tiny else (DECODING, CONTEXT, STEPS)

    def plan(self) -> list[Planned]:
        """Loading, then what is measured."""
        return [Planned(name) for name in (LOAD, "job", *STEP_TOKENS)]

    def run(self, name: str, report: Report) -> None:
        """Run one case."""
        self.report = self._warnings.report = report
        if name == LOAD:
            self.load(**({} if self.args.tiny else {"kv_budget": KV_BYTES}))
        elif name == "job":
            self.measure(name)
        else:
            self._run_steps(STEP_TOKENS[name] // (64 if self.args.tiny else 1))

    def _run_steps(self, tokens: int) -> None:
        """Measure steady steps of ``tokens`` tokens; 0: of the decoding sequences alone."""
        assert self.engine is not None, "a side that did not load is asked nothing more"
        engine, prompt = self.engine, max(0, tokens - self.decoding)
        prompts = -(-prompt // (engine.config.max_model_len - 1))
        for index in range(self.decoding):
            self._add(f"decoding-{index}", self.context, 10**6)
        settling, seconds = -(-self.decoding * self.context // engine.config.max_num_batched_tokens) + SETTLE, []
        before = engine.stats()
        for number in range(settling + self.steps):
            if number == settling:
                before = engine.stats()
            if prompt and number >= settling - SETTLE // 2:
                for index in range(prompts):
                    size = prompt * (index + 1) // prompts - prompt * index // prompts
                    self._add(f"prompt-{number}-{index}", size, 1)
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        after = engine.stats()
        for index in range(self.decoding):
            engine.abort(f"decoding-{index}")
        while engine.has_work():
            engine.step()
        scheduled = [stats.prefill_tokens_scheduled + stats.decode_tokens_scheduled for stats in (before, after)]
        phases = {name: after.phase_seconds[name] - before.phase_seconds[name] for name in after.phase_seconds}
        tokens_a_step = (scheduled[1] - scheduled[0]) / self.steps
        if tokens_a_step != self.decoding + prompt:
            self.report.fail("steps", f"{tokens_a_step:g} tokens a step in place of {self.decoding + prompt}")
        self.report.row(
            median_step_ms=quantiles(seconds[-self.steps :], 1e3)["p50"],
            tokens_a_step=tokens_a_step,
            replayed_share=(after.replayed_steps - before.replayed_steps) / self.steps,
            **{f"{name}_ms": 1e3 * spent / self.steps for name, spent in phases.items()},
        )

    def _add(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds a request of ``prompt_tokens``, and of as many ``output_tokens`` as the model's length leaves."""
        assert self.engine is not None and self.engine.config.max_model_len is not None
        first, vocab = zlib.crc32(name.encode()), self.engine.model_info.vocab_size
        prompt = tuple((first + i * 31) % vocab for i in range(prompt_tokens))
        most = min(output_tokens, self.engine.config.max_model_len - prompt_tokens)
        params = SamplingParams(max_tokens=most, temperature=TEMPERATURE, ignore_eos=True)
        self.engine.add_request(Request(name, prompt, params))


CASES = EngineTurns
