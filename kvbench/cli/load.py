"""``kvbench load``: one load, or a search over rates, on a server that runs already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import (
    FORM_OPTIONS,
    NO_CALIBRATION,
    OVERRIDES,
    PROFILE,
    PROMPT_OPTIONS,
    RUNNING_SERVER_OPTIONS,
    SEED,
    FiniteRange,
    add_options,
    given_options,
    with_form,
)
from kvbench.common.ports import LOCUST_PORT

_LIMIT = re.compile(r"[a-z0-9_]+:[0-9.]+")
_PORT = {"type": click.IntRange(1, 65535), "default": LOCUST_PORT, "show_default": True, "metavar": "PORT"}
_POSITIVE = FiniteRange(min=0, min_open=True)


class _Command(click.Command):
    """Takes ``--goodput ttft:200 tpot:50``, several words after one option, as vllm bench serve does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for word in args:
            if _LIMIT.fullmatch(word) and len(joined) > 1 and joined[-2] == "--goodput":
                joined[-1] += f" {word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


_LOAD_OPTIONS = (
    click.option("--at", metavar="LOAD",
                 help="Which of the WORKLOAD's loads: c32 is that of 32 users, r4 that of 4 requests/s (default: the "
                 "first)."),
    click.option("--request-rate", type=FiniteRange(min=0, min_open=True, inf=True), metavar="R",
                 help="Open loop at R requests/s (conversations/s where the workload has them), whatever the server "
                 "does; inf: all at once."),
    click.option("--burstiness", type=_POSITIVE, metavar="B",
                 help="Gamma-distributed gaps: below 1 burstier than Poisson, above 1 more regular."),
    click.option("--max-concurrency", "--concurrency", type=click.IntRange(1), metavar="N",
                 help="Closed loop: the users. Open loop: most requests in flight; the time that others wait in the "
                 "client is in their TTFT, and shown apart."),
    click.option("--num-prompts", type=click.IntRange(1), metavar="N",
                 help="Requests of the load, or conversations where the workload has them (--find-max-rate: of a run, "
                 "at least)."),
    click.option("--num-warmups", type=click.IntRange(0, 1000), default=4, show_default=True, metavar="N",
                 help="Warm-up requests of the load's shape, never measured; then as many short ones at once as "
                 "the load has in flight. 0: none of either."),
    click.option("--goodput", multiple=True, metavar="NAME:MS", help="An SLO such as 'ttft:200 tpot:50'. Repeatable."),
    click.option("--canaries", metavar="SHARE[:FILE]",
                 help="Mix in requests whose right answers are known: 0.1 is one in ten. FILE: of `kvbench canaries`, "
                 "or a set's name (default: the set that has the model's name)."),
    click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
                 help="Keep manifest, raw samples and metrics there; it must be new or empty (default: keep nothing)."),
    click.option("--resume", is_flag=True,
                 help="With --output-dir: go on with what was begun there, or measure an invalid load again."),
)  # fmt: skip
_SEARCH_OPTIONS = (
    click.option("--find-max-rate", metavar="SLO",
                 help="Search the highest request rate that meets SLO, with a 95 % interval: conditions such as "
                 "p95_ttft<=500ms,p99_itl<=50ms or goodput>=95% (of the requests, with --goodput); < and > are read as "
                 "<= and >=."),
    click.option("--min-rate", type=_POSITIVE, metavar="R",
                 help="--find-max-rate: lowest rate tried (default: 1/64 of the first)."),
    click.option("--max-rate", type=_POSITIVE, metavar="R",
                 help="--find-max-rate: highest rate tried (default: 1024 times the first)."),
    click.option("--tolerance", type=FiniteRange(0.01, 0.5), default=0.1, show_default=True,
                 help="--find-max-rate: how wide the 95 % interval may be at the end, relative to the rate."),
    click.option("--max-runs", type=click.IntRange(1, 1000), default=40, show_default=True,
                 help="--find-max-rate: most runs, disturbed ones included."),
    click.option("--max-minutes", type=_POSITIVE, default=60.0, show_default=True,
                 help="--find-max-rate: its end: a run that cannot end by then is not begun, or is cut."),
    click.option("--run-seconds", type=FiniteRange(min=0), default=20.0, show_default=True,
                 help="--find-max-rate: least seconds of arrivals of a run. Without --num-prompts a run also "
                 "lasts until an overload of half the --tolerance would show: for the limit on TTFT or E2EL over that, "
                 "or for 3 / that^2 arrivals."),
)  # fmt: skip
_PROCESS_OPTIONS = (
    click.option("--processes", type=click.IntRange(1, 1000), metavar="N",
                 help="Share the load among N processes of this machine (default: the workload's load.processes)."),
    click.option("--master", is_flag=True, help="Share the load among workers on other machines, and wait for them."),
    click.option("--expect-workers", type=click.IntRange(1, 1000), default=1, show_default=True, metavar="N",
                 help="--master: how many."),
    click.option("--bind-host", default="127.0.0.1", show_default=True, metavar="HOST",
                 help="--master: where to listen for them, e.g. 0.0.0.0 on a network of your own."),
    click.option("--bind-port", **_PORT, help="--master: and at which port."),
    click.option("--worker", is_flag=True, help="Be a worker of the master at --master-host; nothing else is needed."),
    click.option("--master-host", default="127.0.0.1", show_default=True, metavar="HOST", help="--worker: the master."),
    click.option("--master-port", **_PORT, help="--worker: its port."),
)  # fmt: skip


@click.command(cls=_Command)
@click.argument("workload", type=click.Path(), required=False)
@click.option("--url", "--base-url", "url", help="The server, e.g. http://127.0.0.1:8000 (with or without /v1).")
@add_options(*PROMPT_OPTIONS)
@PROFILE
@OVERRIDES
@add_options(*FORM_OPTIONS)
@SEED
@add_options(*_LOAD_OPTIONS, *RUNNING_SERVER_OPTIONS, NO_CALIBRATION, *_SEARCH_OPTIONS, *_PROCESS_OPTIONS)
def load(**options: Any) -> int:
    """Send one load to a server that runs already.

    Then print what the client measured.

    The load is one of WORKLOAD, or without a file the one that --input-len, --output-len and --concurrency make.

    A few warm-up requests whose prompts are never measured go first; the cache is put into the declared state and
    checked; the load is valid or the reasons why it is not are printed.

    \b
    Examples:
      kvbench serve --model llama-32m --port 8000 &
      kvbench load --url http://127.0.0.1:8000 --input-len 600 --output-len 150 --concurrency 20
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --at c32
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --goodput 'ttft:200 tpot:50' --output-dir out
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --find-max-rate 'p95_ttft<=500ms'
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --canaries 0.1
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --processes 4
      kvbench load workloads/mixed.yaml --url http://10.0.0.1:8000 --master --expect-workers 2 --bind-host 10.0.0.2
      kvbench load --worker --master-host 10.0.0.2

    \b
    Files written, with --output-dir only:
      manifest.json       what was measured, with what, on what; "status": complete or incomplete
      metrics.json        the result, in vllm bench serve's field names and kvbench's own
      requests.parquet    one row a request: its times, each chunk's, its tokens, its failure
      wrong_answers.jsonl one line a canary's wrong answer: what it is, what it should be, where its KV was
      load.json           the client's own figures; spec.json: its settings; client.log: its errors, if any
      counters.json       what the server's /metrics counted; server.parquet: each reading of them
      requests/           what was sent, and how it was drawn; cells/: the same load as that of a sweep
      calibration.json    how precise the client is on this machine
      runs/, search.json  --find-max-rate: the same for each run; and the answer

    \b
    Exit codes:
      0    measured; that the server refused requests by errors of its own is a finding, and said
      1    canaries were answered wrongly (--find-max-rate: that is a rate which is missed)
      2    usage or bad input, or no server; nothing was sent
      3    --find-max-rate ended before its interval was within the tolerance (--max-runs, --max-minutes), its runs were
           too short to tell, or the client was the limit before the server
      4    the load is invalid, or could not be driven to its end
      130  interrupted; with --output-dir go on with --resume
    """
    from kvbench.sweep.one_load import load_command

    return load_command(given=given_options(options), **with_form(options))
