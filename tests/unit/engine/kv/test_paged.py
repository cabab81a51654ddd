"""The paged manager: copies on write, and the edges of its capacity."""

import numpy as np
import pytest

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import Move, MoveKind
from kvbench_engine.kv.paged import PagedKVManager
from kvbench_engine.sequence import Sequence
from tests.support.engine_parts import drain, request, small_engine, undisturbed


def manager_of(pages: int, page_size: int = 4, pages_per_seq: int = 8) -> PagedKVManager:
    return PagedKVManager(4, KVCapacity(0, 128, 0, page_size, pages, pages * page_size, pages_per_seq, 0), False)


def test_the_source_of_a_copy_on_write_stays_pinned_until_it_is_copied():
    """All its owners leave in the step that copies it, and still it is not allocated again before the copy is done."""
    kv = manager_of(3)
    parent = Sequence.of(request("a", 6))
    assert kv.admit(parent, 0) and kv.grow(parent, 6)
    kv.commit(parent, 6)
    child = parent.fork(1)
    assert kv.fork(parent, child)
    shared = parent.pages[1]
    assert kv.grow(child, 1)  # writes to the shared page, so it is copied
    own = child.pages[1]
    assert kv.take_moves() == [Move(MoveKind.COPY, shared * 4, own * 4, 2)] and own != shared
    kv.free(parent)
    kv.free(child)
    assert (kv.stats().pages_pinned, kv.stats().slots_pinned, kv.stats().pages_free) == (1, 4, 2)
    assert shared not in [kv.pool.allocate() for _ in range(kv.pool.num_available)]
    kv.moves_done()
    assert kv.stats().pages_pinned == 0 and kv.pool.allocate() == shared


def test_a_request_larger_than_the_pool_is_refused_alone():
    """nano-vllm admitted it, preempted it, and died."""
    engine = small_engine(64, page_size=4)
    engine.kv = engine.scheduler.kv = manager_of(pages=5)  # less than max_model_len
    engine.executor.watch(engine.kv)
    with pytest.raises(ValueError, match="21 tokens and the KV budget holds 20"):
        engine.add_request(request("large", 11, max_tokens=10))
    one = request("fits", 10, max_tokens=10)
    engine.add_request(one)
    assert drain(engine) == undisturbed([one])


def test_slot_numbers_do_not_wrap_at_two_to_the_31():
    """vllm#47671, sglang#20389: page x page size in int32 wrapped, and KV was written to other slots."""
    page_size, pages = 2**20, 4096
    manager = manager_of(pages, page_size, 2)
    assert manager.page_table.dtype == np.int64
    for page in range(pages - 2):
        assert manager.pool.allocate() == page
    seq = Sequence.of(request("a", 3))
    seq.token_ids = [0] * (page_size + 1)
    assert manager.admit(seq, 0) and manager.grow(seq, page_size + 1)
    assert manager.page_table[0, seq.row].tolist() == [(2**12 - 2) * 2**20, (2**12 - 1) * 2**20]
    assert manager.stats().slots_total == 2**32


@pytest.mark.parametrize(("watermark", "admitted"), [(None, 3), (0.0, 5), (0.2, 4), (0.25, 3), (0.5, 2), (0.99, 1)])
def test_a_watermark_keeps_its_share_of_all_pages_free_beside_others(watermark, admitted):
    """20 pages of 4 tokens, and prompts of 4 pages; without one, 4 pages are kept for each sequence that runs."""
    engine = small_engine(80, page_size=4, watermark=watermark, max_num_seqs=8, max_num_batched_tokens=200)
    for i in range(6):
        engine.add_request(request(str(i), range(i, i + 14), max_tokens=2))
    engine.step()
    assert len(engine.scheduler.running) == admitted
    drain(engine)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"watermark": 1}, "from 0 to less than 1"),
        ({"watermark": -0.1}, "from 0 to less than 1"),
        ({"watermark": True}, "from 0 to less than 1"),
        ({"watermark": "0.1"}, "from 0 to less than 1"),
        ({"watermark": 0.1, "layout": "contiguous"}, "no effect with layout 'contiguous'"),
    ],
)
def test_a_watermark_that_means_nothing_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig(**settings)
