"""The sentences of the report and of what is made like it, in sentences_en.toml beside this file."""

from __future__ import annotations

from pathlib import Path

from kvbench.common import text as words
from kvbench.common.wording import Wording
from kvbench.report.comparisons import amount

_FORMATS = {
    "bytes": words.data_size,
    "capital": words.upper_first,
    "change": amount,  # of a ratio
    "count": words.count,
    "decimal": words.decimal,
    "figures": words.significant,
    "list": words.listing,
    "lower": str.lower,
    "more": words.and_more,
    "ms": words.ms,
    "percent": words.percent,
    "ratio": words.ratio,
    "two": lambda value: words.significant(value, 2),
}
"""Name of a format in the file of sentences -> what writes a value so."""

say = Wording(Path(__file__).with_name("sentences_en.toml"), _FORMATS).say
