"""A token count in a workload file: one number, a range, or percentiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import model_serializer, model_validator

from kvbench.common.schema import StrictModel

PERCENTILE_KEYS = ("min", "p50", "p90", "p95", "p99", "max")


class Length(StrictModel):
    """A token count: a fixed int, ``[low, high]`` (uniform), or ``{percentiles: {p50: .., max: ..}}``."""

    low: int | None = None
    high: int | None = None
    percentiles: dict[str, float] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, data: Any) -> Any:
        if isinstance(data, bool):
            raise ValueError(f"{data} is not a length; write an int, [low, high] or {{percentiles: ...}}.")
        if isinstance(data, int):
            return {"low": data, "high": data}
        if isinstance(data, list | tuple):
            if len(data) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in data):
                raise ValueError(f"{list(data)} is not a length; a range is [low, high], two whole numbers.")
            return {"low": data[0], "high": data[1]}
        if not isinstance(data, dict | Length):
            raise ValueError(f"{data!r} is not a length; write an int, [low, high] or {{percentiles: ...}}.")
        return data

    @model_validator(mode="after")
    def _check(self) -> Length:
        if self.percentiles is not None:
            _check_percentiles(self.percentiles)
            return self
        if self.low is None or self.high is None:
            raise ValueError("a length needs an int, [low, high] or {percentiles: {p50: .., max: ..}}.")
        if self.low < 1:
            raise ValueError(f"a length of {self.low} tokens is too small; the least is 1.")
        if self.high < self.low:
            raise ValueError(f"[{self.low}, {self.high}] runs backwards; write [low, high] with low <= high.")
        return self

    @model_serializer
    def _to_yaml(self) -> Any:
        if self.percentiles is not None:
            return {"percentiles": dict(self.percentiles)}
        return self.low if self.low == self.high else [self.low, self.high]

    @property
    def maximum(self) -> int:
        """The largest token count this length can give, before any scaling."""
        if self.percentiles is not None:
            return math.ceil(self.percentiles["max"])
        return int(self.high or 0)


def _check_percentiles(given: dict[str, float]) -> None:
    unknown = [k for k in given if k not in PERCENTILE_KEYS]
    if unknown:
        raise ValueError(f"`{unknown[0]}` is not a known percentile; use {', '.join(PERCENTILE_KEYS)}.")
    if "p50" not in given or "max" not in given:
        raise ValueError(f"percentiles {sorted(given)} are not enough; at least p50 and max are needed.")
    values = [given[k] for k in PERCENTILE_KEYS if k in given]
    if values != sorted(values) or values[0] < 1:
        raise ValueError(f"percentiles {given} must be at least 1 and must not fall from min to max.")


def fit_scale(longest_total: int, max_model_len: int) -> float:
    """The factor (at most 1) by which lengths shrink so that the longest prompt + output fits max_model_len."""
    return min(1.0, max_model_len / longest_total)


def scale_lengths(lengths: np.ndarray, scale: float) -> np.ndarray:
    """Token counts times ``scale``, rounded down, at least 1. int64 [n]"""
    return np.maximum(1, np.floor(lengths * scale + 1e-9)).astype(np.int64)
