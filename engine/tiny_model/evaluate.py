"""Measures kvbench-tiny in float32 with transformers: passkeys by depth and length, perplexity, outliers of its keys.

    python -m kvbench_engine.tiny_model.evaluate FOLDER [--count 16] [--curve curve.svg]

Prints a Markdown table. ``--curve`` also draws the learning curve of FOLDER/curve.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbench_engine.tiny_model.data import TEMPLATES, Encode, fact_tokens, random_digits
from kvbench_engine.tiny_model.outliers import FACTOR, outlier_ratios, scale_key_channels
from kvbench_engine.tiny_model.train import held_out_loss

LENGTHS = (256, 512, 1024, 1536, 2048)
DEPTHS = tuple(i / 10 for i in range(11))


def passkey(
    rng: np.random.Generator, encode: Encode, filler: Sequence[int], length: int, depth: float
) -> tuple[list[int], int]:
    """Make ``length`` tokens that end with the answer to the passkey; their ids, and the answer's length."""
    fact, question, answer = fact_tokens(TEMPLATES[0], "pass", random_digits(rng, 5), encode)
    around = length - len(fact) - len(question) - len(answer)
    start, before = int(rng.integers(0, len(filler) - around)), round(depth * around)
    text = list(filler[start : start + around])
    return [*text[:before], *fact, *text[before:], *question, *answer], len(answer)


@torch.inference_mode()
def answered(model: Any, ids: list[int], answer: int) -> bool:
    """Tests whether each token of the answer is the likeliest one: then greedy decoding gives exactly that answer."""
    tokens = torch.tensor([ids])
    best = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=answer).logits.argmax(-1)
    return bool((best == tokens[:, -answer:]).all())


def print_passkey_table(model: Any, encode: Encode, filler: Sequence[int], count: int, seed: int = 5) -> None:
    """Print the share of ``count`` passkeys answered exactly, by depth and length, as Markdown."""
    rng = np.random.default_rng(seed)
    print("| depth |", *(f"{length} |" for length in LENGTHS))
    print("|---:|" + "---:|" * len(LENGTHS))
    for depth in DEPTHS:
        cells = [[passkey(rng, encode, filler, length, depth) for _ in range(count)] for length in LENGTHS]
        right = (sum(answered(model, *passkey_ids) for passkey_ids in cell) for cell in cells)
        print(f"| {depth:.0%} |", *(f"{number}/{count} |" for number in right), flush=True)


def curve_svg(rows: Sequence[dict[str, str]]) -> str:
    """Draw held-out loss and the share of right answer tokens over the tokens seen."""
    width, height, left, top = 640, 300, 50, 20
    tokens = [float(row["tokens"]) for row in rows]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * left} {height + 70}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i in range(6):
        y = top + height * i / 5
        parts.append(
            f'<path d="M{left} {y}h{width}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#1f6fb4">{5 - i}</text>'
            f'<text x="{left + width + 8}" y="{y + 4}" fill="#c2571a">{100 - 20 * i} %</text>'
        )
    for name, largest, colour in (("held_out_loss", 5.0, "#1f6fb4"), ("answers_right", 1.0, "#c2571a")):
        points = " ".join(
            f"{left + width * seen / tokens[-1]:.1f},{top + height * (1 - float(row[name]) / largest):.1f}"
            for seen, row in zip(tokens, rows, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for million in range(0, int(tokens[-1] / 1e6) + 1, 2):
        x = left + width * million * 1e6 / tokens[-1]
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{million} M</text>')
    parts.append(
        f'<text x="{left}" y="{top + height + 42}" fill="#1f6fb4">held-out loss, nats a token</text>'
        f'<text x="{left + width / 2}" y="{top + height + 42}" text-anchor="middle">tokens seen</text>'
        f'<text x="{left + width}" y="{top + height + 42}" text-anchor="end" fill="#c2571a">tokens of answers right'
        "</text></svg>\n"
    )
    return "".join(parts)


def main() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=16, help="passkeys of each depth and length")
    parser.add_argument("--curve", type=Path)
    given = parser.parse_args()
    if given.curve:
        with (given.folder / "curve.csv").open(newline="") as file:
            given.curve.write_text(curve_svg(list(csv.DictReader(file))))
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
    text = (given.folder / "heldout.txt").read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text).ids)
    print(f"held out: {len(ids):,} tokens of {len(text) / len(ids):.2f} characters")
    for length in (1024, 2048):
        print(f"perplexity a token, context {length}: {math.exp(held_out_loss(model, ids, length)):.2f}")
    first = torch.from_numpy(ids[None, :2048])
    for name, factor in (("shipped", 1.0), ("without the factor", 1 / FACTOR)):
        scale_key_channels(model, factor)
        ratios = outlier_ratios(model, first)
        print(f"largest over median key channel, {name}: {ratios.min():.1f} to {ratios.max():.1f}")
    scale_key_channels(model, FACTOR)
    print_passkey_table(model, lambda part: tokenizer.encode(part).ids, ids.tolist(), given.count)


if __name__ == "__main__":
    main()
