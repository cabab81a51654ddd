"""An OpenAI-compatible server that runs already: measured as it is, never launched, restarted or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets.base import PLAIN_ACCESS, Access, ModelFacts, Target
from kvbench.targets.preset import Preset
from kvbench.targets.presets import BUILT_IN, GENERIC
from kvbench.targets.prompt_texts import TokenizerWords


class OpenAITarget(Target):
    """``url``: with or without ``/v1``. Sizes that /v1/models and /server_info do not tell must be given.

    The workload's engine settings do not reach such a server, so only one configuration can be measured.
    ``preset``: what kind of server it is; ``tokenizer``: a folder, for a server that takes texts only.
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
        base_url = url.rstrip("/").removesuffix("/v1")
        super().__init__(base_url, preset=preset, access=access, text_of_ids=text_of_ids)
        self._given = (model, vocab_size, max_model_len)
        self._caches_prefixes = True

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Checks that it answers; launches nothing. Raises UsageError or MeasurementError."""
        name, vocab_size, max_model_len = self._given
        try:
            row = self._row_of(name)
        except MeasurementError as error:
            raise UsageError(str(error)) from None
        if self.preset is GENERIC and row.get("owned_by") == "kvbench":  # as the built-in server names itself
            self.preset = BUILT_IN
        info = self.server_info() or {}
        own_vocab = (info.get("model") or {}).get("vocab_size")
        self._caches_prefixes = (info.get("engine") or {}).get("enable_prefix_caching") is not False
        length = self._size("--max-model-len", max_model_len, row.get("max_model_len"))
        vocab = self._size("--vocab-size", vocab_size, own_vocab)
        self.model = ModelFacts(name or str(row["id"]), vocab, length)

    def reset_prefix_cache(self) -> bool | None:
        """As ``Target``; a cache that the server says is off is empty."""
        return super().reset_prefix_cache() if self._caches_prefixes else True

    def _row_of(self, name: str | None) -> dict[str, Any]:
        """The model's row of /v1/models; a server that lists none must be healthy, and needs the name."""
        if self.preset.models_path is None:
            answer = self.answer_at(self.preset.health)
            if answer.status != 200:
                raise UsageError(self.http.said(self.preset.health, answer))
            if name is None:
                raise UsageError(f"{self.preset.title} does not list its models: give --model NAME")
            return {"id": name}
        rows = self.models()
        if name is None:
            return rows[0]
        for wanted in (name, name.partition("?")[0]):  # the mock server takes settings as a query
            if row := next((row for row in rows if row["id"] == wanted), None):
                return row
        known = ", ".join(str(row["id"]) for row in rows)
        raise UsageError(f"{self.base_url} serves no model {name!r}: its models are {known}")

    def _size(self, option: str, given: int | None, own: Any) -> int:
        """The size that was given, else the server's own. UsageError when there is none, or it is less than given."""
        if not given and not own:
            raise UsageError(f"{self.base_url} does not tell its {option[2:].replace('-', ' ')}: give {option} N")
        if given and own and given > int(own):
            raise UsageError(f"{option} {given} is more than the {own} that {self.base_url} tells: leave it out")
        return int(given or own)

    def server_info(self) -> dict[str, Any] | None:
        """As ``Target``; of a server of a known kind what its preset and its version tell."""
        if self.preset in (GENERIC, BUILT_IN):
            return super().server_info()
        version = self.version()
        return {
            "versions": {self.preset.name: version} if version else {},
            "server": {"kind": self.preset.name, "title": self.preset.title, "quirks": list(self.preset.quirks)},
        }
