"""Effects of engines in lockstep: estimates, errors and calls against closed forms, scipy and direct simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.effects.comparison import Call, Comparison, call_of
from kvbench.lockstep import intervals
from kvbench.lockstep.intervals import (
    POOLED,
    LaunchRatio,
    Steps,
    as_it_recurs,
    effect,
    effect_of_values,
    fewest_launches,
    for_other_requests,
    goes_on,
    is_decided,
    launch_ratios,
    noise,
    pooled_effects,
    ratio_of_totals,
    share_ends,
    with_confidence,
)
from kvbench.metrics.definitions import ENGINE, THROUGHPUT
from tests.support.lockstep_simulation import sittings


def steps_of(rng: np.random.Generator, many: int = 400, factor: float = 1.0, sd: float = 0.1) -> Steps:
    """Every sixteenth step a prefill without tokens, the others of 3 tokens."""
    prefill = np.arange(many) % 16 == 0
    seconds = np.where(prefill, 0.054, 0.009) * factor * np.exp(sd * rng.normal(size=many))
    return Steps(seconds, np.where(prefill, 0, 3))


def launches_of(*log_ratios: float, error: float = 0.0) -> list[LaunchRatio]:
    return [LaunchRatio(y, error, 32) for y in log_ratios]


def effect_between(low: float, high: float, n: int = 5, basis: str = "") -> Comparison:
    call = call_of(THROUGHPUT, ENGINE, low, high)
    return Comparison(THROUGHPUT, ENGINE, math.sqrt(low * high), low, high, n, call, smallest=0.01, basis=basis)


def test_the_ratio_is_that_of_throughputs_whatever_the_steps_are_and_few_steps_have_no_error():
    base, other = steps_of(np.random.default_rng(1)), steps_of(np.random.default_rng(2), many=300, factor=0.8)
    expected = (other.tokens.sum() / other.seconds.sum()) / (base.tokens.sum() / base.seconds.sum())
    assert math.exp(launch_ratios([base], [other])[0].log_ratio) == pytest.approx(expected)
    few = Steps(np.full(6, 0.01), np.full(6, 3))
    found = effect(launch_ratios([few], [few]))
    assert found.ratio == 1 and found.low is None and found.call == Call.UNDECIDED and goes_on([found])
    assert effect(launch_ratios([few] * 5, [few] * 5)).call == Call.LEVEL  # launches tell where steps do not


def test_shares_end_where_their_tokens_were_made():
    # 2 s without tokens belong to the 4 tokens of the third second, 1 s after the last token to the last ones
    steps = Steps(np.array([1.0, 1, 1, 4, 1]), np.array([0, 0, 4, 4, 0]))
    assert share_ends(steps, 4).tolist() == [0, 1.5, 3, 5.5, 8]


def test_the_error_within_a_launch_is_how_much_ratios_scatter():
    rng = np.random.default_rng(3)
    base, other = ([steps_of(rng) for _ in range(400)] for _ in range(2))
    found = launch_ratios(base, other)
    scatter = np.std([each.log_ratio for each in found])
    assert np.mean([each.error for each in found]) == pytest.approx(scatter, rel=0.1)


def test_different_work_is_no_scatter_where_every_launch_computes_it():
    rng = np.random.default_rng(5)
    bases = [steps_of(rng) for _ in range(400)]
    others = [Steps(each.seconds * np.linspace(0.5, 1.5, 400), each.tokens) for each in (steps_of(rng) for _ in bases)]
    scatter = np.std([each.log_ratio for each in launch_ratios(bases, others)])
    claimed = {same: np.mean([e.error for e in launch_ratios(bases, others, same)]) for same in (False, True)}
    assert claimed[True] == pytest.approx(scatter, rel=0.1)
    assert claimed[False] > 3 * scatter  # nothing tells one launch that the work was not scatter
    few = [launch_ratios(bases[i : i + 4], others[i : i + 4], True) for i in range(0, 400, 4)]
    assert np.sqrt(np.mean([e.error**2 for of in few for e in of])) == pytest.approx(scatter, rel=0.1)


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_shares_grow_until_they_tell_nothing_about_one_another(memory):
    rng = np.random.default_rng(4)
    noise = rng.normal(size=(2000, 128))
    for i in range(1, 128):
        noise[:, i] = memory * noise[:, i - 1] + math.sqrt(1 - memory**2) * noise[:, i]
    found = ratio_of_totals(np.ones_like(noise), 1 + 0.05 * noise)
    scatter = found.log_ratio.std()
    assert np.sqrt((found.error**2).mean()) == pytest.approx(scatter, rel=0.15)
    alone = 0.05 / math.sqrt(128)  # what shares of the first length would claim
    assert scatter > (2.5 if memory == 0.9 else 0.9) * alone
    assert (np.median(found.shares) == 128) if not memory else (np.median(found.shares) <= 32)


def test_a_step_that_is_long_once_is_limited_and_one_that_recurs_counts_in_full():
    usual = np.tile([0.01, 0.05, 0.01, 0.01], (5, 10))
    once, recurring, slow = usual.copy(), usual.copy(), usual.copy()
    once[2, 8] = 0.9
    recurring[1:4, 8] = 0.9
    slow[1] *= 1.4  # the machine, for all of a launch
    slow[3, 20:] *= 1.4
    assert as_it_recurs(usual) == pytest.approx(usual)
    assert as_it_recurs(once).sum() == pytest.approx(usual.sum() + (intervals.RECURS - 1) * 0.01)
    assert as_it_recurs(recurring) == pytest.approx(recurring)
    assert as_it_recurs(slow) == pytest.approx(slow)
    assert as_it_recurs(3 * once) == pytest.approx(3 * as_it_recurs(once))


def test_the_interval_is_the_t_interval_over_launches():
    y = [0.01, 0.03, 0.02, 0.035, 0.015]
    found = effect(launches_of(*y))
    expected = stats.ttest_1samp(y, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(expected)))
    assert found.ratio == pytest.approx(math.exp(np.mean(y))) and found.n == 5
    values = effect_of_values([10.0] * 5, 10 * np.exp(y))  # such as p95 TTFT
    assert (values.ratio, values.low, values.high) == pytest.approx((found.ratio, found.low, found.high))
    wider = with_confidence(found, 0.99)
    assert (wider.low, wider.high) == pytest.approx(tuple(np.exp(stats.ttest_1samp(y, 0).confidence_interval(0.99))))
    assert with_confidence(effect_of_values([10.0], [11.0]), 0.99).low is None


def test_launches_side_by_side_that_agree_are_known_no_better_than_their_rounds():
    half = lambda y, at_once: math.log((found := effect(launches_of(*y), at_once)).high / found.ratio)  # noqa: E731
    t = stats.t.ppf(0.975, 3)
    assert half([0.01, 0.01, 0.05, 0.05], 2) == pytest.approx(t * 0.04 / 2)  # of two rounds, 0.01 and 0.05
    assert half([0.01, 0.01, 0.05, 0.05], 1) == pytest.approx(t * 0.04 / 2 / math.sqrt(3))
    assert half([0.01, 0.05, 0.01, 0.05], 2) == half([0.01, 0.05, 0.01, 0.05], 1)  # rounds agree: it is the launches'


@pytest.mark.parametrize(("at_once", "rounds"), [(1, 2), (2, 1)])
def test_the_scatter_of_two_launches_is_moderated_by_what_is_expected(at_once, rounds):
    y, error = np.array([0.30, 0.34]), 0.02
    found = effect(launches_of(*y, error=error), at_once)
    expected = (2 * error**2 + 0.015**2) / 2 + (0.1 * y.mean()) ** 2 / rounds
    half = stats.t.ppf(0.975, 5) * math.sqrt((4 * expected + np.var(y, ddof=1) / 2) / 5)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((y.mean() - half, y.mean() + half))
    unknown = effect(launches_of(*y, error=math.nan))
    assert math.log(unknown.high) == pytest.approx(y.mean() + stats.t.ppf(0.975, 1) * np.std(y, ddof=1) / math.sqrt(2))


@pytest.mark.parametrize("kind", ["ar1", "bimodal", "drifting", "bursty"])
@pytest.mark.parametrize("true", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("launch_sd", [0.0, 0.02])
def test_intervals_of_two_launches_cover_on_machines_that_change_and_are_narrower(kind, true, launch_sd):
    rng = np.random.default_rng([3, int(10 * true)])
    tokens, seconds = sittings(kind, rng, 80, 2, 3, true, launch_sd, loads=1, steps=200, step_sd=0.07)
    parts = np.diff([share_ends(Steps(step, tokens[0]), 32) for step in np.eye(len(tokens[0]))])
    seen = ratio_of_totals(*np.split(as_it_recurs(seconds[0]) @ parts, [1], axis=2), same_work=True)
    covered, halves = [], []
    for run, engine in np.ndindex(seen.log_ratio.shape[1:]):
        y, errors = seen.log_ratio[:, run, engine], seen.error[:, run, engine]
        found = effect([LaunchRatio(*launch, 32) for launch in zip(y, errors, strict=True)])
        covered.append(found.low <= 1 + true <= found.high)
        halves.append([math.log(found.high / found.ratio), stats.t.ppf(0.975, 1) * np.std(y, ddof=1) / math.sqrt(2)])
    moderated, own = np.median(halves, axis=0)
    assert np.mean(covered) >= 0.93 and moderated < 0.8 * own


def test_launches_that_agree_by_chance_are_known_no_better_than_their_steps_say():
    found = effect(launches_of(0.01, 0.01, 0.01, 0.01, error=0.02))
    assert math.log(found.high / found.ratio) == pytest.approx(1.2816 * 0.02 / 2, rel=1e-3)  # 80 % of a normal


def test_one_launch_has_the_interval_of_its_steps_and_says_so():
    found = effect(launches_of(0.02, error=0.01))
    assert found.n == 1 and math.log(found.high) == pytest.approx(0.02 + stats.t.ppf(0.975, 31) * 0.01)
    sure = effect(launches_of(0.5, error=0.01))
    assert sure.low > 1.4 and sure.call == Call.UNDECIDED  # launches differ
    alone = effect_of_values([10.0], [11.0], "p95_ttft_ms")
    assert alone.ratio == pytest.approx(1.1) and alone.high is None and alone.call == Call.UNDECIDED


def test_a_percentile_of_few_requests_is_known_no_better_than_its_requests_tell():
    rng = np.random.default_rng(9)

    def p95s(n, many):
        """Log ratios of p95 of ``n`` requests, each drawn alike for both engines, and what one draw claims."""
        base = np.exp(rng.normal(0, 0.5, (many, n)))
        other = base * np.exp(rng.normal(0.1, 0.3, (many, n)))  # not the same requests are the slow ones
        ratios = np.log(np.quantile(other, 0.95, axis=1) / np.quantile(base, 0.95, axis=1))
        return ratios, [[[np.array([x]) for x in row] for row in each] for each in (base, other)]

    ratios, (base, other) = p95s(400, 300)
    exact = effect_between(1.099, 1.101)
    found = [for_other_requests(exact, *each, 0.95) for each in zip(base, other, strict=True)]
    claimed = np.median([math.log(each.high / each.ratio) for each in found]) / 1.96
    assert claimed == pytest.approx(ratios.std(), rel=0.2)
    assert all(each.smallest > exact.smallest for each in found)
    slower = for_other_requests(exact, base[0], [1.1 * x for x in base[0]], 0.95)  # all requests alike
    assert (slower.low, slower.high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize(
    ("low", "high", "throughput", "latency"),
    [
        (1.001, 1.03, Call.BETTER, Call.WORSE),
        (0.96, 0.99, Call.WORSE, Call.BETTER),
        (0.981, 1.019, Call.LEVEL, Call.LEVEL),
        (1.005, 1.019, Call.LEVEL, Call.LEVEL),  # a difference, and too small to matter
        (0.99, 1.03, Call.UNDECIDED, Call.UNDECIDED),
    ],
)
def test_calls(low, high, throughput, latency):
    half, middle = math.log(high / low) / 2, math.log(high * low) / 2
    y = middle + half / stats.t.ppf(0.975, 4) * math.sqrt(5) * np.array([-1, -1, 0, 1, 1])  # whose interval this is
    assert effect(launches_of(*y)).low == pytest.approx(low)
    assert effect(launches_of(*y)).call == throughput
    assert effect_of_values(np.ones(5), np.exp(y), "p95_ttft_ms").call == latency
    assert effect_of_values(np.ones(5), np.exp(y)).call == Call.UNDECIDED  # of no metric


def test_the_smallest_effect_seen_is_found_in_four_of_five_sittings():
    rng = np.random.default_rng(7)
    sd = 0.01
    y = sd * rng.normal(size=(4000, 5))
    seen = effect(launches_of(*(sd * np.array([-1, -0.5, 0, 0.5, 1]) / np.std([-1, -0.5, 0, 0.5, 1], ddof=1))))
    t = stats.ttest_1samp(y + math.log1p(seen.smallest), 0, axis=1)
    assert (t.pvalue <= 0.05).mean() == pytest.approx(0.8, abs=0.02)


def test_a_large_effect_is_answered_early_only_by_its_99_percent_interval():
    enough, too_wide = effect_between(0.49, 0.51, n=3), effect_between(0.465, 0.535, n=3)  # it may be +-0.1 wide
    assert is_decided(enough) and is_decided(too_wide)
    assert not goes_on([enough, enough])  # 2.3 times as wide at 99 %: +-0.023
    assert goes_on([enough, too_wide]) and goes_on([enough, replace(enough, n=2)])
    assert not goes_on([enough, replace(too_wide, n=5)])


def test_a_sitting_goes_on_until_every_question_is_decided():
    narrow, wide, open_ = effect_between(0.99, 1.01), effect_between(1.1, 1.2), effect_between(0.995, 1.0225)
    assert not goes_on([narrow, narrow])
    assert goes_on([narrow, wide])  # ahead, but not known to 1.5 %
    assert goes_on([narrow, open_])  # known to 1.5 %, but neither level nor apart
    assert goes_on([narrow, effect_between(0.99, 1.01, n=4)])
    assert goes_on([narrow]) and not goes_on([effect_between(0.99, 1.01, n=6)])  # alone: one launch more
    pooled = [effect_between(0.99, 1.01, n=3, basis=POOLED)] * 4
    assert not goes_on(pooled) and goes_on([*pooled, effect_between(0.99, 1.01, n=3)])
    assert [fewest_launches(n) for n in (1, 2, 3, 4, 7)] == [6, 5, 3, 3, 3]


def by_name(y: np.ndarray) -> tuple[dict, dict]:
    """Log ratios [launches, configurations] by name, and the effect of each alone."""
    ratios = {f"c{i}": list(each) for i, each in enumerate(y.T)}
    return ratios, {name: effect(launches_of(*each)) for name, each in ratios.items()}


def test_the_noise_is_the_residual_mean_square_of_a_block_design():
    y = np.random.default_rng(3).normal(0, 0.01, (4, 6))
    x = np.column_stack([np.zeros(4), y])
    launch, configuration = (part.ravel() for part in np.indices(x.shape))
    dummies = np.column_stack([np.eye(4)[launch], np.eye(7)[configuration]])  # least squares by numpy as the oracle
    fitted = dummies @ np.linalg.lstsq(dummies, x.ravel(), rcond=None)[0]
    square, freedom = noise(y)
    assert freedom == 18 == x.size - np.linalg.matrix_rank(dummies)
    assert square == pytest.approx(((x.ravel() - fitted) ** 2).sum() / freedom)


def test_configurations_that_are_alike_share_their_noise_and_others_keep_their_own():
    rng = np.random.default_rng(5)
    y = rng.normal(0, 0.01, (5, 7))
    y[:, 5] -= 1.0  # another machine for most of its time
    y[:, 6] = [-0.2, 0.2, -0.1, 0.15, 0.0]  # scatters far more
    ratios, alone = by_name(y)
    pooled = pooled_effects(alone, ratios)
    assert list(pooled) == list(alone)
    assert [pooled[name] == alone[name] for name in pooled] == [False] * 5 + [True] * 2
    common = 2 * noise(y[:, :5])[0]
    for i in range(5):
        variance = (6 * common + 4 * np.var(y[:, i], ddof=1)) / (6 + 4)  # Smyth 2004, with 6 prior degrees of freedom
        half = stats.t.ppf(0.975, 6 + 4) * math.sqrt(variance / 5)
        assert math.log(pooled[f"c{i}"].high) == pytest.approx(y[:, i].mean() + half)


@pytest.mark.parametrize("shape", [(3, 2), (12, 1)])  # launches, configurations
def test_too_few_degrees_of_freedom_or_one_configuration_pool_nothing(shape):
    ratios, alone = by_name(np.random.default_rng(1).normal(0, 0.01, shape))
    assert pooled_effects(alone, ratios) == alone


def test_a_pooled_interval_claims_no_more_degrees_of_freedom_than_the_launches_hold():
    y = np.random.default_rng(2).normal(0, 0.01, (5, 2))
    ratios, alone = by_name(y)
    variance = (6 * 2 * noise(y)[0] + 4 * np.var(y[:, 0], ddof=1)) / (6 + 4)
    half = stats.t.ppf(0.975, 2 * 4) * math.sqrt(variance / 5)  # three engines, five launches: 8, where 6 + 4 are 10
    assert math.log(pooled_effects(alone, ratios)["c0"].high) == pytest.approx(y[:, 0].mean() + half)


@pytest.mark.parametrize(("scatter", "shared"), [(1.0, True), (10.0, False)])
def test_a_baseline_that_scatters_more_than_the_others_shares_no_noise_with_them(scatter, shared):
    x = np.random.default_rng(3).normal(0, 0.005, (5, 7)) * [scatter, 1, 1, 1, 1, 1, 1]
    ratios, alone = by_name(x[:, 1:] - x[:, :1])
    assert (pooled_effects(alone, ratios) != alone) == shared


@pytest.mark.parametrize("scatter", [1.0, 1.7])
def test_pooled_intervals_cover_and_are_sharper_than_those_of_each_alone(scatter):
    rng = np.random.default_rng(11)
    covered, halves = [], []
    for _ in range(300):
        x = rng.normal(0, 0.007, (4, 7)) * [1, 1, 1, 1, 1, 1, scatter]
        ratios, alone = by_name(x[:, 1:] - x[:, :1])
        pooled = pooled_effects(alone, ratios)
        covered.append([each.low <= 1 <= each.high for each in pooled.values()])
        halves.append([np.mean([e.half_width for e in of.values()]) for of in (pooled, alone)])
    assert 0.93 <= np.mean(covered) <= 0.98
    assert np.mean(covered, axis=0)[-1] > 0.90  # that of the configuration that scatters more
    shared, own = np.mean(halves, axis=0)
    assert shared < 0.8 * own
