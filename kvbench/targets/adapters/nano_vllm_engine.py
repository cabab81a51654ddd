"""Steps nano-vllm in its own process. Arguments: ``--model FOLDER``, since it has no server; its settings are below.

Written from the sources of nano-vllm 0.2.0 (with chunked prefill); not run.
"""

import argparse
import socket

_NAMES = {"page_size": "kvcache_block_size", "max_num_seqs": "max_num_seqs", "max_model_len": "max_model_len",
          "max_num_batched_tokens": "max_num_batched_tokens"}  # fmt: skip
_ONLY = {"layout": ["paged"], "device": ["auto", "cuda"], "kv_cache_dtype": ["auto"], "kernel_backend": ["auto"],
         "enable_prefix_caching": [True], "enable_chunked_prefill": [True], "scheduling_policy": ["fcfs"],
         "preemption_mode": ["recompute"]}  # fmt: skip
_ELSEWHERE = ("kv_budget", "dtype", "model", "tokenizer", "load_format", "seed", "num_threads")
_GREEDY = 1e-6  # the temperature in place of 0, which it refuses


class NanoVLLMEngine:
    def __init__(self, settings, arguments):
        import torch
        from nanovllm import LLM, SamplingParams
        from nanovllm.engine.model_runner import ModelRunner

        config, budget = _config(settings), _bytes(settings.get("kv_budget"))
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", required=True)
        parser.add_argument("--gpu-memory-utilization", type=float, default=argparse.SUPPRESS)
        try:
            config |= vars(parser.parse_args(arguments))
        except SystemExit:
            raise ValueError(f"nano-vllm's adapter does not take these arguments: {' '.join(arguments)}") from None
        start, allocate = torch.distributed.init_process_group, ModelRunner.allocate_kv_cache
        url = f"tcp://localhost:{_free_port()}"  # its own is the same for every engine
        torch.distributed.init_process_group = lambda backend, *_, **more: start(
            backend, **{**more, "init_method": url}
        )

        def allocate_budget(runner):
            free, total = torch.cuda.mem_get_info()
            stats = torch.cuda.memory_stats()
            kept = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
            runner.config.gpu_memory_utilization = (total - free + kept + budget + 1) / total
            allocate(runner)

        if budget is not None:
            ModelRunner.allocate_kv_cache = allocate_budget
        try:
            self.engine = LLM(config.pop("model"), **config)
        except AssertionError as error:
            raise ValueError(f"nano-vllm does not take these settings: {config} {error}") from error
        self._torch, self._sampling, self.config = torch, SamplingParams, self.engine.model_runner.config
        self.dtype = str(self.engine.model_runner.kv_cache.dtype).removeprefix("torch.")
        if settings.get("dtype") not in (None, "auto", self.dtype):
            raise ValueError(f"nano-vllm has the model folder's dtype, {self.dtype}: leave {settings['dtype']} out")
        self.manager = self.engine.scheduler.block_manager
        self.allocate, self.manager.allocate = self.manager.allocate, self._allocate
        self.running, self.names, self.cached = {}, {}, {}

    def describe(self):
        import importlib.metadata

        config, device = self.config, self.engine.model_runner.kv_cache.device.type
        size, pages = config.kvcache_block_size, config.num_kvcache_blocks
        return {
            "engine": {"page_size": size, "enable_prefix_caching": True, "max_num_seqs": config.max_num_seqs,
                       "max_num_batched_tokens": config.max_num_batched_tokens, "max_model_len": config.max_model_len},
            "resolved": {"device": device, "dtype": self.dtype},
            "model": {"name": config.model, "vocab_size": config.hf_config.vocab_size,
                      "max_model_len": config.max_model_len},
            "capacity": {"page_size": size, "num_pages": pages, "capacity_tokens": size * pages},
            "versions": {"nano-vllm": importlib.metadata.version("nano-vllm"), "torch": self._torch.__version__},
        }  # fmt: skip

    def _allocate(self, sequence, *more):
        self.allocate(sequence, *more)
        self.cached.setdefault(self.names[sequence.seq_id], sequence.num_cached_tokens)

    def cached_tokens(self, name):
        return self.cached.get(name, 0)

    def add(self, name, prompt, max_tokens, temperature, ignore_eos):
        if len(prompt) + max_tokens > self.config.max_model_len:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens: {self.config.max_model_len} are possible")
        sampling = self._sampling(temperature=temperature or _GREEDY, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.engine.add_request(list(prompt), sampling)
        self.running[name] = self.engine.scheduler.waiting[-1]
        self.names[self.running[name].seq_id] = name
        self.cached.pop(name, None)

    def step(self):
        before = {name: sequence.num_completion_tokens for name, sequence in self.running.items()}
        self.engine.step()
        made = []
        for name, count in before.items():
            sequence = self.running[name]
            if new := sequence.num_completion_tokens - count:
                ended = "length" if sequence.num_completion_tokens == sequence.max_tokens else "stop"
                made.append((name, 0, sequence.token_ids[-new:], ended if sequence.is_finished else None))
                if sequence.is_finished:
                    del self.running[name]
        return made

    def reset_cache(self):
        self.manager.hash_to_block_id.clear()

    def wait(self):
        self._torch.cuda.synchronize()


Engine = NanoVLLMEngine


def _config(settings):
    config = {}
    for name, value in settings.items():
        if name in _NAMES and value is not None:
            config[_NAMES[name]] = value
        elif name == "cuda_graphs" and value is not None:
            config["enforce_eager"] = not value
        elif value is not None and name not in _ELSEWHERE and value not in _ONLY.get(name, []):
            raise ValueError(f"nano-vllm cannot have {name} {value}: leave it out")
    return config


def _bytes(budget):
    for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if str(budget).endswith(unit):
            return int(float(budget.removesuffix(unit)) * factor)
    return None if budget is None else int(budget)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
