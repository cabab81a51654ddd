"""``kvbench bench-engine``: the engine alone, in process, against Hugging Face on the same weights in one sitting.

The case: a Llama-shaped float32 model of 32 M seeded weights, 32 requests of 32, 64, 128 or 512 random prompt tokens,
64 greedy output tokens each, all there at the start. Sides take turns, repeat by repeat, so that a machine that slows
down slows all of them; a ratio is taken within one repeat. Each turn is a process of its own: load, one unmeasured run,
one measured run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from engine.build import assemble_engine
from engine.config import EngineConfig, parse_bytes
from engine.engine import Engine
from engine.engine_thread import EngineThread
from engine.executor import available_cpus
from engine.model_loader import LoadedModel, load_model
from engine.model_spec import find_model
from engine.sequence import Request, SamplingParams

PROMPT_TOKENS = (32, 64, 128, 512)
TURN_LIMIT_S = 600.0
EXIT_LIMIT_S = 5.0
SAME_TOKENS_LIMIT = 0.9  # float32 rounding can break a near tie; more than that is not the same work
SIDES = ("kvbench", "hf-continuous", "hf-continuous-best", "hf-static")


@dataclass(frozen=True)
class Case:
    """Prompts (token ids) and how many tokens each is to give."""

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def total_output(self) -> int:
        return len(self.prompts) * self.output_tokens


def make_case(num_requests: int, output_tokens: int, vocab_size: int, seed: int) -> Case:
    rng = random.Random(seed)
    lengths = [rng.choice(PROMPT_TOKENS) for _ in range(num_requests)]
    return Case(tuple(tuple(rng.randrange(1, vocab_size) for _ in range(n)) for n in lengths), output_tokens)


def run_engine(engine: Engine, case: Case) -> list[list[int]]:
    """Output tokens by prompt."""
    params = SamplingParams(max_tokens=case.output_tokens, temperature=0.0, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in case.prompts]
    for index, prompt in enumerate(case.prompts):
        engine.add_request(Request(str(index), prompt, params))
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)].extend(output.token_ids)
    return outputs


def _generation_config(case: Case) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=case.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def run_hf_continuous(loaded: LoadedModel, case: Case, best: bool) -> list[list[int]]:
    """transformers' own continuous batching with SDPA, its pool sized so that nothing waits.

    As its documentation shows it, ``generate_batch`` on a loaded model; or ``best``: with a manager that persists, so
    that cache and thread are made by the first, unmeasured run, as ours are.
    """
    tokens = sum(len(p) + case.output_tokens for p in case.prompts)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=tokens // 32 + 2 * len(case.prompts))
    answers = loaded.model.generate_batch(
        inputs=[list(p) for p in case.prompts],
        generation_config=_generation_config(case),
        continuous_batching_config=batching,
        persistent_manager=best,
    )
    ordered = [answers[name] for name in sorted(answers, key=lambda n: int(n.rsplit("_", 1)[-1]))]
    return [list(answer.generated_tokens) for answer in ordered[-len(case.prompts) :]]


@torch.inference_mode()
def run_hf_static(loaded: LoadedModel, case: Case) -> list[list[int]]:
    """One left-padded ``generate`` of all prompts."""
    longest = max(map(len, case.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in case.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in case.prompts])
    ids, mask = ids.to(loaded.device), mask.to(loaded.device)
    output = loaded.model.generate(ids, attention_mask=mask, generation_config=_generation_config(case))
    return output[:, longest:].tolist()


def _load_for(side: str, config: EngineConfig) -> Callable[[Case], list[list[int]]]:
    """The side's runner, its model loaded."""
    loaded = load_model(config)
    if side == "kvbench":
        engine = assemble_engine(config, loaded)
        return lambda case: run_engine(engine, case)
    loaded.model.set_attn_implementation("sdpa")
    if side == "hf-static":
        return lambda case: run_hf_static(loaded, case)
    return lambda case: run_hf_continuous(loaded, case, best=side == "hf-continuous-best")


def measure(side: str, config: EngineConfig, case: Case) -> tuple[float, list[list[int]]]:
    """Output tokens/s and the tokens of one measured run after an unmeasured one of the same case."""
    if side == "hf-continuous-best":
        # It computes on a thread of its own. A thread that ends takes its OpenMP team with it; were the model loaded
        # here, as any program would, this thread's team would slow the other down (see engine_thread).
        thread = EngineThread()
        run = thread.submit(_load_for, side, config).result()
        thread.stop()
    else:
        run = _load_for(side, config)
    run(case)
    started = time.perf_counter()
    outputs = run(case)
    speed = case.total_output / (time.perf_counter() - started)
    short = [len(tokens) for tokens in outputs if len(tokens) != case.output_tokens]
    if short or len(outputs) != len(case.prompts):
        raise RuntimeError(f"{side} gave {len(outputs)} answers, {len(short)} of a wrong length")
    return speed, outputs


def _worker(side: str, config: EngineConfig, case: Case, threads: int, connection: Connection) -> None:
    torch.set_num_threads(threads)
    try:
        connection.send(measure(side, config, case))
    except Exception as error:
        connection.send(error)
    connection.close()


def measure_apart(side: str, config: EngineConfig, case: Case) -> tuple[float, list[list[int]]]:
    """``measure`` in a process of its own, so that no side meets another's threads, caches or memory.

    Raises:
        ValueError: the side could not run, or not within ``TURN_LIMIT_S``.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(side, config, case, torch.get_num_threads(), sender), daemon=True)
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(TURN_LIMIT_S) else TimeoutError(f"not done in {TURN_LIMIT_S} s")
    except EOFError:
        result = RuntimeError("its process died")
    finally:
        process.join(EXIT_LIMIT_S)  # its own way, if it can: a thread of the other side may keep it
        process.kill()
        process.join()
    if isinstance(result, Exception):
        raise ValueError(f"{side} could not be measured: {result}") from result
    return result


def compare(config: EngineConfig, case: Case, sides: tuple[str, ...], repeats: int, report: Callable) -> dict:
    """Output tokens/s of each side and repeat, and kvbench's ratio to each other side, repeat by repeat."""
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    outputs: dict[str, list[list[int]]] = {}
    for repeat in range(repeats):
        for side in random.Random(repeat).sample(sides, len(sides)):
            speed, outputs[side] = measure_apart(side, config, case)
            speeds[side].append(speed)
            report(side, repeat, speed)
    ratios = {
        side: [a / b for a, b in zip(speeds["kvbench"], speeds[side], strict=True)]
        for side in sides
        if side != "kvbench" and "kvbench" in sides
    }
    same = {side: _agreement(outputs["kvbench"], outputs[side]) for side in ratios}
    return {"output_tokens_per_s": speeds, "ratio": ratios, "same_tokens": same}


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of requests whose greedy tokens are all equal (float32 rounding can break a near tie)."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbench bench-engine",
        description="Measure the engine alone, without server or load generator, against Hugging Face transformers on "
        "the same weights, side by side. Prints output tokens/s and ratios.",
        epilog="Exit codes: 0 done, 1 --require-ratio was missed, 2 bad input, 4 the sides gave different tokens. "
        "Example: kvbench bench-engine --repeats 3 --require-ratio 3",
    )
    parser.add_argument("--model", default="llama-32m", help="folder, config JSON, or a config that ships")
    parser.add_argument("--requests", type=int, default=32, help="number of prompts, all there at the start")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens each prompt gives")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"what to run, of {', '.join(SIDES)}")
    parser.add_argument("--layout", default="paged", choices=("paged", "contiguous"))
    parser.add_argument("--page-size", type=int, default=16, help="tokens")
    parser.add_argument("--kv-budget", default="512MiB", help="bytes of KV cache, such as 512MiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens computed in one step")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the prompts")
    parser.add_argument("--json", metavar="FILE", help="write every measured figure there")
    parser.add_argument(
        "--require-ratio", type=float, metavar="X", help="exit 1 unless the median ratio to hf-continuous is at least X"
    )
    return parser


def _check(args: argparse.Namespace) -> tuple[str, ...]:
    sides = tuple(dict.fromkeys(args.sides.split(",")))
    if unknown := sorted(set(sides) - set(SIDES)):
        raise ValueError(f"--sides knows {', '.join(SIDES)}, not {', '.join(map(repr, unknown))}")
    for name in ("requests", "output_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} cannot be {getattr(args, name)}: it is at least 1")
    if args.require_ratio is not None and not {"kvbench", "hf-continuous"} <= set(sides):
        raise ValueError("--require-ratio compares kvbench with hf-continuous: name both in --sides")
    return sides


def main(argv: list[str]) -> int:
    """Run from the command line; returns the exit code. ValueError: bad input, for the caller to print."""
    args = _parser().parse_args(argv)
    sides = _check(args)
    torch.set_num_threads(available_cpus())
    config = EngineConfig(
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
    case = make_case(args.requests, args.output_tokens, find_model(args.model).text_config["vocab_size"], args.seed)
    print(
        f"{len(case.prompts)} requests, {sum(map(len, case.prompts))} prompt tokens, {case.output_tokens} output "
        f"tokens each, model {args.model}, {torch.get_num_threads()} threads",
        flush=True,
    )
    result = compare(
        config,
        case,
        sides,
        args.repeats,
        lambda side, repeat, speed: print(f"  repeat {repeat + 1}  {side:18} {speed:8.1f} output tokens/s", flush=True),
    )
    for side, speeds in result["output_tokens_per_s"].items():
        line = f"{side:18} median {statistics.median(speeds):8.1f} output tokens/s"
        line += f" ({min(speeds):.1f} to {max(speeds):.1f})"
        if side in result["ratio"]:
            ratios = result["ratio"][side]
            line += f"   kvbench is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            line += f", {result['same_tokens'][side]:.0%} of requests token for token equal"
        print(line)
    if args.json:
        record = {"config": asdict(config), "torch": torch.__version__, "threads": torch.get_num_threads(), **result}
        Path(args.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if wrong := [side for side, share in result["same_tokens"].items() if share < SAME_TOKENS_LIMIT]:
        print(f"not a comparison of equal work: {', '.join(wrong)} gave other tokens than kvbench")
        return 4
    if args.require_ratio is not None:
        reached = statistics.median(result["ratio"]["hf-continuous"])
        if reached < args.require_ratio:
            print(f"below the required ratio: {reached:.2f}x to hf-continuous, wanted {args.require_ratio:.2f}x")
            return 1
    return 0
