import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampler import restrict, sample
from engine.sequence import Request, SamplingParams, Sequence


def sequence(name: str = "a", tokens: int = 4, **params) -> Sequence:
    return Sequence.of(Request(name, tuple(range(tokens)), SamplingParams(**params)))


def draws(logits: torch.Tensor, count: int, **params) -> np.ndarray:
    """``count`` tokens of one row, each from a request with a seed of its own."""
    sequences = [sequence(seed=i, **params) for i in range(count)]
    return np.array(sample(logits.expand(count, -1), sequences, engine_seed=0))


def test_greedy_rows_take_the_largest_logit():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 2.0]])
    assert sample(logits, [sequence(temperature=0.0), sequence(temperature=1.0, top_k=1)], 0) == [1, 0]


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
    unseeded = [sample(logits, [sequence(name)], 0)[0] for name in ("a", "b", "c")]
    assert len(set(unseeded)) > 1


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
