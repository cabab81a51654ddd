"""``kvbench audit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.common.options import Options, argument, option, switch, takes


@dataclass(frozen=True, kw_only=True)
class AuditRequest(Options):
    """The request of ``kvbench audit``."""

    files: tuple[Path, ...] = argument("FILES")
    allow: tuple[str, ...] = option(
        "Do not fail for this check, by its name in brackets, such as cache where prompts share a prefix on purpose. "
        "Repeatable.",
        default=(), metavar="CHECK",
    )  # fmt: skip
    as_json: bool = switch("Print verdict.json instead of the tables.", "--json")
    output_dir: Path | None = option("Write verdict.json, junit.xml and summary.md to this folder.")


@takes(AuditRequest)
def audit(request: AuditRequest) -> int:
    """Hold results of other load tools against their own data.

    FILES are result files, or folders of them, of vLLM's and SGLang's benchmarks, GuideLLM, AIPerf, inference-perf,
    llm-d's Benchmark Report or InferenceX; they are recognised by their content. Each check says that the result is
    ok, that it is broken, or what to run again so that it can be decided: a warm cache; chunks taken for tokens; token
    counts that differ; a client short of CPU; a load that was not delivered; too few samples for a percentile; failed
    requests; a peak below the mean; ramp and drain in the percentiles; queueing left out of TTFT; a single run; a name
    for another definition.

    Of several results at one load it says whether they are comparable, and shows their figures by one definition.

    \b
    Examples:
      kvbench audit result.json
      kvbench audit artifacts/                              AIPerf's or inference-perf's folder, its records too
      kvbench audit guidellm.json vllm.json --output-dir results/audit
      kvbench audit result.json --allow cache               the prompts share a prefix on purpose
    \b
    Exit codes:
      0  no check found anything broken
      1  something is broken
      2  usage, or a file that is not such a result
      4  a result has neither a request nor a figure
    """
    from kvbench.audit.report import report_audit

    return report_audit(request.files, request.allow, request.output_dir, as_json=request.as_json)
