"""kvbench and transformers, each as the process of a turn runs it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvbench_engine.async_engine import EngineThread
from kvbench_engine.bench.case import Outputs, PromptBatch, speed_of
from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.sequence import Request, SamplingParams

OURS = "kvbench"
HF_SIDES = ("hf-continuous", "hf-continuous-best", "hf-static")


def run_engine(engine: Engine, case: PromptBatch) -> Outputs:
    """Run the built-in engine, with all requests there at the start."""
    params = SamplingParams(max_tokens=case.output_tokens, temperature=0.0, ignore_eos=True)
    outputs: Outputs = [[] for _ in case.prompts]
    for index, prompt in enumerate(case.prompts):
        engine.add_request(Request(str(index), prompt, params))
    while engine.has_work():
        for output in engine.step():
            outputs[int(output.request_id)].extend(output.token_ids)
    return outputs


def _generation_config(case: PromptBatch) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=case.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def run_hf_continuous(loaded: LoadedModel, case: PromptBatch, best: bool) -> Outputs:
    """Run transformers' own continuous batching with SDPA, its pool sized so that nothing waits.

    ``generate_batch`` on a loaded model, as its documentation shows it. ``best``: with a manager that persists, so that
    the first, unmeasured run makes cache and thread, as ours does.
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
def run_hf_static(loaded: LoadedModel, case: PromptBatch) -> Outputs:
    """Run one left-padded ``generate`` of all prompts."""
    longest = max(map(len, case.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in case.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in case.prompts])
    ids, mask = ids.to(loaded.device), mask.to(loaded.device)
    output = loaded.model.generate(ids, attention_mask=mask, generation_config=_generation_config(case))
    return output[:, longest:].tolist()


def _load_for(side: str, config: EngineConfig) -> Callable[[PromptBatch], Outputs]:
    """The side's runner, its model loaded."""
    loaded = load_model(config)
    if side == OURS:
        engine = assemble_engine(config, loaded)
        return lambda case: run_engine(engine, case)
    loaded.model.set_attn_implementation("sdpa")
    if side == "hf-static":
        return lambda case: run_hf_static(loaded, case)
    return lambda case: run_hf_continuous(loaded, case, best=side == "hf-continuous-best")


def measure(side: str, config: EngineConfig, case: PromptBatch) -> tuple[float, Outputs]:
    """Output tokens/s and the tokens of one measured run after an unmeasured one of the same case.

    Raises:
        ValueError: the side did not do the work.
    """
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
    return speed_of(case, outputs, time.perf_counter() - started), outputs


def save_model(config: EngineConfig, folder: str) -> str:
    """Write config.json and safetensors of the very weights that ``measure`` runs; the name of their dtype."""
    loaded = load_model(config)
    loaded.model.save_pretrained(folder)
    return str(loaded.dtype).removeprefix("torch.")
