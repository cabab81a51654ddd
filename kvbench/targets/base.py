"""What the sweep needs from an engine under test, and the HTTP part that every target shares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.common.foreign_cpu import Server, server_at
from kvbench.common.secrets import without_key
from kvbench.load.dialect import Dialect
from kvbench.requests.request import RequestSpec
from kvbench.targets.access import Access
from kvbench.targets.bounded import BoundedTransport
from kvbench.targets.presets import GENERIC, METRIC_KINDS
from kvbench.targets.presets.preset import Preset
from kvbench.targets.prometheus import MetricsSample, parse_metrics
from kvbench.targets.texts import Texts, with_texts
from kvbench.targets.unreachable import BAD_REQUEST, connection_trouble, key_trouble, scheme_trouble

_READ_TIMEOUT_S = 10.0  # a busy engine may hold the interpreter for one long step
FACTS_TIMEOUT_S = 60.0  # vLLM, asked the first time, runs a dozen programs to describe its machine
_GONE_S = 0.1  # a process's connections close before its parent hears of its end
_NOT_THERE = (404, 405, 501)
_REFUSED = (400, 404, 405, 413, 422)  # of a request that would fare no better a second time
_PLAIN = Access()


@dataclass(frozen=True)
class ModelFacts:
    """What prompts are made for. ``max_model_len`` in tokens of prompt + output."""

    name: str
    vocab_size: int
    max_model_len: int


class Target(Protocol):
    """One server, from launch to stop. ``start`` returns when it serves, within its own bound.

    ``starts_cold``: it was launched for us, so nothing that is measured can be in its cache before its first load.
    """

    base_url: str
    model: ModelFacts
    starts_cold: bool

    def client_fields(self) -> dict[str, Any]:
        """What the load client's spec is told of this server: its dialect, key and TLS."""

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        """The requests as this server takes them."""

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


def reason_of(target: Target, error: MeasurementError) -> str:
    """Why a load failed: the last words of a server that is gone say more than the connection that broke with it."""
    time.sleep(_GONE_S)
    try:
        target.check_alive()
    except MeasurementError as gone:
        return str(gone)
    return str(error)


class HttpTarget:
    """The HTTP calls of a kvbench or vLLM-shaped server. One client, kept open; usable from two threads."""

    preset: Preset = GENERIC
    starts_cold: bool = False

    def __init__(
        self, base_url: str, *, preset: Preset = GENERIC, access: Access = _PLAIN, texts: Texts | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.preset, self.access, self._texts = preset, access, texts
        # trust_env=False: a proxy variable must not carry a local benchmark's traffic elsewhere.
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=_READ_TIMEOUT_S,
            trust_env=False,
            headers=access.headers(),
            transport=BoundedTransport(trust_env=False, verify=access.trust(self.base_url)),
        )
        self._has_metrics: bool | None = None

    @property
    def dialect(self) -> Dialect:
        """What the server's API does differently."""
        return self.preset.dialect

    def client_fields(self) -> dict[str, Any]:
        """As ``Target``; empty for a server with nothing special."""
        quirks = self.dialect.model_dump(exclude_defaults=True)
        return {**({"dialect": quirks} if quirks else {}), **self.access.fields()}

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        """As ``Target``. Raises MeasurementError when there is no tokenizer to make texts with."""
        if self.dialect.token_id_prompts or all(r.prompt is not None for r in requests):
            return requests
        return with_texts(requests, self._texts_or_refuse())

    def _texts_or_refuse(self) -> Texts:
        if self._texts is None:
            raise MeasurementError(
                f"{self.preset.title} takes no token ids, and kvbench has no tokenizer to make texts of them: give "
                "prompts of kind text with send_text: true"
            )
        return self._texts

    def healthy(self) -> bool:
        """Whether the health path answers 200."""
        try:
            return self._http.get(self.preset.health, timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def answer_at(self, path: str) -> httpx.Response:
        """Its answer to GET. Raises MeasurementError, which says what to do, where none comes or access is refused."""
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.base_url} {connection_trouble(error, self.base_url)}") from None
        trouble = key_trouble(response.status_code, self.access.api_key_env)
        if response.status_code == BAD_REQUEST and self.base_url.startswith("http:"):
            trouble = scheme_trouble(self.base_url)
        if response.has_redirect_location:
            place = without_key(response.headers["location"], self.access.api_key_env)
            trouble = f"sends on to {place}: give the URL that it serves at"
        if trouble is not None:
            raise MeasurementError(f"{self.base_url} {trouble}")
        return response

    def json_at(self, path: str) -> Any:
        """The JSON there, None where there is none."""
        try:
            response = self._http.get(path)
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, RecursionError):
            return None

    def models(self) -> list[dict[str, Any]]:
        """The rows of /v1/models. Raises MeasurementError when the answer is not OpenAI-shaped."""
        response = self.answer_at("/v1/models")
        try:
            if response.status_code != 200:
                raise ValueError(f"it answered {response.status_code}")
            rows = response.json()["data"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MeasurementError(f"{self.base_url}/v1/models does not list models: {error}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
            said = without_key(str(rows), self.access.api_key_env)[:100]
            raise MeasurementError(f"{self.base_url}/v1/models does not list models: {said!r}")
        if not rows:
            raise MeasurementError(f"{self.base_url}/v1/models lists no model")
        return rows

    def server_info(self) -> dict[str, Any] | None:
        """None when the server has none. Raises MeasurementError when no answer comes."""
        try:
            response = self._http.get("/server_info", timeout=FACTS_TIMEOUT_S)
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
            return parse_metrics(response.text, time.perf_counter(), METRIC_KINDS)
        except ValueError as error:
            raise MeasurementError(f"{self.base_url}/metrics cannot be read: {error}") from None

    def server(self) -> Server:
        return server_at(self.base_url)

    def reset_prefix_cache(self) -> bool | None:
        """As ``Target``. Raises MeasurementError when no answer comes."""
        reset = self.preset.reset
        if reset is None:
            return None
        if "{slot}" not in reset.path:
            return self._post_reset(reset.path)
        slots = self.json_at("/slots")
        answers = [self._post_reset(reset.path.format(slot=each["id"])) for each in slots or ()]
        return None if None in answers or not answers else all(answers)

    def _post_reset(self, path: str) -> bool | None:
        reset = self.preset.reset
        assert reset is not None
        try:
            response = self._http.post(path)
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.base_url}{path} did not answer: {error!r}") from None
        if response.status_code == 200:
            return not _says_no(response, reset.success_key)
        if response.status_code in reset.busy:
            return False
        if response.status_code in _NOT_THERE:
            return None
        raise MeasurementError(f"{self.base_url}{path} answered {response.status_code}")

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> None:
        """One unmeasured completion (warm-up, priming). Raises MeasurementError; RefusedError if it fails for good."""
        if isinstance(prompt, list) and not self.dialect.token_id_prompts:
            prompt = self._texts_or_refuse().text(prompt)
        body = {"model": self.model_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        try:
            response = self._http.post(self.dialect.endpoint, json=body | self.dialect.extra_body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise MeasurementError(f"a warm-up request to {self.base_url} failed: {error!r}") from None
        if trouble := key_trouble(response.status_code, self.access.api_key_env):
            raise MeasurementError(f"{self.base_url} {trouble}")
        if response.status_code != 200 or not _is_completion(response):
            said = without_key(response.text, self.access.api_key_env)[:300]
            kind = RefusedError if response.status_code in _REFUSED else MeasurementError
            raise kind(f"a warm-up request to {self.base_url} was answered {response.status_code}: {said}")

    @property
    def model_name(self) -> str:
        return self.model.name

    model: ModelFacts

    def close(self) -> None:
        self._http.close()


def _says_no(response: httpx.Response, key: str | None) -> bool:
    """Whether a JSON answer with 200 says in the field ``key`` that nothing was done."""
    if key is None:
        return False
    try:
        return response.json().get(key) is False
    except (ValueError, AttributeError, RecursionError):
        return False  # an older version answers without a body


def _is_completion(response: httpx.Response) -> bool:
    """A proxy's page of apology also comes with 200."""
    try:
        return bool(response.json()["choices"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


START_GUESS_S = 8.0  # the built-in server, before the first one was seen
