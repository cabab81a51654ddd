"""Loads made of a trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from kvbench.requests.build import build_requests
from kvbench.requests.request import RequestList, RequestSpec
from kvbench.workload.load_section import LoadConfig

CLOSED = {"mode": "closed", "arrivals": "poisson", "concurrency": 1, "build": {"concurrency": 1}}


def build(file: Path, text: str | None = None, *, load: dict | None = None, **prompts) -> RequestList:
    """The requests of the trace ``file``. ``load``: keys of the load and, in ``build``, arguments of build_requests."""
    if text is not None:
        file.write_text(text, encoding="utf-8")
    keys = {"mode": "open", "arrivals": "trace"} | (load or {})
    given = {"vocab_size": 8192, "max_model_len": 4096, "seed": 0} | keys.pop("build", {})
    prompts = {"kind": "trace", "path": str(file)} | prompts
    return build_requests(LoadConfig.model_validate(keys | {"prompts": prompts}), **given)


def jsonl(*rows: dict) -> str:
    """JSONL."""
    return "\n".join(map(json.dumps, rows))


def lengths(requests: list[RequestSpec]) -> list[int]:
    """Prompt tokens of each."""
    return [len(r.prompt_token_ids) for r in requests]


def shared_tokens(a: RequestSpec, b: RequestSpec) -> int:
    """Leading tokens that both have."""
    pairs = zip(a.prompt_token_ids, b.prompt_token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
