"""What the sweep needs from an engine under test, and the HTTP part that every target shares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from kvbench.contention import Server, server_at
from kvbench.errors import MeasurementError
from kvbench.server_metrics import MetricsSample, parse_metrics
from kvbench.targets.bounded import BoundedTransport

_READ_TIMEOUT_S = 10.0  # a busy engine may hold the interpreter for one long step
_NOT_THERE = (404, 405, 501)


@dataclass(frozen=True)
class ModelFacts:
    """What prompts are made for. ``max_model_len`` in tokens of prompt + output."""

    name: str
    vocab_size: int
    max_model_len: int


class Target(Protocol):
    """One server, from launch to stop. ``start`` returns when it serves, within its own bound."""

    base_url: str
    model: ModelFacts

    def start(self, settings: Mapping[str, Any], log: Path) -> None: ...

    def server_info(self) -> dict[str, Any] | None: ...

    def metrics(self) -> MetricsSample | None:
        """One reading of /metrics; None when the target has none."""

    def reset_prefix_cache(self) -> bool | None:
        """True: the cache is empty. False: refused, requests are running. None: the target cannot."""

    def server(self) -> Server:
        """The server's process, whose CPU time is not foreign."""

    def check_alive(self) -> None:
        """Raises MeasurementError with the server's last words when it is gone."""

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> None:
        """One unmeasured completion (warm-up, priming)."""

    def stop(self) -> None: ...


class HttpTarget:
    """The HTTP calls of a kvbench or vLLM-shaped server. One client, kept open; usable from two threads."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        # trust_env=False: a proxy variable must not carry a local benchmark's traffic elsewhere.
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=_READ_TIMEOUT_S,
            trust_env=False,
            transport=BoundedTransport(trust_env=False),
        )
        self._has_metrics: bool | None = None

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[dict[str, Any]]:
        """The rows of /v1/models. Raises MeasurementError when the answer is not OpenAI-shaped."""
        try:
            response = self._http.get("/v1/models")
            response.raise_for_status()
            rows = response.json()["data"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise MeasurementError(f"{self.base_url}/v1/models does not list models: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
            raise MeasurementError(f"{self.base_url}/v1/models does not list models: {str(rows)[:100]!r}")
        if not rows:
            raise MeasurementError(f"{self.base_url}/v1/models lists no model")
        return rows

    def server_info(self) -> dict[str, Any] | None:
        """None when the server has none. Raises MeasurementError when no answer comes."""
        try:
            response = self._http.get("/server_info")
            info = response.json() if response.status_code == 200 else None
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.base_url}/server_info did not answer: {error!r}") from None
        except (ValueError, RecursionError):
            return None
        return info if isinstance(info, dict) else None

    def metrics(self) -> MetricsSample | None:
        """As ``Target``. Raises MeasurementError when no answer comes or it is not Prometheus text."""
        if self._has_metrics is False:
            return None
        try:
            response = self._http.get("/metrics")
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.base_url}/metrics did not answer: {error!r}") from None
        if response.status_code != 200:
            if self._has_metrics is None and response.status_code < 500:
                self._has_metrics = False
                return None
            raise MeasurementError(f"{self.base_url}/metrics answered {response.status_code}")
        self._has_metrics = True
        try:
            return parse_metrics(response.text, time.time())
        except ValueError as error:
            raise MeasurementError(f"{self.base_url}/metrics cannot be read: {error}") from None

    def server(self) -> Server:
        return server_at(self.base_url)

    def reset_prefix_cache(self) -> bool | None:
        """As ``Target``. Raises MeasurementError when no answer comes."""
        try:
            response = self._http.post("/reset_prefix_cache")
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.base_url}/reset_prefix_cache did not answer: {error!r}") from None
        if response.status_code in (200, 409):
            return response.status_code == 200
        if response.status_code in _NOT_THERE:
            return None
        raise MeasurementError(f"{self.base_url}/reset_prefix_cache answered {response.status_code}")

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> None:
        """One unmeasured completion (warm-up, priming). Raises MeasurementError when it fails."""
        body = {
            "model": self.model_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
        }
        try:
            response = self._http.post("/v1/completions", json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise MeasurementError(f"a warm-up request to {self.base_url} failed: {error!r}") from None
        if response.status_code != 200 or not _is_completion(response):
            raise MeasurementError(
                f"a warm-up request to {self.base_url} was answered {response.status_code}: {response.text[:300]}"
            )

    @property
    def model_name(self) -> str:
        return self.model.name

    model: ModelFacts

    def close(self) -> None:
        self._http.close()


def _is_completion(response: httpx.Response) -> bool:
    """A proxy's page of apology also comes with 200."""
    try:
        return bool(response.json()["choices"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
