"""An OpenAI-compatible server that runs already: measured as it is, never launched, restarted or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.targets.access import Access
from kvbench.targets.base import HttpTarget, ModelFacts
from kvbench.targets.presets import GENERIC
from kvbench.targets.presets.preset import Preset
from kvbench.targets.texts import TokenizerTexts
from kvbench.targets.versions import version_of

_PLAIN = Access()


class OpenAITarget(HttpTarget):
    """``url`` with or without ``/v1``. What the server does not tell (/v1/models, /server_info) must be given.

    ``settings`` of the workload's engine section do not reach such a server: one configuration can be measured.
    ``preset``: what kind of server it is; ``tokenizer``: the folder of one, for a kind that takes texts only.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        preset: Preset = GENERIC,
        access: Access = _PLAIN,
        tokenizer: Path | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--target {url!r} is not a URL: write for example http://127.0.0.1:8000")
        texts = TokenizerTexts(tokenizer) if tokenizer else None
        super().__init__(url.rstrip("/").removesuffix("/v1"), preset=preset, access=access, texts=texts)
        self._asked = (model, vocab_size, max_model_len)

    def start(self, settings: Mapping[str, Any], log: Path) -> None:
        """Checks that it answers; launches nothing. Raises UsageError or MeasurementError."""
        name, vocab_size, max_model_len = self._asked
        rows = self._rows(name)
        named = (name, name.partition("?")[0]) if name else (rows[0]["id"],)  # the mock takes settings as a query
        row = next((r for wanted in named for r in rows if r["id"] == wanted), None)
        if row is None:
            known = ", ".join(str(r["id"]) for r in rows)
            raise UsageError(f"{self.base_url} serves no model {name!r}: its models are {known}")
        info = self.server_info() or {}
        length = max_model_len or row.get("max_model_len")
        vocab = vocab_size or (info.get("model") or {}).get("vocab_size")
        for value, told, flag in (
            (length, row.get("max_model_len"), "--max-model-len"),
            (vocab, (info.get("model") or {}).get("vocab_size"), "--vocab-size"),
        ):
            if not value:
                raise UsageError(f"{self.base_url} does not tell its {flag[2:].replace('-', ' ')}: give {flag} N")
            if told and int(value) > int(told):
                raise UsageError(f"{flag} {value} is more than the {told} that {self.base_url} tells: leave it out")
        self.model = ModelFacts(name or str(row["id"]), int(vocab), int(length))

    def _rows(self, name: str | None) -> list[dict[str, Any]]:
        """Its models; a server that lists none is asked for its health, and its model must be named."""
        if self.preset.models_path is None:
            self._must_be_healthy()
            if name is None:
                raise UsageError(f"{self.preset.title} does not list its models: give --model NAME")
            return [{"id": name}]
        try:
            return self.models()
        except MeasurementError as error:
            raise UsageError(str(error)) from None

    def _must_be_healthy(self) -> None:
        try:
            status = self.answer_at(self.preset.health).status_code
        except MeasurementError as error:
            raise UsageError(str(error)) from None
        if status != 200:
            raise UsageError(f"{self.base_url} does not serve: {self.preset.health} answered {status}")

    def server_info(self) -> dict[str, Any] | None:
        """As ``HttpTarget``; of a server of a known kind what its preset and its version tell."""
        if self.preset is GENERIC:
            return super().server_info()
        version = version_of(self, "")
        return {
            "versions": {self.preset.name: version} if version else {},
            "server": {"kind": self.preset.name, "title": self.preset.title, "quirks": list(self.preset.quirks)},
        }

    def check_alive(self) -> None:
        """Nothing to watch: a server that is gone shows as failed requests, and before a load in ``metrics``."""

    def stop(self) -> None:
        self.close()
