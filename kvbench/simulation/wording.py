"""The sentences that simulations print, in sentences_en.toml beside this file."""

from __future__ import annotations

from pathlib import Path

from kvbench.common.wording import Wording

sentence = Wording(Path(__file__).with_name("sentences_en.toml")).say
