"""Forks: siblings of one prompt, best_of, beams; what they share, what they copy, and what comes back."""

import pytest

from engine.sequence import Status
from tests.support.engine_parts import CountingExecutor, collect, drain, expected_outputs, request, small_engine


def expected(one, vocab_size=97, eos=(), max_model_len=32):
    """As ``drain`` names them."""
    found = expected_outputs(one, max_model_len, CountingExecutor(vocab_size, eos))
    return {f"{one.request_id}/{i}" if i else one.request_id: list(tokens) for i, (tokens, _) in found.items()}


WIDE = [
    {"n": 3},
    {"n": 2, "best_of": 4},
    {"beam_width": 3},
    {"n": 3, "beam_width": 4, "length_penalty": 0.5},
    {"n": 2, "beam_width": 3, "early_stopping": "never"},
]


@pytest.mark.parametrize("width", WIDE, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 4},
        {"preemption_mode": "swap", "host_slots": 20},
        {"layout": "contiguous"},
        {"layout": "contiguous", "reservation": "oracle", "preemption_mode": "swap", "host_slots": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [32, 256], ids=["full", "roomy"])
def test_outputs_are_those_of_the_pure_functions(width, settings, slots):
    """A pool that holds one sequence of 32 tokens: the siblings take turns."""
    one = request("a", 13, max_tokens=12, **width)
    page_size = {} if "layout" in settings else {"page_size": 4}
    engine = small_engine(slots, CountingExecutor(97, (5,)), **page_size, **settings)
    engine.add_request(one)
    assert drain(engine) == expected(one, eos=(5,))
    stats = engine.stats()
    assert (stats.kv.pages_owned, stats.kv.host_slots_used) == (0, 0)
    assert sum(stats.finished.values()) == one.params.n


def test_siblings_share_the_prompt_and_copy_only_the_last_page_when_they_write_it():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4)
    engine.add_request(request("a", 14, max_tokens=4, n=3))
    engine.step()
    running = engine.scheduler.running
    assert [seq.index for seq in running] == [0, 1, 2]
    assert running[0].pages == running[1].pages == running[2].pages
    kv = engine.stats().kv
    assert (kv.pages_owned, kv.slots_used, kv.slots_shared) == (4, 14, 28)
    engine.step()
    pages = [seq.pages for seq in running]
    assert pages[0][:3] == pages[1][:3] == pages[2][:3]
    assert len({p[3] for p in pages}) == 3, "each has a last page of its own"
    stats = engine.stats()
    assert (stats.counters.copied_pages, stats.counters.copied_slots) == (2, 4), "the last one keeps the original"
    assert (stats.kv.slots_used, stats.kv.slots_shared) == (12 + 3 * 3, 24)
    assert stats.forks == 2
    drain(engine)


@pytest.mark.parametrize("prompt", [12, 16])
def test_a_prompt_of_full_pages_is_not_copied_at_all(prompt):
    engine = small_engine(256, page_size=4)
    engine.add_request(request("a", prompt, max_tokens=4, n=4))
    drain(engine)
    assert engine.stats().counters.copied_pages == 0


def test_a_contiguous_fork_copies_everything():
    engine = small_engine(4 * 32, layout="contiguous")
    engine.add_request(request("a", 14, max_tokens=4, n=3))
    drain(engine)
    counters = engine.stats().counters
    assert (counters.copied_pages, counters.copied_slots) == (2, 28)


def test_an_aborted_sibling_leaves_the_others_alone():
    """vLLM 0.2.7: `ref_count` counted finished siblings, so that shared pages were never freed."""
    one = request("a", 14, max_tokens=8, n=3)
    engine = small_engine(64, page_size=4)
    engine.add_request(one)
    got: dict[str, list[int]] = {}
    collect(engine.step(), got)
    assert engine.abort("a", index=1)
    assert not engine.abort("a", index=1)
    engine.check_integrity()
    collect(engine.step(), got)
    assert engine.abort("a", "error", index=0)
    engine.check_integrity()
    rest = drain(engine)
    alone = expected(one)
    assert got["a"] + rest.get("a", []) == alone["a"][:2]
    assert got["a/1"] == alone["a/1"][:1]
    assert got["a/2"] + rest["a/2"] == alone["a/2"]
    stats = engine.stats()
    assert stats.finished == {"abort": 1, "error": 1, "length": 1}
    assert stats.kv.pages_owned == 0


@pytest.mark.parametrize("width", [{"n": 2, "best_of": 3}, {"n": 2, "beam_width": 3}], ids=str)
def test_of_a_request_that_chooses_all_go(width):
    engine = small_engine(64, page_size=4)
    engine.add_request(request("a", 14, max_tokens=8, **width))
    assert [engine.step() for _ in range(3)] == [[], [], []], "nothing is shown before the end"
    assert engine.abort("a", index=0)
    assert not engine.has_work()
    assert engine.stats().finished == {"abort": 2}
    assert engine.stats().kv.pages_owned == 0


def test_before_the_prompt_is_computed_all_siblings_go():
    engine = small_engine(64, page_size=4, max_num_batched_tokens=4)
    engine.add_request(request("a", 14, max_tokens=8, n=3))
    engine.step()
    assert engine.abort("a", index=2)
    assert not engine.has_work()
    assert engine.stats().finished == {"abort": 3}


def test_a_fork_takes_no_row_that_others_were_promised():
    """b is computing its prompt and will have a sibling; a fork of a, which nobody reckoned with, has to wait."""
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
    while engine.has_work():
        engine.step()
        engine.check_integrity()


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

    one = request("a", 3, max_tokens=3, n=2, best_of=4, stop_token_ids=(5,))  # sibling 2 ends first
    engine = small_engine(256, Scripted(), page_size=4)
    engine.add_request(one)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [(o.index, o.token_ids) for o in outputs] == [(0, (0, 0, 0)), (1, (5,))]
    assert [o.num_discarded for o in outputs] == [6, 0]
    assert engine.stats().generation_tokens == 10


def test_beams_wait_for_each_other_and_need_room_for_one_only():
    """One sequence's worth of pages, three beams: they are computed in turns, preempted with their candidates."""
    one = request("a", 10, max_tokens=20, n=3, beam_width=3)
    engine = small_engine(32, page_size=8)
    engine.add_request(one)
    assert drain(engine) == expected(one)
    assert engine.stats().num_preemptions > 0


def test_wider_than_the_vocabulary_is_refused():
    """A search of 4 beams over 3 tokens could end with fewer results than were asked for."""
    engine = small_engine(64, CountingExecutor(5, (4,)), page_size=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="beam_width 5 is more than the 4 tokens of the vocabulary"):
        engine.add_request(request("a", 3, beam_width=5, max_tokens=1))
    assert not engine.has_work()
    engine.add_request(request("a", 3, beam_width=4, n=4, max_tokens=1))
    assert len(drain(engine)) == 4


def test_siblings_have_keys_of_their_own():
    engine = small_engine(256, page_size=4, enable_prefix_caching=True)
    engine.add_request(request("a", 6, max_tokens=12, n=2))
    for _ in range(11):
        engine.step()
    one, other = engine.scheduler.running
    assert one.page_hashes[0] == other.page_hashes[0]
    assert not set(one.page_hashes[1:]) & set(other.page_hashes[1:])
    assert len(one.page_hashes) == len(other.page_hashes) == 4


def test_what_a_fork_without_room_computes_is_counted_as_computed_again():
    engine = small_engine(32, layout="contiguous")
    engine.add_request(request("a", 13, max_tokens=4, n=2))
    drain(engine)
    assert engine.stats().recomputed_tokens == 13
