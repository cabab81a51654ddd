"""Writes the sentences of audits, which are templates in sentences_en.toml."""

from __future__ import annotations

from pathlib import Path

from kvbench.common.wording import Wording

say = Wording(Path(__file__).with_name("sentences_en.toml")).say
