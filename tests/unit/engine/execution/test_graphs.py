"""Decode under graphs, on the CPU: a fake capture keeps the function and runs it again on the same buffers.

What is shown here is the padding and the buffers; that CUDA replays what it captured is CUDA's part.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from transformers import AttentionInterface

from engine.execution.forward import ModelForward
from engine.execution.graphs import LARGEST_BATCH, padded_sizes
from engine.model.attention import NAME, AttentionHost, StepTensors
from engine.model.attention import forward as attention_forward
from engine.model.compiler import compile_model
from engine.model.loader import LoadedModel
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import VOCAB, loaded, model_folder, one_thread

MAX_SEQS, MAX_LEN = 11, 40
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
    """``MAX_SEQS`` sequences of 1 to ``MAX_LEN - 4`` tokens with a random KV, NaN wherever nobody's token lies."""

    def __init__(self, model: LoadedModel, page_size: int, kv_cache_dtype: str = "auto"):
        self.pages = -(-MAX_LEN // page_size)
        num_slots = MAX_SEQS * self.pages * page_size + UNUSED
        like = next(model.model.parameters())
        self.host = AttentionHost(model.backend, model.kv_shape, num_slots, page_size, like, kv_cache_dtype)
        self.page_size = page_size
        generator = torch.Generator().manual_seed(page_size)
        order = torch.randperm(MAX_SEQS * self.pages, generator=generator)
        self.page_starts = order.view(MAX_SEQS, self.pages) * page_size
        self.lengths = torch.randint(1, MAX_LEN - 3, (MAX_SEQS,), generator=generator)
        self.lengths[0] = 1
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

    def step(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, StepTensors, torch.Tensor]:
        """What the executor hands over for one token of each of ``rows``."""
        lengths = self.lengths[rows]
        at = lengths - 1
        width = int(-(-lengths.max() // self.page_size))
        tables = self.page_starts[rows]
        step = StepTensors(
            num_decodes=len(rows),
            slots=tables.gather(1, at[:, None] // self.page_size)[:, 0] + at % self.page_size,
            decode_page_starts=tables[:, :width],
            decode_seq_lens=lengths,
            prefill_page_starts=tables[:0],
            prefill_seq_lens=lengths[:0],
            query_starts=torch.zeros(1, dtype=torch.int64),
            max_decode_tokens=int(lengths.max()),
            max_prefill_tokens=0,
            max_queries=0,
        )
        return self.ids[rows], at, step, torch.arange(len(rows))


def same_bits(ours: tuple[torch.Tensor, ...], theirs: list[torch.Tensor]) -> bool:
    """NaN included."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def test_sizes_cover_every_batch_and_grow_slowly():
    assert padded_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert padded_sizes(1) == [1]
    assert padded_sizes(11) == [1, 2, 4, 8, 11]
    for most in (3, 64, 65, 100, 256, 300, 512, 4000):
        sizes = padded_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, LARGEST_BATCH)
        for count in range(1, sizes[-1] + 1):
            size = min(size for size in sizes if size >= count)
            assert size < 2 * count and (count <= 64 or size - count < count / 4)


@pytest.mark.parametrize("page_size", [1, 7, 16, MAX_LEN], ids=["1", "7", "16", "contiguous"])
def test_every_batch_size_gives_the_logits_and_the_kv_of_the_step_alone(model: LoadedModel, page_size: int):
    batch = Batch(model, page_size)
    plain = ModelForward(model.model, batch.host)
    graphed = ModelForward(model.model, batch.host)
    capture = FakeCapture()
    assert graphed.capture_decodes((MAX_SEQS, batch.pages), MAX_LEN, capture)
    assert same_bits(batch.host.raw_tensors(), batch.before), "capturing writes nobody's KV"
    begin, seen = batch.host.begin, []
    batch.host.begin = lambda step: (seen.append(step), begin(step))
    sizes = [11, 1, 9, 2, 10, 3, 8, 4, 7, 5, 6]  # large before small: rows of the step before must not count
    for done, count in enumerate(sizes):
        rows = [(row + done) % MAX_SEQS for row in range(count)]
        with torch.inference_mode():
            expected = plain(*batch.step(rows)).clone()
            written = [tensor.clone() for tensor in batch.host.raw_tensors()]
            batch.restore()
            got = graphed(*batch.step(rows)).clone()
        padded = seen[-1]
        assert padded.slots[count:].eq(-1).all() and padded.decode_seq_lens[count:].eq(0).all(), "padding is at rest"
        assert padded.max_decode_tokens == MAX_LEN, "the number of programs is part of the graph"
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        for ours, theirs, before in zip(batch.host.raw_tensors(), written, batch.before, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
            changed = (ours != before) & ~(ours.isnan() & before.isnan())
            assert int(changed.flatten(1).any(1).sum()) == count, "one slot a sequence and no other"
        batch.restore()
    assert (capture.captured, capture.replayed) == (len(padded_sizes(MAX_SEQS)), len(sizes))


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_a_quantised_cache_too(model: LoadedModel, kv_cache_dtype: str):
    batch = Batch(model, 16, kv_cache_dtype)
    plain, graphed = ModelForward(model.model, batch.host), ModelForward(model.model, batch.host)
    assert graphed.capture_decodes((MAX_SEQS, batch.pages), MAX_LEN, FakeCapture())
    assert same_bits(batch.host.raw_tensors(), batch.before)
    for count in (11, 3, 6):
        rows = list(range(count))
        with torch.inference_mode():
            expected = plain(*batch.step(rows)).clone()
            batch.restore()
            torch.testing.assert_close(graphed(*batch.step(rows)), expected, rtol=1e-3, atol=1e-3)
        batch.restore()


def test_steps_with_a_prompt_and_too_wide_ones_run_eagerly(model: LoadedModel):
    batch = Batch(model, 16)
    forward = ModelForward(model.model, batch.host)
    capture = FakeCapture()
    assert forward.capture_decodes((MAX_SEQS - 2, batch.pages), MAX_LEN, capture)
    with torch.inference_mode():
        forward(*batch.step(list(range(MAX_SEQS))))
        assert capture.replayed == 0, "more rows than any graph has"
        ids, positions, step, _ = batch.step([0, 3])
        (chunk,) = batch.step([5])[2:3]
        mixed = StepTensors(
            num_decodes=2,
            slots=torch.cat([step.slots, chunk.slots]),
            decode_page_starts=step.decode_page_starts,
            decode_seq_lens=step.decode_seq_lens,
            prefill_page_starts=chunk.decode_page_starts,
            prefill_seq_lens=chunk.decode_seq_lens,
            query_starts=torch.tensor([0, 1]),
            max_decode_tokens=step.max_decode_tokens,
            max_prefill_tokens=chunk.max_decode_tokens,
            max_queries=1,
        )
        both = torch.cat([ids, batch.ids[[5]]]), torch.cat([positions, batch.lengths[[5]] - 1])
        assert forward(*both, mixed, torch.arange(3)).shape == (3, VOCAB)
        assert capture.replayed == 0
        everything = forward(ids, positions, step, torch.arange(2)).clone()
        drawing = forward(ids, positions, step, torch.tensor([1]))
    assert capture.replayed == 2
    assert torch.equal(drawing, everything[1:]), "only the rows that draw"


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so(
    model: LoadedModel, fails_at: int, caplog: pytest.LogCaptureFixture
):
    batch = Batch(model, 16)
    plain, forward = ModelForward(model.model, batch.host), ModelForward(model.model, batch.host)
    capture = FakeCapture(fails_at)
    with caplog.at_level("WARNING"):
        assert not forward.capture_decodes((MAX_SEQS, batch.pages), MAX_LEN, capture)
    (record,) = caplog.records
    assert "not permitted when stream is capturing" in record.message and "\n" not in record.message
    with pytest.raises(ValueError, match=r"^cuda_graphs cannot be true: .*not permitted.*leave"):
        forward.capture_decodes((MAX_SEQS, batch.pages), MAX_LEN, FakeCapture(fails_at), required=True)
    assert not forward.replays_graphs
    with torch.inference_mode():
        expected = plain(*batch.step([1, 2])).clone()
        batch.restore()
        assert torch.equal(forward(*batch.step([1, 2])), expected)
    assert capture.replayed == 0


def test_a_compiled_model_gives_the_same_logits(tmp_path_factory: pytest.TempPathFactory):
    """dynamo's part, without a code generator: what is traced, what stays outside, and any number of tokens."""
    model = loaded(model_folder(str(tmp_path_factory.mktemp("compiled"))))
    batch = Batch(model, 16)
    plain = ModelForward(model.model, batch.host)
    compiled = ModelForward(model.model, batch.host, lambda inner: compile_model(inner, backend="eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    try:
        with torch.inference_mode():
            for rows in ([0, 1, 2], [4], list(range(MAX_SEQS))):
                expected = plain(*batch.step(rows)).clone()
                batch.restore()
                torch.testing.assert_close(compiled(*batch.step(rows)), expected, rtol=1e-4, atol=1e-4)
                batch.restore()
                graphs.append(counters["stats"]["unique_graphs"])
    finally:
        AttentionInterface.register(NAME, attention_forward)
        torch._dynamo.reset()
    assert 0 < graphs[0] <= graphs[1] == graphs[2], "compiled, and again for a single token at most"
