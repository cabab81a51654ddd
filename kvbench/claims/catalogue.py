"""The claims: what is said, who says it, what is measured, and who judges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvbench.claims import judges
from kvbench.claims.judges import Found, Verdict
from kvbench.claims.measure import Measurement

SERVED = "served"  # the one measurement over HTTP
_KWON = "Kwon et al., PagedAttention, SOSP 2023"
_FOLKLORE = "folklore"


@dataclass(frozen=True)
class Claim:
    """``says``: the claim as it circulates; ``measurements``: names of what ``judge`` looks at."""

    name: str
    says: str
    source: str
    measurements: tuple[str, ...]
    judge: Callable[[Found], Verdict]

    @property
    def rule(self) -> str:
        """When it held: the judge's docstring."""
        return getattr(self.judge, "func", self.judge).__doc__ or ""


def _sharing(kind: str, option: str) -> list[Measurement]:
    one = "load.prompts.classes.0"
    return [
        Measurement(
            f"sharing-{kind}-{width}",
            (f"{one}.n={width if option == 'n' else 1}", *([f"{one}.{option}={width}"] if option != "n" else [])),
            workload="sharing",
            exact=True,
        )
        for width in (2, 4, 6)
    ]


_CLASSES = {
    "easy": "[{name: easy, prompt_tokens: [8, 32], output_tokens: [8, 16]}]",
    "average": "[{name: average, prompt_tokens: [96, 160], output_tokens: [32, 64]}]",
    "long": "[{name: long, prompt_tokens: [480, 800], output_tokens: [32, 64]}]",
    "production": "[{name: production, prompt_tokens: {percentiles: {min: 8, p50: 64, p90: 256, p99: 700, max: 800}}, "
    "output_tokens: {percentiles: {min: 4, p50: 32, p90: 96, max: 200}}}]",
}
_NUMBERS = {"easy": 96, "average": 32, "long": 16, "production": 40}  # of requests

MEASUREMENTS = {
    each.name: each
    for each in (
        Measurement("reservation", exact=True),
        Measurement("useful-memory", exact=True),
        Measurement("mixed-lengths"),
        Measurement("uniform-lengths"),
        Measurement("single-user"),
        Measurement("page-size"),
        *_sharing("parallel", "n"),
        *_sharing("beam", "beam_width"),
        Measurement("paging-cost"),
        Measurement("prefix-unshared"),
        Measurement("prefix-shared-short", workload="prefix-shared"),
        Measurement("prefix-shared-long", ("load.prompts.classes.0.output_tokens=64",), workload="prefix-shared"),
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

CLAIMS = (
    Claim(
        "reservation",
        "A 300-token chat wastes 93 % of its 4,096-token reservation; pages waste almost nothing.",
        _FOLKLORE,
        ("reservation",),
        judges.reservation,
    ),
    Claim(
        "useful-memory",
        "Contiguous caches use 20 to 38 % of the KV memory for tokens, pages 96 %.",
        f"{_KWON}, figure 2",
        ("useful-memory",),
        judges.useful_memory,
    ),
    Claim(
        "mixed-lengths",
        "Paging gives 2 to 4 times the throughput on mixed lengths at the same memory.",
        f"{_KWON}, abstract",
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
    Claim(
        "sharing-parallel",
        "Copy-on-write saves about 6 to 10 % of the memory of 2 to 6 answers to one short prompt.",
        f"{_KWON}, 6.3, Alpaca",
        tuple(f"sharing-parallel-{width}" for width in (2, 4, 6)),
        partial(judges.sharing, "parallel", 6.1, 9.8),
    ),
    Claim(
        "sharing-beam",
        "Copy-on-write saves about 38 to 55 % of the memory of beam search.",
        f"{_KWON}, 6.3, Alpaca",
        tuple(f"sharing-beam-{width}" for width in (2, 4, 6)),
        partial(judges.sharing, "beam", 37.6, 55.2),
    ),
    Claim(
        "paging-cost",
        "Reading KV through a page table costs 3 to 5 %.",
        _FOLKLORE,
        ("paging-cost",),
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
        "A shared prefix gives about 1.67 times the throughput.",
        f"{_KWON}, 6.4 (one-shot prefix, translation)",
        ("prefix-shared-short", "prefix-shared-long"),
        judges.prefix_shared,
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
        "Scales weigh more when pages shrink: INT4 gains less in small pages.",
        _FOLKLORE,
        ("quantised-kv",),
        judges.scales_and_pages,
    ),
    Claim(
        "swap-by-page",
        "Swapping page by page moves less than swapping whole sequences.",
        _FOLKLORE,
        ("swap",),
        judges.swap_by_page,
    ),
    Claim(
        "max-num-seqs",
        "A max_num_seqs that is too low wastes throughput, one that is too high preempts and delays.",
        _FOLKLORE,
        ("max-num-seqs",),
        partial(judges.batch_limit, "max-num-seqs", "max_num_seqs"),
    ),
    Claim(
        "max-num-batched-tokens",
        "A max_num_batched_tokens that is too low wastes throughput, one that is too high holds up running streams.",
        "vLLM, optimization and tuning guide",
        ("max-num-batched-tokens",),
        partial(judges.batch_limit, "max-num-batched-tokens", "max_num_batched_tokens"),
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
