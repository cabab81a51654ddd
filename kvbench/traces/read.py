"""Reads a trace of any known format; the format is named, or found by the file's content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.common.plugins import add_plugins
from kvbench.common.text import and_more
from kvbench.traces.formats import chats, csv, lengths_jsonl, servegen, weka
from kvbench.traces.model import Trace
from kvbench.traces.rows import Source, TraceFormat, open_source, short

PAGE_ID_SOURCES = (
    "Traces with page ids (hash_ids) are Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces), "
    "Qwen/Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) and the agent sessions of "
    "github.com/callanjfox/kv-cache-tester"
)
FORMATS = {
    format.name: format
    for module in (lengths_jsonl, weka, csv, servegen, chats)
    for format in module.FORMATS
}  # fmt: skip
add_plugins(FORMATS, "trace_formats", TraceFormat)
_MOST_KEYS = 6  # of a file in a sentence
_SAY_UNIT = "say --format mooncake if its timestamps are in ms, "
_IN_WORKLOAD = " (in a workload: load.prompts.format)"

Paths = str | Path | Sequence[str | Path]


def check_format(name: str) -> str:
    """Returns ``name`` again. ValueError when it is no format of traces."""
    if name not in ("auto", *FORMATS):
        raise ValueError(f"{name!r} is not a format of traces; write auto or one of {', '.join(FORMATS)}")
    return name


def read_trace(paths: Paths, format: str = "auto", page_size: int | None = None) -> Trace:
    """Reads a trace: one file, or several of one format (sessions of agents, pieces of a long trace).

    Args:
        format: a key of ``FORMATS``; auto: by the content, never by the file's name.
        page_size: tokens, for page ids; None: given by the file or found from the lengths.

    Raises:
        ValueError: a file that is missing, unreadable or of no known format, a bad row (with its place), lengths that
            no page size, or more than one, can explain, or times whose unit is unknown.
    """
    trace, source = _read(paths, format, page_size)
    doubt = lengths_jsonl.unit_doubt(source, trace) if format == "auto" and trace.format == "mooncake" else None
    if doubt is not None:
        raise ValueError(f"{source.path} has page ids, but {doubt}: {_SAY_UNIT}timed_trace if in seconds{_IN_WORKLOAD}")
    return trace


def read_page_ids(paths: Paths, format: str = "auto", page_size: int | None = None) -> Trace:
    """Reads a trace for callers that need page ids and the order of the requests, but no times.

    ValueError when the trace has no page ids. Times may be in any unit.
    """
    trace, source = _read(paths, format, page_size)
    if trace.page_ids is None:
        raise ValueError(
            f"{source.path} (format {trace.format}) has no page ids (hash_ids), which tell the prompts that "
            f"begin alike. {PAGE_ID_SOURCES}; give one of them"
        )
    return trace


def _read(paths: Paths, format: str, page_size: int | None) -> tuple[Trace, Source]:
    """The trace, and its first file."""
    names = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not names:
        raise ValueError("no trace is given: name at least one file")
    check_format(format)
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


def _find(source: Source, name: str) -> TraceFormat:
    if name != "auto":
        named = FORMATS[name]
        if not (named.accepts or named.fits)(source):
            raise ValueError(f"{source.path} is not of the format {name} ({named.looks}): {_begins(source)}")
        return named
    fitting = [f for f in FORMATS.values() if f.fits(source)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting and lengths_jsonl.is_plain(source):
        raise ValueError(
            f"{source.path} has times and lengths but no unit: {_SAY_UNIT}"
            f"{' or '.join(f.name for f in fitting)} if in seconds{_IN_WORKLOAD}"
        )
    if fitting:
        raise ValueError(
            f"{source.path} fits the formats {', '.join(f.name for f in fitting)}: say which with "
            f"--format{_IN_WORKLOAD}"
        )
    if source.container == "jsonl" and isinstance(source.first["requests"], list):
        raise ValueError(
            f"{source.path}, line 2: more after the first session; page ids are local to a session and sessions share "
            "no clock, so give each one a file of its own"
        )
    formats = "; ".join(f"{f.name} ({f.looks})" for f in FORMATS.values())
    raise ValueError(f"{source.path} is no trace of a known format: {_begins(source)}. Known are {formats}")


def _begins(source: Source) -> str:
    if source.container in ("csv", "other"):
        return f"its first line is {short(','.join(source.columns))}"
    keys = [short(key) for key in source.first]
    return f"its first row has {and_more(keys, _MOST_KEYS) or 'no keys'}"
