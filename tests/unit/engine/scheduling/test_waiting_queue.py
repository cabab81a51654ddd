from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.waiting_queue import WaitingQueue
from engine.sequence import Sequence
from tests.support.engine_parts import request


def sequence(priority: int, arrival: int, index: int = 0) -> Sequence:
    seq = Sequence.of(request(f"{priority}/{arrival}/{index}", 1, priority=priority))
    seq.arrival, seq.index = arrival, index
    return seq


def rank(seq: Sequence):
    return (seq.request.priority, seq.arrival, seq.index)


def test_priority_then_arrival_then_sibling():
    queue = WaitingQueue(rank)
    for seq in (sequence(1, 1), sequence(0, 3, 1), sequence(0, 3, 0), sequence(0, 2), sequence(2, 0)):
        queue.push(seq)
    assert [seq.request_id for seq in queue] == ["0/2/0", "0/3/0", "0/3/1", "1/1/0", "2/0/0"]
    assert queue.peek().request_id == "0/2/0"


def test_who_comes_back_comes_back_to_its_place():
    queue = WaitingQueue(rank)
    first, second, third = (sequence(0, i) for i in range(3))
    for seq in (first, second, third):
        queue.push(seq)
    queue.remove(first)
    assert queue.peek() is second
    queue.push(first)
    assert queue.peek() is first
    queue.remove(second)
    assert first in queue and second not in queue
    queue.remove(first)
    assert queue.peek() is third
    queue.remove(third)
    assert queue.peek() is None and len(queue) == 0


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=80))
def test_against_a_sorted_list(orders):
    queue, model = WaitingQueue(rank), []
    for number, (push, value) in enumerate(orders):
        if push or not model:
            seq = sequence(value, number)
            queue.push(seq)
            model.append(seq)
        else:
            queue.remove(model.pop(value % len(model)))
        model.sort(key=rank)
        assert list(queue) == model
        assert queue.peek() is (model[0] if model else None)
        assert set(queue.unordered()) == set(model) and len(queue) == len(model)


def test_entries_of_the_gone_do_not_pile_up():
    """Requests that are aborted at the far end never come to the front, where lazy removal would drop them."""
    queue = WaitingQueue(rank)
    queue.push(sequence(0, 0))
    for i in range(10_000):
        late = sequence(1, i)
        queue.push(late)
        queue.remove(late)
    assert len(queue._heap) < 100
