"""Steps under a controller's command: the engine's own clock, and who sends when by it."""

from __future__ import annotations

import io
import itertools
import json

import pytest

from kvbench_engine import lockstep
from kvbench_engine.engine import Engine
from kvbench_engine.execution.null_executor import ReplayExecutor
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.lockstep import SteppedEngine
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.engine_parts import capacity, drain, small_config, small_engine

STEP_S = 0.25


@pytest.fixture
def stepped():
    return SteppedEngine(small_engine(64, page_size=4))


def load(engine, rows, concurrency=None):
    return engine.load(rows, concurrency, temperature=0.0, ignore_eos=True, keep_cache=False)


def to_end(engine, length=1):
    steps = []
    while not engine.ended:
        answer = engine.turn(length)
        assert 0 < len(answer["steps"]) <= length
        steps += answer["steps"]
    assert answer["ended"]
    return steps


def rows_of(engine):
    return engine.result()["requests"]


def test_the_clock_is_the_sum_of_the_steps_and_stamps_every_token(stepped, monkeypatch):
    durations = iter([0.5, 0.25, 1.0, 0.125])
    monkeypatch.setattr(stepped.engine, "step", timed(stepped.engine.step, durations, monkeypatch))
    load(stepped, [[[1, 2, 3], 4, None, 0]], 1)
    steps = to_end(stepped)
    assert [step[0] for step in steps] == [0.5, 0.25, 1.0, 0.125]
    ((t0, ts, times, tokens, cached, reason, ids),) = rows_of(stepped)
    assert (t0, ts, times) == (0.0, 0.0, [0.5, 0.75, 1.75, 1.875])
    assert (tokens, cached, reason, len(ids)) == ([1] * 4, 0, "length", 4)
    assert stepped.clock == sum(step[0] for step in steps)
    assert [step[1:4] for step in steps] == [(3, 0, 1), (0, 1, 1), (0, 1, 1), (0, 1, 1)]


def timed(step, durations, monkeypatch):
    """``step`` that takes the next of ``durations`` by the module's clock."""
    now = [0.0]
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: now[0])

    def run():
        outputs = step()
        now[0] += next(durations)
        return outputs

    return run


@pytest.fixture
def even(stepped, monkeypatch):
    """An engine whose every step takes STEP_S."""
    monkeypatch.setattr(stepped.engine, "step", timed(stepped.engine.step, itertools.repeat(STEP_S), monkeypatch))
    return stepped


def test_each_user_sends_the_next_request_when_its_last_one_ended(even):
    load(even, [[[i + 1] * 3, 4, None, 0] for i in range(5)], 2)
    to_end(even, 8)
    spans = [(ts, times[-1]) for _, ts, times, *_ in rows_of(even)]
    events = sorted([(at, 1) for at, _ in spans] + [(at, -1) for _, at in spans])
    assert max(itertools.accumulate(change for _, change in events)) == 2
    ends = sorted(end for _, end in spans)
    assert sorted(start for start, _ in spans) == [0.0, 0.0, *ends[:3]]  # at the very moment that one ended


def test_arrivals_are_by_the_engines_clock_and_idle_time_is_no_step(even):
    load(even, [[[1, 2], 2, 0.1, 0], [[3, 4], 2, 0.2, 0], [[5, 6], 2, 50.0, 0]])
    steps = to_end(even)
    (first, second, third) = rows_of(even)
    assert [row[0] for row in (first, second, third)] == [0.1, 0.2, 50.0]
    assert first[1] == 0.1 and first[2] == [0.1 + STEP_S, 0.1 + 2 * STEP_S]
    assert second[1] == 0.1 + STEP_S  # it waited for the step that ran; TTFT counts from t0
    assert third[1] == 50.0 and third[2] == [50.25, 50.5]
    assert sum(step[0] for step in steps) == STEP_S * len(steps) < even.clock == 50.5


def test_a_new_load_starts_at_zero_with_an_empty_cache_unless_it_is_kept(monkeypatch):
    engine = SteppedEngine(small_engine(64, page_size=4, enable_prefix_caching=True))
    rows = [[list(range(1, 13)), 2, None, 0]]
    cached = []
    for keep in (False, True, False):
        engine.load(rows, 1, temperature=0.0, ignore_eos=True, keep_cache=keep)
        assert engine.clock == 0.0
        to_end(engine)
        cached.append(rows_of(engine)[0][4])
    assert cached == [0, 8, 0]


def test_a_load_during_a_load_or_with_an_unknown_option_is_refused(even):
    with pytest.raises(ValueError, match="top_k"):
        load(even, [[[1, 2, 3], 4, None, 0, {"top_k": 3}]], 1)
    load(even, [[[1, 2, 3], 4, None, 0]], 1)  # it was left idle
    even.turn(1)
    with pytest.raises(ValueError, match="last load"):
        load(even, [], 1)


@pytest.fixture
def uneven(monkeypatch):
    """Makes engines whose sequences end after different numbers of tokens; every step takes STEP_S."""

    def make():
        config = small_config(page_size=4, max_num_seqs=8)
        kv = make_kv_manager(config, capacity(config, 512))
        engine = Engine(config, ReplayExecutor(seed=1, vocab_size=6), kv)
        monkeypatch.setattr(engine, "step", timed(engine.step, itertools.repeat(STEP_S), monkeypatch))
        return SteppedEngine(engine)

    return make


def answers_of(row):
    """Tokens and times of each sequence, from a row of a result."""
    _, _, times, counts, _, _, ids, sequences = row
    found = {}
    for sequence in sorted(set(sequences)):
        of = [(at, count) for at, count, own in zip(times, counts, sequences, strict=True) if own == sequence]
        number = sum(count for _, count in of)
        found[sequence], ids = (ids[:number], [at for at, _ in of]), ids[number:]
    assert not ids
    return found


def test_a_request_of_several_sequences_ends_with_its_last_one(uneven):
    stepped, users = uneven(), 2
    rows = [[[i] * 5, 20, None, 0, {"n": 3}] for i in range(6)]
    stepped.load(rows, users, temperature=1.0, ignore_eos=False, keep_cache=False)
    to_end(stepped)
    spans = []
    for index, row in enumerate(rows_of(stepped)):
        answers = answers_of(row)
        alone = uneven().engine
        params = SamplingParams(max_tokens=20, n=3)
        alone.add_request(Request(str(index), tuple(rows[index][0]), params))
        assert {i: tokens for i, (tokens, _) in answers.items()} == by_index(drain(alone), str(index))
        ends = [times[-1] for _, times in answers.values()]
        assert row[1] + STEP_S == min(times[0] for _, times in answers.values())
        spans.append((row[1], max(ends), min(ends)))
    assert any(first < last for _, last, first in spans)  # else it tells nothing
    starts, ends = sorted(start for start, *_ in spans), sorted(end for _, end, _ in spans)
    assert starts == [0.0] * users + ends[:-users]


def by_index(tokens, name):
    return {int(key.removeprefix(name).removeprefix("/") or 0): ids for key, ids in tokens.items()}


@pytest.mark.parametrize("options", [{"best_of": 4, "n": 2}, {"beam_width": 4, "n": 2}])
def test_sequences_that_are_chosen_at_the_end_come_in_its_step(even, options):
    load(even, [[[1, 2, 3], 4, None, 0, options], [[3, 2, 1], 4, None, 0]], 1)
    steps = to_end(even)
    chosen, plain = rows_of(even)
    assert len(plain) == 7 and plain[2][-1] - plain[1] == 4 * STEP_S
    assert chosen[2] == [4 * STEP_S] * 2 and chosen[7] == [0, 1]
    assert chosen[3] == [4, 4] and len(chosen[6]) == 8 and chosen[5] == "length"
    assert [step[3] for step in steps[:4]] == [0, 0, 0, 8]  # what is thrown away is no output


def test_the_metrics_count_latencies_in_engine_time_and_gaps_within_sequences(even):
    load(even, [[[1, 2, 3], 4, None, 0, {"n": 3}]], 1)
    to_end(even)
    lines = dict(line.rsplit(" ", 1) for line in even.result()["metrics"].splitlines() if not line.startswith("#"))
    assert float(lines["kvbench:time_to_first_token_seconds_count"]) == 3
    assert float(lines["kvbench:time_to_first_token_seconds_sum"]) == 3 * STEP_S
    assert float(lines["kvbench:inter_token_latency_seconds_sum"]) == 3 * 3 * STEP_S
    assert float(lines["kvbench:generation_tokens_total"]) == 12


def test_the_process_speaks_its_protocol_first_and_answers_every_line():
    said = io.StringIO()
    lines = [
        '{"do": "turn", "name": "a", "steps": 1}',
        '{"do": "open", "name": "a", "settings": {"page_size": 0}}',
        "{",
    ]
    lockstep.serve(io.StringIO("\n".join(lines)), said)
    first, *answers = map(json.loads, said.getvalue().splitlines())
    assert first["protocol"] == lockstep.PROTOCOL and "n" in first["options"]
    assert len(answers) == 3 and all(set(answer) == {"error"} for answer in answers)
    assert "page_size" in answers[1]["error"]
