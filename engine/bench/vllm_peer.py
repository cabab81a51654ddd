"""vLLM's CPU backend as a side, in an environment with its own torch and none of our packages.

So that it runs at its best for this case it gets all cores for its OpenMP threads (0.32 leaves them free in
the calling process; a version that binds them there would keep one core for its scheduler), the OpenMP runtime and
allocator that its documentation asks for where they are found, no tokenizer, no prefix cache (the prompts share
nothing), its own batch limit, and its engine in the calling process. ``vllm`` is its default, compiled by torch;
``vllm-eager`` is the same without compilation, which small models may run faster with.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench_engine.bench.case import Outputs, PromptBatch, speed_of
from kvbench_engine.bench.turns import TURN_LIMIT_S, run_command

VLLM_SIDES = ("vllm", "vllm-eager")
SCRIPT = Path(__file__).with_name("vllm_turn.py")
_PRELOADED = ("libtcmalloc*.so.4", "libiomp5.so")  # what vLLM's CPU backend looks for in LD_PRELOAD
_SPEED_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "TORCHINDUCTOR_")  # beginnings of names


@dataclass(frozen=True)
class VllmPeer:
    """A vLLM installation to compare with, and what it runs.

    ``python``: of an environment with vLLM for CPUs. The model folder holds safetensors.
    ``kv_budget``: bytes; vLLM takes whole GiB, so it may get more than that, never less.
    """

    python: Path
    model: Path
    scratch: Path
    dtype: str  # a torch dtype's name
    kv_budget: int
    max_model_len: int
    max_num_seqs: int
    threads: int
    limit_s: float = TURN_LIMIT_S

    def measure(self, side: str, case: PromptBatch) -> tuple[float, Outputs]:
        """One turn: output tokens/s and tokens. ``side`` is one of ``VLLM_SIDES``.

        Raises:
            ValueError: it could not run, did not do the work, or not within ``limit_s``.
        """
        job, result = self.scratch / f"{side}-job.json", self.scratch / f"{side}-result.json"
        result.unlink(missing_ok=True)
        job.write_text(json.dumps(self.job(side, case)), encoding="utf-8")
        command = [str(self.python), "-I", str(SCRIPT), str(job), str(result)]
        run_command(command, self.environment(os.environ), self.scratch / f"{side}.log", self.limit_s)
        if not result.is_file():
            raise ValueError("it wrote no result")
        measured = json.loads(result.read_text(encoding="utf-8"))
        return speed_of(case, measured["outputs"], measured["seconds"]), measured["outputs"]

    def job(self, side: str, case: PromptBatch) -> dict[str, Any]:
        """The job that ``vllm_turn.py`` reads."""
        llm = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": False,
            "enforce_eager": side == "vllm-eager",
            "seed": 0,
        }
        return {"llm": llm, "prompts": case.prompts, "output_tokens": case.output_tokens}

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The variables of ``given`` and the missing ones; threads and memory are always the comparison's.

        An exported OMP_NUM_THREADS=1 would reach only vLLM, since the other sides set their threads themselves.
        Compiled code is kept for the next turn, in the scratch folder.
        """
        ours = {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.kv_budget / 2**30)),
        }
        defaults = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: self.threads])),
            "VLLM_CACHE_ROOT": str(self.scratch / "vllm-cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if libraries := preloaded(self.python.parent.parent):
            defaults["LD_PRELOAD"] = ":".join(map(str, libraries))
        kept = {name: value for name, value in given.items() if name != "OMP_THREAD_LIMIT"}
        return defaults | kept | ours


def speed_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect vLLM's speed, for the JSON record; of paths only the file names."""
    return {
        name: ":".join(Path(part).name for part in value.split(":")) if "/" in value else value
        for name, value in sorted(environment.items())
        if name == "LD_PRELOAD" or name.startswith(_SPEED_SETTINGS)
    }


def vllm_version(python: str) -> str | None:
    """Name and version of the vLLM package of that environment; None if there is none."""
    code = "from importlib import metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line for line in sorted(done.stdout.splitlines()) if line.startswith("vllm")), None)


def preloaded(prefix: Path, system: Path = Path("/usr/lib")) -> list[Path]:
    """The libraries that vLLM recommends and that exist in its environment ``prefix`` or the system."""
    libraries = []
    for pattern in _PRELOADED:
        places = [*sorted((prefix / "lib").glob(pattern)), *sorted(system.glob(f"*/{pattern}"))]
        libraries += places[:1]
    return libraries
