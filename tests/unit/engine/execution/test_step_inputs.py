"""A step's inputs against a loop over its tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.execution.step_inputs import InputBuffers, PageTables, StepInputs
from kvbench_engine.scheduling.step_plan import Scheduled
from kvbench_engine.sequence import PENDING, Request, Sequence

CPU = torch.device("cpu")
ROWS, LONGEST = 7, 40


@st.composite
def steps(draw):
    """(page sizes of one or several groups, page tables, items with single tokens first)."""
    page_sizes = draw(st.sampled_from([(1,), (3,), (16,), (3, 3, 3), (40, 7)]))
    shape = len(page_sizes), ROWS, -(-LONGEST // min(page_sizes))
    starts = draw(st.permutations(range(np.prod(shape))))
    table = np.array(starts, dtype=np.int64).reshape(shape) * max(page_sizes)
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True))
    items = []
    for row in rows:
        length = draw(st.integers(1, LONGEST))
        seq = Sequence.of(Request(str(row), tuple(100 * row + i for i in range(length))))
        seq.row = row
        if draw(st.booleans()):
            seq.token_ids[-1] = PENDING
            seq.num_pending = 1
        seq.num_computed = draw(st.integers(0, length - 1))
        items.append(Scheduled(seq, draw(st.integers(1, length - seq.num_computed))))
    return page_sizes, table, sorted(items, key=lambda item: item.num_tokens > 1)


def check(inputs: StepInputs, page_sizes: tuple, table: np.ndarray, items: list[Scheduled], drawn_at: dict) -> None:
    ids, positions, last, pending = [], [], [], []
    slots: list[list[int]] = [[] for _ in page_sizes]
    for seq, count in items:
        for position in range(seq.num_computed, seq.num_computed + count):
            if seq.token_ids[position] == PENDING:
                pending.append((len(ids), drawn_at[seq]))
            ids.append(seq.token_ids[position])
            positions.append(position)
            for group, size in enumerate(page_sizes):
                slots[group].append(int(table[group, seq.row, position // size]) + position % size)
        if seq.num_computed + count == len(seq.token_ids):
            last.append(len(ids) - 1)
    assert inputs.ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.last_tokens.tolist() == last
    assert list(zip(inputs.pending_at.tolist(), inputs.pending_from.tolist(), strict=True)) == pending
    step = inputs.step
    decodes = [item for item in items if item.num_tokens == 1]
    chunks = [item for item in items if item.num_tokens > 1]
    assert (step.num_decodes, step.slots.tolist()) == (len(decodes), slots)
    longest = max(seq.num_computed + count for seq, count in items)
    for part, starts, lengths, most in (
        (decodes, step.decode_page_starts, step.decode_seq_lens, step.max_decode_tokens),
        (chunks, step.prefill_page_starts, step.prefill_seq_lens, step.max_prefill_tokens),
    ):
        ends = [seq.num_computed + count for seq, count in part]
        assert (lengths.tolist(), most) == (ends, max(ends, default=0))
        assert starts.shape == (len(page_sizes), len(part), -(-longest // min(page_sizes)))
        for group, size in enumerate(page_sizes):
            for own, end, (seq, _) in zip(starts[group].tolist(), ends, part, strict=True):
                pages = -(-end // size)
                assert own[:pages] == table[group, seq.row, :pages].tolist()
    bounds = np.cumsum([0, *(count for _, count in chunks)]).tolist()
    assert (step.query_starts.tolist(), step.max_queries) == (bounds, max((n for _, n in chunks), default=0))


@settings(deadline=None, max_examples=60)
@given(steps(), st.randoms(use_true_random=False))
def test_every_token_has_its_place(step, random):
    page_sizes, table, items = step
    drawn_at = {seq: at for at, (seq, _) in enumerate(random.sample(items, len(items)))}
    inputs = InputBuffers(CPU, page_sizes, table).make(items, drawn_at)
    check(inputs, page_sizes, table, items, drawn_at)
    drawn = torch.arange(len(items)) + 5000
    expected = inputs.ids.clone()
    for at, source in zip(inputs.pending_at.tolist(), inputs.pending_from.tolist(), strict=True):
        assert expected[at] == PENDING
        expected[at] = drawn[source]
    inputs.fill_in(drawn)
    assert torch.equal(inputs.ids, expected) and PENDING not in expected


@settings(deadline=None, max_examples=15)
@given(steps(), steps(), steps())
def test_a_step_still_stands_when_the_next_one_is_made(first, second, third):
    """On a GPU the copy out of a buffer may not have begun by then."""
    buffers = InputBuffers(CPU, first[0], first[1])
    made = []
    for page_sizes, table, items in (first, second, third):
        buffers.tables = PageTables(table, CPU, page_sizes)
        drawn_at = {seq: at for at, (seq, _) in enumerate(items)}
        made.append((buffers.make(items, drawn_at), page_sizes, table, items, drawn_at))
        for one in made[-2:]:
            check(*one)


@settings(deadline=None, max_examples=15)
@given(steps())
def test_all_parts_are_aligned_alike_in_every_step(step):
    """Triton compiles another kernel for a pointer that 16 bytes do not divide."""
    page_sizes, table, items = step
    inputs = InputBuffers(CPU, page_sizes, table).make(items, {seq: 0 for seq, _ in items})
    views = [value for part in (inputs, inputs.step) for value in vars(part).values() if torch.is_tensor(value)]
    assert len(views) == 11
    tables = [inputs.step.decode_page_starts, inputs.step.prefill_page_starts]
    views = [view for view in views if view.numel() and not any(view is table for table in tables)]
    base = inputs.ids.data_ptr()
    assert all((view.data_ptr() - base) % 64 == 0 and view.is_contiguous() for view in views)
    assert base % 16 == 0


@settings(deadline=None, max_examples=60)
@given(steps(), st.integers(1, 30), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_a_sequence_that_comes_back_to_its_row_sends_all_its_pages(step, seed, returned):
    """It was preempted meanwhile, and may have other pages; those of the others change only where they are written."""
    page_sizes, table, items = step
    buffers = InputBuffers(CPU, page_sizes, table)
    buffers.tables = PageTables(table, CPU, page_sizes, copied=True)
    buffers.tables._by_row.fill_(-1)
    drawn_at = {seq: 0 for seq, _ in items}
    check(buffers.make(items, drawn_at), page_sizes, table, items, drawn_at)
    other = np.random.default_rng(seed).permutation(table.ravel()).reshape(table.shape)
    for (seq, _), back in zip(items, returned, strict=False):
        seq.num_preemptions += back
        for group, size in enumerate(page_sizes):
            first = 0 if back else seq.num_computed // size
            table[group, seq.row, first:] = other[group, seq.row, first:]
    check(buffers.make(items, drawn_at), page_sizes, table, items, drawn_at)
