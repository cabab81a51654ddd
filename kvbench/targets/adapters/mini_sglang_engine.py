"""Steps mini-sglang in its own process. Arguments: those of its server, read by its own parser.

A step is one round of its scheduler without overlap. Without the HTTP server and its tokenizer.
Written from the sources of minisgl 0.1.0 (with paged radix cache); not run.
"""

import dataclasses
import socket


class MiniSGLangEngine:
    def __init__(self, settings, arguments):
        import torch
        from minisgl.core import SamplingParams
        from minisgl.message import UserMsg
        from minisgl.scheduler import Scheduler
        from minisgl.server.args import parse_args

        self._torch, self._sampling, self._message = torch, SamplingParams, UserMsg
        try:
            args, _ = parse_args(arguments)
        except SystemExit:
            raise ValueError(f"mini-sglang does not take these arguments: {' '.join(arguments)}") from None
        if args.tp_info.size != 1:
            raise ValueError("this adapter steps one GPU: leave --tensor-parallel-size out")
        # The port behind the server's is that of torch.distributed.
        self.args = dataclasses.replace(args, offline_mode=True, server_port=_free_port() - 1)
        self.scheduler = Scheduler(self.args)
        self.scheduler.receive_msg, self.scheduler.send_result = self._receive, self._take
        manager = self.scheduler.prefill_manager
        self.schedule, manager.schedule_next_batch = manager.schedule_next_batch, self._schedule
        self.requests, self.sent, self.made, self.cached = [], [], [], {}

    def describe(self):
        import importlib.metadata

        args, engine = self.args, self.scheduler.engine
        size, pages = args.page_size, engine.num_pages
        return {
            "engine": {"page_size": size, "max_num_seqs": args.max_running_req, "max_model_len": engine.max_seq_len,
                       "max_num_batched_tokens": args.max_extend_tokens,
                       "enable_prefix_caching": args.cache_type != "naive", "async_scheduling": True},
            "resolved": {"device": engine.device.type, "dtype": str(engine.dtype).removeprefix("torch.")},
            "model": {"name": args.model_path, "vocab_size": args.model_config.vocab_size,
                      "max_model_len": engine.max_seq_len},
            "capacity": {"page_size": size, "num_pages": pages, "capacity_tokens": size * pages},
            "versions": {"minisgl": importlib.metadata.version("minisgl"), "torch": self._torch.__version__},
        }  # fmt: skip

    def add(self, name, prompt, max_tokens, temperature, ignore_eos):
        longest = self.scheduler.engine.max_seq_len
        if len(prompt) + max_tokens > longest:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens: {longest} are possible")
        sampling = self._sampling(temperature=temperature, ignore_eos=ignore_eos, max_tokens=max_tokens)
        ids = self._torch.tensor(prompt, dtype=self._torch.int32, device="cpu")
        self.sent.append(self._message(uid=len(self.requests), input_ids=ids, sampling_params=sampling))
        self.requests.append((name, ignore_eos))
        self.cached.pop(name, None)

    def step(self):
        scheduler, self.made = self.scheduler, []
        with self._torch.inference_mode(), scheduler.engine_stream_ctx:
            scheduler.engine.stream.wait_stream(scheduler.stream)
            scheduler.normal_loop()
        return self.made

    def _receive(self, blocking=False):
        sent, self.sent = self.sent, []
        return sent

    def _schedule(self, prefill_budget):
        batch = self.schedule(prefill_budget)
        for request in batch.reqs if batch else ():
            self.cached.setdefault(self.requests[request.uid][0], request.cached_len)
        return batch

    def _take(self, reply):
        for message in reply:
            name, ignore_eos = self.requests[message.uid]
            stopped = message.next_token == self.scheduler.eos_token_id and not ignore_eos
            reason = ("stop" if stopped else "length") if message.finished else None
            self.made.append((name, 0, [message.next_token], reason))

    def cached_tokens(self, name):
        return self.cached.get(name, 0)

    def reset_cache(self):
        manager = self.scheduler.cache_manager
        if size := manager.prefix_cache.size_info.evictable_size:
            manager._free(manager.prefix_cache.evict(size))

    def wait(self):
        self._torch.cuda.synchronize()


Engine = MiniSGLangEngine


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
