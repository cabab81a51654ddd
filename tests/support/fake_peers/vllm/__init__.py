"""A stand-in for vLLM's LLM and kernels: the arguments that we pass and no others, outputs of the lengths asked for."""

from dataclasses import dataclass
from types import SimpleNamespace

__version__ = "0.0"


@dataclass
class SamplingParams:
    temperature: float
    ignore_eos: bool
    max_tokens: int
    detokenize: bool


class LLM:
    def __init__(
        self, model, *, load_format, skip_tokenizer_init, dtype, seed, max_model_len, max_num_seqs,
        enable_prefix_caching, attention_backend, kv_cache_memory_bytes, gpu_memory_utilization,
        max_num_batched_tokens=16384,
    ):  # fmt: skip
        self.longest = max_model_len
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
                attention_config=SimpleNamespace(backend=attention_backend),
            )
        )

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert len(prompts) == len(sampling_params) and not use_tqdm
        lengths = [
            min(params.max_tokens, self.longest - len(prompt["prompt_token_ids"]))
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * length)]) for length in lengths]
