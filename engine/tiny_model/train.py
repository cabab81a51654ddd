"""Trains kvbench-tiny: a small Llama that finds what its prompt says.

    python -m kvbench_engine.tiny_model.train OUT_DIR [--minutes 60] [--seed 0]

Writes a Hugging Face folder (config, safetensors in bfloat16, tokenizer), curve.csv and recipe.json. The schedule is by
tokens, so that the same seed sees the same data on every machine; ``--minutes`` only ends it early.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kvbench_engine.model.gguf import QWEN2_SPLIT
from kvbench_engine.tiny_model.data import ANSWER_WEIGHT, Corpus, batches, documents, facts
from kvbench_engine.tokenizer.train import SPECIAL_TOKENS, save_tokenizer, train_bpe

VOCAB_SIZE = 2048
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Phase:
    length: int  # tokens a sequence
    rows: int  # sequences a step
    steps: int


PHASES = (Phase(256, 16, 800), Phase(512, 8, 400), Phase(1024, 4, 300), Phase(2048, 2, 900))


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE, one token a digit."""
    from tokenizers import Regex, pre_tokenizers

    split = [
        # Qwen2's pattern, one token a digit, so that other engines know how to split.
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return train_bpe(texts, pre_tokenizers.Sequence(split), VOCAB_SIZE)


def make_optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_at(done: float, peak: float) -> float:
    """The learning rate when ``done`` of all tokens are seen.

    1 % warm-up, then flat, the last 40 % linear to zero.
    """
    return peak * min(1.0, done / 0.01 + 0.01, (1.0 - done) / 0.4 + 0.01)


def loss_of(model: Any, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@torch.inference_mode()
def held_out_loss(model: Any, ids: np.ndarray, length: int) -> float:
    """Nats a token over the held-out text, cut into pieces of ``length`` tokens."""
    pieces = torch.from_numpy(ids[: len(ids) // length * length].reshape(-1, length))
    total = 0.0
    for part in pieces.split(max(1, 8192 // length)):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        total += float(cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (len(pieces) * (length - 1))


@torch.inference_mode()
def answers_right(model: Any, corpus: Corpus, length: int, count: int) -> float:
    """Share of the tokens of answers at the end of sequences of facts that are the likeliest ones."""
    right = total = 0
    for _ in range(count):
        ids, weights = facts(corpus, length, max(1, min(16, length // 64)))
        best = model(input_ids=torch.from_numpy(ids)[None, :-1], use_cache=False).logits[0].argmax(-1).numpy()
        answers = weights[1:] == ANSWER_WEIGHT
        right += int((best == ids[1:])[answers].sum())
        total += int(answers.sum())
    return right / total


def train(folder: Path, seed: int, minutes: float, peak: float) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts, held_out = documents()
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder, MODEL["max_position_embeddings"], bos_token=SPECIAL_TOKENS[0])
    (folder / "heldout.txt").write_text("\n\n".join(held_out), encoding="utf-8")
    corpus = Corpus.of(texts, tokenizer, np.random.default_rng(seed))
    judge = Corpus.of(held_out, tokenizer, np.random.default_rng(seed + 1))
    print(f"{len(corpus.ids):,} tokens of text, {len(judge.ids):,} held out", flush=True)
    model = LlamaForCausalLM._from_config(LlamaConfig(**MODEL), attn_implementation="sdpa")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizers = make_optimizers(model, peak)
    began, seen, rows = time.monotonic(), 0, []
    total = sum(phase.length * phase.rows * phase.steps for phase in PHASES)
    for phase in PHASES:
        drawn = batches(corpus, phase.length, phase.rows)
        for step in range(phase.steps):
            done = max(seen / total, (time.monotonic() - began) / (60 * minutes))
            if done >= 1:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(done, peak)
            ids, weights = next(drawn)
            loss = loss_of(model, torch.from_numpy(ids), torch.from_numpy(weights).float())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen += ids.size
            if step % 100 == 99 or step == phase.steps - 1:
                model.eval()
                row = {
                    "minutes": round((time.monotonic() - began) / 60, 2),
                    "tokens": seen,
                    "length": phase.length,
                    "loss": round(float(loss.detach()), 4),
                    "held_out_loss": round(held_out_loss(model, judge.ids[:8192], min(phase.length, 1024)), 4),
                    "answers_right": round(answers_right(model, judge, phase.length, 16384 // phase.length), 4),
                }
                model.train()
                rows.append(row)
                print(row, flush=True)
                if step % 300 == 299 or step == phase.steps - 1:
                    model.save_pretrained(folder / "checkpoint")
    model.to(torch.bfloat16).save_pretrained(folder)
    with (folder / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    recipe = {"seed": seed, "rate": peak, "phases": [asdict(phase) for phase in PHASES], "torch": torch.__version__}
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3)
    given = parser.parse_args()
    train(given.folder, given.seed, given.minutes, given.rate)
