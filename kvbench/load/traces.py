"""Readers of recorded traces: arrival times and token counts, no contents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_SOURCE = (
    "the public one is AzureLLMInferenceTrace_conv.csv in github.com/Azure/AzurePublicDataset "
    "(folder data, CC-BY-4.0). Give the path with -o load.prompts.path=PATH."
)


@dataclass(frozen=True)
class Trace:
    """``arrival_s`` [n] float64, seconds after the file's first row; the token counts [n] int64."""

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_s)


def read_azure(path: str | Path) -> Trace:
    """Reads an Azure LLM inference trace (2023 or 2024; Patel et al., "Splitwise", ISCA 2024).

    Timestamps have seven decimals and sometimes "+00:00"; the last line may lack its newline. ValueError with
    the way out for a missing or malformed file.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the trace {path} does not exist; {AZURE_SOURCE}")
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a CSV file ({error}); {AZURE_SOURCE}") from error
    missing = [c for c in AZURE_COLUMNS if c not in table.columns]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]}; an Azure trace has {', '.join(AZURE_COLUMNS)}. {AZURE_SOURCE}"
        )
    if table.empty:
        raise ValueError(f"{path} has no rows; {AZURE_SOURCE}")
    times = pd.to_datetime(table["TIMESTAMP"], utc=True, format="ISO8601", errors="coerce")
    counts = [pd.to_numeric(table[c], errors="coerce") for c in AZURE_COLUMNS[1:]]
    bad = times.isna() | counts[0].isna() | counts[1].isna() | (counts[0] < 0) | (counts[1] < 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"{path}, line {row + 2} cannot be read: {','.join(table.iloc[row])}. {AZURE_SOURCE}")
    stamps = times.dt.tz_convert(None).to_numpy().astype("datetime64[ns]").astype(np.int64)
    order = np.argsort(stamps, kind="stable")
    stamps = stamps[order]
    return Trace(
        arrival_s=(stamps - stamps[0]) / 1e9,
        prompt_tokens=counts[0].to_numpy()[order].astype(np.int64),
        output_tokens=counts[1].to_numpy()[order].astype(np.int64),
    )


def select(
    trace: Trace,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    max_requests: int | None = None,
) -> Trace:
    """The rows of [start_s, start_s + duration_s) of the trace, re-based to 0 and played rate_scale times as fast.

    ``start_s`` and ``duration_s`` are in the trace's own time. ValueError when nothing is left.
    """
    end = np.inf if duration_s is None else start_s + duration_s
    keep = np.flatnonzero((trace.arrival_s >= start_s) & (trace.arrival_s < end))[:max_requests]
    if not keep.size:
        raise ValueError(
            f"no request of the trace lies in [{start_s}, {end}) s; it spans 0 to "
            f"{trace.arrival_s[-1]:.1f} s, so choose start_s and duration_s inside that."
        )
    arrival = trace.arrival_s[keep]
    return Trace((arrival - arrival[0]) / rate_scale, trace.prompt_tokens[keep], trace.output_tokens[keep])


def fit_scale(longest_total: int, max_model_len: int) -> float:
    """The factor (at most 1) by which lengths shrink so that the longest prompt + output fits max_model_len."""
    return min(1.0, max_model_len / longest_total)


def scale_lengths(lengths: np.ndarray, scale: float) -> np.ndarray:
    """Token counts times ``scale``, rounded down, at least 1. int64 [n]"""
    return np.maximum(1, np.floor(lengths * scale + 1e-9)).astype(np.int64)
