"""Tiers below HBM: against one LRU of their sizes together, plain dictionaries, and the cost model's own step times."""

from __future__ import annotations

import json
from array import array
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.capacity.gpus import find_gpu
from kvbench.capacity.model import plan_model
from kvbench.cli.main import main
from kvbench.common.errors import UsageError
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.fleet.tiers import FirstTokens, Tier, TieredCache, parse_tiers, simulate_tiers
from kvbench.trace_analysis.cache_sim import replay
from kvbench.traces.model import Trace
from kvbench_engine.execution.simulated_executor import StepWork
from tests.support.trace_samples import page_row

PAGE = 128  # tokens
HBM_PAGES = 4  # no request of ``requests`` is longer


def trace_of(requests: list[list[int]]) -> Trace:
    tokens = np.array([len(ids) * PAGE for ids in requests], dtype=np.int64)
    pages = tuple(array("q", ids) for ids in requests)
    return Trace("test", tokens, tokens * 0 + 1, page_ids=pages, page_size=PAGE, page_size_from="given")


@st.composite
def requests(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that are paths in a small tree, so that prefixes come back."""
    steps = st.lists(st.integers(0, 2), min_size=1, max_size=HBM_PAGES)
    paths = draw(st.lists(steps, min_size=1, max_size=40))
    ids: dict[tuple[int, ...], int] = {}
    return [[ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))] for path in paths]


@settings(max_examples=30, deadline=None)
@given(requests(), st.integers(1, 6), st.integers(1, 8))
def test_lru_tiers_hit_what_one_lru_of_their_pages_hits(prompts, dram, ssd):
    trace = trace_of(prompts)
    cache = TieredCache([HBM_PAGES, dram, ssd])
    tiers = [cache.serve(ids) for ids in trace.page_ids]
    for last, pages in enumerate((HBM_PAGES, HBM_PAGES + dram, HBM_PAGES + dram + ssd)):
        hits = [sum(tier <= last for tier in actual) for actual in tiers]
        assert hits == replay(trace, pages).hits.tolist()


def plain_tiers(prompts: list[list[int]], sizes: list[int], policy: str) -> list[list[int]]:
    """What ``TieredCache.serve`` returns, with a dictionary a tier and a search for each eviction."""
    held: list[OrderedDict[int, None]] = [OrderedDict() for _ in sizes]
    uses: Counter[int] = Counter()

    def put(tier: int, page: int) -> None:
        if tier == len(held):
            del uses[page]
            return
        held[tier][page] = None
        if len(held[tier]) > sizes[tier]:
            pages = list(held[tier])
            out = min(pages, key=lambda p: (uses[p], pages.index(p))) if policy == "lfu" else pages[0]
            del held[tier][out]
            put(tier + 1, out)

    actual = []
    for prompt in prompts:
        uses.update(prompt)
        where = [next((t for t, pages in enumerate(held) if page in pages), None) for page in prompt]
        run = where.index(None) if None in where else len(where)
        actual.append(where[:run])
        for page in prompt:
            for pages in held[1:]:
                pages.pop(page, None)
        for page in prompt:  # none of the prompt's own pages may leave HBM
            held[0].setdefault(page)
            if len(held[0]) > sizes[0]:
                out = next(p for p in held[0] if p not in prompt)
                del held[0][out]
                put(1, out)
        for page in reversed(prompt):
            held[0].move_to_end(page)
    return actual


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(1, 6), st.integers(1, 8), st.sampled_from(["lru", "lfu"]))
def test_each_page_is_found_in_the_tier_where_plain_dictionaries_have_it(prompts, dram, ssd, policy):
    sizes = [HBM_PAGES, dram, ssd]
    cache = TieredCache(sizes, policy)
    assert [cache.serve(ids) for ids in prompts] == plain_tiers(prompts, sizes, policy)


def test_a_frequent_page_outlives_recent_ones_with_lfu_and_not_with_lru():
    often, once = [[0], [0], [0]], [[1], [2], [3], [4]]
    actual = {}
    for policy in ("lru", "lfu"):
        cache = TieredCache([1, 2], policy)
        for ids in often + once:
            cache.serve(ids)
        actual[policy] = cache.serve([0])
    assert actual == {"lru": [], "lfu": [1]}


MACHINE = Machine(plan_model("llama-3.1-8b"), find_gpu("H100"))


def first_tokens(speed: float, latency: float = 0.0) -> FirstTokens:
    return FirstTokens(MACHINE, PAGE, (Tier("hbm", 2**33, np.inf, 0.0), Tier("dram", 2**33, speed, latency)))


def timer(times: FirstTokens):
    config, _ = MACHINE.settle({"max_num_batched_tokens": times.step_tokens, "max_num_seqs": 1})
    time_of = MACHINE.step_timer(config)
    return lambda *parts, drawn=1: time_of(StepWork(parts, 0, 0, 0, drawn)).total


def test_ttft_is_the_load_and_the_steps_of_what_is_left():
    times = first_tokens(1e12, latency=1e-4)
    step, size = timer(times), times.step_tokens
    page_s = PAGE * 131_072 / 1e12  # 32 layers x 8 heads x 128 x 2 x 2 bytes a token
    assert times.of(1000, ())[0] == pytest.approx(step((1000, 0)))
    assert times.of(1000, [0, 0])[0] == pytest.approx(step((1000 - 2 * PAGE, 2 * PAGE)))
    assert times.of(1000, [0, 1, 1]) == (pytest.approx(1e-4 + 2 * page_s + step((1000 - 3 * PAGE, 3 * PAGE))), [1, 2])
    assert times.of(2 * PAGE, [0, 0])[0] == pytest.approx(step((1, 2 * PAGE - 1)))  # the last token is always computed
    long = size + 10
    assert times.of(long, ())[0] == pytest.approx(step((size, 0), drawn=0) + step((10, size)))
    assert times.of(size, ())[0] == pytest.approx(step((size, 0)))


def test_the_later_pages_of_a_prompt_are_loaded_where_only_they_take_longer_to_compute():
    times = first_tokens(1e12)
    step, size = timer(times), times.step_tokens
    first, second = (step((size, before), drawn=0) / size * PAGE for before in (0, size))
    assert first < second  # attention sees more tokens
    pages = size // PAGE
    between = first_tokens(PAGE * 131_072 / ((first + second) / 2))
    assert between.of(3 * size, [1] * 2 * pages)[1] == list(range(pages, 2 * pages))


def test_a_tier_with_a_long_latency_does_not_spoil_the_one_above_it():
    tiers = (Tier("hbm", 2**33, np.inf, 0.0), Tier("dram", 2**33, 1e12, 0.0), Tier("ssd", 2**33, 1e12, 0.01))
    times = FirstTokens(MACHINE, PAGE, tiers)
    assert times.of(4000, [1, 1, 2])[1] == [0, 1]


def test_a_tier_saves_the_difference_that_it_makes():
    trace = trace_of([[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]])
    page_bytes = PAGE * 131_072
    tiers = (Tier("hbm", 4 * page_bytes, np.inf, 0.0), Tier("dram", 4 * page_bytes, 1e12, 0.0))
    times = FirstTokens(MACHINE, PAGE, tiers)
    result = simulate_tiers(trace, times)
    hbm, dram = result.tiers
    assert (hbm.page_hits, dram.page_hits, dram.pages_not_computed) == (0, 4, 4)
    assert hbm.mean_ttft_s == result.no_cache["mean_ttft_s"]
    whole, hit = times.of(4 * PAGE, ())[0], times.of(4 * PAGE, [1] * 4)[0]
    assert dram.saved_mean_ttft_s == hbm.mean_ttft_s - dram.mean_ttft_s == pytest.approx((whole - hit) / 3)


def test_speeds_and_latencies_are_the_users_else_the_devices():
    hbm, dram, ssd = parse_tiers("ssd=1TiB@2GB/s@3ms,dram=40GiB,hbm=8GiB", MACHINE)
    assert (hbm.num_bytes, ssd.num_bytes, ssd.bytes_per_s, ssd.latency_s) == (2**33, 2**40, 2e9, 3e-3)
    assert dram.bytes_per_s == MACHINE.gpu.performance.host_link_bytes_per_s
    assert parse_tiers("dram=40GiB", MACHINE)[0].name == "hbm"  # all that is left beside the weights


@pytest.mark.parametrize(
    "text",
    [
        "", "tape=1GiB", "dram=x", "dram=0", "dram=1GiB,dram=2GiB", "hbm=1GiB@5GB/s", "dram=1GiB@0GB/s",
        "dram=1GiB@1parsec", "hbm=400GiB",
    ],
)  # fmt: skip
def test_bad_tiers_are_refused(text):
    with pytest.raises(UsageError):
        parse_tiers(text, MACHINE)


@pytest.fixture
def trace_file(tmp_path):
    rows = [page_row([0, 1, 2]), page_row([3, 4, 5]), page_row([0, 1, 2]), page_row([3, 4])]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["cache-sim", *arguments])
    return stopped.value.code, *capsys.readouterr()


ON = ("--model", "llama-3.1-8b", "--device", "H100")


def test_cache_sim_prints_the_tiers(capsys, trace_file, tmp_path):
    six_mib = "6MiB"  # three pages of 16 tokens
    page = tmp_path / "tiers.html"
    asked = (trace_file, "--tiers", f"hbm={six_mib},dram={six_mib}", *ON)
    code, out, _ = run(capsys, *asked, "--json", "--html", str(page))
    actual = json.loads(out)
    assert code == 0 and actual["simulated"] and page.stat().st_size > 10_000
    assert [(t["tier"], t["num_pages"], t["page_hits"]) for t in actual["tiers"]] == [("hbm", 3, 0), ("dram", 3, 5)]
    code, out, _ = run(capsys, *asked)
    assert code == 0 and "DRAM" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tiers", "dram=1GiB"],
        ["--tiers", "dram=1KiB", *ON],
        ["--tiers", "dram=1GiB", *ON, "--pages", "5"],
        ["--tiers", "dram=1GiB", *ON, "--warm-up", "9"],
        ["--policy", "lfu"],
    ],
)
def test_bad_input_of_tiers_is_one_sentence_and_exit_code_2(capsys, trace_file, arguments):
    code, out, err = run(capsys, trace_file, *arguments)
    assert code == 2 and err.startswith("error: ") and "Traceback" not in out + err
