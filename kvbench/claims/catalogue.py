"""The claims: what is said, who says it, what is measured, and who judges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvbench.claims import judges
from kvbench.claims.judges import KERNEL_COST, SERVED, SHARING_WIDTHS, Found, Verdict
from kvbench.claims.kernel_cost import measure_kernel_cost
from kvbench.claims.measure import Measurement
from kvbench.claims.served import measure_served

OTHERS = {SERVED: measure_served, KERNEL_COST: measure_kernel_cost}
"""Measurements without a workload: functions of (folder, on_cpu, say, check) that return facts."""
_KWON = "Kwon et al., PagedAttention, SOSP 2023"
_FOLKLORE = "folklore"


@dataclass(frozen=True)
class Claim:
    """``says``: the claim as it circulates; ``measurements``: names of what ``judge`` looks at.

    counted: it rests on exact counts alone, which one launch tells.
    """

    name: str
    says: str
    source: str
    measurements: tuple[str, ...]
    judge: Callable[[Found], Verdict]
    counted: bool = False

    @property
    def rule(self) -> str:
        """When it held: the judge's docstring."""
        return getattr(self.judge, "func", self.judge).__doc__ or ""


def _sharing(workload: str, kind: str, option: str) -> list[Measurement]:
    """Each width alone, on pages alone: reservations share nothing."""
    one = "load.prompts.classes.0"
    return [
        Measurement(
            f"{workload}-{kind}-{width}",
            ("sweep={}", f"{one}.n={width if option == 'n' else 1}", f"{one}.{option}={width}"),
            workload=workload,
        )
        for width in SHARING_WIDTHS
    ]


_CLASSES = {
    "easy": "[{name: easy, prompt_tokens: [8, 32], output_tokens: [8, 16]}]",
    "average": "[{name: average, prompt_tokens: [96, 160], output_tokens: [32, 64]}]",
    "long": "[{name: long, prompt_tokens: [480, 800], output_tokens: [32, 64]}]",
    "production": "[{name: production, prompt_tokens: {percentiles: {min: 8, p50: 64, p90: 256, p99: 700, max: 800}}, "
    "output_tokens: {percentiles: {min: 4, p50: 32, p90: 96, max: 200}}}]",
}
_FIVE_SHOT = 341  # tokens of the prefix with five examples; the workload's own has one
_NUMBERS = {"easy": 72, "average": 24, "long": 12, "production": 30}  # of requests

MEASUREMENTS = {
    each.name: each
    for each in (
        Measurement("reservation"),
        Measurement("useful-memory"),
        Measurement("mixed-lengths"),
        Measurement("uniform-lengths"),
        Measurement("single-user"),
        Measurement("page-size"),
        *(
            each
            for workload in ("sharing", "sharing-long")
            for kind, option in (("parallel", "n"), ("beam", "beam_width"))
            for each in _sharing(workload, kind, option)
        ),
        Measurement("prefix-unshared"),
        Measurement("prefix-one-shot", workload="prefix-shared"),
        Measurement("prefix-five-shot", (f"load.prompts.shared_prefix.tokens={_FIVE_SHOT}",), workload="prefix-shared"),
        Measurement("quantised-kv"),
        Measurement("swap"),
        Measurement("max-num-seqs"),
        Measurement("max-num-batched-tokens"),
        Measurement("long-contexts"),
        Measurement(
            "long-contexts-none",
            ("load.prompts.classes=[{name: chat, prompt_tokens: [16, 48], output_tokens: [24, 40]}]",),
            workload="long-contexts",
        ),
        *(
            Measurement(
                f"prompts-{kind}",
                (f"load.prompts.classes={_CLASSES[kind]}", f"load.num_requests={_NUMBERS[kind]}"),
                workload="kinds-of-prompts",
            )
            for kind in judges.KINDS
        ),
    )
}


def _sharing_claim(name: str, says: str, lengths: str, published: tuple[str, float, float]) -> Claim:
    """``lengths``: the data set whose they are; ``published``: what was measured, and the least and most saved [%]."""
    measured = tuple(f"{published[0]}-{width}" for width in SHARING_WIDTHS)
    return Claim(name, says, f"{_KWON}, 6.3, {lengths}", measured, partial(judges.sharing, *published), counted=True)


CLAIMS = (
    Claim(
        "reservation",
        "A 300-token chat wastes 93 % of its 4,096-token reservation; pages waste almost nothing.",
        _FOLKLORE,
        ("reservation",),
        judges.reservation,
        counted=True,
    ),
    Claim(
        "useful-memory",
        "Contiguous caches use 20 to 38 % of the KV memory for tokens, pages 96 %.",
        f"{_KWON}, figure 2",
        ("useful-memory",),
        judges.useful_memory,
        counted=True,
    ),
    Claim(
        "batched-at-once",
        "Pages batch 30 requests at once where contiguous caches batch 7 to 14.",
        f"{_KWON}, figure 13",
        ("useful-memory",),
        judges.batched_at_once,
        counted=True,
    ),
    Claim(
        "sustainable-rate",
        "Pages sustain 1.7 to 2.7 times the request rate of exact reservations, 2.7 to 8 times that of the longest.",
        f"{_KWON}, 6.2",
        ("useful-memory",),
        judges.sustainable_rate,
    ),
    Claim(
        "mixed-lengths",
        "Paging gives 2 to 4 times the throughput on mixed lengths at the same memory.",
        f"folklore, after {_KWON}",
        ("mixed-lengths",),
        judges.mixed_lengths,
    ),
    Claim(
        "uniform-lengths",
        "Paging brings little where all requests are equally long.",
        _FOLKLORE,
        ("uniform-lengths",),
        partial(judges.brings_little, "uniform-lengths"),
    ),
    Claim(
        "single-user",
        "Paging brings a single user nothing.",
        _FOLKLORE,
        ("single-user",),
        partial(judges.brings_little, "single-user"),
    ),
    Claim("page-16", "16 tokens are the best page size.", _FOLKLORE, ("page-size",), judges.sweet_spot),
    Claim(
        "small-pages",
        "Pages of 4 to 8 tokens waste memory and time on their page tables.",
        _FOLKLORE,
        ("page-size",),
        judges.small_pages,
    ),
    _sharing_claim(
        "sharing-parallel",
        "Copy-on-write saves about 6 to 10 % of the memory of 2 to 6 answers to one short prompt.",
        "Alpaca",
        ("sharing-parallel", 6.1, 9.8),
    ),
    _sharing_claim(
        "sharing-beam",
        "Copy-on-write saves about 38 to 55 % of the memory of beam search.",
        "Alpaca",
        ("sharing-beam", 37.6, 55.2),
    ),
    _sharing_claim(
        "sharing-parallel-long",
        "Copy-on-write saves about 16 to 31 % of the memory of 2 to 6 answers to one longer prompt.",
        "ShareGPT",
        ("sharing-long-parallel", 16.2, 30.5),
    ),
    _sharing_claim(
        "sharing-beam-long",
        "Copy-on-write saves about 44 to 66 % of the memory of beam search on longer prompts.",
        "ShareGPT",
        ("sharing-long-beam", 44.3, 66.3),
    ),
    Claim(
        "paging-cost",
        "Reading KV through a page table costs 3 to 5 %.",
        _FOLKLORE,
        (KERNEL_COST,),
        judges.paging_cost,
    ),
    Claim(
        "prefix-unshared",
        "Prefix caching costs more than it gives on short, ever-changing prompts.",
        "folklore; vLLM says so of its v0, and near zero of v1",
        ("prefix-unshared",),
        judges.prefix_unshared,
    ),
    Claim(
        "prefix-shared",
        "A shared prefix gives 1.67 times the throughput with one example in it, 3.58 times with five.",
        f"{_KWON}, 6.4, translation",
        ("prefix-one-shot", "prefix-five-shot"),
        judges.prefix_shared,
    ),
    Claim(
        "shared-tokens",
        "40 to 60 % of the tokens of a batch of chats are shared.",
        _FOLKLORE,
        ("prefix-one-shot", "prefix-five-shot", "prefix-unshared"),
        judges.shared_tokens,
        counted=True,
    ),
    Claim(
        "quantised-kv",
        "FP8, INT8 and INT4 KV are faster where memory is scarce.",
        _FOLKLORE,
        ("quantised-kv",),
        judges.quantised_kv,
    ),
    Claim(
        "scales-and-pages",
        "Scales weigh more when the data of a page shrinks: with fewer bits, and in smaller pages.",
        _FOLKLORE,
        ("quantised-kv",),
        judges.scales_and_pages,
        counted=True,
    ),
    Claim(
        "swap-by-page",
        "Swapping page by page moves much less than swapping whole sequences.",
        _FOLKLORE,
        ("swap",),
        judges.swap_by_page,
    ),
    Claim(
        "max-num-seqs",
        "A max_num_seqs that is too low wastes throughput, one that is too high preempts and delays.",
        _FOLKLORE,
        ("max-num-seqs",),
        judges.max_num_seqs,
    ),
    Claim(
        "max-num-batched-tokens",
        "A max_num_batched_tokens that is too low wastes throughput, one that is too high holds up running streams.",
        "vLLM, optimization and tuning guide",
        ("max-num-batched-tokens",),
        judges.max_num_batched_tokens,
    ),
    Claim(
        "long-contexts",
        "A few long contexts slow everyone.",
        _FOLKLORE,
        ("long-contexts-none", "long-contexts"),
        judges.long_contexts,
    ),
    Claim(
        "kinds-of-prompts",
        "What a benchmark of average prompts shows holds for easy, long and production-like ones.",
        _FOLKLORE,
        tuple(f"prompts-{kind}" for kind in judges.KINDS),
        judges.kinds_of_prompts,
    ),
    Claim("abandoned", "Conversations whose users leave keep their memory.", _FOLKLORE, (SERVED,), judges.abandoned),
    Claim(
        "malformed",
        "Malformed prompts disturb the requests beside them.",
        "bugs of small engines: nano-vllm, mini-sglang",
        (SERVED,),
        judges.malformed,
    ),
)
