"""An OpenAI-compatible server that runs already: measured as it is, never launched, restarted or stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, RefusedError, UsageError
from kvbench.load.completion import judge
from kvbench.load.endpoints import ENDPOINTS, PATHS, Dialect
from kvbench.runs.server_info import ModelRow, ServerFacts, ServerInfo
from kvbench.targets.base import NO_SUCH_PATH, PLAIN_ACCESS, REFUSED, Access, HttpAnswer, ModelFacts, Target
from kvbench.targets.model_export import shipped_tokenizer
from kvbench.targets.preset import Preset
from kvbench.targets.presets import BUILT_IN, GENERIC
from kvbench.targets.prompt_texts import texts_of
from kvbench.workload.request_form import DEFAULT_FORM, RequestForm
from kvbench.workload.settings import Settings

_DRAWN_IDS = 8192  # of a vocabulary that nobody tells: they become words, and are not sent
_SHIPPED = "bpe8k"  # the name of the tokenizer that ships, as a server tells it
_SHIPPED_TEXTS = (
    "prompts are sent as texts of the tokenizer that ships, whose lengths in the server's own tokens are only about "
    "right: --tokenizer DIR (a folder with its tokenizer.json) makes them exact"
)
_NO_VOCABULARY = (
    "the server does not tell its vocabulary, so no token ids are drawn: --vocab-size N (vocab_size in the model's "
    "config.json) does, for a server that takes them"
)
_UNTOLD_LENGTH = (
    "the server does not tell its longest sequence, so prompts are not held against it: --max-model-len N does"
)
_REFUSALS = (200, *REFUSED, *NO_SUCH_PATH)  # 200: with an error, or what cannot be measured, in place of a stream
# What a server may refuse of a request, tried in this order: vLLM's fields, then others of each API.
_PLAIN = {"ignore_eos": False, "return_token_ids": False}
_NEWER = {**_PLAIN, "max_completion_tokens": True}
_FORMS: Mapping[str, tuple[Mapping[str, bool], ...]] = {
    "completions": ({}, _PLAIN, {**_PLAIN, "stream_options": False}),
    "chat": ({}, _PLAIN, _NEWER, {**_NEWER, "temperature": False}, {**_PLAIN, "stream_options": False}),
    "responses": ({}, _PLAIN, {**_PLAIN, "temperature": False}, {**_PLAIN, "api_fields": False}),
    "messages": ({}, {"temperature": False}),
}
_UNMEASURABLE = ("server_error", "not_streamed", "no_usage", "no_finish_reason")
_REFUSED_FIELDS = {
    "ignore_eos": "the server refuses ignore_eos and return_token_ids, so answers end where its model ends them",
    "temperature": "the server refuses the temperature, so its own is used",
    "done_marker": "the server's streams have no end mark; finish_reason and usage show that they are whole",
}


class OpenAITarget(Target):
    """A server at ``url``, which may have ``/v1`` and what follows it.

    Sizes that it does not tell are given, or not known. A server of no known kind is asked what it takes: which
    endpoint, token ids or texts, vLLM's fields or none.

    tokenizer: a folder: prompts are sent as texts that are made with it
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        preset: Preset = GENERIC,
        access: Access = PLAIN_ACCESS,
        tokenizer: Path | None = None,
        form: RequestForm = DEFAULT_FORM,
    ) -> None:
        text_of_ids = texts_of(tokenizer) if tokenizer else None
        base_url = url.rstrip("/")
        for path in (*PATHS.values(), "/v1"):
            base_url = base_url.removesuffix(path)
        super().__init__(base_url, preset=preset, access=access, text_of_ids=text_of_ids)
        self.form = form
        self._given = (model, vocab_size, max_model_len)
        self._takes: Mapping[str, bool] = {}  # what it was found to take, as fields of a dialect
        self._caches_prefixes = True

    def start(self, settings: Settings, log: Path) -> None:
        """Asks what it serves and takes; launches nothing. Raises UsageError or MeasurementError."""
        name, vocab_size, max_model_len = self._given
        try:
            row = self._row_of(name)
            if self.preset is GENERIC and row.owned_by == "kvbench":  # as the built-in server names itself
                self.preset = BUILT_IN
            info = self.server_info()
        except MeasurementError as error:
            raise UsageError(str(error)) from None
        self._caches_prefixes = info.engine.enable_prefix_caching is not False
        own_vocab, own_length = self.told_sizes(row)
        own_vocab = info.model.vocab_size or own_vocab
        sizes = (("--vocab-size", vocab_size, own_vocab), ("--max-model-len", max_model_len, own_length))
        for option, size, own in sizes:
            if size and own and size > int(own):
                raise UsageError(f"{option} {size} is more than the {own} that {self.base_url} tells: leave it out")
        vocab, length = vocab_size or own_vocab, max_model_len or own_length
        self.model = ModelFacts(name or row.id, int(vocab or _DRAWN_IDS), length)
        has_tokenizer = self._text_of_ids is not None
        if has_tokenizer or not vocab:  # ids of an unknown vocabulary cannot be drawn
            self._takes = {"token_id_prompts": False}
        if self.preset is GENERIC:
            self._find_form()
        if not vocab and self.dialect.endpoint == "completions" and self.preset.dialect.token_id_prompts:
            self.notes += (_NO_VOCABULARY,)
        if not self.dialect.token_id_prompts:
            self.exact_texts = has_tokenizer or info.tokenizer.name == _SHIPPED
            self.notes += () if self.exact_texts else (_SHIPPED_TEXTS,)
            self.learn_template()
        if length is None:
            self.notes += (_UNTOLD_LENGTH,)

    @property
    def dialect(self) -> Dialect:
        return super().dialect.model_copy(update=self._takes)

    @property
    def ends_answers(self) -> bool:
        return not self.dialect.ignore_eos

    def _find_form(self) -> None:
        """Finds the first endpoint, and the first form of a request there, that the server takes.

        An endpoint that fails, asks for a key or does not answer now is there, and left to the warm-up. UsageError
        where the server takes no request at all.
        """
        wanted, given = self.form, self._takes
        refusals: list[str] = []
        for endpoint in (wanted.endpoint,) if wanted.endpoint else tuple(ENDPOINTS):
            self.form, self._takes = dataclasses.replace(wanted, endpoint=endpoint), given
            forms = _FORMS[self.dialect.endpoint]
            texts = [{**form, "token_id_prompts": False} for form in forms]
            for form in (*forms, *texts) if self.dialect.token_id_prompts else texts:
                self._takes = {**given, **form}
                answer = self._try_form()
                if answer is None or answer.status not in _REFUSALS:
                    self._takes = self._takes if answer is None else given
                    self._note_form(wanted, given, refusals)
                    return
                refusal = self.http.words_of(self.dialect.api.path, answer).removeprefix(self.base_url)
                if answer.status in NO_SUCH_PATH:
                    break
            refusals.append(refusal)
        raise UsageError(f"{self.base_url} takes no request of a load: {'; '.join(refusals)}")

    def _try_form(self) -> HttpAnswer | None:
        """Sends a request of the present form, as a load's are; the answer where the server did not take it.

        What does not answer in time is not refused. Streams that lack nothing but the end mark are known from here on.
        """
        dialect = self.dialect
        request = self._request([1, 2], 1)
        body = dialect.streamed_body(self.model.name, request, self.form.temperature, ignore_eos=True)
        try:
            answer = self.http.call("POST", dialect.api.path, body=body, headers=self._api_headers())
        except MeasurementError:
            return None
        if answer.status != 200:
            return answer
        stream = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer.body), answer.body)
        outcome = judge([0.0], [stream], request.max_tokens, dialect=dialect)
        if outcome.error_kind == "no_done":
            self._takes = {**self._takes, "done_marker": False}
        if outcome.error_kind in _UNMEASURABLE:
            return dataclasses.replace(answer, body=json.dumps({"error": outcome.error}).encode())
        return None

    def _note_form(self, wanted: RequestForm, given: Mapping[str, bool], refusals: Sequence[str]) -> None:
        """Says what differs from what was asked for, and what the server said to the endpoint before."""
        endpoint = self.form.endpoint
        if endpoint != (wanted.endpoint or "completions"):
            path = PATHS[str(endpoint)]
            self.notes += (f"requests go to {path}, as the server refuses others: {refusals[0]}",)
        elif endpoint == "completions" and "token_id_prompts" in self._takes.keys() - given.keys():
            self.notes += ("the server takes no token ids",)
        self.notes += tuple(note for name, note in _REFUSED_FIELDS.items() if not self._takes.get(name, True))

    def _make_text(self, ids: Any) -> str:
        if self._text_of_ids is None:
            self._text_of_ids = texts_of(shipped_tokenizer())
        return super()._make_text(ids)

    def reset_prefix_cache(self) -> bool | None:
        """Empties the cache as ``Target`` does; one that the server says is off is empty.

        An unknown server that breaks off instead of answering such a path does not have it.
        """
        if not self._caches_prefixes:
            return True
        try:
            return super().reset_prefix_cache()
        except MeasurementError as error:
            if self.preset is GENERIC and isinstance(error.__cause__, ConnectionError):
                return None
            raise

    def _row_of(self, name: str | None) -> ModelRow:
        """The model's row of /v1/models; a server that lists none must be healthy, and its row is empty."""
        if self.preset.models_path is None:
            answer = self.http.check_access(self.http.call("GET", self.preset.health))
            if answer.status != 200:
                raise UsageError(self.http.words_of(self.preset.health, answer))
            return self._unlisted(name)
        try:
            rows = self.models()
        except RefusedError:
            return self._unlisted(name)
        if name is None:
            return rows[0]
        for wanted in (name, name.partition("?")[0]):  # the mock server takes settings as a query
            if row := next((row for row in rows if row.id == wanted), None):
                return row
        models = ", ".join(row.id for row in rows)
        raise UsageError(f"{self.base_url} serves no model {name!r}: its models are {models}")

    def _unlisted(self, name: str | None) -> ModelRow:
        """The row of a server that lists no models. UsageError where nobody names its model."""
        if name is None:
            raise UsageError(f"{self.base_url} does not list the name of its model: give --model NAME")
        return ModelRow(id=name)

    def server_info(self) -> ServerInfo:
        """Returns the server's facts by itself; of a known kind of server what its preset and its version tell."""
        if self.preset in (GENERIC, BUILT_IN):
            info = super().server_info()
            server = info.server.model_copy(update={"notes": self.notes})
            return info.model_copy(update={"server": server}) if self.notes else info
        version, quirks = self.version(), self.preset.quirks_at(self.dialect.endpoint)
        if self.preset.kv_log_pattern is not None:
            quirks += ("it tells size and type of its KV cache in its log only, so they are not known here",)
        facts = {"kind": self.preset.name, "title": self.preset.title, "quirks": quirks, "notes": self.notes}
        return ServerInfo(versions={self.preset.name: version} if version else {}, server=ServerFacts(**facts))
