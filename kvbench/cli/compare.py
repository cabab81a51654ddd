"""``kvbench compare`` and ``kvbench dev calibrate``: pairs of freshly launched servers, judged or taken as noise."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from kvbench.common.errors import UsageError
from kvbench.common.options import takes
from kvbench.gate.compare.options import CalibrateOptions, CompareOptions, PairOptions

if TYPE_CHECKING:
    from kvbench.gate.compare.request import CompareRequest


@takes(CompareOptions)
def compare(options: CompareOptions) -> int:
    """Say whether CANDIDATE is slower than BASE, and why.

    The verdict is FAIL, PASS or INCONCLUSIVE.

    Each side is a git ref (built in a worktree and environment of its own, kept in ~/.cache/kvbench/builds; `.` is the
    working tree), a launch command with {port}, a URL, settings (page_size=16,enable_prefix_caching=true), or the
    folder of a stored run. With --target NAME it is settings of that engine, or a git ref of --repo.

    A pair is a fresh launch of each side under the same requests: of engines with an adapter (kvbench's own, vLLM,
    transformers) both at once, in turns step by step and in engine time, with a short check over HTTP at the end; else
    servers one after the other, in random order.
    After 8, 12 and 16 pairs p95 TTFT, p95 ITL and throughput are judged per cell, class and overall by sign-flip max-T,
    held against floors and margins; the first look that decides ends the comparison, and so does --max-minutes, with a
    look at what there is.

    \b
    Examples:
      kvbench compare main HEAD --workload workloads/ci_timing.yaml
      kvbench compare v1.2 . --workload workloads/mixed.yaml --max-minutes 60 --policy ci/gates.yaml
      kvbench compare page_size=16 page_size=32 --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare block_size=16 block_size=128 --target vllm --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare --target vllm --target-python old/bin/python --candidate-python new/bin/python
          --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare 'vllm serve {model} --port {port}' 'vllm serve {model} --port {port} --block-size 32'
          --preset vllm --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench compare results/mixed/<run> results/mixed/<other run>
      kvbench compare --resume results/compare/<run>

    \b
    Files written, in results/compare/<UTC time>-<git sha>/:
      verdict.json, junit.xml, summary.md   the verdict for programs, for CI, for people; pairs.html: the pairs drawn
      benchmark-{bigger,smaller}-is-better.json   the candidate's values for github-action-benchmark
      pairs.csv                             one row a pair, cell and metric
      served.json                           single requests to the servers of both sides, round by round
      manifest.json                         both sides, the order, the machine
      base/, candidate/                     raw samples and counters of every load, laid out as a sweep's

    \b
    Exit codes:
      0    PASS: every change is shown to be within its margin
      1    FAIL: a slowdown is shown, and it is above its floor
      2    usage or bad input, the sides differ in model, device, versions or requests, or --max-minutes hold too few
           pairs for any verdict (see --force); no verdict
      3    INCONCLUSIVE, with the smallest slowdown that would have been seen and the pairs that are needed; also
           where --max-minutes were over before the first pair was whole
      4    INVALID: a pair could not be measured, a build failed, or the disk is full
      5    nothing was compared
      130  interrupted; go on with --resume
    """
    from kvbench.gate.compare.run import compare_command

    base, candidate = options.base, options.candidate
    if options.candidate_python:
        base = base or "set:"
        candidate = candidate or base
    return compare_command(_request(options, base, candidate))


@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> int:
    """Measure the noise of this machine in A/A pairs.

    SIDE (default: HEAD) is compared with itself, in pairs as `compare` runs them. What is left between two equal sides
    is what a gate cannot see through. The noise of this class of runners is stored, and warnings say which floors and
    margins are below what it can see; `compare` repeats them.

    \b
    Examples:
      kvbench dev calibrate --workload workloads/ci_timing.yaml
      kvbench dev calibrate 'vllm serve {model} --port {port}' --preset vllm --workload workloads/mixed.yaml
          -o 'sweep={}'

    \b
    Exit codes: 0 stored, 2 usage or bad input, 4 a pair could not be measured, 130 interrupted (go on with --resume).
    Files written: STORE/<runner class>.json, and the pairs as `compare` does.
    """
    from kvbench.gate.compare.run import calibrate_pairs_command

    return calibrate_pairs_command(_request(options, options.side, options.side))


def _request(options: PairOptions, base: str | None, candidate: str | None) -> CompareRequest:
    """The request. Raises UsageError for an option that would change the comparison that is resumed."""
    from kvbench.gate.compare.request import OF_AN_EXECUTION, CompareRequest

    changing = [name for name in options.given if name not in OF_AN_EXECUTION]
    if options.resume is not None and changing:
        raise UsageError(
            f"{options.typed(changing[0])} cannot change a comparison that has begun ({options.resume}): leave it out, "
            "or start a new one without --resume"
        )
    names = [field.name for field in fields(options) if field.name in CompareRequest.model_fields]
    values = {name: getattr(options, name) for name in names}
    return CompareRequest(**values | {"base": base, "candidate": candidate})
