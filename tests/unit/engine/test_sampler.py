import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampler import restrict, sample
from engine.sequence import Drawn, Request, SamplingParams, Sequence


def sequence(name: str = "a", tokens: int = 4, **params) -> Sequence:
    return Sequence.of(Request(name, tuple(range(tokens)), SamplingParams(**params)))


def tokens_of(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int = 0) -> list[int]:
    """The one token that each of them draws."""
    drawn = sample(logits, sequences, engine_seed)
    assert all(len(d.token_ids) == 1 and not d.logprobs for d in drawn)
    return [d.token_ids[0] for d in drawn]


def draws(logits: torch.Tensor, count: int, **params) -> np.ndarray:
    """``count`` tokens of one row, each from a request with a seed of its own."""
    sequences = [sequence(seed=i, **params) for i in range(count)]
    return np.array(tokens_of(logits.expand(count, -1), sequences))


def test_greedy_rows_take_the_largest_logit():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 2.0]])
    assert tokens_of(logits, [sequence(temperature=0.0), sequence(temperature=1.0, top_k=1)]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    expected = torch.softmax(logits / temperature, -1).double().numpy()
    counts = np.bincount(draws(logits, 3000, temperature=temperature), minlength=5)
    assert stats.chisquare(counts, expected / expected.sum() * 3000).pvalue > 1e-4


def test_top_k_and_top_p_allow_exactly_the_right_tokens():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))

    def kept(**params):
        return torch.isfinite(restrict(logits, SamplingParams(**params))).tolist()

    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, True, False, False]
    assert kept(top_p=0.4) == [True, False, False, False]
    assert kept(top_p=0.95) == [True, True, True, True]
    assert kept(top_k=3, top_p=0.75) == [True, True, False, False]  # 0.4 + 0.3 of 0.9 reach 0.75
    assert kept(top_p=1e-9) == [True, False, False, False]
    assert set(draws(logits, 300, top_k=2)) == {0, 1}


def test_a_row_does_not_depend_on_its_batch_mates():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    sequences = [sequence(f"r{i}", tokens=3 + i) for i in range(6)]
    together = sample(logits, sequences, engine_seed=5)
    alone = [sample(logits[i : i + 1], [sequences[i]], engine_seed=5)[0] for i in range(6)]
    assert together == alone


def test_seeds_matter():
    logits = torch.zeros(1, 1000)
    first = sample(logits, [sequence(seed=1)], 0)
    assert first == sample(logits, [sequence("other", seed=1)], 9)
    assert first != sample(logits, [sequence(seed=2)], 0)
    unseeded = [*tokens_of(logits, [sequence("a")]), *tokens_of(logits, [sequence("b")])]
    unseeded += [*tokens_of(logits, [sequence("a")], engine_seed=1), *tokens_of(logits, [sequence("a", tokens=5)])]
    assert len(set(unseeded)) == 4, "name, engine seed and position each matter"


@pytest.mark.parametrize("seed", [0, 77, 2**64 - 2, None], ids=str)
def test_a_fork_draws_what_a_request_of_its_own_would(seed):
    """From the prompt's end, where one row serves all siblings, and afterwards, each from its own row."""
    torch.manual_seed(1)
    logits = torch.randn(2, 400)
    parent = sequence("a", seed=seed, n=4)
    (together,) = sample(logits[:1], [parent], engine_seed=9)
    children = [parent.fork(index) for index in range(4)]
    for child in children:
        child.pending_forks = 0
    assert list(together.token_ids) == tokens_of(logits[:1].expand(4, -1), children, engine_seed=9)
    for child, token in zip(children, together.token_ids, strict=True):
        child.token_ids.append(token)
    later = tokens_of(logits[1:].expand(4, -1), children, engine_seed=9)
    assert len({*together.token_ids, *later}) == 8
    if seed is not None:
        apart = [sequence(f"other-{i}", seed=(seed + i) % 2**64) for i in range(4)]
        assert list(together.token_ids) == tokens_of(logits[:1].expand(4, -1), apart)
        for one in apart:
            one.token_ids.append(0)
        assert later == tokens_of(logits[1:].expand(4, -1), apart)


def test_greedy_forks_take_the_largest_logit():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert sample(logits, [sequence(temperature=0.0, n=3)], 0) == [Drawn((1, 1, 1))]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 3.0, "top_k": 2}, {"seed": 4, "top_p": 0.7}])
def test_candidates_of_best_of_bring_the_model_s_own_log_probabilities(params):
    """Before temperature, top-k and top-p, for all siblings of a row, and for each later token."""
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0]], dtype=torch.float64)
    logprobs = torch.log_softmax(logits[0], -1)
    parent = sequence(n=1, best_of=3, **params)
    child = parent.fork(2)
    for seq, count in ((parent, 3), (child, 1)):
        (drawn,) = sample(logits, [seq], 0)
        assert len(drawn.token_ids) == count
        assert drawn.logprobs == pytest.approx([float(logprobs[token]) for token in drawn.token_ids], abs=1e-6)


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_a_beam_gets_its_best_continuations(count):
    """Best first, at most the vocabulary; the temperature does not matter."""
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    beams = [sequence(name, n=2, beam_width=2, temperature=9.0) for name in ("a", "b")]
    for beam in beams:
        beam.num_candidates = count
    for row, drawn in zip(logits, sample(logits, beams, 0), strict=True):
        order = sorted(range(5), key=lambda token: -float(row[token]))[:count]
        assert list(drawn.token_ids) == order
        assert drawn.logprobs == pytest.approx([float(torch.log_softmax(row, -1)[token]) for token in order])


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_tokens": 0}, "max_tokens cannot be 0"),
        ({"temperature": -1.0}, "temperature cannot be -1.0"),
        ({"temperature": float("nan")}, "temperature cannot be nan"),
        ({"top_p": 0.0}, "top_p cannot be 0.0"),
        ({"top_k": -2}, "top_k cannot be -2"),
    ],
)
def test_impossible_sampling_is_refused(params, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params)
