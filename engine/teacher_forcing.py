"""Logits of given tokens at every position, from the engine's forward pass, and the divergence between two engines.

To see how a quantised KV cache changes the model's predictions, two engines are fed the same tokens (teacher forcing).
The tokens go through the code that serves requests: the same model, kernels and step inputs, KV in pages that are not
contiguous, prompts in chunks, continuations token by token beside others (on CUDA by captured graphs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.execution.executor import available_cpus
from engine.execution.step_inputs import InputBuffers
from engine.kv.budget import PAGE_TABLE_ENTRY_BYTES
from engine.model.loader import LoadedModel
from engine.scheduling.step_plan import Scheduled
from engine.sequence import Request
from engine.sequence import Sequence as TokenSequence

REFERENCE = "auto"  # kv_cache_dtype of the reference: KV in the model's own dtype
_ROWS = 8  # sequences side by side
_POSITIONS = 64  # at once in float64, of the whole vocabulary each


class TeacherForced:
    """``num_rows`` sequences of up to ``longest`` tokens, in the engine of ``config``.

    Budget and limits of ``config`` are replaced by what is needed; nothing is scheduled.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, num_rows: int, longest: int):
        sized = _sized(config, loaded, num_rows, longest)
        engine = assemble_engine(sized, loaded)
        capacity = engine.capacity
        self._forward = engine.executor.forward
        self._inputs = InputBuffers(loaded.device, capacity.page_size)
        pages = np.random.default_rng(0).permutation(num_rows * capacity.max_pages_per_seq)
        self._page_table = (pages * capacity.page_size).reshape(num_rows, -1).astype(np.int64)  # first slots
        self._rows = [TokenSequence.of(Request(str(row), ())) for row in range(num_rows)]
        for row, each in enumerate(self._rows):
            each.row = row

    @torch.inference_mode()
    def feed(self, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """One step: append ``tokens`` to their rows -> the logits of each token, ``[T, vocab]``.

        Rows of one token come first, else all are in the given order. The logits are valid until the next call.
        """
        items = []
        for row in sorted(tokens, key=lambda row: len(tokens[row]) > 1):
            self._rows[row].token_ids += tokens[row]
            items.append(Scheduled(self._rows[row], len(tokens[row])))
        inputs = self._inputs.make(items, self._page_table, {})
        every = torch.arange(len(inputs.ids), device=inputs.ids.device)
        logits = self._forward(inputs.ids, inputs.positions, inputs.step, every)
        for each, count in items:
            each.num_computed += count
        return logits


def _sized(config: EngineConfig, loaded: LoadedModel, num_rows: int, longest: int) -> EngineConfig:
    pages = 1 if config.layout == "contiguous" else -(-longest // config.page_size)
    slots = longest if config.layout == "contiguous" else pages * config.page_size
    budget = num_rows * (slots * loaded.kv_shape.slot_bytes(config.kv_cache_dtype) + pages * PAGE_TABLE_ENTRY_BYTES)
    changed = {
        "kv_budget": budget,
        "max_model_len": longest,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, num_rows),
        "max_num_partial_prefills": 1,
        "preemption_mode": "recompute",
        "swap_space": None,
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    return EngineConfig(**{**asdict(config), **changed})


@dataclass(frozen=True)
class Divergence:
    """Of each position, in order: ``kld`` [nats] float64, ``same`` whether the likeliest token is the same, and
    ``decoded`` whether the position was computed alone, as decodes are, and not in a chunk of its prompt."""

    kld: np.ndarray
    same: np.ndarray
    decoded: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Divergence]) -> Divergence:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("kld", "same", "decoded")))


def divergence(expected: torch.Tensor, got: torch.Tensor, *, decoded: bool) -> Divergence:
    """KL(expected || got) of each row of logits ``[T, vocab]``: sum of p (log p - log q), in float64.

    Negative results of rounding (1e-17) become 0.
    """
    klds = []
    for start in range(0, len(expected), _POSITIONS):
        log_p, log_q = (x[start : start + _POSITIONS].double().log_softmax(-1) for x in (expected, got))
        terms = log_p.exp() * (log_p - log_q)
        klds.append(torch.where(log_p.exp() > 0, terms, 0.0).sum(-1).clamp_min(0.0).cpu().numpy())
    same = (expected.argmax(-1) == got.argmax(-1)).cpu().numpy()
    return Divergence(np.concatenate(klds), same, np.full(len(same), decoded))


def measure_divergence(
    config: EngineConfig, loaded: LoadedModel, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> Divergence:
    """The engine of ``config`` against the same engine with KV in the model's own dtype, on the same tokens.

    Each prompt is followed by the reference's greedy continuation of ``max_tokens`` tokens, EOS or not, so that KV
    written by decodes is read as well. Prompts are computed ``config.max_num_batched_tokens`` at a time.

    Raises:
        ValueError: the engine cannot be built; one sentence says why.
    """
    if loaded.device.type == "cpu":
        torch.set_num_threads(config.num_threads or available_cpus())
    found: list[Divergence] = []
    for start in range(0, len(prompts), _ROWS):
        rows, counts = prompts[start : start + _ROWS], max_tokens[start : start + _ROWS]
        longest = max(len(prompt) + count for prompt, count in zip(rows, counts, strict=True))
        reference = EngineConfig(**{**asdict(config), "kv_cache_dtype": REFERENCE})
        engines = [TeacherForced(each, loaded, len(rows), longest) for each in (reference, config)]
        found += _in_lockstep(*engines, rows, counts, config.max_num_batched_tokens)
    return Divergence.of(found)


def _in_lockstep(
    reference: TeacherForced,
    other: TeacherForced,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    chunk: int,
) -> Iterator[Divergence]:
    newest: dict[int, int] = {}
    for row, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            part = {row: list(prompt[start : start + chunk])}
            expected = reference.feed(part).clone()
            yield divergence(expected, other.feed(part), decoded=False)
        newest[row] = int(expected[-1].argmax())
    for step in range(max(max_tokens)):
        part = {row: [token] for row, token in newest.items() if step < max_tokens[row]}
        expected = reference.feed(part).clone()
        yield divergence(expected, other.feed(part), decoded=True)
        newest = dict(zip(part, expected.argmax(-1).tolist(), strict=True))
