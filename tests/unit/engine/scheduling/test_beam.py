"""Beam search against transformers' generate, against enumeration of every sequence, and by its invariants."""

import itertools
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench_engine.scheduling.beam import BeamSearch, Hypothesis
from kvbench_engine.sequence import Drawn

STEPS = 10


class TinyModel:
    """A random Llama, sharp enough (logits x 5) that no two beams tie, with its log probabilities by prefix."""

    def __init__(self, seed: int, vocab: int = 48) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.llama = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            self.llama.lm_head.weight.mul_(5.0)
        self.prompt = tuple(torch.randint(vocab, (5,)).tolist())
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}

    def best(self, beams: list[tuple[int, ...]], count: int) -> list[Drawn]:
        """Each beam's ``count`` best continuations, from forward passes over the whole of its tokens."""
        missing = [beam for beam in beams if beam not in self.rows]
        if missing:
            with torch.no_grad():
                logits = self.llama(torch.tensor([self.prompt + beam for beam in missing]), use_cache=False).logits
            self.rows.update(zip(missing, torch.log_softmax(logits[:, -1].float(), dim=-1), strict=True))
        top = [torch.topk(self.rows[beam], min(count, self.rows[beam].shape[0])) for beam in beams]
        return [Drawn(tuple(t.indices.tolist()), tuple(t.values.tolist())) for t in top]

    def common_tokens(self, count: int) -> frozenset[int]:
        """Those that an endless beam search meets most often: as EOS they end some beams and not others."""
        results, _ = search(self, BeamSearch(4, STEPS, frozenset()), 4)
        counts = Counter(token for hypothesis in results for token in hypothesis.token_ids if token)
        return frozenset(token for token, _ in counts.most_common(count))


@cache
def tiny_model(seed: int, vocab: int = 48) -> TinyModel:
    return TinyModel(seed, vocab)


def search(model: TinyModel, beams: BeamSearch, n: int) -> tuple[list[Hypothesis], int]:
    """The results, and how many steps they took."""
    live, steps = [()], 0
    while live:
        moves = beams.advance(model.best(live, beams.num_candidates))
        live = [(*live[parent], token) for parent, token in moves]
        steps += 1
    return beams.results(n), steps


def expected(model: TinyModel, width: int, n: int, eos: frozenset[int], **settings) -> list[tuple[list[int], float]]:
    """(generated tokens, score) of transformers' beam search; for one beam too, which generate would do greedily."""
    output = model.llama.generate(
        torch.tensor([model.prompt]),
        attention_mask=torch.ones(1, len(model.prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=n,
        do_sample=False,
        max_new_tokens=STEPS,
        eos_token_id=sorted(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        custom_generate=LlamaForCausalLM._beam_search if width == 1 else None,
        **settings,
    )
    rows = [row[len(model.prompt) :] for row in output.sequences.tolist()]
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return list(
        zip([row[:end] for row, end in zip(rows, ends, strict=True)], output.sequences_scores.tolist(), strict=True)
    )


def assert_same(actual: list[Hypothesis], wanted: list[tuple[list[int], float]], eos: frozenset[int]) -> None:
    assert [list(hypothesis.token_ids) for hypothesis in actual] == [tokens for tokens, _ in wanted]
    np.testing.assert_allclose([hypothesis.score for hypothesis in actual], [score for _, score in wanted], atol=1e-4)
    assert [h.finish_reason for h in actual] == ["stop" if tokens[-1] in eos else "length" for tokens, _ in wanted]


EVERY = itertools.product((1, 2, 3, 4, 8), (0, 1, 2, 6), (0.0, 1.0, 2.0, -1.0), (True, False, "never"))
SOME = random.Random(3).sample(list(EVERY), 16)  # of the 240 combinations


@pytest.mark.parametrize(("width", "num_eos", "length_penalty", "early_stopping"), [*SOME, (4, 6, 1.0, True)])
def test_equals_transformers(width, num_eos, length_penalty, early_stopping):
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    model = tiny_model(seed=width % 3)
    eos, n = model.common_tokens(num_eos), max(1, width - num_eos)
    actual, steps = search(model, BeamSearch(width, STEPS, eos, **settings), n)
    assert_same(actual, expected(model, width, n, eos, **settings), eos)
    assert steps < STEPS or (num_eos, early_stopping) != (6, True), "all beams were to end early"


def test_the_smallest_vocabulary_that_can_equal_transformers():
    model, eos = tiny_model(seed=0, vocab=10), frozenset({3, 7})
    actual, _ = search(model, BeamSearch(8, STEPS, eos), 8)
    assert_same(actual, expected(model, 8, 8, eos), eos)


class Table:
    """Log probabilities that depend on the newest token and the position alone; float32."""

    def __init__(self, seed: int, vocab: int) -> None:
        logits = np.random.default_rng(seed).normal(size=(STEPS, vocab, vocab)) * 2
        self.logprobs = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)

    def row(self, beam: tuple[int, ...]) -> np.ndarray:
        return self.logprobs[len(beam), beam[-1] if beam else 0]

    def best(self, beams: list[tuple[int, ...]], count: int) -> list[Drawn]:
        orders = [np.argsort(-self.row(beam), kind="stable")[:count] for beam in beams]
        return [Drawn(tuple(o.tolist()), tuple(self.row(b)[o].tolist())) for b, o in zip(beams, orders, strict=True)]

    def sum(self, beam: tuple[int, ...]) -> float:
        return float(sum(np.float64(self.row(beam[:i])[token]) for i, token in enumerate(beam)))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("eos", [frozenset(), frozenset({1}), frozenset({0, 2})])
def test_a_wide_enough_search_finds_the_best_of_all_sequences(eos, length_penalty):
    """The vocabulary is far smaller than the width, and no beam is ever dropped."""
    table, vocab, steps = Table(seed=5, vocab=3), 3, 4
    beams = BeamSearch(100, steps, eos, length_penalty, early_stopping="never")
    actual, _ = search(table, beams, 100)
    every = {
        sequence[: next((i + 1 for i, token in enumerate(sequence) if token in eos), steps)]
        for sequence in itertools.product(range(vocab), repeat=steps)
    }
    scores = {sequence: table.sum(sequence) / len(sequence) ** length_penalty for sequence in every}
    assert [h.token_ids for h in actual] == sorted(scores, key=scores.get, reverse=True)
    np.testing.assert_allclose([h.score for h in actual], sorted(scores.values(), reverse=True), rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 12),
    width=st.integers(1, 6),
    max_new_tokens=st.integers(1, STEPS),
    eos=st.frozensets(st.integers(0, 11), max_size=4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_invariants(seed, vocab, width, max_new_tokens, eos, length_penalty, early_stopping):
    table = Table(seed, vocab)
    beams = BeamSearch(width, max_new_tokens, eos, length_penalty, early_stopping)
    live, steps = [()], 0
    while live:
        moves = beams.advance(table.best(live, beams.num_candidates))
        assert len(moves) <= width
        assert all(0 <= parent < len(live) and token not in eos for parent, token in moves)
        live, steps = [(*live[parent], token) for parent, token in moves], steps + 1
        assert len(set(live)) == len(live)
        sums = [table.sum(beam) for beam in live]
        assert all(better >= worse - 1e-4 for better, worse in itertools.pairwise(sums))
    assert steps <= max_new_tokens
    results = beams.results(width)
    assert len({h.token_ids for h in results}) == len(results)
    assert len(results) == width or vocab < width + len(eos)
    for better, worse in itertools.pairwise(results):
        assert better.score >= worse.score
    for h in results:
        assert h.score == pytest.approx(table.sum(h.token_ids) / len(h.token_ids) ** length_penalty, rel=1e-4)
        assert not eos & set(h.token_ids[:-1])
        ended = h.token_ids[-1] in eos
        assert h.finish_reason == ("stop" if ended else "length")
        assert ended or len(h.token_ids) == max_new_tokens


def test_sums_round_to_float32_and_of_a_tie_the_better_parent_goes_first():
    beams = BeamSearch(2, 3, frozenset())
    assert beams.advance([Drawn((7, 8), (-1000.0, -1000.00012))]) == [(0, 7), (0, 8)]
    steps = torch.tensor([-1.0, -0.99987])
    sums = torch.tensor([-1000.0, -1000.00012]) + steps  # float32, as transformers adds them
    assert sums[0] == sums[1]
    assert -1000.0 - 1.0 < -1000.00012 - 0.99987  # in float64 the second would lead
    first, second = steps.tolist()
    assert beams.advance([Drawn((1, 2), (first, -50.0)), Drawn((3, 4), (second, -50.0))]) == [(0, 1), (1, 3)]


def test_an_end_that_ranks_below_the_width_is_dropped():
    beams = BeamSearch(1, 3, frozenset({9}), length_penalty=-2.0)
    assert beams.advance([Drawn((1, 9), (-0.1, -0.2))]) == [(0, 1)]
    assert beams.advance([Drawn((2, 9), (-3.0, -4.0))]) == [(0, 2)]
    assert beams.advance([Drawn((3, 9), (-1.0, -2.0))]) == []
    assert [h.token_ids for h in beams.results(1)] == [(1, 2, 3)]


def test_a_live_beam_that_only_ties_with_the_worst_ended_one_does_not_go_on():
    beams = BeamSearch(1, 3, frozenset({9}), length_penalty=0.0)
    assert beams.advance([Drawn((9, 1), (-1.0, -1.0))]) == []
    assert beams.results(1) == [Hypothesis((9,), -1.0, "stop")]


def test_never_with_a_negative_penalty_scores_a_live_beam_at_its_present_length():
    """That is the length in its favour: -1.2 * 2 beats the worst ended, -5 * 2, but -1.2 * 10 would not."""
    beams = BeamSearch(2, 10, frozenset({9}), length_penalty=-1.0, early_stopping="never")
    assert beams.advance([Drawn((9, 1, 2), (-1.0, -1.1, -6.0))]) == [(0, 1), (0, 2)]
    assert beams.advance([Drawn((3, 9, 4), (-0.1, -3.9, -5.0)), Drawn((3, 9, 4), (-3.0, -4.0, -5.0))]) == [
        (0, 3),
        (0, 4),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "beam_width cannot be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens of a beam search cannot be 0"),
        ({"length_penalty": float("nan")}, "length_penalty cannot be nan"),
        ({"length_penalty": 1e6}, "keep it between -10.0 and 10.0"),
    ],
)
def test_settings_that_no_search_can_run_with(arguments, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(**{"width": 2, "max_new_tokens": 1000, "eos_token_ids": frozenset(), **arguments})
