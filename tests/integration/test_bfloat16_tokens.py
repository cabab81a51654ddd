"""Greedy tokens in bfloat16 on a CPU against transformers in bfloat16; only what rounding decides may differ."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.loader import load_model
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.hf_parts import VOCAB, Run, make_engine, model_folder, one_thread

OUTPUT_TOKENS = 12
TIE = 4.0  # times the RMS error of transformers' own logits


@pytest.mark.parametrize("family", ["llama-wide", "gemma2"])
def test_tokens_differ_only_where_rounding_decides(family, tmp_path_factory):
    """Our token at each place is transformers' for the same text before it, or as good as that within its rounding.

    The error of its logits is taken against the same weights in float64.
    """
    folder, rng = model_folder(str(tmp_path_factory.mktemp("models")), family), random.Random(5)
    prompts = {str(n): tuple(rng.randrange(2, VOCAB) for _ in range(n)) for n in (1, 7, 16, 40, 70)}
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    with torch.no_grad():
        for rounded, parameter in zip(own.parameters(), exact.parameters(), strict=True):
            parameter.copy_(rounded)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    with one_thread(), torch.no_grad():
        model = load_model(EngineConfig(model=folder, device="cpu", dtype="bfloat16"))
        engine = make_engine(model, folder, dtype="bfloat16", slots=256, max_model_len=96, max_num_seqs=5, page_size=16)
        answers = Run(engine, [Request(name, prompt, params) for name, prompt in prompts.items()]).tokens()
        same = 0
        for name, prompt in prompts.items():
            tokens = torch.tensor(answers[name])
            ids = torch.cat([torch.tensor(prompt), tokens[:-1]])[None]
            logits, right = (hf(ids, use_cache=False).logits[0, len(prompt) - 1 :].double() for hf in (own, exact))
            error = (logits - right).square().mean(-1).sqrt()
            behind = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]
            assert bool((behind <= TIE * error).all()), f"{name}: {behind / error}"
            same += int((behind == 0).sum())
    assert same >= 0.8 * OUTPUT_TOKENS * len(prompts)
