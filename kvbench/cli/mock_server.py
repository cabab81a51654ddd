"""``kvbench mock-server``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from kvbench.cli.options import FiniteRange
from kvbench.workload.request_form import EndpointName

_RATE = FiniteRange(0, 1)
_ENDPOINTS = get_args(EndpointName)


@click.command(name="mock-server")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option("--ttft-ms", type=FiniteRange(0), default=50.0, show_default=True, help="Receipt to first chunk.")
@click.option("--itl-ms", type=FiniteRange(0), default=20.0, show_default=True, help="Between chunks.")
@click.option(
    "--jitter", type=FiniteRange(0, 10), default=0.0, show_default=True,
    help="Coefficient of variation of both (gamma distributed; the means stay).",
)  # fmt: skip
@click.option("--tokens-per-chunk", type=click.IntRange(1), default=1, show_default=True)
@click.option("--events-per-write", type=click.IntRange(1), default=1, show_default=True, help="Chunks sent at once.")
@click.option(
    "--endpoint", "endpoints", type=click.Choice(_ENDPOINTS), multiple=True, default=_ENDPOINTS,
    help="The only one that is served; may be repeated.  [default: all]",
)  # fmt: skip
@click.option(
    "--deltas", metavar="KIND[:COUNT],...", default="text", show_default=True,
    help="Kinds of an answer's tokens in their order, as in reasoning:8,text (see above).",
)  # fmt: skip
@click.option(
    "--template-tokens", type=click.IntRange(0), default=0, show_default=True,
    help="What a chat template adds to the tokens of messages.",
)  # fmt: skip
@click.option("--in-step", is_flag=True, help="All streams' chunks on common ticks, as an engine's steps send them.")
@click.option("--fail-rate", type=_RATE, default=0.0, show_default=True, help="Share of requests answered 500.")
@click.option("--truncate-rate", type=_RATE, default=0.0, show_default=True, help="Share closed in mid-stream.")
@click.option("--drop-rate", type=_RATE, default=0.0, show_default=True, help="Share closed without an answer.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--vocab-size", type=click.IntRange(1), default=32000, show_default=True)
@click.option("--max-model-len", type=click.IntRange(1), default=32768, show_default=True)
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="PEM; serves https://.")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="PEM; of --tls-cert.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable with the key that requests must carry.")
def mock_server(**options: Any) -> int:
    """Serve chat and other APIs that compute nothing.

    They are completions, chat completions and Responses as OpenAI's, and messages as Anthropic's. Their tokens come on
    a known schedule.

    Every chunk is stamped with the moment of its sending where the request asks for it (x-kvbench-stamp: 1); GET
    /stamps tells all schedules and sends afterwards. One request changes the schedule through its model's name, as a
    query of ttft_ms, itl_ms, jitter, in_step, tokens_per_chunk, events_per_write, cached_tokens, textless (tokens at
    the end without text), deltas, split (what is written goes out in pieces of so many bytes) and fault. A word of a
    text is a token; POST /tokenize counts them. The shares of --fail-rate, --truncate-rate and --drop-rate are 1 at
    most together.

    Kinds of deltas: text, reasoning_content, reasoning, reasoning_details, refusal, tool_calls, role (a chunk without a
    token), empty (a token without text), hidden (reasoning that only the usage counts) and held (text that comes with
    the next chunk). The last without a count takes the rest; another is one token. An endpoint that has no such delta
    answers 400: reasoning over completions, for one.

    \b
    Example:
      kvbench mock-server --port 8000 --ttft-ms 100 --itl-ms 20 --jitter 0.1 --truncate-rate 0.01
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --model 'mock?ttft_ms=20&itl_ms=5'
      kvbench mock-server --endpoint chat --deltas reasoning_content:32,text --template-tokens 6
    \b
    Prints "ready URL" once it serves. No files are written.
    Exit codes: 0 stopped by SIGINT or SIGTERM, 2 bad input.
    """
    from kvbench.calibration.mock.server import run

    return run(**options)
