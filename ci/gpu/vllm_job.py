"""Runs nano-vllm's batch job through vLLM, in a process that keeps its engine from one case to the next.

Case ``load`` builds and warms the engine up. Case ``job`` is one run of the whole job, timed from the call of
``generate`` until it returns; prompts and sampling parameters are made before. vLLM's own defaults but for what the
job asks for: as much KV as ours, no text, no reuse of prompts. FLASH_ATTN is what vLLM 0.26 chooses on a Hopper GPU;
named here, it cannot silently fall back to another backend.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import time
from typing import Any

from ci.gpu.engine_job import TEMPERATURE, TINY_SEQUENCES, WARM_UP_TOKENS, shortened
from ci.gpu.engine_turns import KV_BYTES, MODEL
from ci.gpu.nano_shape import NUM_SEQUENCES, NanoJob, draw_job
from ci.gpu.part import Planned, Report
from engine.model.spec import CONFIG_DIR

TINY_KV_BYTES = 4 * 2**20
LOAD_SECONDS, JOB_SECONDS = 240.0, 90.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its processes talk to each other, and the machine may have no other address
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it must be importable else; without top-k and top-p it is never called
}
FACTS = {  # by name, where vLLM's configuration has them
    "attention_backend": "attention_config.backend",
    "async_scheduling": "scheduler_config.async_scheduling",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "compilation_mode": "compilation_config.mode",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "v2_model_runner": "use_v2_model_runner",
    "block_size": "cache_config.block_size",
    "gpu_blocks": "cache_config.num_gpu_blocks",
}


class VllmJob:
    """Cases on one engine, which the case ``load`` builds."""

    workers = 1  # nothing else may run on the device

    def __init__(self, args: Any):
        self._scratch, self._tiny = args.scratch, args.tiny
        self._job = draw_job(TINY_SEQUENCES, 8, 32) if args.tiny else draw_job()
        self._llm: Any = None

    def plan(self) -> list[Planned]:
        """Lists loading, and one run of the job."""
        return [Planned("load", seconds=LOAD_SECONDS), Planned("job", seconds=JOB_SECONDS)]

    def run(self, name: str, report: Report) -> None:
        """Runs one case."""
        if name == "load":
            self._load(report)
        elif self._llm is None:
            report.skip(name, "vLLM's engine was not built")
        else:
            row = self._generate(self._job)
            report.row(case=name, **row)
            if not row["complete"]:
                report.fail(
                    name, f"{row['output_tokens']:,} output tokens, not the {self._job.output_tokens:,} asked for"
                )

    def _load(self, report: Report) -> None:
        if importlib.util.find_spec("vllm") is None:
            report.fail("load", "vLLM is not on this machine: bring it along with ci/gpu/bring.sh peers")
            return
        started = time.perf_counter()
        os.environ.update(ENVIRONMENT, VLLM_CACHE_ROOT=str(self._scratch / "vllm"))
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # if it is there, vLLM tunes it, for nothing here
        import vllm

        self._llm = vllm.LLM(**self._arguments())
        report.put(version=vllm.__version__, load_seconds=time.perf_counter() - started)
        self._generate(shortened(self._job, WARM_UP_TOKENS))
        config, facts = self._llm.llm_engine.vllm_config, {}
        for name, path in FACTS.items():
            value = functools.reduce(lambda value, key: getattr(value, key, None), path.split("."), config)
            facts[name] = value if type(value) in (bool, int) else str(getattr(value, "name", value))
        report.put(config=facts)

    def _arguments(self) -> dict[str, Any]:
        """The arguments of vllm.LLM. The share of the memory is what must be free at the start; the KV has its own."""
        model = self._scratch / f"vllm-{MODEL}"  # for vLLM a model, of which it needs the shape alone
        model.mkdir(exist_ok=True)
        shutil.copyfile(CONFIG_DIR / f"{MODEL}.json", model / "config.json")
        return {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
            "max_model_len": 2048, "max_num_seqs": NUM_SEQUENCES, "enable_prefix_caching": False,
            "kv_cache_memory_bytes": TINY_KV_BYTES if self._tiny else KV_BYTES, "gpu_memory_utilization": 0.1,
            "attention_backend": "FLASH_ATTN",
        }  # fmt: skip

    def _generate(self, job: NanoJob) -> dict[str, Any]:
        """Runs ``job`` once and returns the row of it."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(prompt)} for prompt in job.prompts]
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=wanted, detokenize=False)
            for wanted in job.output_lengths
        ]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        return {
            "seconds": seconds, "output_tokens": sum(lengths), "output_tokens_per_s": sum(lengths) / seconds,
            "complete": lengths == list(job.output_lengths),
        }  # fmt: skip


CASES = VllmJob
