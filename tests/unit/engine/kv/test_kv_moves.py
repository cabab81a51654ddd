from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.manager import Move, MoveKind
from engine.kv.mover import batches

COPY, OUT, IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN


def test_moves_of_one_kind_go_together():
    moves = [Move(OUT, 0, 8, 4), Move(OUT, 4, 0, 4), Move(IN, 4, 12, 2), Move(COPY, 0, 8, 3), Move(COPY, 0, 4, 4)]
    assert list(batches(moves)) == [moves[:2], moves[2:3], moves[3:]]


def test_what_one_move_wrote_is_read_by_a_later_batch():
    moves = [Move(COPY, 0, 4, 4), Move(COPY, 4, 8, 4)]
    assert list(batches(moves)) == [moves[:1], moves[1:]]


def test_a_slot_that_is_written_twice_is_written_in_order():
    moves = [Move(OUT, 0, 8, 4), Move(OUT, 4, 8, 4)]
    assert list(batches(moves)) == [moves[:1], moves[1:]]


def test_no_moves_no_batches():
    assert list(batches([])) == []


def do_one_by_one(moves, device, host):
    for kind, source, target, count in moves:
        sources = host if kind is IN else device
        targets = host if kind is OUT else device
        targets[target : target + count] = sources[source : source + count]


def do_batch_at_once(batch, device, host):
    """As an index copy does: everything is read before anything is written; of two writes to one slot, either may
    come last, here the first."""
    kind = batch[0].kind
    sources = host if kind is IN else device
    targets = host if kind is OUT else device
    read = [sources[source : source + count] for _, source, _, count in batch]
    for (_, _, target, count), held in reversed(list(zip(batch, read, strict=True))):
        targets[target : target + count] = held


PAGE = 3
moves_of_pages = st.lists(
    st.builds(
        lambda kind, source, target, count: Move(kind, source * PAGE, target * PAGE, count),
        st.sampled_from(MoveKind), st.integers(0, 5), st.integers(0, 5), st.integers(1, PAGE),
    ).filter(lambda move: move.kind is not COPY or move.source != move.target),
    max_size=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(moves_of_pages)
def test_batches_done_at_once_give_what_moves_one_by_one_give(moves):
    one, other = (([f"d{i}" for i in range(30)], [f"h{i}" for i in range(30)]) for _ in range(2))
    do_one_by_one(moves, *one)
    found = list(batches(moves))
    for batch in found:
        assert len({move.kind for move in batch}) == 1
        do_batch_at_once(batch, *other)
    assert one == other
    assert [move for batch in found for move in batch] == moves
