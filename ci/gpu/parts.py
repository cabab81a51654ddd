"""The parts in their order: what each needs, and how long it may take. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

TORCH = ("torch", "numpy")
MODEL = (*TORCH, "transformers", "tokenizers", "safetensors")
SERVER = (*MODEL, "fastapi", "uvicorn", "httptools", "uvloop", "pydantic", "prometheus_client", "jinja2")
CLIENT = ("locust", "gevent", "httpx", "psutil", "yaml", "click", "rich")
REPORT = ("pandas", "pyarrow", "plotly", "scipy")
HARNESS = (*SERVER, *CLIENT, *REPORT)
STEPPED = (*MODEL, "pydantic", "httpx", "psutil", "yaml", "click", "rich", "pandas", "pyarrow", "scipy")  # no client

GRACE_S = 15.0  # time for a part to finish a measurement past its limit; then it is stopped
LEAST_S = 20.0  # with less left a part is not begun
OVERHEAD_S = 60.0  # overhead of an entry: wheels, the last part's grace, the summary


@dataclass(frozen=True)
class Part:
    """A part: a ``module`` of this package, run with ``arguments``.

    ``needs``: import names; ``gpu_needs``: those that a GPU adds.

    ``quick_s``, ``full_s``: seconds after which it begins no new measurement; 0: left out of such a run (both: only an
    entry of the queue has it).
    ``isolated``: the module has cases, each run in a child process; ``wrapper``: a command that runs these processes.
    """

    name: str
    module: str
    what: str
    quick_s: float = 0.0
    full_s: float = 0.0
    needs: tuple[str, ...] = TORCH
    gpu_needs: tuple[str, ...] = ("triton",)
    arguments: tuple[str, ...] = ()
    result: str = ""  # the result file that its JSON goes into
    isolated: bool = True
    wrapper: str = ""

    def command(self, python: str) -> list[str]:
        """Returns the command of the part's process, without the arguments that all parts have."""
        if not self.isolated:
            return [python, "-m", f"ci.gpu.{self.module}", *self.arguments]
        wrapped = ["--wrapper", self.wrapper] if self.wrapper else []
        return [python, "-m", "ci.gpu.isolated", f"ci.gpu.{self.module}", *wrapped, *self.arguments]

    def seconds(self, quick: bool) -> float:
        """Returns the seconds after which the part begins no new measurement."""
        return self.quick_s if quick else self.full_s

    def needed(self, device: str) -> tuple[str, ...]:
        """Returns the import names that the part needs on ``device``."""
        return self.needs + (self.gpu_needs if device == "cuda" else ("numba",) if self.module != "facts" else ())


def _engine(model: str, quick_s: float) -> Part:
    return Part(
        f"engine-{model}", "engine_job", f"nano-vllm's batch job on {model}, random weights", quick_s, 400.0, MODEL,
        arguments=("--model", model), result="engine.json",
    )  # fmt: skip


_SANITIZER = "compute-sanitizer --tool memcheck --error-exitcode 86 --print-limit 20"  # WRAPPER_ERROR of isolated

PARTS = (
    Part("facts", "facts", "device and measured ceilings", 25.0, 60.0, result="manifest.json"),
    Part("check", "check_kernels", "kernels against float64 on the device", 35.0, 300.0, result="kernels.json"),
    Part(
        "tokens", "check_tokens", "greedy tokens of whole engines against Hugging Face", 35.0, 120.0, MODEL,
        result="engine.json",
    ),
    Part(
        "windows-tokens", "check_tokens", "the same of a model with sliding windows", needs=MODEL,
        arguments=("--model", "windows"), result="engine.json",
    ),
    Part(
        "latent-tokens", "check_tokens", "the same of a model with latent attention", needs=MODEL,
        arguments=("--model", "latent"), result="engine.json",
    ),
    Part(
        "latent-decode", "time_kernels", "decode over latent rows", arguments=("--latent",), result="kernels.json",
    ),
    Part("kernels", "time_kernels", "kernel times against the ceilings", 35.0, 400.0, result="kernels.json"),
    _engine("qwen3-0.6b", 40.0),
    _engine("llama-3.1-8b", 55.0),
    _engine("qwen3-14b", 0.0),
    Part(
        "variants", "engine_job", "short jobs of engines that differ in one setting", 75.0, 600.0, MODEL,
        arguments=("--model", "qwen3-0.6b", "--variants"), result="engine.json",
    ),
    Part(
        "tests", "check_suite", "the repository's device tests", 25.0, 300.0, (*TORCH, "pytest"),
        result="kernels.json",
    ),
    Part(
        "memcheck", "memcheck", "a few kernel cases under compute-sanitizer", 30.0, 240.0, result="kernels.json",
        wrapper=_SANITIZER,
    ),
    Part(
        "sweep", "sweep", "gpu profile of workloads/mixed.yaml through the server", 130.0, 3600.0,
        needs=HARNESS, result="sweep", isolated=False,
    ),
    Part(
        "peer-job", "turns", "nano-vllm's job: kvbench and vLLM in turns", needs=MODEL, arguments=("--pair", "peers"),
        result="engine.json", isolated=False,
    ),
    Part("peer-kernels", "peer_kernels", "decode kernels of other projects beside ours", result="kernels.json"),
    Part(
        "before-after", "turns", "two commits of the engine in turns: job, decode steps, mixed steps", needs=MODEL,
        arguments=("--pair", "before-after"), result="engine.json", isolated=False,
    ),
    Part(
        "settings", "settings", "engine time of settings against paged, beside the simulator's predictions",
        needs=HARNESS, result="engine.json", isolated=False,
    ),
    *(
        Part(
            f"{method}-pairs", "sharpness", f"{method} pairs of equal sides: how far they scatter", needs=HARNESS,
            arguments=(method,), result="engine.json", isolated=False,
        )
        for method in ("launched", "lockstep")
    ),
    Part(
        "vllm-pairs", "sharpness", "pairs of two equal vLLM engines in turns: how far they scatter", needs=STEPPED,
        arguments=("lockstep", "--vllm"), result="engine.json", isolated=False,
    ),
    Part(
        "long-decode", "time_kernels", "decode of long and skewed batches", arguments=("--decode-from", "32768"),
        result="kernels.json",
    ),
    Part(
        "quality", "commands", "what configurations change in kvbench-tiny's answers", needs=HARNESS,
        arguments=("quality",), result="engine.json", isolated=False,
    ),
    Part(
        "paging-cost", "commands", "what a page table costs the decode kernel: the claim's verdict", needs=HARNESS,
        arguments=("claims", "--claim", "paging-cost"), result="engine.json", isolated=False,
    ),
    Part(
        "windows-claim", "commands", "how many more sequences windows hold: the claim's verdict", needs=HARNESS,
        arguments=("claims", "--claim", "windows"), result="engine.json", isolated=False,
    ),
    Part(
        "latent-claim", "commands", "how many more sequences latent rows hold: the claim's verdict", needs=HARNESS,
        arguments=("claims", "--claim", "latent-kv"), result="engine.json", isolated=False,
    ),
    Part(
        "tune", "tune", "kernel configurations for this architecture", 0.0, 900.0,
        needs=(*TORCH, "click", "rich", "psutil"), result="tuned.json", isolated=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class QueueEntry:
    """A prepared run of docs/gpu.md's queue. ``seconds``: what each of its parts takes, by name, in their order."""

    name: str
    seconds: Mapping[str, float] = field(hash=False)

    @property
    def limit_s(self) -> float:
        """The seconds for everything, installing wheels and writing the summary included."""
        return sum(self.seconds.values()) + OVERHEAD_S

    def parts(self, names: Collection[str] = ()) -> list[Part]:
        """Returns the parts with this entry's seconds; with ``names`` only these, and facts.

        Raises:
            ValueError: the entry has no part of such a name.
        """
        if unknown := set(names) - set(self.seconds):
            raise ValueError(f"{self.name} has no part {min(unknown)!r}: its parts are {', '.join(self.seconds)}")
        by_name = {part.name: part for part in PARTS}
        return [
            replace(by_name[name], quick_s=seconds, full_s=seconds)
            for name, seconds in self.seconds.items()
            if not names or name in ("facts", *names)
        ]


ENTRIES = {
    entry.name: entry
    for entry in (
        QueueEntry("peers", {"facts": 20.0, "peer-job": 240.0, "peer-kernels": 170.0}),
        QueueEntry("settings", {"facts": 20.0, "settings": 490.0}),
        QueueEntry("before-after", {"facts": 25.0, "before-after": 220.0}),
        QueueEntry("sharpness", {"facts": 20.0, "launched-pairs": 360.0, "lockstep-pairs": 130.0}),
        QueueEntry("vllm-pairs", {"facts": 20.0, "vllm-pairs": 400.0}),
        QueueEntry(
            "long",
            {"facts": 20.0, "engine-qwen3-14b": 180.0, "long-decode": 40.0, "paging-cost": 45.0, "quality": 230.0},
        ),
        QueueEntry("windows", {"facts": 20.0, "windows-tokens": 90.0, "windows-claim": 120.0}),
        QueueEntry("latent", {"facts": 20.0, "latent-tokens": 90.0, "latent-decode": 60.0, "latent-claim": 120.0}),
    )
}


def select_parts(names: list[str], quick: bool) -> list[Part]:
    """Selects the parts of ``names`` in their own order, ``facts`` always among them; without names, all of such a run.

    A name stands for every part whose name begins with it and a dash: ``engine`` for all models.

    Raises:
        ValueError: no part has such a name.
    """
    for name in names:
        if not any(_matches(part, name) for part in PARTS):
            raise ValueError(f"there is no part {name!r}: the parts are {', '.join(part.name for part in PARTS)}")
    if not names:
        return [part for part in PARTS if part.seconds(quick)]
    named = {name for name in names if any(part.name == name for part in PARTS)}
    return [
        part
        for part in PARTS
        if part.name == "facts"
        or part.name in named
        or (part.seconds(quick) and any(_matches(part, name) for name in names))
    ]


def _matches(part: Part, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}-")


def plan_seconds(parts: list[Part], quick: bool, left: float) -> float:
    """Seconds that the first of ``parts`` gets when ``left`` are left for all of them.

    Its own, and up to as much again of what earlier ones saved; the last one gets all that is left.
    """
    own, later = parts[0].seconds(quick), parts[1:]
    spare = left - GRACE_S - sum(part.seconds(quick) for part in later)
    wanted = max(own, min(spare, 2 * own) if later and own else spare)
    return min(wanted, left - GRACE_S)
