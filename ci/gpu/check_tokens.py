"""Part ``tokens``: greedy tokens of whole engines on the device against Hugging Face ``generate`` on the CPU.

A tiny float32 model, under {graphs, eager} x {async, in turn} x {recompute, swap}, each with preemption and prefix
caching, and each made to show that it did replay graphs, preempt and hit. Graphs that read or write the wrong buffers,
and steps that overlap wrongly, give other tokens and nothing else. On a CPU, which has no graphs: eager only. Each way
has a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ci.gpu.part import Planned, Report
from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.budget import page_table_bytes
from engine.model.loader import LoadedModel, load_model
from engine.sequence import Request, SamplingParams

MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 499, "tie_word_embeddings": False,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
WINDOWED = {
    **MODEL, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 40, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    **MODEL, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 48,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "first_k_dense_replace": 2, "head_dim": 16,
}  # fmt: skip
LENGTHS = (300, 70, 65, 64, 17, 16, 33, 1, 5, 48)  # tokens of the prompts; prompts of 48 and more begin alike
COMMON_TOKENS = 48
OUTPUT_TOKENS = 32
MAX_MODEL_LEN, PAGE_SIZE, MAX_NUM_SEQS = 384, 16, 6
POOL_SLOTS = 416  # of whole tokens; holds the long prompt and its output, but not six of the others beside it
WINDOWED_SLOTS = 224  # likewise, where windows free what they no longer see
MODELS = {"plain": (MODEL, POOL_SLOTS), "windows": (WINDOWED, WINDOWED_SLOTS), "latent": (LATENT, POOL_SLOTS)}
CLEAR_GAP = 1e-3  # least gap of the two largest logits: summing float32 in another order changes less
TRIES = 20  # draws of a prompt until rounding does not decide its answer

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A way to run an engine."""

    graphs: bool
    overlapping: bool
    preemption: str

    @property
    def name(self) -> str:
        """Writes the way as "graphs, async, swap"."""
        how = ("graphs" if self.graphs else "eager", "async" if self.overlapping else "in turn", self.preemption)
        return ", ".join(how)


def ways(device: str) -> list[Way]:
    """Lists all ways that ``device`` has, the most intricate first."""
    graphs = (True, False) if device == "cuda" else (False,)
    return [Way(*settings) for settings in itertools.product(graphs, (True, False), ("recompute", "swap"))]


def save_model(folder: Path, config: Mapping[str, Any] = MODEL) -> str:
    """Saves random weights, so widely spread that one logit is mostly clear of the others; the folder."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def make_problem(folder: str) -> dict[Tokens, list[int]]:
    """Draws prompts with the answer of ``generate`` to each alone, on the CPU.

    Prompts whose answer rounding decides are drawn again.

    Raises:
        ValueError: no prompt with a clear answer was drawn.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    rng, vocab = random.Random(5), MODEL["vocab_size"]

    def drawn(count: int) -> Tokens:
        return tuple(rng.randrange(2, vocab) for _ in range(count))

    common, answers = drawn(COMMON_TOKENS), {}
    for length in LENGTHS:
        for _ in range(TRIES):
            prompt = common + drawn(length - COMMON_TOKENS) if length > COMMON_TOKENS else drawn(length)
            ids = torch.tensor([prompt])
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT_TOKENS,
                eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            top = torch.cat(generated.logits).topk(2).values
            assert len(top) == OUTPUT_TOKENS, "generate ended early"
            if float((top[:, 0] - top[:, 1]).min()) > CLEAR_GAP:
                answers[prompt] = generated.sequences[0, length:].tolist()
                break
        else:
            raise ValueError(f"none of {TRIES} prompts of {length} tokens is clear of rounding")
    return answers


def make_engine(loaded: LoadedModel, folder: str, way: Way, pool_slots: int) -> Engine:
    """Builds an engine with ``pool_slots`` slots of KV."""
    slot_bytes = loaded.kv_shape.slot_bytes("auto")
    config = EngineConfig(
        model=folder, device=loaded.device.type, dtype="float32", page_size=PAGE_SIZE, enable_prefix_caching=True,
        kv_budget=1, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64, preemption_mode=way.preemption, async_scheduling=way.overlapping,
        swap_space=pool_slots * slot_bytes if way.preemption == "swap" else None,
        cuda_graphs=way.graphs if loaded.device.type == "cuda" else None,
    )  # fmt: skip
    budget = pool_slots * slot_bytes + page_table_bytes(config, loaded.kv_shape)
    return assemble_engine(replace(config, kv_budget=budget), loaded)


def greedy(engine: Engine, prompts: Sequence[Tokens], name: str) -> list[list[int]]:
    """Runs all requests from the start; their tokens by prompt."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(f"{name}-{index}", prompt, params))
    while engine.has_work():
        for output in engine.step():
            tokens[int(output.request_id.rsplit("-", 1)[1])].extend(output.token_ids)
    engine.check_integrity()
    return tokens


def check_way(report: Report, engine: Engine, way: Way, answers: dict[Tokens, list[int]]) -> None:
    """Runs two rounds of all prompts, the second with a prefix cache that knows them.

    Adds one row; a failure says what is off.

    Also checks that graphs were replayed, steps overlapped, sequences preempted and prefixes hit: else equal tokens
    would show nothing.
    """
    prompts, wrong = list(answers), []
    for number in (1, 2):
        for prompt, tokens in zip(prompts, greedy(engine, prompts, f"round{number}"), strict=True):
            if tokens != answers[prompt]:
                same = next((i for i, (a, b) in enumerate(zip(tokens, answers[prompt], strict=False)) if a != b), None)
                where = f"{len(tokens)} tokens" if same is None else f"token {same}"
                wrong.append(f"round {number}, prompt of {len(prompt)} tokens: {where} differs from generate")
    stats = engine.stats()
    wrong += [
        f"it was to be {wanted}, and was not"
        for wanted, is_so in (
            ("with graphs" if way.graphs else "eager", engine.executor.forward.replays_graphs == way.graphs),
            ("async" if way.overlapping else "in turn", engine.pipelined == way.overlapping),
            ("preempted", stats.num_preemptions > 0),
            ("swapped", stats.counters.swapped_in_slots > 0 or way.preemption != "swap"),
            ("served from the prefix cache", stats.counters.prefix_hits > 0),
        )
        if not is_so
    ]
    report.row(
        case=way.name, status="failed" if wrong else "passed", preemptions=stats.num_preemptions,
        swapped_in_slots=stats.counters.swapped_in_slots, prefix_hits=stats.counters.prefix_hits,
    )  # fmt: skip
    if wrong:
        report.fail(way.name, wrong[0] + (f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""))


class TokenChecks:
    """One case a way. The plan makes the model and the answers that all ways share."""

    workers = 4  # mostly imports, loading and captures, which do not disturb each other

    def __init__(self, args: Any):
        torch.set_num_threads(1)  # the model is so small that handing out the work takes longer than doing it
        own = argparse.ArgumentParser()
        own.add_argument("--model", choices=MODELS, default="plain")
        self._config, self._pool = MODELS[own.parse_args(args.own).model]
        self.device, self._folder = args.device, args.scratch / f"tokens-{self._config['model_type']}"
        self._ways = {way.name: way for way in ways(self.device)}
        self._loaded: LoadedModel | None = None

    def plan(self) -> list[Planned]:
        """Makes the problem and lists all ways."""
        answers = make_problem(save_model(self._folder, self._config))
        pairs = [[list(prompt), tokens] for prompt, tokens in answers.items()]
        (self._folder / "answers.json").write_text(json.dumps(pairs), encoding="utf-8")
        return [Planned(name, None) for name in self._ways]

    def run(self, name: str, report: Report) -> None:
        """Checks one way."""
        pairs = json.loads((self._folder / "answers.json").read_text(encoding="utf-8"))
        answers = {tuple(prompt): tokens for prompt, tokens in pairs}
        folder, way = str(self._folder), self._ways[name]
        if self._loaded is None:
            self._loaded = load_model(EngineConfig(model=folder, dtype="float32", device=self.device))
        check_way(report, make_engine(self._loaded, folder, way, self._pool), way, answers)


CASES = TokenChecks
