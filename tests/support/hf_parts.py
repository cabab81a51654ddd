"""A tiny Hugging Face model served twice: by its own ``generate``, alone and undisturbed, and by our engine.

The oracle knows nothing of pages, chunks, batches, forks or swaps. Weights are random with a wide spread, so that the
winning logit is clear of rounding; ``greedy_outputs`` asserts that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import page_table_bytes
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.sequence import Request

VOCAB = 211
EOS = 1
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}
COMMON = {
    **SMALL,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
LATENT = {  # attention of latent rows (MLA), every size different; experts, which rounding may switch, are elsewhere
    "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "first_k_dense_replace": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama-wide": {"model_type": "llama", "head_dim": 32},  # of 32 values and more are the heads that a CPU rotates
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    # alternating sliding-window and full layers, softcap on the scores, query scale of its own
    "gemma2": {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 24, "num_hidden_layers": 6},
    "mistral": {"model_type": "mistral", "sliding_window": 24},  # a window in every layer
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 24, "rope_interleave": False},
}
PREEMPTION = ("recompute", "swap", "swap-small")  # small: part of what is swapped out is lost and recomputed
CLEAR_GAP = 1e-3  # between the two largest logits; float32 sums in another order differ by about 1e-5 here


@contextmanager
def one_thread() -> Iterator[None]:
    """The models are so small that handing out the work takes longer than doing it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model_folder(root: str, family: str = "llama") -> str:
    """A local folder with safetensors, so that the oracle and the engine load the very same weights."""
    config = AutoConfig.for_model(**{**COMMON, **FAMILIES[family]})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    folder = f"{root}/{family}"
    model.save_pretrained(folder)
    return folder


@cache
def oracle(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@cache
def loaded(folder: str, backend: str = "auto", latent_kv: bool = True) -> LoadedModel:
    return load_model(EngineConfig(model=folder, kernel_backend=backend, device="cpu", latent_kv=latent_kv))


def greedy_outputs(
    folder: str, prompts: Mapping[str, Sequence[int]], num_tokens: int, eos: tuple[int, ...] = ()
) -> dict[str, list[int]]:
    """What ``generate`` gives each prompt alone; an EOS that ends it is part of it."""
    answers = {}
    for name, prompt in prompts.items():
        ids = torch.tensor([list(prompt)])
        output = oracle(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=list(eos) or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.topk(torch.cat(output.logits), 2).values
        assert float((top[:, 0] - top[:, 1]).min()) > CLEAR_GAP, f"prompt {name} is decided by rounding: take another"
        answers[name] = output.sequences[0, len(prompt) :].tolist()
    return answers


def make_engine(model: LoadedModel, folder: str, *, slots: int, swap_slots: int | None = None, **settings) -> Engine:
    """An engine of exactly ``slots`` slots (paged: rounded down to pages), the page table paid beside them."""
    config = EngineConfig(model=folder, device="cpu", **settings)
    slot_bytes = model.kv_shape.slot_bytes(config.kv_cache_dtype)
    table = page_table_bytes(config, model.kv_shape)
    swap_space = None if swap_slots is None else swap_slots * slot_bytes
    sized = {**settings, "kv_budget": slots * slot_bytes + table, "swap_space": swap_space}
    return assemble_engine(EngineConfig(model=folder, device="cpu", **sized), model)


def preempting(how: str, small_swap_slots: int) -> dict[str, object]:
    """The settings of ``make_engine`` for one of ``PREEMPTION``."""
    if how == "recompute":
        return {}
    return {"preemption_mode": "swap", "swap_slots": small_swap_slots if how == "swap-small" else 1024}


@dataclass
class Answer:
    """One sequence of a request: all its tokens, and why it ended."""

    tokens: list[int]
    reason: str | None = None


class Run:
    """Requests driven to their end, integrity checked after every step; ``[name, index]`` are the answers.

    ``later``: step -> what happens before it, requests that arrive or calls with the engine.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        later: Mapping[int, Sequence[Request | Callable[[Engine], object]]] | None = None,
    ):
        self.engine = engine
        self.answers: dict[tuple[str, int], Answer] = {}
        later = dict(later or {})
        for request in requests:
            engine.add_request(request)
        step = 0
        while engine.has_work() or later:
            for event in later.pop(step, ()):
                if isinstance(event, Request):
                    engine.add_request(event)
                else:
                    event(engine)
            self._take(engine.step())
            engine.check_integrity()
            step += 1
            assert step < 3000, "the engine did not finish"
        stats = engine.stats().kv
        assert stats.pages_owned == stats.pages_pinned == stats.host_slots_used == 0, "something was not given back"

    def _take(self, outputs) -> None:
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer([]))
            assert answer.reason is None, f"{output.request_id}/{output.index} goes on after its end"
            answer.tokens.extend(output.token_ids)
            answer.reason = output.finish_reason

    def tokens(self, index: int = 0) -> dict[str, list[int]]:
        """Of the sequence ``index`` of each request, by name."""
        return {name: answer.tokens for (name, i), answer in self.answers.items() if i == index}

    def family(self, name: str) -> list[list[int]]:
        """All sequences of one request, by index."""
        mine = {i: answer.tokens for (other, i), answer in self.answers.items() if other == name}
        assert sorted(mine) == list(range(len(mine))), f"{name} has the indices {sorted(mine)}"
        return [mine[i] for i in range(len(mine))]
