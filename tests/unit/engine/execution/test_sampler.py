import numpy as np
import pytest
import torch
from scipy import stats

from kvbench_engine.execution.gumbel import allowed_tokens
from kvbench_engine.sequence import Request, SamplingParams, Sequence
from tests.support.sampling import sample


def sequence(name: str = "a", tokens: int = 4, **params) -> Sequence:
    return Sequence.of(Request(name, tuple(range(tokens)), SamplingParams(**params)))


def tokens_of(logits: torch.Tensor, sequences: list[Sequence], engine_seed: int = 0) -> list[int]:
    """The one token that each of them draws."""
    sampled = sample(logits, sequences, engine_seed)
    drawn = sampled.read()
    assert sampled.tokens.tolist() == [d if isinstance(d, int) else d.token_ids[0] for d in drawn]
    return sampled.tokens.tolist()


def draws(logits: torch.Tensor, count: int, **params) -> np.ndarray:
    """``count`` tokens of one row, each from a request with a seed of its own."""
    sequences = [sequence(seed=i, **params) for i in range(count)]
    return np.array(tokens_of(logits.expand(count, -1), sequences))


def kept(probabilities: list[float], top_k: int | None = None, top_p: float = 1.0) -> list[int]:
    logits = np.log(np.array(probabilities, dtype=np.float32))
    top_k = top_k or len(probabilities)
    return allowed_tokens(logits - logits.max(), np.float32(1), top_k, np.float32(top_p)).tolist()


def test_top_k_and_top_p_allow_exactly_the_right_tokens():
    shares = [0.2, 0.4, 0.1, 0.3]
    assert kept(shares, top_k=2) == [1, 3]
    assert kept(shares, top_p=0.5) == [1, 3]
    assert kept(shares, top_p=0.4) == [1]
    assert kept(shares, top_p=0.95) == [0, 1, 2, 3]
    assert kept(shares, top_k=3, top_p=0.75) == [1, 3]  # 0.4 + 0.3 of 0.9 reach 0.75
    assert kept(shares, top_p=1e-9) == [1]
    assert kept([0.3, 0.2, 0.3, 0.2], top_k=3) == [0, 1, 2, 3], "who is as probable as the k-th stays"
    assert kept([0.25] * 4, top_p=0.5) == [0, 1], "the fewest that reach it, and of equals the first"


def test_seeds_matter():
    logits = torch.zeros(1, 100_000)
    first = tokens_of(logits, [sequence(seed=1)])
    assert first == tokens_of(logits, [sequence("other", seed=1)], 9)
    assert first != tokens_of(logits, [sequence(seed=2)])
    unseeded = [*tokens_of(logits, [sequence("a")]), *tokens_of(logits, [sequence("b")])]
    unseeded += [*tokens_of(logits, [sequence("a")], engine_seed=1), *tokens_of(logits, [sequence("a", tokens=5)])]
    assert len(set(unseeded)) == 4, "name, engine seed and position each matter"


@pytest.mark.parametrize("seed", [0, 77, 2**64 - 2, None], ids=str)
def test_a_fork_draws_what_a_request_of_its_own_would(seed):
    """From the prompt's end, where one row serves all siblings, and afterwards, each from its own row."""
    torch.manual_seed(1)
    logits = torch.randn(2, 400)
    parent = sequence("a", seed=seed, n=4)
    (together,) = sample(logits[:1], [parent], engine_seed=9).read()
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


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 3.0, "top_k": 2}, {"seed": 4, "top_p": 0.7}])
def test_candidates_of_best_of_bring_the_model_s_own_log_probabilities(params):
    """Before temperature, top-k and top-p, for all siblings of a row, and for each later token."""
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0]], dtype=torch.float64)
    logprobs = torch.log_softmax(logits[0], -1)
    parent = sequence(n=1, best_of=3, **params)
    child = parent.fork(2)
    for seq, count in ((parent, 3), (child, 1)):
        (drawn,) = sample(logits, [seq], 0).read()
        assert len(drawn.token_ids) == count
        assert drawn.logprobs == pytest.approx([float(logprobs[token]) for token in drawn.token_ids], abs=1e-6)


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_a_beam_gets_its_best_continuations(count):
    """Best first, at most the vocabulary; the temperature does not matter."""
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    beams = [sequence(name, n=2, beam_width=2, temperature=9.0) for name in ("a", "b")]
    for beam in beams:
        beam.num_candidates = count
    for row, drawn in zip(logits, sample(logits, beams, 0).read(), strict=True):
        order = sorted(range(5), key=lambda token: -float(row[token]))[:count]
        assert list(drawn.token_ids) == order
        assert drawn.logprobs == pytest.approx([float(torch.log_softmax(row, -1)[token]) for token in order])


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 0.3, "top_p": 0.5, "n": 3, "seed": 5},
    {"temperature": 1.0, "best_of": 4},
    {"temperature": 0.0, "n": 2, "best_of": 2},
    {"beam_width": 3, "n": 3},
    {"temperature": 1e-300},
    {"temperature": 100.0, "top_k": 3, "n": 2, "best_of": 3},
    {"beam_width": 2},
]


def mixed_sequences() -> list[Sequence]:
    sequences = [sequence(f"r{i}", tokens=3 + i, **params) for i, params in enumerate(MIXED)]
    for seq in sequences:
        seq.num_candidates = 2 * (seq.request.params.beam_width or 0)
    return sequences


@pytest.mark.parametrize(("vocab", "dtype"), [(37, torch.float32), (40_000, torch.float32), (300, torch.bfloat16)])
def test_all_kinds_of_rows_together_are_each_kind_alone(vocab, dtype):
    """Greedy, filtered in every way, forks, best_of and beams in one call; the larger vocabulary goes in blocks.

    bfloat16 has many equal logits: what stays at the edge of top-k and top-p may not hang on the batch.
    """
    torch.manual_seed(2)
    logits = (torch.randn(len(MIXED), vocab) * 3).to(dtype)
    sequences = mixed_sequences()
    together = sample(logits, sequences, 1)
    drawn = together.read()
    for row, seq in enumerate(sequences):
        alone = sample(logits[row : row + 1], [seq], 1)
        assert alone.read() == [drawn[row]], MIXED[row]
        tokens = (drawn[row],) if isinstance(drawn[row], int) else drawn[row].token_ids
        assert int(alone.tokens) == int(together.tokens[row]) == tokens[0]
        if seq.request.params.greedy and not seq.num_candidates:
            assert set(tokens) == {int(logits[row].argmax())}
    order = torch.randperm(len(MIXED)).tolist()
    shuffled = sample(logits[order], [sequences[i] for i in order], 1).read()
    assert shuffled == [drawn[i] for i in order]


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, top-k and top-p in float64, one token after the other."""
    shares = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = sorted(range(len(logits)), key=lambda token: -shares[token])
    if top_k:
        order = order[:top_k]
    total, kept = shares[order].sum(), []
    for token in order:
        kept.append(token)
        if shares[kept].sum() / total >= top_p:
            break
    result = np.zeros(len(logits))
    result[kept] = shares[kept] / shares[kept].sum()
    return result


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.7), (12, 0.8), (3, 0.99)])
def test_draws_follow_the_float64_oracle(temperature, top_k, top_p):
    logits = torch.from_numpy(np.random.default_rng(8).normal(0, 2, 40).astype(np.float32))
    expected = oracle(logits.numpy(), temperature, top_k, top_p)
    counts = np.bincount(draws(logits, 4000, temperature=temperature, top_k=top_k, top_p=top_p), minlength=40)
    assert not counts[expected == 0].any(), "a token outside top-k and top-p was drawn"
    common = expected * 4000 >= 5  # where chi-square's approximation holds; the rest is one class
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    rare = wanted[-1] * 4000 >= 5
    observed, wanted = np.array(observed[: None if rare else -1]), np.array(wanted[: None if rare else -1])
    assert stats.chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-4


@pytest.mark.parametrize("bad", [np.nan, np.inf, None], ids=["nan", "inf", "nothing finite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_nothing_can_be_drawn_from_gives_no_token_and_spares_the_others(bad, dtype):
    """Of every kind of row, greedy ones and beams too; a single NaN in the vocabulary is enough."""
    torch.manual_seed(5)
    logits = torch.randn(len(MIXED), 3000).to(dtype)
    sequences = mixed_sequences()
    good = sample(logits, sequences, 1).read()
    for first in range(2):
        broken = logits.clone()
        for row in range(first, len(MIXED), 2):
            broken[row] = -torch.inf if bad is None else broken[row]
            broken[row, 17 * row] = -torch.inf if bad is None else bad
        sampled = sample(broken, sequences, 1)
        expected = [good[row] if row % 2 != first else ((), ()) for row in range(len(MIXED))]
        assert sampled.read() == expected
        assert int(sampled.tokens.min()) >= 0 and int(sampled.tokens.max()) < 3000, "the next step reads them"
    greedy = [sequence("g", temperature=0.0), sequence("h", temperature=0.0)]
    broken = torch.stack([logits[0], broken[1]])
    assert sample(broken, greedy, 1).read() == [int(logits[0].argmax()), ((), ())]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (0, 1e-12), (50, 1.0), (50, 0.7), (4999, 0.999)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("heat", [0.3, 1.0, 100.0])
def test_the_allowed_tokens_are_those_of_a_full_sort(top_k, top_p, spread, heat):
    """In float64 over all tokens, in order of logit and then id; half of the logits tie."""
    logits = np.random.default_rng(3).normal(0, spread, 5000).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 8) / 8
    logits -= logits.max()
    order = np.lexsort((np.arange(5000), -logits))
    if top_k:
        order = order[logits[order] >= logits[order[top_k - 1]]]
    shares = np.exp(logits[order].astype(np.float64) / heat)
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    at_edge = np.abs(before - top_p) < 1e-6
    got = allowed_tokens(logits, np.float32(heat), top_k or 5000, np.float32(top_p))
    assert np.array_equal(got, np.sort(got)) and len(set(got)) == len(got)
    inside = set(got.tolist())
    assert set(order[(before < top_p) & ~at_edge].tolist()) <= inside
    assert inside <= set(order[(before < top_p) | at_edge].tolist())
