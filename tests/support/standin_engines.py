"""Engines that need a GPU, stood in for: the names, signatures and order of calls that their adapters rely on.

They follow the sources that the adapters name, check the type of every argument, and compute ``next_token`` in place of
a model. ``install`` writes modules of the engines' names into a folder; a process that has it on its path imports them.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import itertools
import time
import typing
from argparse import ArgumentParser as ArgumentParser
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

VOCAB, LAYERS, EOS = 997, 2, 7
BLOCK_BYTES = 2 * LAYERS * 256 * 4 * 16 * 2  # of nano-vllm: K and V, layers, tokens, heads, their size, bytes
_STEP_S = 0.001
Function = typing.TypeVar("Function", bound=Callable[..., Any])


def next_token(ids: list[int]) -> int:
    """Returns the token behind ``ids``: the same for the same ids."""
    return (31 * sum(ids) + 17 * len(ids)) % VOCAB


def strict(function: Function) -> Function:
    """Makes a function raise TypeError for an argument of another type than its annotation."""
    signature = inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        kinds = typing.get_type_hints(function)
        for name, value in bound.arguments.items():
            kind = object if kinds.get(name, Any) is Any else kinds[name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
                raise TypeError(f"{function.__qualname__}: {name} is {value!r}, {kind} is expected")
        return function(*args, **kwargs)

    return typing.cast("Function", checked)


def prefixes(ids: list[int], page_size: int) -> set[tuple[int, ...]]:
    """Returns the beginnings of ``ids`` that end with a whole page."""
    return {tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)}


def held(ids: list[int], page_size: int, cached: Collection[tuple[int, ...]]) -> int:
    """Counts the tokens at the beginning of ``ids`` whose pages are cached."""
    end = 0
    while end + page_size <= len(ids) and tuple(ids[: end + page_size]) in cached:
        end += page_size
    return end


# What the adapters use of torch.


class StandinTensor:
    def __init__(self, ids: list[int], dtype: str, device: str) -> None:
        self.ids, self.dtype, self.device = ids, dtype, device

    def __len__(self) -> int:
        return len(self.ids)


class StandinStream:
    """A stream of the device, current while it is entered."""

    current: StandinStream | None = None

    def __init__(self) -> None:
        self.waited, self.outer = False, None

    def __enter__(self) -> None:
        self.outer, StandinStream.current = StandinStream.current, self

    def __exit__(self, *exc: object) -> None:
        StandinStream.current = self.outer

    def wait_stream(self, stream: StandinStream) -> None:
        self.waited = isinstance(stream, StandinStream)

    def synchronize(self) -> None:
        raise NotImplementedError("a stream of the CPU cannot be waited for")


class StandinInference:
    on = False

    def __enter__(self) -> None:
        StandinInference.on = True

    def __exit__(self, *exc: object) -> None:
        StandinInference.on = False


class StandinDistributed:
    @staticmethod
    @strict
    def init_process_group(backend: str, init_method: str, world_size: int, rank: int) -> None:
        port = int(init_method.rpartition(":")[2])
        if port in (2333, 1) or (world_size, rank) != (1, 0):
            raise RuntimeError(f"port {port} is taken by the engine of another process")


class StandinCuda:
    total, used, peak, current = 150754820096, 60 << 30, 5 << 30, 3 << 30
    synchronize = staticmethod(lambda device=None: None)
    is_available = staticmethod(lambda: True)

    @classmethod
    def mem_get_info(cls) -> tuple[int, int]:
        return cls.total - cls.used, cls.total

    @classmethod
    def memory_stats(cls) -> dict[str, int]:
        return {"allocated_bytes.all.peak": cls.peak, "allocated_bytes.all.current": cls.current}


@strict
def tensor(data: list, dtype: str, device: str) -> StandinTensor:
    return StandinTensor(data, dtype, device)


# nano-vllm: nanovllm/config.py, sampling_params.py and engine/.


class NanoSamplingParams:
    @strict
    def __init__(self, temperature: float = 1.0, max_tokens: int = 64, ignore_eos: bool = False) -> None:
        assert temperature > 1e-10, "greedy sampling is not permitted"
        self.temperature, self.max_tokens, self.ignore_eos = temperature, max_tokens, ignore_eos


class NanoConfig:
    @strict
    def __init__(
        self, model: str, max_num_batched_tokens: int = 16384, max_num_seqs: int = 512, max_model_len: int = 4096,
        gpu_memory_utilization: float = 0.9, enforce_eager: bool = False, kvcache_block_size: int = 256,
    ) -> None:  # fmt: skip
        assert Path(model).is_dir()
        assert kvcache_block_size % 256 == 0
        self.model, self.max_num_batched_tokens, self.max_num_seqs = model, max_num_batched_tokens, max_num_seqs
        self.gpu_memory_utilization, self.enforce_eager = gpu_memory_utilization, enforce_eager
        self.kvcache_block_size, self.num_kvcache_blocks = kvcache_block_size, -1
        self.hf_config = SimpleNamespace(vocab_size=VOCAB)
        self.max_model_len = min(max_model_len, 2048)


class NanoSequence:
    counter = itertools.count()

    def __init__(self, token_ids: list[int], sampling: NanoSamplingParams) -> None:
        self.seq_id, self.is_finished = next(self.counter), False
        self.token_ids, self.num_prompt_tokens = list(token_ids), len(token_ids)
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.max_tokens, self.ignore_eos = sampling.max_tokens, sampling.ignore_eos
        self.block_table: list[int] = []

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class NanoBlockManager:
    def __init__(self, block_size: int) -> None:
        self.block_size, self.hash_to_block_id = block_size, {}

    def can_allocate(self, sequence: NanoSequence) -> int:
        return held(sequence.token_ids[:-1], self.block_size, self.hash_to_block_id) // self.block_size

    @strict
    def allocate(self, seq: NanoSequence, num_cached_blocks: int) -> None:
        assert not seq.block_table
        seq.block_table = [0]
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def deallocate(self, sequence: NanoSequence) -> None:
        sequence.num_cached_tokens = 0
        sequence.block_table.clear()


class NanoScheduler:
    def __init__(self, config: NanoConfig) -> None:
        self.config, self.block_manager = config, NanoBlockManager(config.kvcache_block_size)
        self.waiting: deque[NanoSequence] = deque()
        self.running: deque[NanoSequence] = deque()

    def schedule(self) -> tuple[list[NanoSequence], bool]:
        scheduled, left = [], self.config.max_num_batched_tokens
        while self.waiting and left and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not sequence.block_table:
                self.block_manager.allocate(sequence, self.block_manager.can_allocate(sequence))
            needed = len(sequence.token_ids) - sequence.num_cached_tokens
            sequence.num_scheduled_tokens = min(needed, left)
            left -= sequence.num_scheduled_tokens
            scheduled.append(sequence)
            if sequence.num_scheduled_tokens < needed:
                break
            self.running.append(self.waiting.popleft())
        if scheduled:
            return scheduled, True
        assert self.running
        for sequence in self.running:
            sequence.num_scheduled_tokens = 1
        return list(self.running), False

    def postprocess(self, sequences: list[NanoSequence], ids: list[int], is_prefill: bool) -> None:
        for sequence, token in zip(sequences, ids, strict=True):
            self.block_manager.hash_to_block_id |= dict.fromkeys(
                prefixes(sequence.token_ids, self.config.kvcache_block_size), 0
            )
            sequence.num_cached_tokens += sequence.num_scheduled_tokens
            if is_prefill and sequence.num_cached_tokens < len(sequence.token_ids):
                continue
            sequence.token_ids.append(token)
            stopped = token == EOS and not sequence.ignore_eos
            if stopped or sequence.num_completion_tokens == sequence.max_tokens:
                sequence.is_finished = True
                self.block_manager.deallocate(sequence)
                self.running.remove(sequence)


class NanoModelRunner:
    def __init__(self, config: NanoConfig) -> None:
        import torch

        self.config, self._torch = config, torch
        torch.distributed.init_process_group("nccl", "tcp://localhost:2333", world_size=1, rank=0)
        self.allocate_kv_cache()

    def allocate_kv_cache(self) -> None:
        cuda = self._torch.cuda
        held = int(cuda.total * self.config.gpu_memory_utilization - cuda.used - cuda.peak + cuda.current)
        self.config.num_kvcache_blocks = held // BLOCK_BYTES
        assert self.config.num_kvcache_blocks > 0
        self.kv_cache = SimpleNamespace(dtype="torch.bfloat16", device=SimpleNamespace(type="cuda"))


class NanoLLM:
    def __init__(self, model: str, **kwargs: Any) -> None:
        import nanovllm.engine.model_runner

        config = NanoConfig(model, **kwargs)  # stricter than the real one, which drops what it does not know
        self.model_runner = nanovllm.engine.model_runner.ModelRunner(config)
        self.scheduler = NanoScheduler(config)

    @strict
    def add_request(self, prompt: list, sampling_params: NanoSamplingParams) -> None:
        self.scheduler.waiting.append(NanoSequence(prompt, sampling_params))

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        time.sleep(_STEP_S)
        sequences, is_prefill = self.scheduler.schedule()
        self.scheduler.postprocess(sequences, [next_token(s.token_ids) for s in sequences], is_prefill)
        return [(s.seq_id, s.token_ids[s.num_prompt_tokens :]) for s in sequences if s.is_finished], len(sequences)


# mini-sglang: minisgl/core.py, message/, scheduler/ and server/args.py.


class MiniSamplingParams:
    @strict
    def __init__(
        self, temperature: float = 0.0, top_k: int = -1, top_p: float = 1.0, ignore_eos: bool = False,
        max_tokens: int = 1024,
    ) -> None:  # fmt: skip
        self.temperature, self.ignore_eos, self.max_tokens = temperature, ignore_eos, max_tokens


class MiniUserMsg:
    @strict
    def __init__(self, uid: int, input_ids: StandinTensor, sampling_params: MiniSamplingParams) -> None:
        if (input_ids.dtype, input_ids.device) != ("int32", "cpu"):
            raise TypeError("input_ids is a CPU 1D int32 tensor")
        self.uid, self.input_ids, self.sampling_params = uid, input_ids.ids, sampling_params


@dataclass(frozen=True)
class MiniServerArgs:
    model_path: str
    tp_info: SimpleNamespace
    max_running_req: int = 256
    max_seq_len_override: int | None = None
    max_extend_tokens: int = 8192
    num_page_override: int | None = None
    page_size: int = 1
    cache_type: str = "radix"
    offline_mode: bool = False
    server_host: str = "127.0.0.1"
    server_port: int = 1919

    @property
    def model_config(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=VOCAB)


@strict
def parse_args(args: list, run_shell: bool = False) -> tuple[MiniServerArgs, bool]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--max-running-requests", type=int, dest="max_running_req", default=256)
    parser.add_argument("--max-seq-len-override", type=int)
    parser.add_argument("--max-prefill-length", type=int, dest="max_extend_tokens", default=8192)
    parser.add_argument("--num-pages", type=int, dest="num_page_override")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--cache-type", choices=["naive", "radix"], default="radix")
    parser.add_argument("--host", dest="server_host", default="127.0.0.1")
    parser.add_argument("--port", type=int, dest="server_port", default=1919)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    values = vars(parser.parse_args(args))
    return MiniServerArgs(tp_info=SimpleNamespace(size=values.pop("tensor_parallel_size")), **values), run_shell


class MiniReq:
    def __init__(self, message: MiniUserMsg, cached_len: int, ends: int) -> None:
        self.uid, self.message, self.cached_len, self.ends = message.uid, message, cached_len, ends


class MiniPrefixCache:
    """The pages of prompts that ended, as prefixes; what a running request shares cannot be evicted."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.pages, self.locked = page_size, set(), 0

    @property
    def size_info(self) -> SimpleNamespace:
        return SimpleNamespace(evictable_size=0 if self.locked else len(self.pages) * self.page_size)

    @strict
    def evict(self, size: int) -> list[int]:
        assert size <= self.size_info.evictable_size
        indices = list(range(len(self.pages) * self.page_size))
        self.pages.clear()
        return indices


class MiniCacheManager:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size, self.free_pages = num_pages, page_size, num_pages
        self.prefix_cache = MiniPrefixCache(page_size)

    @strict
    def _free(self, indices: list) -> None:
        self.free_pages += len(indices[:: self.page_size])

    def check_integrity(self) -> None:
        if self.free_pages + len(self.prefix_cache.pages) != self.num_pages:
            raise RuntimeError("CacheManager integrity check failed")


class MiniPrefillManager:
    def __init__(self, args: MiniServerArgs, cache: MiniCacheManager, running: list[MiniReq]) -> None:
        self.args, self.cache, self.running = args, cache, running
        self.pending: list[MiniUserMsg] = []
        self.chunked: MiniReq | None = None

    @strict
    def schedule_next_batch(self, prefill_budget: int) -> SimpleNamespace | None:
        reqs = []
        while self.pending and prefill_budget and len(self.running) + len(reqs) < self.args.max_running_req:
            message, matched = self.pending[0], 0
            if self.chunked is not None:
                matched = self.chunked.ends
            elif self.args.cache_type == "radix":
                matched = held(message.input_ids[:-1], self.cache.page_size, self.cache.prefix_cache.pages)
            ends = min(matched + prefill_budget, len(message.input_ids))
            prefill_budget -= ends - matched
            reqs.append(MiniReq(message, matched, ends))
            self.chunked = reqs[-1] if ends < len(message.input_ids) else None
            if self.chunked is not None:
                break
            self.pending.pop(0)
        return SimpleNamespace(reqs=reqs, is_prefill=True) if reqs else None


class MiniScheduler:
    @strict
    def __init__(self, config: MiniServerArgs) -> None:
        if not config.offline_mode:
            raise RuntimeError("there is no tokenizer at the other end of the sockets")
        url = f"tcp://127.0.0.1:{config.server_port + 1}"
        StandinDistributed.init_process_group("gloo", init_method=url, world_size=1, rank=0)
        pages = config.num_page_override or 4096
        length = min(config.max_seq_len_override or 2048, pages * config.page_size)
        self.engine = SimpleNamespace(
            device=SimpleNamespace(type="cuda"), dtype="torch.bfloat16", num_pages=pages, max_seq_len=length,
            stream=StandinStream(),
        )  # fmt: skip
        self.stream, self.engine_stream_ctx = StandinStream(), self.engine.stream
        self.running: list[MiniReq] = []
        self.cache_manager = MiniCacheManager(pages, config.page_size)
        self.prefill_manager = MiniPrefillManager(config, self.cache_manager, self.running)
        self.eos_token_id, self.prefill_budget = EOS, config.max_extend_tokens
        self.receive_msg: Callable[..., list[MiniUserMsg]] = self.offline_receive_msg
        self.send_result: Callable[[list[SimpleNamespace]], None] = self.offline_send_result

    def offline_receive_msg(self, blocking: bool = False) -> Never:
        raise NotImplementedError("should be implemented")

    def offline_send_result(self, reply: list[SimpleNamespace]) -> Never:
        raise NotImplementedError("should be implemented")

    def normal_loop(self) -> None:
        if not (StandinInference.on and StandinStream.current is self.engine.stream and self.engine.stream.waited):
            raise RuntimeError("a batch is computed in inference mode, in the engine's stream behind the scheduler's")
        time.sleep(_STEP_S)
        for message in self.receive_msg(blocking=not (self.prefill_manager.pending or self.running)):
            if not isinstance(message, MiniUserMsg) or len(message.input_ids) >= self.engine.max_seq_len:
                raise TypeError(f"{message!r} is no request, or is dropped with a warning")
            message.sampling_params.max_tokens = min(
                message.sampling_params.max_tokens, self.engine.max_seq_len - len(message.input_ids)
            )
            self.prefill_manager.pending.append(message)
        if not self.running and not self.prefill_manager.chunked:
            self.cache_manager.check_integrity()
        batch = self.prefill_manager.schedule_next_batch(self.prefill_budget)
        if batch is None and self.running:
            batch = SimpleNamespace(reqs=list(self.running), is_prefill=False)
        self.send_result([self._advance(req) for req in batch.reqs if req is not self.prefill_manager.chunked])

    def _advance(self, req: MiniReq) -> SimpleNamespace:
        cache, ids, sampling = self.cache_manager, req.message.input_ids, req.message.sampling_params
        if req not in self.running:
            self.running.append(req)
            cache.prefix_cache.locked += 1
            req.prompt = list(ids)
        token = next_token(ids)
        ids.append(token)
        finished = len(ids) - len(req.prompt) == sampling.max_tokens or (token == EOS and not sampling.ignore_eos)
        if finished:
            self.running.remove(req)
            cache.prefix_cache.locked -= 1
            pages = prefixes(req.prompt, cache.page_size) - cache.prefix_cache.pages
            cache.prefix_cache.pages |= pages
            cache.free_pages -= len(pages)
        return SimpleNamespace(uid=req.uid, next_token=token, finished=finished)


# SGLang: sglang/srt/server_args.py, runtime_context.py, sampling/sampling_params.py, managers/.


class SGLServerArgs(argparse.Namespace):
    resolved = configured = published = False

    def resolve_once(self) -> None:
        self.resolved = True


@strict
def prepare_server_args(argv: list) -> SGLServerArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("dtype", "kv-cache-dtype"):
        parser.add_argument(f"--{name}", default="auto")
    parser.add_argument("--schedule-policy", default="fcfs")
    parser.add_argument("--device", default="cuda")
    for name in ("page-size", "tp-size", "pp-size", "dp-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("port", "max-total-tokens", "context-length", "max-running-requests", "chunked-prefill-size",
                 "max-queued-requests", "random-seed"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--base-gpu-id", type=int, default=0)
    for name in ("enable-metrics", "enable-cache-report", "disable-radix-cache", "enable-priority-scheduling",
                 "schedule-low-priority-values-first", "disable-cuda-graph", "enable-torch-compile",
                 "disable-overlap-schedule", "skip-tokenizer-init"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv, SGLServerArgs())


@strict
def _set_envs_and_config(server_args: SGLServerArgs) -> None:
    assert server_args.resolved
    server_args.configured = True


class SGLSpawnRanks:
    @strict
    def __init__(self, world_rank: int, dp_rank: int | None = None, gpu_id: int | None = None) -> None:
        self.world_rank, self.gpu_id = world_rank, gpu_id


@strict
def publish(
    server_args: SGLServerArgs, *, role: str, hf_config: Any = None, ranks: SGLSpawnRanks | None = None
) -> None:
    assert server_args.configured and role == "scheduler" and ranks is not None
    server_args.published = (ranks.world_rank, ranks.gpu_id) == (0, server_args.base_gpu_id)


class SGLPortArgs:
    @staticmethod
    @strict
    def init_new(server_args: SGLServerArgs) -> SGLPortArgs:
        return SGLPortArgs()


class SGLSamplingParams:
    @strict
    def __init__(self, *, max_new_tokens: int = 128, temperature: float = 1.0, ignore_eos: bool = False) -> None:
        self.max_new_tokens, self.ignore_eos = max_new_tokens, ignore_eos
        self.temperature, self.checked = temperature, []

    def normalize(self, tokenizer: Any) -> None:
        self.checked.append("normalized")

    @strict
    def verify(self, vocab_size: int) -> None:
        self.checked.append("verified")


class SGLRequest:
    @strict
    def __init__(
        self, *, input_text: str | None, input_ids: array, input_embeds: list | None, mm_inputs: dict | None,
        token_type_ids: list | None, sampling_params: SGLSamplingParams, return_logprob: bool, logprob_start_len: int,
        top_logprobs_num: int, token_ids_logprob: list | None, stream: bool, rid: str | None = None,
        priority: int | None = None,
    ) -> None:  # fmt: skip
        if sampling_params.checked != ["normalized", "verified"] or input_ids.typecode != "q":
            raise TypeError("the tokenizer's side normalizes and verifies, and sends array('q')")
        self.rid, self.ids, self.sampling_params, self.stream = rid, list(input_ids), sampling_params, stream
        self.priority, self.cached, self.ends, self.prompt = priority, 0, 0, len(input_ids)
        self.finished_reason: dict[str, Any] | None = None


class SGLSender:
    @strict
    def send_output(self, output: SimpleNamespace, recv_obj: Any = None) -> None:
        raise RuntimeError("nobody reads this socket")


class SGLReceiver:
    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        raise RuntimeError("nobody writes to this socket")


class SGLScheduler:
    @strict
    def __init__(self, server_args: SGLServerArgs, port_args: SGLPortArgs) -> None:
        if not (server_args.published and server_args.disable_overlap_schedule and server_args.skip_tokenizer_init):
            raise RuntimeError("the arguments are published first, without overlap and tokenizer")
        self.server_args, self.device, self.page_size = server_args, server_args.device, server_args.page_size
        length, tokens = server_args.context_length or 2048, server_args.max_total_tokens or 65536
        self.model_config = SimpleNamespace(vocab_size=VOCAB, context_len=length, dtype="torch.bfloat16")
        self.max_total_num_tokens = tokens
        self.max_running_requests = server_args.max_running_requests or 48
        self.max_req_len = min(length, tokens) - 1
        self.max_req_input_len = self.max_req_len - 5
        chunk = server_args.chunked_prefill_size or 8192
        self.chunked_prefill_size = chunk if chunk > 0 else None
        self.disable_radix_cache = server_args.disable_radix_cache
        self.enable_priority_scheduling = server_args.enable_priority_scheduling
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=SGLSender(), send_to_detokenizer=SGLSender())
        self.request_receiver, self.schedule_stream = SGLReceiver(), StandinStream()
        self.device_module = SimpleNamespace(StreamContext=lambda stream: stream, synchronize=lambda: None)
        self.waiting: list[SGLRequest] = []
        self.running: list[SGLRequest] = []
        self.prefixes: set[tuple[int, ...]] = set()
        self.gracefully_exit, self.last_batch = False, None

    def event_loop_normal(self) -> None:
        if StandinStream.current is not self.schedule_stream:
            raise RuntimeError("the loop runs in its own stream")
        for _ in itertools.count():
            if self.gracefully_exit:
                return
            if _ == 9:
                raise RuntimeError("the loop does not end")
            for request in self.request_receiver.recv_requests(local_reqs=[]):
                self._handle(request)
            self.running = [request for request in self.running if request.finished_reason is None]
            batch = self._batch()
            if batch:
                self._run(batch)
            self.last_batch = batch

    def flush_cache(self) -> bool:
        if self.running or self.waiting or self.last_batch:
            return False
        self.prefixes.clear()
        return True

    @strict
    def _handle(self, request: SGLRequest) -> None:
        limit = self.server_args.max_queued_requests
        if request.priority is not None and not self.enable_priority_scheduling:
            raise RuntimeError("Using priority is disabled for this server.")
        if limit is not None and len(self.waiting) >= limit:
            reason = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
            output = SimpleNamespace(rid=request.rid, finished_reason=reason)
            self.ipc_channels.send_to_tokenizer.send_output(output, request)
            return
        if len(request.ids) >= self.max_req_input_len:
            request.finished_reason = {"type": "abort", "message": "Input length exceeds the maximum"}
            self._stream([(request, [])])
            return
        sampling = request.sampling_params
        sampling.max_new_tokens = min(sampling.max_new_tokens, self.max_req_len - len(request.ids) - 1)
        self.waiting.append(request)

    def _batch(self) -> list[SGLRequest]:
        left, batch = self.chunked_prefill_size or 16384, []
        if self.enable_priority_scheduling:
            self.waiting.sort(key=lambda request: (request.ends == 0, request.priority))
        while self.waiting and left and len(self.running) + len(batch) < self.max_running_requests:
            request = self.waiting[0]
            if not request.ends and not self.disable_radix_cache:
                request.cached = request.ends = held(request.ids[:-1], self.page_size, self.prefixes)
            computed = min(left, len(request.ids) - request.ends)
            left -= computed
            request.ends += computed
            batch.append(request)
            if request.ends == len(request.ids):
                self.waiting.pop(0)
        return batch or list(self.running)

    def _run(self, batch: list[SGLRequest]) -> None:
        time.sleep(_STEP_S)
        if self.device == "cpu":
            self.schedule_stream.synchronize()
        outputs = []
        for request in batch:
            if request in self.waiting:  # a chunk
                continue
            if request not in self.running:
                self.running.append(request)
            token, sampling = next_token(request.ids), request.sampling_params
            request.ids.append(token)
            if token == EOS and not sampling.ignore_eos:
                request.finished_reason = {"type": "stop", "matched": token}
            elif len(request.ids) - request.prompt == sampling.max_new_tokens:
                request.finished_reason = {"type": "length", "length": sampling.max_new_tokens}
            if request.finished_reason:
                self.prefixes |= prefixes(request.ids[: request.prompt], self.page_size)
            if request.stream:
                outputs.append((request, [token]))
            elif request.finished_reason:
                outputs.append((request, request.ids[request.prompt :]))
        if outputs:
            self._stream(outputs)

    def _stream(self, outputs: list[tuple[SGLRequest, list[int]]]) -> None:
        payload = SimpleNamespace(
            rids=[request.rid for request, _ in outputs],
            finished_reasons=[request.finished_reason for request, _ in outputs],
            output_ids=[array("q", ids) for _, ids in outputs],
            cached_tokens=[request.cached for request, _ in outputs],
        )
        self.ipc_channels.send_to_detokenizer.send_output(payload)


# vLLM: vllm/engine/arg_utils.py, sampling_params.py, v1/engine/llm_engine.py and v1/worker/utils.py (0.32).


class VLLMOutputKind(enum.Enum):
    CUMULATIVE, DELTA = 0, 1


class VLLMUsageContext(enum.Enum):
    LLM_CLASS, OPENAI_API_SERVER = "LLM_CLASS", "OPENAI_API_SERVER"


class VLLMSamplingParams:
    @strict
    def __init__(
        self, n: int = 1, temperature: float = 1.0, ignore_eos: bool = False, max_tokens: int = 16,
        detokenize: bool = True, output_kind: VLLMOutputKind = VLLMOutputKind.CUMULATIVE,
    ) -> None:  # fmt: skip
        if output_kind is not VLLMOutputKind.DELTA or detokenize:
            raise ValueError("the stand-in gives the new tokens of a step, and no text")
        self.n, self.ignore_eos, self.max_tokens = n, ignore_eos, max_tokens


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments of vLLM's server that a launch gives it."""
    for name in ("model", "host", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("port", "seed", "block-size", "kv-cache-memory-bytes", "max-num-batched-tokens", "max-model-len",
                 "max-num-seqs"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    for name in ("disable-uvicorn-access-log", "enable-prompt-tokens-details", "enforce-eager"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


class VLLMEngineArgs(argparse.Namespace):
    @classmethod
    @strict
    def from_cli_args(cls, args: argparse.Namespace) -> VLLMEngineArgs:
        return cls(async_scheduling=None, **vars(args))  # None: on a GPU it does


class VLLMStandin:
    """Prompts in chunks, as nano-vllm's stand-in, and several sequences a request."""

    @classmethod
    @strict
    def from_engine_args(cls, engine_args: VLLMEngineArgs, usage_context: VLLMUsageContext) -> VLLMStandin:
        free, total = StandinCuda.mem_get_info()
        if engine_args.gpu_memory_utilization * total > free:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        if usage_context is not VLLMUsageContext.OPENAI_API_SERVER or not engine_args.disable_log_stats:
            raise ValueError("limits are those of the server, and no statistics are logged")
        if engine_args.async_scheduling is not False:
            raise NotImplementedError("a step would return what the step before has made")
        return cls(engine_args)

    def __init__(self, args: VLLMEngineArgs) -> None:
        pages = args.kv_cache_memory_bytes // (BLOCK_BYTES * args.block_size // 256)
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=args.block_size, num_gpu_blocks=pages, cache_dtype="auto",
                enable_prefix_caching=args.enable_prefix_caching,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens
            ),
            model_config=SimpleNamespace(
                model=args.model, max_model_len=args.max_model_len, dtype="torch.bfloat16", get_vocab_size=lambda: VOCAB
            ),
            device_config=SimpleNamespace(device_type="cuda"),
        )  # fmt: skip
        self.args, self.requests, self.cached = args, dict[str, SimpleNamespace](), set[tuple[int, ...]]()

    def add_request(self, request_id: str, prompt: dict, params: VLLMSamplingParams, *, priority: int = 0) -> None:
        ids = prompt["prompt_token_ids"]
        if len(ids) > self.args.max_model_len:
            raise ValueError(f"The prompt has {len(ids)} tokens: {self.args.max_model_len} are possible")
        hits = held(ids[:-1], self.args.block_size, self.cached) if self.args.enable_prefix_caching else 0
        self.requests[request_id] = SimpleNamespace(
            name=request_id, prompt=len(ids), params=params, priority=priority, computed=hits, hits=hits,
            sequences={i: list(ids) for i in range(params.n)},
        )  # fmt: skip

    def step(self) -> list[SimpleNamespace]:
        time.sleep(_STEP_S)
        order = sorted(self.requests.values(), key=lambda request: (request.computed == request.hits, request.priority))
        budget, made = self.args.max_num_batched_tokens, []
        for request in order[: self.args.max_num_seqs]:
            if request.computed < request.prompt:
                chunk = min(budget, request.prompt - request.computed)
                budget, request.computed = budget - chunk, request.computed + chunk
            if request.computed >= request.prompt:
                made.append(self._advance(request))
        return made

    def _advance(self, request: SimpleNamespace) -> SimpleNamespace:
        outputs = []
        for number, ids in list(request.sequences.items()):
            ids.append(next_token(ids))
            reason = "length" if len(ids) - request.prompt == request.params.max_tokens else None
            reason = "stop" if ids[-1] == EOS and not request.params.ignore_eos else reason
            outputs.append(SimpleNamespace(index=number, token_ids=[ids[-1]], finish_reason=reason))
            if reason:
                self.cached |= prefixes(ids[: request.prompt], self.args.block_size)
                del request.sequences[number]
        if not request.sequences:
            del self.requests[request.name]
        return SimpleNamespace(
            request_id=request.name, outputs=outputs, finished=not request.sequences, num_cached_tokens=request.hits
        )

    def reset_prefix_cache(self) -> bool:
        self.cached.clear()
        return not self.requests


MODULES = {  # the stand-ins of each engine: module, then the names in it and the names here
    "nano_vllm": {
        "nanovllm": {"LLM": "NanoLLM", "SamplingParams": "NanoSamplingParams"},
        "nanovllm.engine": {},
        "nanovllm.engine.model_runner": {"ModelRunner": "NanoModelRunner"},
    },
    "mini_sglang": {
        "minisgl": {},
        "minisgl.core": {"SamplingParams": "MiniSamplingParams"},
        "minisgl.message": {"UserMsg": "MiniUserMsg"},
        "minisgl.scheduler": {"Scheduler": "MiniScheduler"},
        "minisgl.server": {},
        "minisgl.server.args": {"parse_args": "parse_args"},
    },
    "sglang": {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.managers": {},
        "sglang.srt.sampling": {},
        "sglang.srt.entrypoints.engine": {"_set_envs_and_config": "_set_envs_and_config"},
        "sglang.srt.managers.io_struct": {"TokenizedGenerateReqInput": "SGLRequest"},
        "sglang.srt.managers.scheduler": {"Scheduler": "SGLScheduler"},
        "sglang.srt.runtime_context": {"SpawnRanks": "SGLSpawnRanks", "publish": "publish"},
        "sglang.srt.sampling.sampling_params": {"SamplingParams": "SGLSamplingParams"},
        "sglang.srt.server_args": {"PortArgs": "SGLPortArgs", "prepare_server_args": "prepare_server_args"},
    },
}
_VLLM = {
    "vllm": {"SamplingParams": "VLLMSamplingParams"},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"EngineArgs": "VLLMEngineArgs"},
    "vllm.sampling_params": {"RequestOutputKind": "VLLMOutputKind"},
    "vllm.usage": {},
    "vllm.usage.usage_lib": {"UsageContext": "VLLMUsageContext"},
    "vllm.utils": {},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": "ArgumentParser"},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.llm_engine": {"LLMEngine": "VLLMStandin"},
    "vllm.entrypoints": {},
}
for _name, _folder in (("vllm", "launchers"), ("vllm_031", "openai")):  # the parser lies elsewhere since 0.32
    _module = f"vllm.entrypoints.{_folder}"
    MODULES[_name] = _VLLM | {_module: {}, f"{_module}.cli_args": {"make_arg_parser": "make_arg_parser"}}
TORCH = {"cuda": "StandinCuda", "distributed": "StandinDistributed", "inference_mode": "StandinInference",
         "tensor": "tensor"}  # fmt: skip
VERSIONS = {"nano_vllm": ("nano-vllm", "0.2.0"), "mini_sglang": ("minisgl", "0.1.0"), "sglang": ("sglang", "0.5.23"),
            "vllm": ("vllm", "0.32.0"), "vllm_031": ("vllm", "0.31.0")}


def install(engine: str, folder: Path) -> None:
    """Writes the modules of ``engine``, and a torch, into ``folder``."""
    for module, names in {**MODULES[engine], "torch": TORCH}.items():
        path = folder.joinpath(*module.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"from tests.support.standin_engines import {ours} as {name}" for name, ours in names.items()]
        path.write_text("\n".join([*lines, "__version__, int32 = 'stand-in', 'int32'\n"]))
    name, version = VERSIONS[engine]
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
