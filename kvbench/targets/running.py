"""An OpenAI-compatible server that runs already: measured as it is, never launched, restarted or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, RefusedError, UsageError
from kvbench.common.text import listing
from kvbench.load.dialect import Dialect
from kvbench.targets.base import PLAIN_ACCESS, Access, ModelFacts, Target
from kvbench.targets.model_export import shipped_tokenizer
from kvbench.targets.preset import Preset
from kvbench.targets.presets import BUILT_IN, GENERIC
from kvbench.targets.prompt_texts import TokenizerWords

_DRAWN_IDS = 8192  # of a vocabulary that nobody tells: they become words, and are not sent
_SHIPPED_TEXTS = (
    "the server takes no token ids: random prompts are sent as texts of the tokenizer that ships, whose lengths in its "
    "own tokens are only about right; --tokenizer DIR (a folder with its tokenizer.json) makes them exact"
)


class OpenAITarget(Target):
    """``url``: with or without ``/v1``. Sizes that /v1/models and /server_info do not tell must be given.

    The workload's engine settings do not reach such a server, so only one configuration can be measured.
    ``preset``: what kind of server it is; ``tokenizer``: a folder: prompts are sent as texts that are made with it. A
    server of no known kind that refuses token ids and takes a text gets texts too, of the tokenizer that ships.
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
    ) -> None:
        text_of_ids = TokenizerWords(tokenizer).text if tokenizer else None
        base_url = url.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")
        super().__init__(base_url, preset=preset, access=access, text_of_ids=text_of_ids)
        self._given = (model, vocab_size, max_model_len)
        self._sends_texts = tokenizer is not None or not preset.dialect.token_id_prompts
        if self._sends_texts and tokenizer is None:
            self.notes += (_SHIPPED_TEXTS,)
        self._caches_prefixes = True

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Checks that it answers; launches nothing. Raises UsageError or MeasurementError."""
        name, vocab_size, max_model_len = self._given
        try:
            row = self._row_of(name)
            if self.preset is GENERIC and row.get("owned_by") == "kvbench":  # as the built-in server names itself
                self.preset = BUILT_IN
            info = self.server_info() or {}
        except MeasurementError as error:
            raise UsageError(str(error)) from None
        self._caches_prefixes = (info.get("engine") or {}).get("enable_prefix_caching") is not False
        own_vocab, own_length = self.told_sizes(row)
        own_vocab = (info.get("model") or {}).get("vocab_size") or own_vocab
        self.model = ModelFacts(name or str(row.get("id")), 0, 0)  # sizes: below
        if not (vocab_size or own_vocab):  # which texts do not need
            with suppress(MeasurementError):
                self.complete([1, 2], 1, self.http.timeout_s)
        if self._sends_texts:
            own_vocab = own_vocab or vocab_size or _DRAWN_IDS
        self._require(
            {
                "--model NAME": ("the name of its model", name, row.get("id")),
                "--vocab-size N (vocab_size in the model's config.json)": ("its vocabulary", vocab_size, own_vocab),
                "--max-model-len N (max_position_embeddings in config.json, or as the server was started)": (
                    "its longest sequence", max_model_len, own_length
                ),
            }
        )  # fmt: skip
        self.model = ModelFacts(self.model.name, int(vocab_size or own_vocab), int(max_model_len or own_length))

    @property
    def dialect(self) -> Dialect:
        return super().dialect.model_copy(update={"token_id_prompts": not self._sends_texts})

    def complete(self, prompt: Any, max_tokens: int, timeout_s: float) -> None:
        """Sends one completion; a server of no known kind that refuses token ids gets texts from then on, if it can."""
        try:
            super().complete(prompt, max_tokens, timeout_s)
        except RefusedError:
            if not isinstance(prompt, list) or self.preset is not GENERIC or self._sends_texts:
                raise
            self._sends_texts = True
            try:
                super().complete(prompt, max_tokens, timeout_s)
            except MeasurementError:
                self._sends_texts = False
            if not self._sends_texts:
                raise
            self.notes += (_SHIPPED_TEXTS,)

    def _make_text(self, ids: Any) -> str:
        if self._text_of_ids is None:
            self._text_of_ids = TokenizerWords(shipped_tokenizer()).text
        return super()._make_text(ids)

    def reset_prefix_cache(self) -> bool | None:
        """As ``Target``; a cache that the server says is off is empty."""
        return super().reset_prefix_cache() if self._caches_prefixes else True

    def _row_of(self, name: str | None) -> dict[str, Any]:
        """The model's row of /v1/models; a server that lists none must be healthy, and its row is empty."""
        if self.preset.models_path is None:
            answer = self.answer_at(self.preset.health)
            if answer.status != 200:
                raise UsageError(self.http.said(self.preset.health, answer))
            return {}
        rows = self.models()
        if name is None:
            return rows[0]
        for wanted in (name, name.partition("?")[0]):  # the mock server takes settings as a query
            if row := next((row for row in rows if row["id"] == wanted), None):
                return row
        known = ", ".join(str(row["id"]) for row in rows)
        raise UsageError(f"{self.base_url} serves no model {name!r}: its models are {known}")

    def _require(self, facts: Mapping[str, tuple[str, Any, Any]]) -> None:
        """Raises UsageError that names every fact that is missing, or the size that is more than the server has.

        ``facts``: by option: what it is, as given, as the server tells it.
        """
        missing = {option: what for option, (what, given, own) in facts.items() if not given and not own}
        if missing:
            raise UsageError(
                f"{self.base_url} does not tell {listing([*missing.values()])}: give {' and '.join(missing)}"
            )
        for option, (_, given, own) in facts.items():
            if isinstance(given, int) and own and given > int(own):
                name = option.partition(" ")[0]
                raise UsageError(f"{name} {given} is more than the {own} that {self.base_url} tells: leave it out")

    def server_info(self) -> dict[str, Any] | None:
        """As ``Target``; of a server of a known kind what its preset and its version tell."""
        if self.preset in (GENERIC, BUILT_IN):
            info = super().server_info()
            if not self.notes:
                return info
            server = (info or {}).get("server")
            return {**(info or {}), "server": {**(server if isinstance(server, dict) else {}), "notes": [*self.notes]}}
        version, quirks = self.version(), list(self.preset.quirks)
        if self.preset.kv_log_pattern is not None:
            quirks.append("it tells size and type of its KV cache in its log only, so they are not known here")
        return {
            "versions": {self.preset.name: version} if version else {},
            "server": {"kind": self.preset.name, "title": self.preset.title, "quirks": quirks, "notes": [*self.notes]},
        }
