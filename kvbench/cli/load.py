"""``kvbench load``: one load, or a search over rates, on a server that runs already."""

from __future__ import annotations

import re

import click

from kvbench.common.options import RequestCommand, takes
from kvbench.sweep.requests import LoadRequest

_LIMIT = re.compile(r"[a-z0-9_]+:[0-9.]+")


class _Command(RequestCommand):
    """Takes ``--goodput ttft:200 tpot:50``, several words after one option, as vllm bench serve does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for word in args:
            if _LIMIT.fullmatch(word) and len(joined) > 1 and joined[-2] == "--goodput":
                joined[-1] += f" {word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@takes(LoadRequest, cls=_Command)
def load(request: LoadRequest) -> int:
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

    return load_command(request)
