"""A server under test: what a sweep needs from it, and the HTTP calls that every target shares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.common.foreign_cpu import ServerProcess, server_at
from kvbench.load.http import Dialect
from kvbench.requests.request import RequestSpec
from kvbench.targets.http import PLAIN_ACCESS, Access, HttpAnswer, HttpCalls
from kvbench.targets.preset import Preset
from kvbench.targets.presets import GENERIC, METRIC_KINDS
from kvbench.targets.prometheus import MetricsSample, parse_metrics
from kvbench.targets.prompt_texts import TextOfIds, with_texts
from kvbench.workload.settings import effective

FACTS_TIMEOUT_S = 60.0  # vLLM runs a dozen programs at the first call, to describe its machine
_HEALTH_TIMEOUT_S = 2.0
_GONE_S = 0.1  # a process's connections close before its parent hears of its end
_NO_SUCH_PATH = (404, 405, 501)
_REFUSED = (400, 404, 405, 413, 422)  # of a request that would fare no better a second time
_CAPACITY_TOLERANCE = 0.02  # a page table; a page on top of it, for rounding to whole ones


@dataclass(frozen=True)
class ModelFacts:
    """What prompts are made for. ``max_model_len`` in tokens of prompt + output."""

    name: str
    vocab_size: int
    max_model_len: int


class Target:
    """One server, from launch to stop; usable from two threads.

    ``starts_cold``: it was launched for us, so nothing that is measured can be in its cache before its first load.
    ``model``: known once it has started.
    """

    preset: Preset = GENERIC
    starts_cold: bool = False
    model: ModelFacts

    def __init__(
        self,
        base_url: str,
        *,
        preset: Preset = GENERIC,
        access: Access = PLAIN_ACCESS,
        text_of_ids: TextOfIds | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.preset, self._text_of_ids = preset, text_of_ids
        self.http = HttpCalls(self.base_url, access)
        self._has_metrics: bool | None = None

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Returns when the server serves, within its own bound. Raises UsageError or MeasurementError."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raises MeasurementError with the last lines of the log of a launched server that is gone."""

    def stop(self) -> None:
        """Stops what ``start`` launched, and closes the connections."""
        self.http.close()

    @property
    def dialect(self) -> Dialect:
        """What the server's API does differently."""
        return self.preset.dialect

    def client_fields(self) -> dict[str, Any]:
        """The fields of the load client's spec that depend on this server: its dialect, key and TLS."""
        quirks = self.dialect.model_dump(exclude_defaults=True)
        return {**({"dialect": quirks} if quirks else {}), **self.http.access.fields()}

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        """The requests as this server takes them. MeasurementError when there is no tokenizer to make texts with."""
        if self.dialect.token_id_prompts or all(r.prompt is not None for r in requests):
            return requests
        return with_texts(requests, self._make_text)

    def _make_text(self, ids: Any) -> str:
        if self._text_of_ids is None:
            raise MeasurementError(
                f"{self.preset.title} takes no token ids, and kvbench has no tokenizer to make texts of them: give "
                "prompts of kind text with send_text: true"
            )
        return self._text_of_ids(ids)

    def healthy(self) -> bool:
        """Whether the health path answers 200."""
        try:
            return self.http.call("GET", self.preset.health, timeout_s=_HEALTH_TIMEOUT_S).status == 200
        except MeasurementError:
            return False

    def answer_at(self, path: str) -> HttpAnswer:
        """The answer to GET. Raises MeasurementError where none comes or access is refused."""
        return self.http.check_access(self.http.call("GET", path))

    def json_at(self, path: str) -> Any:
        """The JSON there, None where there is none."""
        try:
            answer = self.http.call("GET", path)
        except MeasurementError:
            return None
        return answer.json() if answer.status == 200 else None

    def models(self) -> list[dict[str, Any]]:
        """The rows of /v1/models, at least one. Raises MeasurementError when the answer is not OpenAI-shaped."""
        answer = self.answer_at("/v1/models")
        found = answer.json()
        rows = found.get("data") if isinstance(found, dict) and answer.status == 200 else None
        if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
            raise self.http.error(f"/v1/models lists no models: it answered {answer.status} {answer.text[:100]!r}")
        return rows

    def version(self) -> str | None:
        """The version that the server's API gives; None where it gives none."""
        answer = self.json_at(self.preset.version_path) if self.preset.version_path else None
        found = answer.get(self.preset.version_key) if isinstance(answer, dict) else None
        return str(found) if found else None

    def server_info(self) -> dict[str, Any] | None:
        """None when the server has none. Raises MeasurementError when no answer comes."""
        answer = self.http.call("GET", "/server_info", timeout_s=FACTS_TIMEOUT_S)
        info = answer.json() if answer.status == 200 else None
        return info if isinstance(info, dict) else None

    def metrics(self) -> MetricsSample | None:
        """One reading of /metrics; None when the server has none. MeasurementError when it cannot be read."""
        if self._has_metrics is False:
            return None
        answer = self.http.call("GET", "/metrics")
        if self._has_metrics is None:
            self._has_metrics = answer.status == 200 or answer.status >= 500
            if not self._has_metrics:
                return None
        if answer.status != 200:
            raise self.http.error(f"/metrics answered {answer.status}")
        try:
            return parse_metrics(answer.text, time.perf_counter(), METRIC_KINDS)
        except ValueError as error:
            raise self.http.error(f"/metrics cannot be read: {error}") from None

    def server(self) -> ServerProcess:
        """The server's process, whose CPU time is not foreign."""
        return server_at(self.base_url)

    def reset_prefix_cache(self) -> bool | None:
        """True: the cache is empty. False: refused, requests are running. None: the server cannot.

        Raises MeasurementError when no answer comes.
        """
        path = self.preset.reset_path
        if path is None:
            return None
        if "{slot}" not in path:
            return self._post_reset(path)
        answers = [self._post_reset(path.format(slot=slot["id"])) for slot in self.json_at("/slots") or ()]
        return None if None in answers or not answers else all(answers)

    def _post_reset(self, path: str) -> bool | None:
        answer = self.http.call("POST", path)
        if answer.status == 200:
            body = answer.json()  # None: an older version answers without a body
            return not (isinstance(body, dict) and body.get("success") is False)
        if answer.status == self.preset.reset_busy:
            return False
        if answer.status in _NO_SUCH_PATH:
            return None
        raise self.http.error(f"{path} answered {answer.status}")

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> None:
        """One unmeasured completion (warm-up, priming). Raises MeasurementError; RefusedError if it fails for good."""
        if isinstance(prompt, list) and not self.dialect.token_id_prompts:
            prompt = self._make_text(prompt)
        body = {"model": self.model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        path = self.dialect.endpoint
        answer = self.http.call("POST", path, body=body | self.dialect.extra_body, timeout_s=timeout_s)
        self.http.check_access(answer)
        found = answer.json()
        if answer.status != 200 or not isinstance(found, dict) or not found.get("choices"):  # or a proxy's error page
            kind = RefusedError if answer.status in _REFUSED else MeasurementError
            raise self.http.error(f"{path} answered a warm-up request {answer.status}: {answer.text[:300]}", kind)


def reason_of(target: Target, error: MeasurementError) -> str:
    """Why a load failed: the log of a server that is gone says more than the connection that broke with it."""
    time.sleep(_GONE_S)
    try:
        target.check_alive()
    except MeasurementError as gone:
        return str(gone)
    return str(error)


def contradiction(settings: Mapping[str, Any], known: Mapping[str, Any], info: Mapping[str, Any] | None) -> str | None:
    """How the server's own page size or KV capacity differs from its configuration; None: it does not, or is not known.

    A capacity differs where it is off by more than 2 % and a page.

    ``settings``: of the configuration. ``known``: what is known of it before the launch (``kv_budget_bytes`` and
    ``bytes_per_token`` [of which ``scale_bytes_per_token``] where the server was given that budget,
    ``capacity_tokens`` where our arithmetic says how many fit). ``info``: as ``server_info``.
    """
    engine, capacity = ((info or {}).get(part) or {} for part in ("engine", "capacity"))
    paged = effective(settings, "layout") == "paged"
    pages, wanted = capacity.get("page_size") or engine.get("page_size"), settings.get("page_size")
    if paged and wanted and pages and int(pages) != int(wanted):
        return (
            f"its pages have {int(pages)} tokens, and the configuration is for pages of {wanted}: pass page_size on "
            f"({{page_size}} in a --serve-cmd), or ask for what it has, -o engine.page_size={int(pages)}"
        )
    tokens, each = capacity.get("capacity_tokens"), known.get("bytes_per_token")
    if not tokens or not each:
        return None
    least = known.get("capacity_tokens") or known["kv_budget_bytes"] / each
    most = least * each / (each - (known.get("scale_bytes_per_token") or 0))  # other KV formats have fewer scales
    slack = 0 if not paged else int(pages or wanted or 1)
    if least * (1 - _CAPACITY_TOLERANCE) - slack <= tokens <= most * (1 + _CAPACITY_TOLERANCE) + slack:
        return None
    return (
        f"its KV cache holds {int(tokens):,} tokens, and the budget of {known['kv_budget_bytes']:,} bytes is "
        f"{least:,.0f}: it was not given this budget, has cut it down, or computes in another dtype (a --serve-cmd "
        "passes on {kv_budget} and {dtype})"
    )
