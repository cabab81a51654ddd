"""The command line of a server, made from the fields of ``EngineConfig``. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvbench_engine import config as settings
from kvbench_engine.config import EngineConfig

DEFAULT_PORT = 8000
REASONING_PARSERS = ("deepseek_r1", "qwen3")  # vLLM's names
TOOL_CALL_PARSERS = ("hermes",)

HELP = {
    "model": "what to serve: a local folder with config.json and *.safetensors, a config JSON, or the name of a model "
    "or config that ships with the engine. Nothing is ever downloaded.",
    "load_format": "auto reads the folder's safetensors; dummy takes seeded random weights: a config is enough.",
    "seed": "seed of the random weights. A request without a seed of its own draws other tokens each time.",
    "dtype": "type of weights and activations. auto: float32 on a CPU, the config's own on a GPU. bfloat16 takes half "
    "the memory and is faster on a CPU with AMX.",
    "device": "auto: the GPU if there is one.",
    "tokenizer": "folder of the tokenizer. Left out: the model folder's own, else the byte-level BPE that ships. "
    "Prompts of token ids need none.",
    "layout": "where a request's KV lies. paged: in pages, taken as the request grows; contiguous: in one stretch, "
    "reserved for its longest possible length, as before paging.",
    "reservation": "contiguous only: slots reserved for each request, at most max_model_len. max: max_model_len; pow2: "
    "the prompt and the next power of two of max_tokens; oracle: the prompt and max_tokens.",
    "page_size": "tokens a page. Small pages waste fewer slots at a request's end; large pages need a shorter table.",
    "kv_budget": "memory for K, V and the page table, in bytes or as 512MiB, 2GiB; the same for both layouts. "
    "Left out: 256 MiB on a CPU; on a GPU 80 %% of the free memory or what two of its largest steps leave of it, "
    "whichever is less.",
    "kv_cache_dtype": "type of the stored K and V. auto: the model's. The others hold more tokens in the same budget, "
    "with less precision; their scales count in the budget.",
    "enable_prefix_caching": "keep the KV of finished requests, and use it for prompts that begin alike (paged only).",
    "free_outside_window": "of layers with a sliding window, free the pages that no later token sees. Off: keep all.",
    "latent_kv": "of latent attention (MLA), keep the row that makes K and V of all heads. Off: keep K and V of each.",
    "max_model_len": "most tokens of prompt and output together. Left out: the model's own limit, or what the KV "
    "budget holds of one sequence if that is less.",
    "max_num_seqs": "most sequences computed in one step. A request cannot ask for more with n, best_of or beams. Left "
    "out: 64 on a CPU, 256 on a GPU.",
    "max_num_batched_tokens": "most tokens computed in one step, prompts and outputs together. Left out: 512 on a CPU, "
    "8192 on a GPU.",
    "enable_chunked_prefill": "let a long prompt be computed over several steps, mixed with the others' tokens.",
    "max_num_partial_prefills": "most prompts computed side by side. With 2 or more, one share of the step is kept for "
    "short prompts, so that a long one cannot hold them up.",
    "max_num_waiting": "most requests in the waiting queue; one more gets HTTP 429. Left out: no limit.",
    "watermark": "share of all pages that stays free when a request is admitted beside others (paged only). A smaller "
    "one admits earlier and preempts more. Left out: room for 16 tokens of each running sequence.",
    "scheduling_policy": "who is admitted first. fcfs: in order of arrival; priority: the lowest priority that a "
    "request states, then in order of arrival.",
    "preemption_mode": "what happens to the newest request when memory runs out. recompute: its KV is freed and "
    "computed again later; swap: its KV goes to host memory and comes back, as far as swap_space reaches.",
    "swap_space": "host memory for swapped-out KV, in bytes or as 512MiB. Left out: as much as kv_budget.",
    "async_scheduling": "plan the next step and send it to the GPU while this one runs there, without waiting for its "
    "tokens. Left out: on for a GPU, off for a CPU, where nothing would overlap.",
    "kernel_backend": "attention kernels: triton for GPUs, numba for CPUs, torch as reference. auto picks by device.",
    "cuda_graphs": "replay steps as CUDA graphs, captured at the start: decodes for about twenty batch sizes, and "
    "steps with prompts for about twenty numbers of tokens up to 2048. A model that cannot be captured runs without. "
    "Left out: on for a GPU.",
    "torch_compile": "compile the model with torch.compile at the start, which takes minutes for a large one; on a CPU "
    "it needs a C++ compiler.",
    "fused_layers": "compute each layer with fewer kernels (norms, rotation and KV write, gated products), where a "
    "test at the start shows the same numbers; the log says what was fused. Left out: on where "
    "kernel_backend is triton or numba, off with torch_compile.",
    "num_threads": "CPU threads of the arithmetic. Left out: all cores that this process may use.",
}
DESCRIPTION = """\
Serve one model over OpenAI's HTTP interface.

  POST /v1/completions, /v1/chat/completions    streaming or not
  POST /tokenize, /detokenize                   the server's own tokenizer
  POST /reset_prefix_cache                      409 while requests are running
  GET  /v1/models, /health, /metrics, /server_info

Prints "ready http://HOST:PORT" when it takes requests. Stops on SIGTERM or Ctrl-C within 5 seconds."""
EPILOG = (
    "example: %(prog)s --model llama-32m --kv-budget 48MiB --page-size 16 --port 8000\n"
    "exit codes: 0 stopped by a signal, 2 the settings cannot work (the reason is on stderr), 4 the engine's process "
    "died while it loaded the model, 130 interrupted while loading."
)


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The settings that are the server's and not the engine's.

    ``port`` 0: any free one. ``step_log``: see ``StepLog``. ``frontend_multiprocessing``: HTTP and the engine in a
    process each (``engine_process``); None: where the engine runs on a GPU. ``watchdog_timeout``: seconds
    without a sign of life from a busy engine after which /health is 503. ``reasoning_parser``, ``tool_call_parser``:
    how the answers of chats are split (``AnswerParts``).
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    served_model_name: str | None = None
    step_log: str | None = None
    frontend_multiprocessing: bool | None = None
    watchdog_timeout: float = 300.0
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port cannot be {self.port}: it lies between 0 (any free port) and 65535")
        if not self.watchdog_timeout > 0:
            raise ValueError(f"watchdog_timeout cannot be {self.watchdog_timeout:g}: it is a number of seconds above 0")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage of all options, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help lists the options)\n")

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        switches = [action for action in self._actions if isinstance(action, argparse.BooleanOptionalAction)]
        names = {name: switch.option_strings for switch in switches for name in switch.option_strings}
        for word, after in itertools.zip_longest(given, given[1:], fillvalue="-"):
            name, equals, value = word.partition("=")
            if name in names and (equals or not after.startswith("-")):
                self.error(f"{name} takes no value such as {value or after!r}: give {' or '.join(names[name])}")
        return super().parse_known_args(given, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every server and engine option; ``kvbench serve`` adds them to its own parser."""
    server = parser.add_argument_group("server")
    host = "address to listen on; no authentication: anything but 127.0.0.1 lets others in. (default: %(default)s)"
    server.add_argument("--host", default=ServeOptions.host, help=host)
    server.add_argument("--port", type=int, default=ServeOptions.port, help="0: any free port. (default: %(default)s)")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model. (default: its own name)"
    )
    server.add_argument(
        "--step-log",
        metavar="FILE",
        help="write a CSV line for each engine step: tokens, preemptions, copies, swaps, and what every KV slot holds.",
    )
    server.add_argument(
        "--frontend-multiprocessing",
        action=argparse.BooleanOptionalAction,
        help="run the engine in a process of its own, beside the one that speaks HTTP. Left out: on for a GPU, off for "
        "a CPU, where both need the same cores.",
    )
    server.add_argument(
        "--watchdog-timeout",
        metavar="SECONDS",
        type=float,
        default=ServeOptions.watchdog_timeout,
        help="after so long without the end of a step or a reply from an engine that has work, /health is 503; nothing "
        "is stopped. Longer than any step takes. (default: %(default)g)",
    )
    server.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="split answers of chats at <think> and </think>: what lies between comes as reasoning and counts as "
        "reasoning_tokens. A chat template that ends with <think> begins the answer in thought. Both do the same.",
    )
    server.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help='take tools in chats, and <tool_call>{"name": ..., "arguments": {...}}</tool_call> in answers as calls.',
    )
    engine = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineConfig):
        engine.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, **_argument(field))


def build_parser(prog: str = "python -m kvbench_engine.server") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return parser


def options_of(args: argparse.Namespace) -> tuple[EngineConfig, ServeOptions]:
    """Both parts of the parsed command line.

    Raises:
        ValueError: a setting has a value that it cannot have.
    """
    config = EngineConfig.from_mapping({f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig)})
    named = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServeOptions)}
    return config, ServeOptions(**named)


def command_line(values: dict[str, Any]) -> list[str]:
    """Write engine settings as the flags of ``add_arguments``; None (the default) is left out."""
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _argument(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """argparse's keywords for one setting. Values are checked by ``EngineConfig``, with its own sentences."""
    text = HELP[field.name]
    if field.default is not None:
        text += " (default: %(default)s)"
    keywords: dict[str, Any] = {"default": field.default, "help": text}
    if field.type in ("bool", "bool | None"):
        keywords["action"] = argparse.BooleanOptionalAction
    elif field.name in settings.CHOICES:
        aliases = settings.KV_CACHE_DTYPE_ALIASES if field.name == "kv_cache_dtype" else ()
        keywords["choices"] = (*settings.CHOICES[field.name], *aliases)
    elif field.name in settings.BYTE_SETTINGS:
        keywords["metavar"] = "BYTES"
    elif "float" in str(field.type):
        keywords["type"] = float
    elif "int" in str(field.type):
        keywords["type"] = int
        keywords["metavar"] = "N"
    else:
        keywords["metavar"] = field.name.upper()
    return keywords
