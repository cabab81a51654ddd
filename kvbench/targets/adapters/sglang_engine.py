"""SGLang, stepped in its own process. Arguments: those of its server, read by its own parser.

A step is one round of its scheduler's own loop, without overlap. Without the HTTP server and its tokenizer.
Written from the sources of sglang 0.5.23; not run.
"""

import array


class SGLangEngine:
    OPTIONS = ("priority",)

    def __init__(self, settings, arguments):
        from sglang.srt.entrypoints.engine import _set_envs_and_config
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import PortArgs, prepare_server_args

        self._sampling, self._request = SamplingParams, TokenizedGenerateReqInput
        self._overlaps = "--disable-overlap-schedule" not in arguments
        try:
            args = prepare_server_args([*arguments, "--disable-overlap-schedule", "--skip-tokenizer-init"])
        except SystemExit:
            raise ValueError(f"SGLang does not take these arguments: {' '.join(arguments)}") from None
        if (args.tp_size, args.pp_size, args.dp_size) != (1, 1, 1):
            raise ValueError("this adapter steps one GPU: leave --tp-size, --pp-size and --dp-size out")
        args.resolve_once()
        _set_envs_and_config(args)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=args.base_gpu_id))
        self.scheduler = scheduler = Scheduler(args, PortArgs.init_new(args))
        if scheduler.device == "cpu":
            scheduler.schedule_stream.synchronize = lambda: None  # as its own start of the loop does
        scheduler.request_receiver = self
        for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
            sender.send_output = self._take
        self.sent, self.made, self.cached, self.refused = [], [], {}, None

    def describe(self):
        import importlib.metadata

        scheduler, args, model = self.scheduler, self.scheduler.server_args, self.scheduler.model_config
        size, tokens = scheduler.page_size, scheduler.max_total_num_tokens
        engine = {"page_size": size, "max_num_seqs": scheduler.max_running_requests,
                  "max_num_batched_tokens": scheduler.chunked_prefill_size, "max_model_len": model.context_len,
                  "enable_prefix_caching": not scheduler.disable_radix_cache,
                  "kv_cache_dtype": args.kv_cache_dtype, "async_scheduling": self._overlaps}  # fmt: skip
        return {
            "engine": {name: value for name, value in engine.items() if value is not None},
            "resolved": {"device": scheduler.device, "dtype": str(model.dtype).removeprefix("torch.")},
            "model": {"name": args.model_path, "vocab_size": model.vocab_size, "max_model_len": model.context_len},
            "capacity": {"page_size": size, "num_pages": tokens // size, "capacity_tokens": tokens},
            "versions": {"sglang": importlib.metadata.version("sglang")},
        }

    def add(self, name, prompt, max_tokens, temperature, ignore_eos, priority=0):
        scheduler, prioritised = self.scheduler, self.scheduler.enable_priority_scheduling
        if len(prompt) + max_tokens > scheduler.max_req_len - 1:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens: {scheduler.max_req_len - 1} are possible")
        if len(prompt) >= scheduler.max_req_input_len:
            raise ValueError(f"a prompt of {len(prompt)} tokens: {scheduler.max_req_input_len - 1} are possible")
        if priority and not prioritised:
            raise ValueError("SGLang takes priorities with --enable-priority-scheduling only")
        sampling = self._sampling(max_new_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos)
        sampling.normalize(None)
        sampling.verify(scheduler.model_config.vocab_size)
        self.sent.append(
            self._request(
                rid=name, input_text=None, input_ids=array.array("q", prompt), input_embeds=None, mm_inputs=None,
                token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
                top_logprobs_num=0, token_ids_logprob=None, stream=True, priority=priority if prioritised else None,
            )
        )  # fmt: skip

    def step(self):
        scheduler = self.scheduler
        scheduler.gracefully_exit, self.made = False, []
        with scheduler.device_module.StreamContext(scheduler.schedule_stream):
            scheduler.event_loop_normal()  # one round, see recv_requests
        refused, self.refused = self.refused, None
        if refused is not None:
            raise ValueError(f"SGLang refused a request: {refused}")
        return self.made

    def recv_requests(self, local_reqs=None):
        """Gives the loop its requests, and lets it end after the round that has begun."""
        self.scheduler.gracefully_exit = True
        sent, self.sent = self.sent, []
        return [*(local_reqs or ()), *sent]

    def _take(self, output, recv_obj=None):
        if (names := getattr(output, "rids", None)) is None:  # an AbortReq
            self.refused = (getattr(output, "finished_reason", None) or {}).get("message", type(output).__name__)
            return
        for number, name in enumerate(names):
            reason = output.finished_reasons[number] or {"type": None}
            if reason["type"] == "abort":
                self.refused = reason["message"]
            self.made.append((name, 0, list(output.output_ids[number]), reason["type"]))
            self.cached[name] = output.cached_tokens[number]

    def cached_tokens(self, name):
        return self.cached.get(name, 0)

    def reset_cache(self):
        self.step()  # an idle round lets go of what has ended
        if not self.scheduler.flush_cache():
            raise ValueError("SGLang did not empty its prefix cache")

    def wait(self):
        self.scheduler.device_module.synchronize()


Engine = SGLangEngine
