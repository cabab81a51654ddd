"""Rows of requests.parquet, made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd


def row(**given: object) -> dict:
    """One request: sent at 1.0, tokens at 1.5, 1.7, 2.0, ended at 2.01, unless given otherwise."""
    base = {
        "index": 0,
        "class": "a",
        "t0": 1.0,
        "ts": 1.0,
        "chunk_times": [1.5, 1.7, 2.0],
        "chunk_tokens": None,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "cached_tokens": 2,
        "ok": True,
        "error_kind": None,
    } | given
    times = base["chunk_times"]
    base.setdefault("first", times[0] if times else None)
    base.setdefault("last", times[-1] if times else None)
    base.setdefault("end", (times[-1] if times else base["ts"]) + 0.01)
    return base


def frame(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(list(rows)).astype({"first": float, "last": float})


def queued_at_the_end() -> pd.DataFrame:
    """An arrival a second, answered 0.1 s after its send; three early ones and the last three wait in the client."""
    waits = np.zeros(100)
    waits[5:8] = waits[97:] = 10.0, 20.0, 30.0
    sent = np.arange(100.0) + waits
    return frame(
        *(
            row(t0=s - w, ts=s, queued_s=w, chunk_times=[s + 0.1, s + 0.2], output_tokens=2)
            for s, w in zip(sent, waits, strict=True)
        )
    )
