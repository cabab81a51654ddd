"""``kvbench dev mock-server``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvbench.common.options import (
    Count,
    ExistingFile,
    NotNegative,
    NotNegativeCount,
    Options,
    Port,
    Share,
    option,
    switch,
    takes,
)
from kvbench.workload.request_form import EndpointName

_ENDPOINTS = get_args(EndpointName)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options, heading="The schedule of the answers"):
    """The times and kinds of an answer's tokens."""

    ttft_ms: NotNegative = option("Milliseconds from a request to its first chunk.", default=50.0)
    itl_ms: NotNegative = option("Milliseconds between two chunks.", default=20.0)
    jitter: float = option(
        "Vary both times: their coefficient of variation (gamma distributed; the means stay).",
        default=0.0,
        least=0,
        most=10,
    )
    tokens_per_chunk: Count = option("Put N tokens in a chunk.", default=1)
    events_per_write: Count = option("Send N chunks at once.", default=1)
    deltas: str = option(
        "Kinds of an answer's tokens in their order, as in reasoning:8,text (see above).",
        default="text", metavar="KIND[:COUNT],...",
    )  # fmt: skip
    in_step: bool = switch("Send all streams' chunks on common ticks, as an engine's steps do.")
    template_tokens: NotNegativeCount = option("Tokens that a chat template adds to messages.", default=0)
    seed: NotNegativeCount = option("Seed of all that is drawn.", default=0)


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Options, heading="Faults"):
    """The shares of requests that fail; at most 1 together."""

    fail_rate: Share = option("Share of requests answered 500.", default=0.0)
    truncate_rate: Share = option("Share of requests closed in mid-stream.", default=0.0)
    drop_rate: Share = option("Share of requests closed without an answer.", default=0.0)


@dataclass(frozen=True, kw_only=True)
class MockServerRequest(ScheduleOptions, FaultOptions, heading="The server"):
    """The request of ``kvbench dev mock-server``."""

    host: str = option("Listen at this address.", default="127.0.0.1")
    port: Port = option("Listen at this port; 0: a free one.", default=8000)
    endpoints: tuple[EndpointName, ...] = option(
        "Serve only this API; may be repeated (default: all).", "--endpoint", default=_ENDPOINTS
    )
    vocab_size: Count = option("Token ids that the model has.", default=32000)
    max_model_len: Count = option("The longest request in tokens.", default=32768)
    tls_cert: ExistingFile | None = option("Serve https:// with this certificate (PEM).")
    tls_key: ExistingFile | None = option("The key of --tls-cert (PEM).")
    api_key_env: str | None = option("Environment variable with the key that requests must carry.", metavar="NAME")


@takes(MockServerRequest)
def mock_server(request: MockServerRequest) -> int:
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
      kvbench dev mock-server --port 8000 --ttft-ms 100 --itl-ms 20 --jitter 0.1 --truncate-rate 0.01
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000
      kvbench load workloads/mixed.yaml --url http://127.0.0.1:8000 --model 'mock?ttft_ms=20&itl_ms=5'
      kvbench dev mock-server --endpoint chat --deltas reasoning_content:32,text --template-tokens 6
    \b
    Prints "ready URL" once it serves. No files are written.
    Exit codes: 0 stopped by SIGINT or SIGTERM, 2 bad input.
    """
    from kvbench.calibration.mock.server import run

    return run(**request.values())
