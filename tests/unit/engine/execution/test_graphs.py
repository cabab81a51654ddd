"""Steps under graphs, on the CPU: a fake capture records the operations and runs them again on the same tensors.

What is shown here is the padding and the buffers, and that nothing of a step is left in Python; that CUDA replays what
it captured is CUDA's part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from transformers import AttentionInterface

from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.forward import ModelForward
from kvbench_engine.execution.graphs import LARGEST_BATCH, LARGEST_MIXED, GraphSizes, decode_sizes, mixed_sizes
from kvbench_engine.model.attention import NAME, AttentionHost, StepTensors
from kvbench_engine.model.attention import forward as attention_forward
from kvbench_engine.model.compiler import compile_model
from kvbench_engine.model.loader import LoadedModel, load_model
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import COMMON, VOCAB, loaded, model_folder, one_thread

MAX_SEQS, MAX_LEN, MAX_TOKENS = 11, 40, 40
UNUSED = 5  # slots that nobody owns


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """gemma2: sliding windows, softcap, a scale of its own."""
    return loaded(model_folder(str(tmp_path_factory.mktemp("models")), request.param))


class Batch:
    """``MAX_SEQS`` sequences of 1 to 36 tokens with a random KV, NaN wherever nobody's token lies."""

    def __init__(self, model: LoadedModel, page_size: int, kv_cache_dtype: str = "auto"):
        self.pages = -(-MAX_LEN // page_size)
        num_slots = MAX_SEQS * self.pages * page_size + UNUSED
        like = next(model.model.parameters())
        self.host = AttentionHost(model.backend, model.kv_shape, num_slots, (page_size,), like, kv_cache_dtype)
        self.page_size = page_size
        generator = torch.Generator().manual_seed(page_size)
        order = torch.randperm(MAX_SEQS * self.pages, generator=generator)
        self.page_starts = order.view(MAX_SEQS, self.pages) * page_size
        self.lengths = torch.tensor([1, 30, 5, 36, 17, 20, 12, 7, 14, 25, 33])
        self.ids = torch.randint(0, VOCAB, (MAX_SEQS,), generator=generator)
        used = torch.zeros(num_slots, dtype=torch.bool)
        for row in range(MAX_SEQS):
            used[self.slots_of(row, int(self.lengths[row]) - 1)] = True
        for tensor in self.host.raw_tensors():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype).abs())
                tensor[~used] = torch.nan
            else:
                tensor.copy_(torch.randint(0, 200, tensor.shape, generator=generator).to(tensor.dtype))
        self.before = [tensor.clone() for tensor in self.host.raw_tensors()]

    def slots_of(self, row: int, count: int) -> torch.Tensor:
        at = torch.arange(count)
        return self.page_starts[row, at // self.page_size] + at % self.page_size

    def restore(self) -> None:
        for tensor, before in zip(self.host.raw_tensors(), self.before, strict=True):
            tensor.copy_(before)

    def step(self, rows: list[int], chunks: dict[int, int] | None = None) -> Inputs:
        """What the executor hands over for one token of each of ``rows`` and the last ``chunks[row]`` of others; all of
        them draw."""
        chunks = chunks or {}
        new = [(row, 1) for row in rows] + list(chunks.items())
        lengths = self.lengths[[row for row, _ in new]]
        at = [torch.arange(int(self.lengths[row]) - count, int(self.lengths[row])) for row, count in new]
        slots = [self.slots_of(row, int(self.lengths[row]))[-count:] for row, count in new]
        ids = [self.ids[row] + torch.arange(count).flip(0) for row, count in new]
        width, split = int(-(-lengths.max() // self.page_size)), len(rows)
        tables = self.page_starts[[row for row, _ in new], :width]
        counts = torch.tensor([count for _, count in new])
        step = StepTensors(
            num_decodes=split,
            slots=torch.cat(slots)[None],
            decode_page_starts=tables[None, :split],
            decode_seq_lens=lengths[:split],
            prefill_page_starts=tables[None, split:],
            prefill_seq_lens=lengths[split:],
            query_starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts[split:].cumsum(0)]),
            max_decode_tokens=int(lengths[:split].max()) if split else 0,
            max_prefill_tokens=int(lengths[split:].max()) if chunks else 0,
            max_queries=max(chunks.values(), default=0),
        )
        return torch.cat(ids) % VOCAB, torch.cat(at), step, counts.cumsum(0) - 1


Inputs = tuple[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor]
SIZES = GraphSizes.of(MAX_SEQS, MAX_TOKENS)


def tables_for(sizes: GraphSizes, batch: Batch) -> torch.Tensor:
    """The tensor in which an executor would have the page tables of its steps; these steps bring their own."""
    return torch.zeros(1, sizes.rows, batch.pages, dtype=torch.int64)


def graphed(
    model: LoadedModel, batch: Batch, sizes: GraphSizes = SIZES, **how: Any
) -> tuple[ModelForward, FakeCapture]:
    """A forward with graphs of all ``sizes``."""
    forward, capture = ModelForward(model.model, batch.host), FakeCapture(batch.host)
    assert forward.capture_graphs(sizes, tables_for(sizes, batch), MAX_LEN, capture)
    assert capture.captured == len(sizes.decodes) + len(sizes.mixed)
    return forward, capture


def same_bits(ours: tuple[torch.Tensor, ...], theirs: list[torch.Tensor]) -> bool:
    """NaN included."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def test_sizes_cover_every_step_and_grow_slowly():
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decode_sizes(1) == [1]
    assert decode_sizes(11) == [1, 2, 4, 8, 11]
    for most in (3, 64, 65, 100, 256, 300, 512, 4000):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST_BATCH)
        for count in range(1, sizes[-1] + 1):
            size = min(size for size in sizes if size >= count)
            assert size < 2 * count and (count <= 64 or size - count < count / 4)
    assert len(mixed_sizes(8192)) == 39
    for most in (2, 24, 512, 700, 2048, 8192):
        sizes = mixed_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST_MIXED)
        for count in range(17, sizes[-1] + 1):
            size = min(size for size in sizes if size >= count)
            assert size < 2 * count and (count <= 128 or size - count < min(count / 2, max(128, size / 8 + 1)))


def test_which_steps_have_a_graph():
    sizes = GraphSizes.of(256, 8192)
    assert sizes.fit(256, 0, 256) == (False, 256) and sizes.fit(3, 0, 3) == (False, 4)
    assert sizes.fit(250, 3, 700) == (True, 768) and sizes.fit(0, 1, 2) == (True, 16)
    assert sizes.fit(0, 16, LARGEST_MIXED) == (True, LARGEST_MIXED)
    assert sizes.fit(0, 1, LARGEST_MIXED + 1) is None
    assert sizes.fit(9, 16, 600) == (True, 640) and sizes.fit(9, 17, 600) is None, "room for the chunks"
    assert sizes.fit(9, 32, 1950) == (True, 2048) and sizes.fit(9, 33, 1950) is None
    assert list(sizes.describe()) == ["decodes", "mixed", "prefills"]
    assert (sizes.describe()["mixed"][-1], sizes.describe()["prefills"][-1]) == (LARGEST_MIXED, 128)
    assert sizes.fit(9, 128, 8000) == (True, LARGEST_MIXED) and sizes.fit(9, 129, 8000) is None
    assert sizes.fit(255, 2, 400) is None, "more sequences than rows"
    assert sizes.fit(0, 0, 0) is None


def check_steps(batch: Batch, plain: ModelForward, replayed: ModelForward, steps: list[Any], tolerance: float) -> None:
    """Logits and KV of each step are those of the step run eagerly, and its slots are all that changed."""
    for rows, chunks in steps:
        with torch.inference_mode():
            inputs = batch.step(rows, chunks)
            expected = plain(*inputs).clone()
            written = [tensor.clone() for tensor in batch.host.raw_tensors()]
            batch.restore()
            got = replayed(*inputs).clone()
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        for ours, theirs, before in zip(batch.host.raw_tensors(), written, batch.before, strict=True):
            if ours.is_floating_point():
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
            changed = (ours != before) & ~(ours.isnan() & before.isnan())
            touched = torch.zeros(len(ours), dtype=torch.bool)
            touched[inputs[2].slots] = True
            assert not changed.flatten(1).any(1)[~touched].any(), "the slots of the step and no others"
        batch.restore()


# large before small: rows of the step before must not count
DECODES = [([(row + count) % MAX_SEQS for row in range(count)], {}) for count in (11, 1, 9, 2, 10, 3, 8, 4, 7, 5, 6)]
MIXED = [
    ([0, 1, 2, 3, 4, 5, 6, 7, 8], {9: 9, 10: 8}),
    ([], {1: 2}),
    ([3], {5: 16}),
    ([8, 2, 4], {1: 3, 7: 2, 10: 12}),
    ([], {9: 5, 8: 6, 7: 7}),
    ([10], {9: 2}),
]


@pytest.mark.parametrize("page_size", [1, 7, 16, MAX_LEN], ids=["1", "7", "16", "contiguous"])
def test_every_step_gives_the_logits_and_the_kv_of_the_step_alone(model: LoadedModel, page_size: int):
    batch = Batch(model, page_size)
    plain = ModelForward(model.model, batch.host)
    replayed, capture = graphed(model, batch)
    assert same_bits(batch.host.raw_tensors(), batch.before), "capturing writes nobody's KV"
    check_steps(batch, plain, replayed, [*DECODES, *MIXED, *DECODES[:3], *MIXED[:2]], 1e-4)
    assert capture.replayed == replayed.num_replayed == len(DECODES) + len(MIXED) + 5


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_a_quantised_cache_too(model: LoadedModel, kv_cache_dtype: str):
    batch = Batch(model, 16, kv_cache_dtype)
    plain = ModelForward(model.model, batch.host)
    replayed, _ = graphed(model, batch)
    assert same_bits(batch.host.raw_tensors(), batch.before)
    check_steps(batch, plain, replayed, [DECODES[0], MIXED[3], DECODES[5], MIXED[1]], 1e-3)


def test_a_step_that_fits_no_graph_runs_eagerly(model: LoadedModel):
    batch = Batch(model, 16)
    sizes = GraphSizes((1, 4), (8,))
    forward, capture = graphed(model, batch, sizes)
    with torch.inference_mode():
        for rows, chunks, fits in (
            ([0, 1, 2, 3, 4], {}, False),
            ([0, 1, 2, 3], {}, True),
            ([], {10: 9}, False),
            ([0], {10: 7}, True),
            ([], {10: 2, 9: 2, 8: 2}, True),
        ):
            before = capture.replayed
            assert forward(*batch.step(rows, chunks)).shape == (len(rows) + len(chunks), VOCAB)
            assert capture.replayed - before == fits, (rows, chunks)


@pytest.mark.parametrize(("rows", "chunks"), [([0, 3], {}), ([0, 3], {10: 5, 9: 2})])
def test_logits_are_those_of_the_tokens_that_draw(model: LoadedModel, rows: list[int], chunks: dict[int, int]):
    """A prompt's chunk, which may be a single token, draws only if it is the last."""
    batch = Batch(model, 16)
    forward, capture = graphed(model, batch)
    ids, positions, step, last = batch.step(rows, chunks)
    with torch.inference_mode():
        everything = forward(ids, positions, step, last).clone()
        for drawing in ([0], [1], [len(last) - 1], []):
            assert torch.equal(forward(ids, positions, step, last[drawing]), everything[drawing])
        assert capture.replayed == 5
        every = torch.arange(len(ids))
        assert forward(ids, positions, step, every).shape == (len(ids), VOCAB)
        many = every.repeat(MAX_SEQS)[: MAX_SEQS + 1]
        assert forward(ids, positions, step, many).shape == (MAX_SEQS + 1, VOCAB)
    assert capture.replayed == 6, "more wanted logits than rows"


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so(
    model: LoadedModel, fails_at: int, caplog: pytest.LogCaptureFixture
):
    batch = Batch(model, 16)
    plain, forward = ModelForward(model.model, batch.host), ModelForward(model.model, batch.host)
    sizes = replace(SIZES, mixed=())
    capture = FakeCapture(batch.host, fails_at)
    with caplog.at_level("WARNING"):
        assert not forward.capture_graphs(sizes, tables_for(sizes, batch), MAX_LEN, capture)
    (record,) = caplog.records
    assert "not permitted when stream is capturing" in record.message and "\n" not in record.message
    capture = FakeCapture(batch.host, fails_at)
    with pytest.raises(ValueError, match=r"^cuda_graphs cannot be true: .*not permitted.*leave"):
        forward.capture_graphs(sizes, tables_for(sizes, batch), MAX_LEN, capture, required=True)
    assert not forward.replays_graphs
    with torch.inference_mode():
        expected = plain(*batch.step([1, 2])).clone()
        batch.restore()
        assert torch.equal(forward(*batch.step([1, 2])), expected)
    assert capture.replayed == 0


def test_mixed_steps_that_the_memory_suffices_for_are_replayed(model: LoadedModel, caplog: pytest.LogCaptureFixture):
    batch = Batch(model, 16)
    forward, capture = ModelForward(model.model, batch.host), FakeCapture(batch.host)
    attempts = []

    def short_of_memory(body: Callable[[], None]) -> Callable[[], None]:
        attempts.append(body)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return capture(body)

    with caplog.at_level("WARNING"):
        assert forward.capture_graphs(SIZES, tables_for(SIZES, batch), MAX_LEN, short_of_memory)
    (record,) = caplog.records
    assert f"mixed step of {SIZES.mixed[-1]} tokens" in record.message and "out of memory" in record.message
    assert forward.graph_sizes == replace(SIZES, mixed=SIZES.mixed[:-1])
    with torch.inference_mode():
        forward(*batch.step([], {3: 36}))
        assert capture.replayed == 0
        forward(*batch.step([], {3: 20}))
    assert capture.replayed == 1


def test_decodes_are_replayed_where_mixed_steps_cannot_be_captured(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
):
    batch = Batch(model, 16)
    forward, capture = ModelForward(model.model, batch.host), FakeCapture(batch.host)
    bodies = []

    def short_of_memory(body: Callable[[], None]) -> Callable[[], None]:
        bodies.append(body)
        if len(bodies) == 2:
            raise RuntimeError("out of memory")
        return capture(body)

    with caplog.at_level("WARNING"):
        assert forward.capture_graphs(SIZES, tables_for(SIZES, batch), MAX_LEN, short_of_memory)
    (record,) = caplog.records
    assert record.message.startswith("steps with prompts run without CUDA graphs") and "out of memory" in record.message
    assert forward.graph_sizes == replace(SIZES, mixed=())
    with torch.inference_mode():
        forward(*batch.step([0, 1], {9: 9}))
        assert capture.replayed == 0
        forward(*batch.step([0, 1]))
    assert capture.replayed == 1


# Parts between one attention and the next, for one token and for several; the head by how many tokens draw: one, some
# or all. Twelve layers share them.
MOST_COMPILED = 16


@pytest.mark.full
def test_a_compiled_model_gives_the_same_logits_and_its_layers_share_what_is_compiled(tmp_path: Path):
    """dynamo's part, without a code generator: what is traced, what stays outside, and any number of tokens."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12}
    path.write_text(json.dumps({**COMMON, **sizes, "model_type": "llama"}))
    model = load_model(EngineConfig(model=str(path), device="cpu"))
    batch = Batch(model, 16)
    plain = ModelForward(model.model, batch.host)
    compiled = ModelForward(model.model, batch.host, lambda inner: compile_model(inner, backend="eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    kinds = [([0, 1, 2], {}), ([4], {}), ([], {3: 20}), ([0, 1], {9: 9, 10: 3})]
    others = [(list(range(MAX_SEQS)), {}), ([2, 3, 5], {10: 6}), ([8], {}), ([], {9: 7})]
    try:
        with torch.inference_mode(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for rows, chunks in kinds + others:
                expected = plain(*batch.step(rows, chunks)).clone()
                batch.restore()
                torch.testing.assert_close(compiled(*batch.step(rows, chunks)), expected, rtol=1e-4, atol=1e-4)
                batch.restore()
                graphs.append(counters["stats"]["unique_graphs"])
    finally:
        AttentionInterface.register(NAME, attention_forward)
        torch._dynamo.reset()
    assert 0 < graphs[0] <= graphs[len(kinds) - 1] == graphs[-1] <= MOST_COMPILED, graphs
