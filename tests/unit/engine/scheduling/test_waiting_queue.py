from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.scheduling.waiting_queue import WaitingQueue
from kvbench_engine.sequence import Sequence
from tests.support.engine_parts import request


def sequence(priority: int, arrival: int, index: int = 0) -> Sequence:
    seq = Sequence.of(request(f"{priority}/{arrival}/{index}", 1, priority=priority))
    seq.arrival, seq.index = arrival, index
    return seq


def rank(seq: Sequence):
    return (seq.request.priority, seq.arrival, seq.index)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "return"]), st.integers(0, 3)), max_size=80))
def test_against_a_sorted_list(orders):
    queue, model, removed = WaitingQueue(rank), [], []
    for number, (order, value) in enumerate(orders):
        if order == "remove" and model:
            removed.append(model.pop(value % len(model)))
            queue.remove(removed[-1])
            assert removed[-1] not in queue
        else:
            seq = removed.pop() if order == "return" and removed else sequence(value, number // 2, number % 2)
            queue.push(seq)
            model.append(seq)
        model.sort(key=rank)
        assert list(queue) == model and all(seq in queue for seq in model)
        assert queue.peek() is (model[0] if model else None)
        assert set(queue.unordered()) == set(model) and len(queue) == len(model)


def test_entries_of_aborted_requests_do_not_pile_up():
    """Requests aborted at the end of the queue never come to the front, where lazy removal would drop them."""
    queue = WaitingQueue(rank)
    queue.push(sequence(0, 0))
    for i in range(10_000):
        late = sequence(1, i)
        queue.push(late)
        queue.remove(late)
    assert len(queue._heap) < 100
