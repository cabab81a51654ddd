"""What the report's words mean, for a reader who never saw the project."""

from __future__ import annotations

from kvbench.report.comparisons import SCATTER
from kvbench.report.provenance import code_paths, repeats_are
from kvbench.report.simulated import MEANING
from kvbench.report.wording import NOT_TOLD
from kvbench.runs.model import Run
from kvbench.runs.ratios import LEVEL


def glossary(run: Run) -> list[tuple[str, str]]:
    """(word, meaning) in the order of the page."""
    return [
        (
            "pays",
            "Output tokens/s ahead of the baseline, and neither p95 TTFT nor p95 ITL behind. Little: the gain may be "
            "smaller than what is called level.",
        ),
        ("at a risk; costs", "At a risk: ahead, and a p95 or another load behind. Costs: output tokens/s behind."),
        (
            "not decided",
            "The interval holds both a gain and a loss: the run shows neither a difference nor that there is none.",
        ),
        (
            "safe",
            "`kvbench quality` found the answers within the limits, each the noise of two equal runs and a margin; or, "
            "in full precision, all of 20 or more canaries under load were right. Not safe: outside a limit.",
        ),
        MEANING
        if run.simulated
        else (
            "engine time",
            "The engine's own time, without HTTP and load client, of configurations in turns step by step. "
            "Served: as the load client saw it over HTTP.",
        ),
        ("ttft", "Time to first token of any kind, from the send (closed loop) or the intended start (open loop)."),
        ("ttfo", "Time to first output (text or tool call), shown where it is not ttft: reasoning comes before it."),
        (
            "reasoning",
            "From a request's first chunk of reasoning to its first output. Output tok/s without reasoning counts the "
            "output tokens that the usage does not call reasoning, in the chunks from the first output on.",
        ),
        ("tpot", "Time per output token of one request: (last chunk − first chunk) / (output tokens − 1)."),
        ("itl, e2el", "Each gap between two chunks, pooled over requests; and from the start to the last chunk."),
        ("client queue", "Where a cap limits the requests in flight: the wait in the client, which is part of ttft."),
        ("goodput", "Requests/s that met every limit of the workload's SLO; failed requests meet none."),
        (
            "steady window",
            "Closed loop: while the asked-for concurrency was reached. Open loop: from the end of the climb to the "
            "last arrival. Latencies are of the requests due in it, if they are 60 % of all, else of the whole run.",
        ),
        (
            "prefix hits",
            'Share of prompt tokens that the prefix cache served; "of a–b": what these prompts allow in the declared '
            "state of the cache. A share outside makes the load invalid.",
        ),
        ("waste", "Token slots reserved by a sequence and holding nothing yet, as a share of what is reserved."),
        ("free, scattered", "Contiguous layout: free slots that would hold a waiting request, but in no single hole."),
        (
            "failed",
            "A request without a finish reason, the end of its stream, or a usage that matches what was streamed. It "
            "is in no latency and no throughput.",
        ),
        ("repeat", repeats_are(run)),
        (
            f"verdict, {run.clock}",
            f"From 3 repeats on. Level: every repeat's ratio within {LEVEL * 100:g} % of 1. Ahead or behind: not "
            f"level, and the 95 % t interval of the mean log ratio excludes 1. All else is {NOT_TOLD}. Repeats scatter "
            f"when the largest throughput of a cell is over {SCATTER:g} times its smallest.",
        ),
        *(("layouts", text) for text in code_paths(run)),
    ]
