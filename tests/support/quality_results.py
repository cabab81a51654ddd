"""What `kvbench quality` would have found, with numbers set by hand: within the limits, outside, the control."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.report.quality import is_quantised
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import QualityResult
from tests.support.report_cells import run as run_of_cells

LIMITS = {
    "mean": 0.002, "p99": 0.02, "rms_dp": 0.02, "perplexity_change": 0.01, "greedy.share": 0.8, "passkey.share": 0.95,
}  # fmt: skip
KLD_OUTSIDE = "its mean KLD is 0.03 nats, the limit is 0.002"


def figures(
    kld: float = 2e-12, passkeys: int = 64, more: float = 0.0, greedy: int = 46, wrong: int = 0, *outside: str
) -> dict[str, Any]:
    """The figures of a configuration: KLD [nats], right passkeys of 64, perplexity change, equal answers of 48.

    ``wrong``: passkeys at a full pool; wrong ones ask for the deepest facts and for lengths of 0 mod page size.
    """
    depths = ["0 to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "80 to 100 %"]
    left = 64 - passkeys

    def parts(of: str, asked: int, wrong: int) -> dict[str, Any]:
        return {"of": of, "asked": asked, "right": asked - min(asked, wrong)}

    return {
        "kv_cache_dtype": "auto", "layout": "paged", "page_size": 16, "positions": 12_345,
        "mean": kld, "mean_low": 0.8 * kld, "mean_high": 1.25 * kld, "p95": 4 * kld, "p99": 9 * kld, "max": 80 * kld,
        "prompt_mean": kld, "decode_mean": kld, "same_argmax": 1 - min(0.4, 2 * kld),
        "rms_dp": kld**0.5, "rms_dp_low": 0.9 * kld**0.5, "rms_dp_high": 1.1 * kld**0.5,
        "perplexity": 6.4 * (1 + more), "perplexity_change": more, "perplexity_change_low": more - 0.001,
        "perplexity_change_high": more + 0.001,
        "greedy": {"answers": 48, "agree": greedy, "share": greedy / 48, "low": greedy / 48 - 0.05,
                   "high": min(1.0, greedy / 48 + 0.05), "first_divergence": 23 if greedy < 48 else None},
        "passkey": {
            "asked": 64, "right": passkeys, "share": passkeys / 64, "low": passkeys / 64 - 0.04,
            "high": min(1.0, passkeys / 64 + 0.02),
            "by_depth": [parts(of, 12, left * (i == 0)) for i, of in enumerate(depths)],
            "by_length": [parts("1 to 256", 32, 0), parts("257 to 512", 32, left)],
            "by_residue": [parts(str(i), 4, left * (i == 0)) for i in range(16)],
        },
        "full_pool": {"answers": 48, "agree": greedy, "passkey_asked": 64, "passkey_right": 64 - wrong,
                      "wrong": [f"passkey-{i}" for i in range(wrong)], "preemptions": 37, "swapped_pages": 210,
                      "evicted_pages": 84, "forks": 6},
        "canaries": {"asked": 24, "right": 24}, "sets": {}, "outside": list(outside),
    }  # fmt: skip


def outside(kld: float = 0.03, why: str = KLD_OUTSIDE) -> dict[str, Any]:
    """Figures as those of INT4: a larger KLD, wrong passkeys, a worse perplexity."""
    return figures(kld, 58, 0.04, 31, 0, why)


def result(configurations: Mapping[str, Mapping[str, Any]], **how: Any) -> QualityResult:
    """``configurations``: id -> figures; ``how``: fields of the result."""
    known = {"workload": "mixed", "model": "own", "beside": False, "weights": "those of own", "control": figures(3e-12)}
    return QualityResult(**(known | {"limits": LIMITS, "configurations": dict(configurations)} | how))


def measured_run(*cells: MeasuredCell, **how: Any) -> Run:
    """``report_cells.run`` with every configuration in full precision measured and found within the limits."""
    made = run_of_cells(*cells, **how)
    return with_quality(made, {cell.config_id: None for cell in made.cells if is_quantised(cell)})


def with_quality(run: Run, but: Mapping[str, Mapping[str, Any] | None] | None = None, **how: Any) -> Run:
    """The run with every configuration measured within the limits; ``but``: id -> other figures, None: not measured."""
    known = {cell.config_id: figures() for cell in run.cells} | (but or {})
    return replace(run, quality=result({name: each for name, each in known.items() if each is not None}, **how))
