"""A server under test: HTTP calls with its key and certificates, and what a sweep needs from it.

A call is bounded as a whole, in time and bytes (kvbench/load/blocking.py).
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, RefusedError, as_usage_error
from kvbench.common.foreign_cpu import ServerProcess, server_at
from kvbench.common.parsing import json_at, parse_json
from kvbench.common.secrets import api_key, without_key
from kvbench.common.server_errors import SERVER_FAULT, error_sentence, in_its_words
from kvbench.common.text import shorten
from kvbench.load.blocking import connect, exchange
from kvbench.load.endpoints import Dialect, Fields
from kvbench.load.http import Address, MalformedStream, Response, call_bytes, tls_context
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import Capacity
from kvbench.runs.server_info import ModelList, ModelRow, ServerInfo, SlotSizes, TokenCount
from kvbench.targets.preset import CAPACITY_TOLERANCE, Preset
from kvbench.targets.presets import BUILT_IN, METRIC_KINDS
from kvbench.targets.prometheus import MetricsSample, parse_metrics
from kvbench.targets.prompt_texts import TextOfIds, with_texts
from kvbench.workload.request_form import DEFAULT_FORM, RequestForm
from kvbench.workload.settings import Settings, effective

_LOGGED_TO = 0.01 * 2**20  # bytes: llama.cpp's log has MiB with two digits behind the point
MOST_BYTES = 64 << 20  # of an answer: /metrics of a busy server is under 1 MiB, a page of completions under 10 MiB
_LONGEST_ERROR = 1000  # characters, some of them a server's own
_TIMEOUT_S = 10.0  # a busy engine may hold the interpreter for one long step
FACTS_TIMEOUT_S = 60.0  # vLLM runs a dozen programs at the first call, to describe its machine
_HEALTH_TIMEOUT_S = 2.0
_GONE_S = 0.1  # a process's connections close before its parent hears of its end
_KEY_REFUSED = (401, 403)
_PROMPT_TOKENS = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
NO_SUCH_PATH = (404, 405, 501)
REFUSED = (400, 404, 405, 413, 422)  # a retry of the request would fail again


@dataclass(frozen=True)
class Access:
    """The way to a server: LoadSpec's fields of the same names. The key itself is never kept."""

    api_key_env: str | None = None
    tls_verify: bool = True
    tls_ca_file: str | None = None

    def headers(self) -> dict[str, str]:
        """Raises UsageError when the variable holds no key, or one that cannot be sent."""
        if self.api_key_env is None:
            return {}
        with as_usage_error():
            return {"Authorization": f"Bearer {api_key(self.api_key_env)}"}

    def trust(self, base_url: str) -> ssl.SSLContext | None:
        """Makes the TLS context of a server; None where nothing is encrypted.

        Raises UsageError for a file without certificates.
        """
        if self.tls_ca_file is None and not base_url.startswith("https:"):
            return None  # reading the system's certificates takes 20 ms
        with as_usage_error():
            return tls_context(self.tls_verify, self.tls_ca_file)

    def fields(self) -> Fields:
        """Returns the fields of LoadSpec that differ from its defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(PLAIN_ACCESS, name)}


PLAIN_ACCESS = Access()


@dataclass(frozen=True)
class HttpAnswer:
    """An answer over HTTP. ``location``: where a redirect points to."""

    status: int
    body: bytes
    location: str | None = None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The JSON; None for none, or with half characters (surrogates), which nothing can store or print."""
        try:
            value = parse_json(self.body)
            if b"\\ud" in self.body.lower():
                json.dumps(value, ensure_ascii=False).encode()
        except ValueError:
            return None
        return value


class HttpCalls:
    """Calls to one server, each on a connection of its own; usable from several threads."""

    def __init__(self, base_url: str, access: Access = PLAIN_ACCESS, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.base_url, self.access, self.timeout_s = base_url, access, timeout_s
        self._head = [f"{name}: {value}" for name, value in access.headers().items()]
        self._tls = access.trust(base_url)

    def call(
        self, method: str, path: str, *, body: Any = None, timeout_s: float | None = None, headers: Sequence[str] = ()
    ) -> HttpAnswer:
        """Sends ``body`` as JSON, or as it is where it is bytes; ``headers``: further lines.

        Raises MeasurementError when no whole answer comes, UsageError for a URL that cannot be spoken to.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        due, connection = time.perf_counter() + limit, None
        with as_usage_error():
            address = Address.from_url(self.base_url)
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        request = call_bytes(address, method, path, [*self._head, *headers, "Connection: close"], payload)
        try:
            with connect(address, due, self._tls if address.tls else None) as connection:
                response = Response(exchange(connection, request, due, MOST_BYTES)[1])
            if not (response.complete or response.until_close):
                raise ConnectionError("the connection closed before the answer's end")
        except (OSError, UnicodeError, MalformedStream) as error:
            raise self.error(f"{path} {_no_answer(error, connection is not None, limit)}") from error
        if response.encoding:
            raise self.error(f"{path}: {response.sentence}")
        return HttpAnswer(response.status, response.body, response.headers.get("location"))

    def error(self, text: str, kind: type[MeasurementError] = MeasurementError) -> MeasurementError:
        """Makes an error of the server's URL and ``text``; a key that the server repeated is taken out."""
        return kind(shorten(without_key(f"{self.base_url}{text}", self.access.api_key_env) or "", _LONGEST_ERROR))

    def check_access(self, answer: HttpAnswer) -> HttpAnswer:
        """The answer. Raises MeasurementError where it refuses access, or sends the client elsewhere."""
        variable = self.access.api_key_env
        if answer.location is not None and 300 <= answer.status < 400:
            raise self.error(f" redirects to {answer.location}: give the URL that it serves at")
        if answer.status not in _KEY_REFUSED:
            return answer
        if variable is None:
            raise self.error(f" answered {answer.status}: name the variable that holds its API key: --api-key-env NAME")
        raise self.error(f" answered {answer.status}, so it refused the key in {variable}: is it this server's key?")

    def words_of(self, path: str, answer: HttpAnswer) -> str:
        """Says it in the server's words: ``http://host:8000/health answered 503 "the engine stopped"``."""
        return str(self.error(f"{path} answered {answer.status}{in_its_words(error_sentence(answer.body))}"))


def _no_answer(error: Exception, connected: bool, limit_s: float) -> str:
    """Says what became of a call, and what to do: a server that takes connections is at its URL."""
    cause = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        if connected:
            return f"did not answer within {limit_s:.3g} s, though it took the connection"
        cause = f"no connection within {limit_s:.3g} s"
    way_out = "is the server running, and is this its URL (http or https, host, port)?"
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        way_out = "name a file of trusted certificates with --tls-ca-file FILE, or give --no-tls-verify"
    return f"did not answer ({cause}): {way_out}"


_NO_LIMIT = 1 << 30  # tokens


@dataclass(frozen=True)
class SteppedLaunch:
    """The launch of a process whose engine computes steps on command, without a server.

    scratch: a folder to remove if kvbench is killed; start_limit_s: until an engine is open
    shared: whether one process has engines of several settings
    """

    command: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    scratch: Path | None = None
    start_limit_s: float = 180.0
    shared: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """The model that prompts are made for. ``max_model_len``: tokens of prompt + output; None: not told."""

    name: str
    vocab_size: int
    max_model_len: int | None

    @property
    def most_tokens(self) -> int:
        """The longest sequence; without a limit where the server does not tell it."""
        return self.max_model_len or _NO_LIMIT


class Target:
    """One server, from launch to stop; usable from two threads.

    starts_cold: we launched it, so its cache is empty before its first load
    model: known after ``start``; check: called again and again during ``start``, may raise to end it
    notes: what a reader of the figures must know of how the server is asked; form: of the load's requests
    exact_texts: a text that is made of ids has as many tokens
    template_tokens: how many its chat template adds to a single message; None: not known
    """

    preset: Preset = BUILT_IN
    starts_cold: bool = False
    notes: tuple[str, ...] = ()
    form: RequestForm = DEFAULT_FORM
    exact_texts: bool = True
    template_tokens: int | None = 0
    model: ModelFacts
    check: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        base_url: str,
        *,
        preset: Preset = BUILT_IN,
        access: Access = PLAIN_ACCESS,
        text_of_ids: TextOfIds | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.preset, self._text_of_ids = preset, text_of_ids
        self.http = HttpCalls(self.base_url, access)
        self._has_metrics: bool | None = None

    def start(self, settings: Settings, log: Path) -> None:
        """Returns when the server serves, within its own bound. Raises UsageError or MeasurementError."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """Raises MeasurementError with the last lines of the log of a launched server that is gone."""

    def stop(self) -> None:
        """Stops what ``start`` launched."""

    @property
    def dialect(self) -> Dialect:
        """The things that the server's API does differently at the endpoint of the load."""
        dialect, form = self.preset.dialect, self.form
        if form.endpoint is not None:
            dialect = dialect.at(form.endpoint)
        changes = {"ignore_eos": False} if form.endpoint in self.preset.ends_answers_at else {}
        return dialect.model_copy(update=changes | {"extra_body": {**dialect.extra_body, **form.extra_body}})

    @property
    def ends_answers(self) -> bool:
        """Tests whether the server ends answers at its model's end token, whatever the load says."""
        return False

    def client_fields(self) -> Fields:
        """Returns the fields of the load client's spec that depend on this server: its dialect, key and TLS."""
        quirks = self.dialect.model_dump(exclude_defaults=True)
        return self.http.access.fields() | ({"dialect": quirks} if quirks else {})

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        """The requests as this server takes them. Raises MeasurementError where it cannot be asked for them."""
        for request in requests:
            why = request.answers and self.preset.refuses_answers(request.cls, request.answers, self.form.endpoint)
            if why:
                raise MeasurementError(why)
        as_messages = self.dialect.endpoint != "completions"
        if self.dialect.token_id_prompts or (all(r.prompt is not None for r in requests) and not as_messages):
            return requests
        made = with_texts(requests, self._make_text, as_messages=as_messages)
        made.notes["exact_texts"] = self.exact_texts and all(r.prompt is None for r in requests)
        if as_messages:
            made.notes |= {"endpoint": self.dialect.api.path, "template_tokens": self.template_tokens}
        return made

    def _make_text(self, ids: Any) -> str:
        if self._text_of_ids is None:
            raise MeasurementError(
                f"{self.preset.title} takes no token ids, and kvbench has no tokenizer to make texts of them: give "
                "prompts of kind text with -o load.prompts.send_text=true"
            )
        return self._text_of_ids(ids)

    def healthy(self) -> bool:
        """Tests whether the health path answers 200."""
        try:
            return self.http.call("GET", self.preset.health, timeout_s=_HEALTH_TIMEOUT_S).status == 200
        except MeasurementError:
            return False

    def why_unhealthy(self) -> str | None:
        """Says what the health path answers with 5xx; None otherwise. Raises MeasurementError when no answer comes."""
        answer = self.http.call("GET", self.preset.health, timeout_s=_HEALTH_TIMEOUT_S)
        return self.http.words_of(self.preset.health, answer) if answer.status >= SERVER_FAULT else None

    def get_json(self, path: str) -> Any:
        """Returns the JSON at an address of the server, None where there is none."""
        try:
            answer = self.http.call("GET", path)
        except MeasurementError:
            return None
        return answer.json() if answer.status == 200 else None

    def models(self) -> list[ModelRow]:
        """The rows of /v1/models, at least one. Raises MeasurementError when the answer is not OpenAI-shaped."""
        answer = self.http.check_access(self.http.call("GET", "/v1/models", headers=self._api_headers()))
        words = self.http.words_of("/v1/models", answer)
        if answer.status in NO_SUCH_PATH:
            raise RefusedError(words)
        if answer.status != 200:
            raise MeasurementError(words + (": begin again once it serves" if answer.status >= SERVER_FAULT else ""))
        models = answer.json()
        try:
            return ModelList.read(models).data
        except ValueError as error:
            why = "no JSON, or half a character in it" if models is None else error
            raise MeasurementError(f"{words}, which lists no models ({why})") from None

    def _api_headers(self) -> list[str]:
        variable = self.http.access.api_key_env
        return self.dialect.api.header_lines(api_key(variable) if variable else None)

    def told_sizes(self, row: ModelRow) -> tuple[int | None, int | None]:
        """Vocabulary and longest sequence, as the row of /v1/models or llama.cpp's /props has them; None: not told."""
        if (meta := row.meta) is None:
            return row.vocab_size, row.max_model_len
        lengths = [row.max_model_len, meta.n_ctx, meta.n_ctx_train]
        generation = None if meta.n_ctx else json_at(self.get_json("/props"), "default_generation_settings")
        if isinstance(generation, dict):
            lengths.append(SlotSizes.read(generation).n_ctx)
        return meta.n_vocab or row.vocab_size, min(filter(None, lengths), default=None)

    def version(self) -> str | None:
        """The version that the server's API gives; None where it gives none."""
        path = self.preset.version_path
        version = json_at(self.get_json(path), self.preset.version_key) if path else None
        return str(version).removesuffix("-unknown") if version else None  # llama.cpp built without its commit

    def server_info(self) -> ServerInfo:
        """Asks the server for its facts. Raises MeasurementError when no answer comes, or one that cannot be true."""
        answer = self.http.call("GET", "/server_info", timeout_s=FACTS_TIMEOUT_S)
        info = answer.json() if answer.status == 200 else None
        try:
            return ServerInfo.read(info) if isinstance(info, dict) else ServerInfo()
        except ValueError as error:
            raise self.http.error(
                f"/server_info is not what an engine says of itself ({error}): name its kind with --preset NAME"
            ) from None

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
            raise MeasurementError(self.http.words_of("/metrics", answer))
        try:
            return parse_metrics(answer.text, time.perf_counter(), METRIC_KINDS)
        except ValueError as error:
            raise self.http.error(f"/metrics cannot be read: {error}") from None

    def server(self) -> ServerProcess:
        """The server's process, whose CPU time is not foreign."""
        return server_at(self.base_url)

    def reset_prefix_cache(self) -> bool | None:
        """Empties the cache; True when it is empty, False while requests run, None where the server cannot do it."""
        path = self.preset.reset_path
        if path is None:
            return None
        if "{slot}" not in path:
            return self._post_reset(path)
        slots = self.get_json("/slots")
        ids = [json_at(slot, "id") for slot in slots] if isinstance(slots, list) else []
        emptied = [self._post_reset(path.format(slot=number)) for number in ids if isinstance(number, int)]
        return None if None in emptied or not emptied else all(emptied)

    def _post_reset(self, path: str) -> bool | None:
        answer = self.http.call("POST", path)
        if answer.status == 200:
            return json_at(answer.json(), "success") is not False  # older versions answer without a body
        if answer.status == self.preset.reset_busy:
            return False
        if answer.status in NO_SUCH_PATH:
            return None
        raise MeasurementError(self.http.words_of(path, answer))

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> Any:
        """Returns the JSON of one unmeasured completion (warm-up, priming).

        Raises MeasurementError, RefusedError where it cannot succeed.
        """
        api = self.dialect.api
        body = self.dialect.body(self.model.name, self._request(prompt, max_tokens), self.form.temperature)
        body |= {"stream": False}
        answer = self.http.call("POST", api.path, body=body, timeout_s=timeout_s, headers=self._api_headers())
        if answer.status == 200 and answer.body.lstrip().startswith((b"data:", b"event:")):
            raise self.http.error(f"{api.path} streamed its answer to a request with stream: false: answer with JSON")
        whole = self.http.check_access(answer).json()
        if answer.status != 200 or not isinstance(whole, dict) or api.answer not in whole:  # or it is a proxy's page
            kind = RefusedError if answer.status in REFUSED else MeasurementError
            raise kind(self.http.words_of(api.path, answer))
        return whole

    def _request(self, prompt: Any, max_tokens: int) -> RequestSpec:
        """A request for a text or token ids, with a number of tokens that every server of its API takes."""
        if isinstance(prompt, list) and not self.dialect.token_id_prompts:
            prompt = self._make_text(prompt)
        ids, text = (None, prompt) if isinstance(prompt, str) else (tuple(prompt), None)
        return RequestSpec(0, "", ids, text, max(max_tokens, self.dialect.api.least))

    def learn_template(self) -> None:
        """Finds how many tokens the chat template adds: by the usage of a text of one token, else by /tokenize."""
        if self.dialect.endpoint == "completions":
            return
        if self.exact_texts and self._text_of_ids is not None:
            try:
                whole = self.complete([1], 1, FACTS_TIMEOUT_S)
            except MeasurementError:
                whole = None
            usage = [json_at(whole, "usage", name) for name in _PROMPT_TOKENS]
            if counts := [count for count in usage if isinstance(count, int)]:
                self.template_tokens = sum(counts) - 1
                return
        of_messages = self._count_tokens(messages=[{"role": "user", "content": "a"}], **self.form.extra_body)
        of_text = self._count_tokens(prompt="a", add_special_tokens=False)
        self.template_tokens = None if of_messages is None or of_text is None else of_messages - of_text

    def _count_tokens(self, **fields: Any) -> int | None:
        try:
            answer = self.http.call("POST", "/tokenize", body={"model": self.model.name, **fields})
        except MeasurementError:
            return None
        counted = answer.json() if answer.status == 200 else None
        return TokenCount.read(counted).count if isinstance(counted, dict) else None


def reason_of(target: Target, error: MeasurementError) -> str:
    """Says why a load failed, and after how much of it: how the server ended if it has, else the error itself."""
    time.sleep(_GONE_S)
    try:
        target.check_alive()
    except MeasurementError as gone:
        gone.after = error.after
        return str(gone)
    return str(error)


def contradiction(settings: Settings, expected: Capacity, info: ServerInfo) -> str | None:
    """Says how the server's page size, length or KV capacity differs from its configuration; None: not, or unknown.

    A capacity differs if it is off by more than 2 % and a page: in tokens, or in bytes where the server tells them.

    expected: before the launch: ``kv_budget_bytes``, ``bytes_per_token`` and ``scale_bytes_per_token`` (a part of it)
        if the server was given the budget; ``capacity_tokens`` if our arithmetic tells how many fit; ``max_model_len``
    """
    paged = effective(settings, "layout") == "paged"
    pages, wanted = info.capacity.page_size or info.engine.page_size, settings.get("page_size")
    if paged and wanted and pages and pages != int(wanted):
        return (
            f"its pages have {pages} tokens, and the configuration is for pages of {wanted}: pass page_size on "
            f"({{page_size}} in a --serve-cmd), or ask for what it has, -o engine.page_size={pages}"
        )
    length, asked = info.engine.max_model_len, expected.max_model_len
    if length and asked and length < asked:  # lowered to what a GPU had free: each layout to another length
        return (
            f"its memory holds one sequence of {length} tokens and not of {asked}, as the configuration is for: "
            f"raise kv_budget, or give all configurations one length, -o engine.max_model_len={length}"
        )
    tokens, a_token, held = info.capacity.capacity_tokens, expected.bytes_per_token, info.capacity.kv_bytes
    if not tokens or not a_token:
        return None
    if held and abs(held - tokens * a_token) > CAPACITY_TOLERANCE * tokens * a_token + _LOGGED_TO:
        return (
            f"its KV cache of {int(tokens):,} tokens takes {held:,} bytes, {held / tokens:,.0f} a token "
            f"({info.capacity.kv_type}), and the configuration is for {a_token:,.0f} a token: give both one dtype, "
            "-o model.dtype=float32 ({dtype} in a --serve-cmd)"
        )
    budget = expected.kv_budget_bytes or 0
    least = expected.capacity_tokens or budget / a_token
    most = least * a_token / (a_token - (expected.scale_bytes_per_token or 0))  # other KV formats have fewer scales
    slack = 0 if not paged else int(pages or wanted or 1)
    if least * (1 - CAPACITY_TOLERANCE) - slack <= tokens <= most * (1 + CAPACITY_TOLERANCE) + slack:
        return None
    return (
        f"its KV cache holds {int(tokens):,} tokens, and the budget of {budget:,.0f} bytes would hold "
        f"{least:,.0f}: it has another budget or another dtype (a --serve-cmd passes on {{kv_budget}} and {{dtype}})"
    )
