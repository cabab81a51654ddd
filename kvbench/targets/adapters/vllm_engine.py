"""vLLM from 0.19 on, stepped in its own process. Arguments: those of its server, read by its own parser.

The scheduler and the model run in this process, without the HTTP server and its tokenizer.
"""

import os
from importlib.metadata import version

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process, where ``step`` computes


class VLLMEngine:
    OPTIONS = ("n", "priority")

    def __init__(self, settings, arguments):
        import torch
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # before 0.32
            from vllm.entrypoints.openai.cli_args import make_arg_parser
        self._vllm, self._delta = vllm, RequestOutputKind.DELTA
        try:
            given = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        except SystemExit:
            raise ValueError(f"vLLM does not take these arguments: {' '.join(arguments)}") from None
        args = EngineArgs.from_cli_args(given)
        args.disable_log_stats = True
        # Its server schedules while the device computes; a step then returns what the step before has made.
        self._overlaps = torch.cuda.is_available() and args.async_scheduling is not False
        args.async_scheduling = False
        has_share = any(word.split("=")[0] == "--gpu-memory-utilization" for word in arguments)
        if torch.cuda.is_available() and args.kv_cache_memory_bytes and not has_share:
            args.gpu_memory_utilization = 0.1  # asked of what is free at the start, where the other side's engine is
        # Limits of a batch that are left open depend on the usage: those of the server.
        self._engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)
        self._cached = {}

    def describe(self):
        config = self._engine.vllm_config
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        size, pages = cache.block_size, cache.num_gpu_blocks
        return {
            "engine": {
                "page_size": size,
                "max_model_len": model.max_model_len,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "async_scheduling": self._overlaps,
                "enable_prefix_caching": cache.enable_prefix_caching,
                "kv_cache_dtype": str(cache.cache_dtype),
            },
            "resolved": {"device": config.device_config.device_type, "dtype": str(model.dtype).removeprefix("torch.")},
            "model": {
                "name": str(model.model),
                "vocab_size": model.get_vocab_size(),
                "max_model_len": model.max_model_len,
            },
            "capacity": {"page_size": size, "num_pages": pages, "capacity_tokens": size * pages if pages else None},
            "versions": {"vllm": self._vllm.__version__, "torch": version("torch")},
        }

    def add(self, name, prompt, max_tokens, temperature, ignore_eos, n=1, priority=0):
        sampling = self._vllm.SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos, detokenize=False,
            output_kind=self._delta,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling, priority=priority)

    def step(self):
        made = []
        for request in self._engine.step():
            if request.finished:
                self._cached[request.request_id] = request.num_cached_tokens or 0
            for output in request.outputs:
                made.append((request.request_id, output.index, list(output.token_ids), output.finish_reason))
        return made

    def cached_tokens(self, name):
        return self._cached.get(name, 0)

    def reset_cache(self):
        self._cached.clear()
        if not self._engine.reset_prefix_cache():
            raise ValueError("vLLM did not empty its prefix cache")

    def wait(self):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


Engine = VLLMEngine
