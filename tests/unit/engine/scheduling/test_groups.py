"""Forks: siblings of one prompt, best_of, beams; what they share, what they copy, and what is returned.

That their outputs are those of pure functions, under any pressure: tests/property.
"""

import pytest

from kvbench_engine.sequence import Status
from tests.support.engine_parts import CountingExecutor, drain, request, small_engine


def test_siblings_share_the_prompt_and_copy_only_the_last_page_when_they_write_it():
    engine = small_engine(256, page_size=4)
    engine.add_request(request("a", 14, max_tokens=4, n=3))
    engine.step()
    running = engine.scheduler.running
    assert [seq.index for seq in running] == [0, 1, 2]
    assert running[0].pages == running[1].pages == running[2].pages
    kv = engine.stats().kv
    assert (kv.pages_owned, kv.pages_logical, kv.slots_used, kv.slots_shared) == (4, 12, 14, 28)
    engine.step()
    pages = [seq.pages for seq in running]
    assert pages[0][:3] == pages[1][:3] == pages[2][:3]
    assert len({p[3] for p in pages}) == 3, "each has a last page of its own"
    stats = engine.stats()
    assert (stats.counters.copied_pages, stats.counters.copied_slots) == (2, 4), "the last one keeps the original"
    assert (stats.kv.slots_used, stats.kv.slots_shared) == (12 + 3 * 3, 24)
    assert stats.page_steps == {"physical": 4 + 6, "logical": 12 + 12}
    assert stats.forks == 2


@pytest.mark.parametrize(
    ("prompt", "slots", "settings", "copied"),
    [(12, 256, {"page_size": 4}, (0, 0)), (14, 4 * 32, {"layout": "contiguous"}, (3, 42))],
    ids=["full pages are never copied", "a contiguous fork copies everything"],
)
def test_what_forks_copy(prompt, slots, settings, copied):
    engine = small_engine(slots, **settings)
    engine.add_request(request("a", prompt, max_tokens=4, n=4))
    drain(engine)
    assert (engine.stats().counters.copied_pages, engine.stats().counters.copied_slots) == copied


def test_a_fork_without_room_is_computed_again():
    engine = small_engine(32, layout="contiguous")
    engine.add_request(request("a", 13, max_tokens=4, n=2))
    drain(engine)
    assert engine.stats().recomputed_tokens == 13


@pytest.mark.parametrize("width", [{"n": 2, "best_of": 3}, {"n": 2, "beam_width": 3}], ids=str)
def test_of_a_request_that_returns_the_best_all_sequences_end_together(width):
    engine = small_engine(64, page_size=4)
    engine.add_request(request("a", 14, max_tokens=8, **width))
    assert [engine.step() for _ in range(3)] == [[], [], []], "nothing is returned before the end"
    assert engine.abort("a", index=0)
    assert not engine.has_work()
    assert engine.stats().finished == {"abort": 2}
    assert engine.stats().kv.pages_owned == 0


def test_a_fork_takes_no_row_that_others_were_promised():
    """b is computing its prompt and will have a sibling; an unplanned fork of a has to wait."""
    engine = small_engine(256, page_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    engine.add_request(request("a", 6, max_tokens=8))
    engine.step()
    engine.add_request(request("b", 20, max_tokens=3, n=2))
    engine.step()
    scheduler = engine.scheduler
    parent = scheduler.running[0]
    child = parent.fork(1)
    scheduler.fork(parent, child)
    assert (child.status, child.row, len(scheduler.running)) == (Status.WAITING, -1, 2)
    assert child in scheduler.waiting
    scheduler.finish(child)
    drain(engine)


def test_a_wide_request_waits_until_all_its_rows_are_free():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, max_num_seqs=4)
    engine.add_request(request("a", 5, max_tokens=3, n=2))
    engine.add_request(request("b", 5, max_tokens=3, n=3))
    engine.add_request(request("c", 5, max_tokens=3))
    drain(engine)
    assert [name for name, _ in executor.plans[0]] == ["a"], "b would need a fifth row, and c comes after b"
    assert max(map(len, executor.plans)) == 4


def test_best_of_takes_the_best_mean_and_of_a_tie_the_lower_index():
    class Scripted(CountingExecutor):
        def sample(self, history, index):
            return (1, 0, 5, 2)[index]

        @staticmethod
        def logprob(token):
            return -0.25 if token in (0, 5) else -0.5

    engine = small_engine(256, Scripted(), page_size=4)
    engine.add_request(request("a", 3, max_tokens=3, n=2, best_of=4, stop_token_ids=(5,)))  # sibling 2 ends first
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [(o.index, o.token_ids) for o in outputs] == [(0, (0, 0, 0)), (1, (5,))]
    assert [o.num_discarded for o in outputs] == [6, 0]
    assert engine.stats().generation_tokens == 10


def test_more_beams_than_the_vocabulary_has_tokens_are_refused():
    """A search of 5 beams over 4 tokens that end no beam could end with fewer results than wanted."""
    engine = small_engine(64, CountingExecutor(5, (4,)), page_size=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="beam_width 5 is more than the 4 tokens"):
        engine.add_request(request("a", 3, beam_width=5, max_tokens=1))
    assert not engine.has_work()
    engine.add_request(request("a", 3, beam_width=4, n=4, max_tokens=1))
    assert len(drain(engine)) == 4
