"""A step of the same decodes as the one before draws what it would if it were planned and prepared anew."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvbench_engine.execution import step_inputs
from kvbench_engine.execution.graphs import GraphSizes
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import VOCAB, loaded, make_engine, model_folder, one_thread

LONGEST = 64
SLOTS = 96


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory):
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")), request.param)


class CopiedTables(step_inputs.PageTables):
    """The page tables of a GPU, which has only the entries that a step has sent."""

    def __init__(self, host: np.ndarray, device: torch.device, page_sizes: tuple[int, ...], whole: bool) -> None:
        super().__init__(host, device, page_sizes, whole, copied=True)

    def use(self, host: np.ndarray) -> None:
        super().use(host)
        self._by_row.fill_(10**9)


SAMPLING = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 5, "seed": 3},
        {"temperature": 1.0, "n": 2},
        {"temperature": 1.0, "best_of": 2},
        {"beam_width": 2},
    ]
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 30), SAMPLING, st.booleans()),
    min_size=1,
    max_size=7,
)  # the step before which it comes, tokens of the prompt and of the output, how it is drawn, whether EOS is ignored
ENGINES = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 3, 16]),
        "enable_prefix_caching": st.booleans(),
        "async_scheduling": st.booleans(),
        "max_num_seqs": st.sampled_from([2, 6]),
        "preemption_mode": st.sampled_from(["swap", "recompute"]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)


def answers(folder, requests, config, tables, graphs, reuses_batches):
    """Tokens and reason of each sequence, and all counters; the sizes of the steps that repeated the one before."""
    swap = 64 if config["preemption_mode"] == "swap" else None
    with mock.patch.object(step_inputs, "PageTables", tables):
        engine = make_engine(
            loaded(folder, "torch"), folder, slots=SLOTS, swap_slots=swap, max_model_len=LONGEST,
            max_num_batched_tokens=24, **config,
        )  # fmt: skip
    engine.scheduler.reuses_batches = reuses_batches
    executor = engine.executor
    if graphs:
        capture = FakeCapture(executor.host)
        sizes = GraphSizes.of(config["max_num_seqs"], 24)
        assert executor.forward.capture_graphs(sizes, executor.page_starts, LONGEST, capture)
    repeat, repeated, taken, step = executor._repeat_inputs, [], {}, 0
    executor._repeat_inputs = lambda scheduled: (repeated.append(len(scheduled)), repeat(scheduled))[1]
    coming = sorted(enumerate(requests), key=lambda request: request[1][0])
    while coming or engine.has_work():
        while coming and (coming[0][1][0] <= step or not engine.has_work()):
            number, (_, prompt, output, sampling, ignore_eos) = coming.pop(0)
            ids = tuple((7 * i + number // 2) % (VOCAB - 2) + 2 for i in range(prompt))
            params = SamplingParams(**{"max_tokens": output, "ignore_eos": ignore_eos, **sampling})
            if params.width <= config["max_num_seqs"]:
                engine.add_request(Request(str(number), ids, params, priority=number % 3))
        for output in engine.step():
            tokens, _ = taken.get((output.request_id, output.index), ((), None))
            taken[output.request_id, output.index] = tokens + output.token_ids, output.finish_reason
        step += 1
    engine.check_integrity()
    stats = engine.stats()
    counters = replace(stats.counters, hash_seconds=0.0), replace(stats.kv), stats.slot_steps, stats.page_steps
    counts = stats.steps, stats.recomputed_tokens, stats.num_preemptions, stats.decode_tokens_scheduled
    return (taken, counters, counts), repeated


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_repeated_steps_draw_the_same_tokens(folder, graphs):
    total = {"decodes": 0, "repeated": 0}

    @settings(deadline=None, max_examples=25, derandomize=True, phases=(Phase.explicit, Phase.generate))
    @given(requests=REQUESTS, config=ENGINES)
    def check(requests, config):
        compare(folder, graphs, requests, config, total)

    check()
    assert total["repeated"] > 0.2 * total["decodes"] > 0, "nothing was repeated: nothing is shown"


def compare(folder, graphs, requests, config, total) -> None:
    expected, repeated = answers(folder, requests, config, step_inputs.PageTables, False, False)
    assert not repeated and all(reason for _, reason in expected[0].values())
    for tables in (step_inputs.PageTables, CopiedTables):
        taken, repeated = answers(folder, requests, config, tables, graphs, True)
        assert taken == expected
        total["decodes"] += expected[-1][-1]
        total["repeated"] += sum(repeated)


def test_captured_steps_find_their_page_tables_after_a_switch_of_the_kv_manager(folder):
    """As on a GPU, where steps are captured with the manager of the warm-up."""
    engine = make_engine(loaded(folder, "torch"), folder, slots=SLOTS, max_model_len=LONGEST, page_size=3)
    executor, captured = engine.executor, engine.executor.page_starts
    executor.use_page_table(np.zeros_like(engine.kv.page_table))
    assert executor.page_starts.data_ptr() == captured.data_ptr()
