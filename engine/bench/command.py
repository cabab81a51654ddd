"""The command line of ``kvbench dev bench-engine``."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench_engine.bench.case import PROMPT_TOKENS, PromptBatch, make_case
from kvbench_engine.bench.compare import SpeedBar, SpeedComparison, Turn, compare, parse_bars
from kvbench_engine.bench.sides import HF_SIDES, OURS, measure, save_model
from kvbench_engine.bench.turns import run_apart
from kvbench_engine.bench.vllm_peer import VLLM_SIDES, VllmPeer, speed_settings, vllm_version
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.executor import available_cpus
from kvbench_engine.model.spec import find_model
from kvbench_engine.sizes import parse_bytes

SIDES = (OURS, *HF_SIDES, *VLLM_SIDES)
VLLM_SKIPPED = (
    "vllm: skipped, no Python with vLLM was given; to have it run: --vllm-python PATH, or VLLM_PYTHON=PATH in the "
    "environment, where PATH is the python of a virtual environment with vLLM for CPUs"
)


def build_parser() -> argparse.ArgumentParser:
    """Options and their defaults."""
    parser = argparse.ArgumentParser(
        prog="kvbench dev bench-engine",
        description="Measure the engine alone, without server or load generator, beside Hugging Face transformers "
        "(documented and at its best) and vLLM on the same weights, side by side. Prints output tokens/s and ratios.",
        epilog="Exit codes: 0 done, 1 a --require was missed, 2 bad input, 4 the sides gave different tokens or the "
        "machine was not ours. Example: kvbench dev bench-engine --repeats 3 --require hf-continuous=5",
    )
    parser.add_argument("--model", default="llama-32m", help="folder, config JSON, or a config that ships")
    parser.add_argument("--requests", type=int, default=32, help="number of prompts, all there at the start")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens each prompt gives")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--sides", help=f"what to run, of {', '.join(SIDES)} (default: all that can)")
    parser.add_argument(
        "--vllm-python", metavar="PATH", default=os.environ.get("VLLM_PYTHON") or None,
        help="python of an environment with vLLM for CPUs (default: $VLLM_PYTHON; without, vllm does not run)",
    )  # fmt: skip
    parser.add_argument("--layout", default="paged", choices=("paged", "contiguous"))
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--kv-budget", default="512MiB", help="bytes of KV cache, such as 512MiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens computed in one step")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the prompts")
    parser.add_argument("--json", metavar="FILE", help="write every measured figure there")
    parser.add_argument(
        "--require", metavar="SIDE=RATIO", action="append", default=[],
        help="exit 1 unless the median ratio to SIDE is at least RATIO, such as hf-continuous=5; can be repeated",
    )  # fmt: skip
    return parser


def available_sides(vllm_python: str | None) -> tuple[str, ...]:
    """All sides that can run."""
    return SIDES if vllm_python else tuple(side for side in SIDES if side not in VLLM_SIDES)


def chosen_sides(args: argparse.Namespace) -> tuple[str, ...]:
    """Check all options and return the sides that run. Raises ValueError."""
    can = available_sides(args.vllm_python)
    sides = can if args.sides is None else tuple(dict.fromkeys(args.sides.split(",")))
    if unknown := sorted(set(sides) - set(SIDES)):
        raise ValueError(f"--sides cannot be {', '.join(map(repr, unknown))}: choose among {', '.join(SIDES)}")
    if missing := [side for side in sides if side not in can]:
        raise ValueError(f"--sides {missing[0]} needs --vllm-python, the python of an environment with vLLM for CPUs")
    if any(side in VLLM_SIDES for side in sides) and not _is_program(args.vllm_python):
        raise ValueError(f"--vllm-python {args.vllm_python!r} is not a program: give the python of an environment")
    for name in ("requests", "output_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} cannot be {getattr(args, name)}: it is at least 1")
    check_json_path(args.json)
    return sides


def _is_program(name: str) -> bool:
    return os.path.isfile(name) and os.access(name, os.X_OK)


def check_json_path(name: str | None) -> None:
    """Raise ValueError before the measurement if the file cannot be written."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"--json {name!r} cannot be written: give a file in a folder that is there and writable")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings. Raises ValueError."""
    return EngineConfig(
        model=args.model,
        seed=args.seed,
        dtype=args.dtype,
        layout=args.layout,
        page_size=args.page_size,
        kv_budget=parse_bytes(args.kv_budget),
        max_model_len=max(PROMPT_TOKENS) + args.output_tokens,
        max_num_seqs=min(args.requests, args.max_num_batched_tokens),
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


@contextmanager
def turns_of(
    sides: Sequence[str],
    config: EngineConfig,
    case: PromptBatch,
    vllm_python: str | None = None,
    record: dict[str, Any] | None = None,
) -> Iterator[dict[str, Turn]]:
    """A turn for each side. While the context is open, a scratch folder holds what vLLM reads.

    ``record`` gets ``vllm_environment``, the settings that vLLM runs under, if it takes part.
    """
    turns: dict[str, Turn] = {s: partial(run_apart, measure, s, config, case) for s in sides if s not in VLLM_SIDES}
    with tempfile.TemporaryDirectory(prefix="kvbench-peers-") as folder:
        peers = [side for side in sides if side in VLLM_SIDES]
        if peers:
            assert vllm_python and config.kv_budget and config.max_model_len
            model, scratch = Path(folder, "model"), Path(folder, "scratch")
            scratch.mkdir()
            peer = VllmPeer(
                python=Path(vllm_python).absolute(),  # not resolved: a virtual environment's python is a link
                model=model,
                scratch=scratch,
                dtype=run_apart(save_model, config, str(model)),
                kv_budget=config.kv_budget,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                threads=torch.get_num_threads(),
            )
            if record is not None:
                record["vllm_environment"] = speed_settings(peer.environment(os.environ))
            turns |= {side: partial(peer.measure, side, case) for side in peers}
        yield turns


def verdict(comparison: SpeedComparison, bars: Sequence[SpeedBar], machine: Mapping[str, Any]) -> int:
    """Print whether the bars are reached; return the exit code. ``machine``: see ``watch`` of ``main``."""
    if wrong := comparison.other_work():
        print(f"not a comparison of equal work: {', '.join(wrong)} gave other tokens than {OURS}")
        return 4
    judged = [bar.judge(comparison) for bar in bars]
    for _, line in judged:
        print(line)
    if machine.get("disturbed"):
        print(
            f"no measurement: other processes used {machine['foreign_cpu_cores']:.2f} of a core meanwhile; stop them "
            "and measure again"
        )
        return 4
    return 0 if all(met for met, _ in judged) else 1


def _say(side: str, repeat: int, speed: float) -> None:
    print(f"  repeat {repeat + 1}  {side:18} {speed:8.1f} output tokens/s", flush=True)


def main(argv: Sequence[str], watch: Callable[[], Mapping[str, Any]] = dict) -> int:
    """Run from the command line; returns the exit code.

    ``watch``, called at the end, tells what the machine did meanwhile: ``foreign_cpu_cores`` that other processes used,
    and ``disturbed`` when they were too many for a measurement. An empty mapping: it is not known.

    Raises:
        ValueError: bad input, for the caller to print.
    """
    args = build_parser().parse_args(argv)
    sides = chosen_sides(args)
    bars = parse_bars(args.require, sides)
    vllm = None
    if any(side in VLLM_SIDES for side in sides) and (vllm := vllm_version(args.vllm_python)) is None:
        raise ValueError(f"--vllm-python {args.vllm_python!r} has no vLLM: give the python of another environment")
    torch.set_num_threads(available_cpus())
    spec = find_model(args.model)
    config = engine_config(args).check_against_model(spec.max_positions)
    case = make_case(args.requests, args.output_tokens, spec.text_config["vocab_size"], args.seed)
    print(
        f"{len(case.prompts)} requests, {sum(map(len, case.prompts))} prompt tokens, {case.output_tokens} output "
        f"tokens each, model {args.model}, dtype {args.dtype}, {torch.get_num_threads()} threads",
        flush=True,
    )
    if args.sides is None and not args.vllm_python:
        print(VLLM_SKIPPED, flush=True)
    record: dict[str, Any] = {}
    with turns_of(sides, config, case, args.vllm_python, record) as turns:
        result = compare(turns, args.repeats, _say, half_precision=config.dtype in ("bfloat16", "float16"))
        machine = watch()
    print("\n".join(result.lines()))
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if vllm is not None:
            versions["vllm"] = vllm
        record |= {"config": asdict(config), "versions": versions, "threads": torch.get_num_threads()}
        record |= {"machine": dict(machine), "bars": [asdict(bar) for bar in bars], **asdict(result)}
        Path(args.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return verdict(result, bars, machine)
