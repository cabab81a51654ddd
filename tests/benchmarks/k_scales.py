"""Compares ways to quantise K of kvbench-tiny to int4 and int8, to see what scales of channels would bring.

Prints the mean KL divergence from unquantised K over 12 x 512 tokens of held-out text, in nats. K is quantised and
turned back as it is written, by the torch backend; V stays as it is.

    python -m tests.benchmarks.k_scales
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import Tokenizer

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.attention import AttentionHost, StepTensors, install
from kvbench_engine.model.kv_outliers import balance_keys
from kvbench_engine.model.kv_scales import run_random_tokens
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.model.spec import MODEL_DIR
from kvbench_kernels.reference import TorchBackend

MODEL, TOKENS, TEXTS = "kvbench-tiny", 512, 12
Change = Callable[[torch.Tensor, int], torch.Tensor]  # K [T, heads, dim] of a layer -> what the cache would give back


class ChangedKeys(TorchBackend):
    """The torch backend, with K changed as it is written. ``layer``: of the next write."""

    def __init__(self, change: Change):
        self._change, self._layer = change, 0

    def write_kv(self, k, v, k_cache, v_cache, slots) -> None:
        super().write_kv(self._change(k, self._layer), v, k_cache, v_cache, slots)
        self._layer += 1


def logits_of(loaded: LoadedModel, ids: torch.Tensor, change: Change) -> torch.Tensor:
    """The log probabilities ``[T, vocab]`` of one text, float64."""
    count, positions = len(ids), torch.arange(len(ids))
    backend = ChangedKeys(change)
    host = AttentionHost(backend, loaded.kv_shape, count, (count,), next(loaded.model.parameters()))
    install(loaded.model, host)
    host.begin(StepTensors.of_prompt(positions, torch.zeros(1, 1, dtype=torch.int64)))
    output = loaded.model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return output.logits[0].double().log_softmax(-1)


def rounded(x: torch.Tensor, scale: torch.Tensor, limit: int) -> torch.Tensor:
    """Round ``x`` to ``limit`` codes on each side of zero."""
    scale = (scale / limit).clamp_min(1e-12)
    return (x / scale).round().clamp(-limit, limit) * scale


def by_tokens(x: torch.Tensor, limit: int, count: int, *, offset: bool) -> torch.Tensor:
    """Round with a scale for each channel of ``count`` tokens, and with an offset (KIVI, arXiv 2402.02750) or not."""
    parts = []
    for part in x.split(count):
        if offset:  # 2 * limit + 2 levels from the lowest to the highest value
            lowest = part.amin(0)
            step = ((part.amax(0) - lowest) / (2 * limit + 1)).clamp_min(1e-12)
            parts.append(((part - lowest) / step).round() * step + lowest)
        else:
            parts.append(rounded(part, part.abs().amax(0), limit))
    return torch.cat(parts)


@torch.inference_mode()
def main() -> None:
    loaded = load_model(EngineConfig(model=MODEL, device="cpu", kernel_backend="torch"))
    print(balance_keys(loaded))
    measured = run_random_tokens(loaded.model, loaded.kv_shape, loaded.info.vocab_size, 64)[0]
    sizes = [cache.abs().amax(0) for cache in measured.k_caches]
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / MODEL / "tokenizer.json"))
    ids = tokenizer.encode((MODEL_DIR / MODEL / "heldout.txt").read_text(encoding="utf-8")).ids
    texts = torch.tensor(ids[: TOKENS * TEXTS]).split(TOKENS)
    largest = [torch.zeros_like(size) for size in sizes]

    def record_largest(k: torch.Tensor, layer: int) -> torch.Tensor:
        largest[layer] = torch.maximum(largest[layer], k.abs().amax(0))
        return k

    exact = [logits_of(loaded, text, record_largest) for text in texts]
    for name, limit in (("int4", 7), ("int8", 127)):
        ways: dict[str, Change] = {
            "a token and head (what the engine has)": lambda k, _, n=limit: rounded(k, k.abs().amax(-1, True), n),
            "a channel, from 64 random tokens": lambda k, layer, n=limit: rounded(k, sizes[layer], n),
            "a channel, from these very texts": lambda k, layer, n=limit: rounded(k, largest[layer], n),
            "a channel of 32 tokens": lambda k, _, n=limit: by_tokens(k, n, 32, offset=False),
            "a channel of 32 tokens, with an offset": lambda k, _, n=limit: by_tokens(k, n, 32, offset=True),
        }
        for way, change in ways.items():
            differences = [
                (wanted.exp() * (wanted - logits_of(loaded, text, change))).sum(-1)
                for text, wanted in zip(texts, exact, strict=True)
            ]
            print(f"{name}, a scale for {way}: {float(torch.cat(differences).mean()):.5f}", flush=True)


if __name__ == "__main__":
    main()
