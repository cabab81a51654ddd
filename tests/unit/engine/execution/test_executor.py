"""What a step of the real executor does on the host, and what it leaves to the device."""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench_engine.sequence import Request, SamplingParams
from kvbench_kernels.api import AttentionOptions
from tests.support.engine_parts import collect
from tests.support.hf_parts import loaded, make_engine, model_folder, one_thread

COPIES = {"copy_", "clone", "contiguous", "_to_copy", "cat", "index", "index_put_", "index_copy_", "index_select"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with one_thread():
        yield str(tmp_path_factory.mktemp("models"))


def decoding_engine(root: str, sequences: int, family: str = "llama", **settings):
    """An engine whose ``sequences`` have all begun to decode."""
    folder = model_folder(root, family)
    sizes = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    engine = make_engine(loaded(folder), folder, slots=1024, **{**sizes, **settings})
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for i in range(sequences):
        engine.add_request(Request(str(i), tuple(range(2, 7 + i)), params))
    for _ in range(3):
        engine.step()
    return engine


def work_of_a_forward(engine) -> Counter[str]:
    """Bytecode instructions executed in the forward pass of one decode step, by function.

    Without garbage collection: its callbacks, Hypothesis's among them, would run wherever a collection falls due.
    """
    executed: Counter[str] = Counter()

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        executed[frame.f_code.co_qualname] += event == "opcode"
        return trace

    forward = engine.executor.forward

    def counted(*args):
        gc.disable()
        before = sys.gettrace()  # of a coverage measurement
        sys._getframe().f_trace_opcodes = True  # before the call: Python 3.12 asks for it there the first time
        sys.settrace(trace)
        try:
            return forward(*args)
        finally:
            sys.settrace(before)
            gc.enable()

    engine.executor.forward = counted
    engine.step()
    engine.executor.forward = forward
    return executed


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"), [("llama", "auto"), ("gemma3", "auto"), ("llama", "int8_per_token_head")]
)
def test_the_layer_loop_has_no_python_for_each_sequence(root, family, kv_cache_dtype):
    few = work_of_a_forward(decoding_engine(root, 5, family, kv_cache_dtype=kv_cache_dtype))
    many = work_of_a_forward(decoding_engine(root, 9, family, kv_cache_dtype=kv_cache_dtype))
    assert few == many
    assert few.total() > 1000


class _Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_kv_goes_from_the_projection_to_its_slot_in_one_copy(root):
    """Decode's own kernel reads K and V where the model left them, strided as they are, and nobody else moves them."""
    engine = decoding_engine(root, 5)
    host, tensors = engine.executor.host, []
    repeat = engine.executor._inputs.repeat
    engine.executor._inputs.repeat = lambda *args: (tensors.append(repeat(*args)), tensors[-1])[1]
    engine.step()
    step = tensors[-1].step
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 16)[0].transpose(0, 1) for heads in (4, 2, 2))
    assert not k.is_contiguous()
    with torch.inference_mode():
        host.begin(step)
        with _Recorded() as recorded:
            host(0, q, k, v, AttentionOptions(scale=0.25))
    assert COPIES.isdisjoint(recorded.ops), recorded.ops
    assert torch.equal(host.k_caches[0][step.slots[0]], k)
    assert torch.equal(host.v_caches[0][step.slots[0]], v)


def test_pending_tokens_never_reach_the_host_before_their_read(root, monkeypatch):
    """What overlaps draws the same, though every step but the first is fed from the tensor that the last one left."""
    outputs = {}
    for overlap in (False, True):
        engine = decoding_engine(root, 3, async_scheduling=overlap)
        executor, fed = engine.executor, []
        engine.scheduler.reuses_batches = False
        make = executor._inputs.make
        monkeypatch.setattr(executor._inputs, "make", lambda *a, make=make, fed=fed: (fed.append(make(*a)), fed[-1])[1])
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            collect(engine.step(), tokens)
        assert {len(inputs.pending_at) for inputs in fed} == ({3} if overlap else {0})
        outputs[overlap] = {name: own[-30:] for name, own in tokens.items()}
    assert outputs[True] == outputs[False]


def test_a_chunk_that_draws_nothing_does_not_shift_the_pending_tokens_of_those_behind_it(root):
    outputs = []
    settings = {"max_num_batched_tokens": 24, "max_num_partial_prefills": 2}
    for overlap in (False, True):
        engine = decoding_engine(root, 3, async_scheduling=overlap, **settings)
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        for name, length in (("long", 50), ("short", 5)):
            engine.add_request(Request(name, tuple(range(2, 2 + length)), params))
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            collect(engine.step(), tokens)
        outputs.append({name: own[-30:] for name, own in tokens.items()})
    assert outputs[0] == outputs[1]


def test_every_step_is_split_into_phases(root):
    engine = decoding_engine(root, 3)
    before = dict(engine.stats().phase_seconds)
    engine.step()
    after = engine.stats().phase_seconds
    assert all(after[name] > before[name] for name in ("schedule", "prepare", "execute", "sample", "output"))
