"""Reads a trace of any known format, found by the file's content or named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.traces.formats import chats as conversations
from kvbench.traces.formats import csv as tables
from kvbench.traces.formats import lengths_jsonl as hashed
from kvbench.traces.formats import servegen, weka
from kvbench.traces.model import Trace
from kvbench.traces.source import Source, open_source, short

PAGE_ID_SOURCES = (
    "Traces with page ids (hash_ids) are Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces), "
    "Qwen/Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) and the agent sessions of "
    "github.com/callanjfox/kv-cache-tester"
)

_SAY_UNIT = "say --format mooncake if its timestamps are in ms, "
_MOST_KEYS = 6  # of a file in a sentence
_IN_WORKLOAD = " (in a workload: load.prompts.format)"


@dataclass(frozen=True)
class Format:
    """A format: how to know it, how to read it, and what it looks like in a few words."""

    name: str
    fits: Callable[[Source], bool]
    read: Callable[[list[Source], int | None], Trace]
    looks: str
    accepts: Callable[[Source], bool] | None = None  # when named; None: what fits


def _guidellm(sources: list[Source], page_size: int | None) -> Trace:
    if sources[0].container == "csv":
        return _table(tables.read_guidellm_table)(sources, page_size)
    return hashed.read_guidellm(sources, page_size)


def _table(read: Callable[[Source], Trace]) -> Callable[[list[Source], int | None], Trace]:
    """A reader of one CSV file."""

    def read_one(sources: list[Source], page_size: int | None) -> Trace:
        if len(sources) > 1:
            raise ValueError(f"{len(sources)} files of a format of which one is read at a time: give one")
        return read(sources[0])

    return read_one


def _csv(columns: tuple[str, ...]) -> Callable[[Source], bool]:
    return lambda source: tables.has(source, columns)


_ALL = (
    Format(
        "mooncake",
        hashed.is_mooncake,
        hashed.read_mooncake,
        "JSONL: timestamp (ms), input_length, hash_ids",
        hashed.is_lengths,
    ),
    Format(
        "timed_trace",
        hashed.is_plain,
        hashed.read_timed_trace,
        "JSONL: the same names, timestamp in seconds",
        hashed.is_lengths,
    ),
    Format("qwen", hashed.is_qwen, hashed.read_qwen, "JSONL: chat_id, parent_chat_id, input_length, hash_ids"),
    Format("weka", weka.is_weka, weka.read_weka, "JSON, a session a file: block_size, requests"),
    Format("azure", _csv(tables.AZURE), _table(tables.read_azure), "CSV: " + ", ".join(tables.AZURE)),
    Format("burstgpt", _csv(tables.BURSTGPT), _table(tables.read_burstgpt), "CSV: " + ", ".join(tables.BURSTGPT)),
    Format("vidur", _csv(tables.VIDUR), _table(tables.read_vidur), "CSV: " + ", ".join(tables.VIDUR)),
    Format(
        "guidellm",
        lambda source: tables.has(source, tables.GUIDELLM) or hashed.is_plain(source),
        _guidellm,
        "CSV or JSONL: timestamp (s), input_length, output_length",
    ),
    Format("servegen", servegen.is_servegen, servegen.read_servegen, "a client's CSV and JSON: a trace is drawn"),
    Format("sharegpt", conversations.is_sharegpt, conversations.read_sharegpt, "JSON: [{conversations: [...]}]"),
    Format("questions", conversations.is_questions, conversations.read_questions, "JSONL: turns (texts)"),
    Format("custom", conversations.is_custom, conversations.read_custom, "JSONL: prompt, output_tokens"),
    Format("lmcache", conversations.is_lmcache, conversations.read_lmcache, "JSONL: input, output, session_id"),
    Format("single_turn", conversations.is_single_turn, conversations.read_single_turn, "JSONL: text or texts"),
    Format("multi_turn", conversations.is_multi_turn, conversations.read_multi_turn, "JSONL: session_id, turns: [...]"),
)
FORMATS = {f.name: f for f in _ALL}


def read_trace(paths: str | Path | Sequence[str | Path], format: str = "auto", page_size: int | None = None) -> Trace:
    """Reads a trace: one file, or several of one format (sessions of agents, pieces of a long trace).

    Args:
        format: a key of ``FORMATS``; auto: by the content, never by the file's name.
        page_size: tokens, for page ids; None: told by the file or found from the lengths.

    Raises:
        ValueError: a file that is missing, unreadable or of no known format, a bad row (with its place), lengths that
            no page size, or more than one, can explain, or times whose unit cannot be told.
    """
    trace, source = _read(paths, format, page_size)
    if format == "auto" and trace.format == "mooncake" and (doubt := hashed.unit_doubt(source, trace)):
        raise ValueError(f"{source.path} has page ids, but {doubt}: {_SAY_UNIT}timed_trace if in seconds{_IN_WORKLOAD}")
    return trace


def read_page_ids(
    paths: str | Path | Sequence[str | Path], format: str = "auto", page_size: int | None = None
) -> Trace:
    """``read_trace`` for those who need to know which prompts begin alike, and only in which order they come.

    ValueError when the trace does not say. Times may be in any unit: where ``read_trace`` asks for it, this does not.
    """
    trace, _ = _read(paths, format, page_size)
    if trace.page_ids is None:
        name = paths if isinstance(paths, str | Path) else paths[0]
        raise ValueError(
            f"{name} (format {trace.format}) has no page ids (hash_ids), so nobody knows which prompts begin alike. "
            f"{PAGE_ID_SOURCES}; give one of them"
        )
    return trace


def _read(paths: str | Path | Sequence[str | Path], format: str, page_size: int | None) -> tuple[Trace, Source]:
    """The trace, and its first file."""
    names = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not names:
        raise ValueError("no trace is given: name at least one file")
    if format not in ("auto", *FORMATS):
        raise ValueError(f"{format!r} is not a format of traces that is read here: {', '.join(FORMATS)}")
    path = names[0]
    try:
        sources = []
        for path in names:
            sources.append(open_source(path))
        kinds = [_find(source, format) for source in sources]
        if len({kind.name for kind in kinds}) > 1:
            mixed = ", ".join(f"{s.path} ({k.name})" for s, k in zip(sources, kinds, strict=True))
            raise ValueError(f"the files are of different formats, which cannot be one trace: {mixed}")
        return kinds[0].read(sources, page_size), sources[0]
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be read ({error.strerror or error}): check the path") from None
    except RecursionError:
        raise ValueError(f"the trace {path} is nested too deeply: flatten it") from None


def _find(source: Source, name: str) -> Format:
    if name != "auto":
        named = FORMATS[name]
        if not (named.accepts or named.fits)(source):
            raise ValueError(f"{source.path} is not of the format {name} ({named.looks}): {_begins(source)}")
        return named
    found = [f for f in FORMATS.values() if f.fits(source)]
    if len(found) == 1:
        return found[0]
    if found and hashed.is_plain(source):
        raise ValueError(
            f"{source.path} has times and lengths but no unit: {_SAY_UNIT}"
            f"{' or '.join(f.name for f in found)} if in seconds{_IN_WORKLOAD}"
        )
    if found:
        raise ValueError(
            f"{source.path} fits the formats {', '.join(f.name for f in found)}: say which with --format{_IN_WORKLOAD}"
        )
    if source.container == "jsonl" and isinstance(source.first.get("requests"), list):
        raise ValueError(
            f"{source.path}, line 2: more after the first session; page ids are local to a session and sessions share "
            "no clock, so give each one a file of its own"
        )
    known = "; ".join(f"{f.name} ({f.looks})" for f in FORMATS.values())
    raise ValueError(f"{source.path} is no trace of a known format: {_begins(source)}. Known are {known}")


def _begins(source: Source) -> str:
    if source.container in ("csv", "other"):
        return f"its first line is {short(','.join(source.columns))}"
    keys = [short(key) for key in itertools.islice(source.first, _MOST_KEYS)]
    more = len(source.first) - len(keys)
    return f"its first row has {', '.join(keys) or 'no keys'}{f' and {more} more' if more else ''}"
