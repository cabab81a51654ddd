"""Output of commands: progress (live on a terminal, a line now and then elsewhere), plain lines, tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

QUIET_S = 30.0  # so long nothing is printed where there is no terminal
_LIVE_PER_S = 2  # updates
_NO_LIMIT = 10_000  # columns

Rows = Callable[[int], Sequence[str]]
"""Lines of text for so many columns."""
Part = tuple[str, int]
"""Some words of a line, and their rank: 0 always stays, the highest is left out first."""


def fit(parts: Iterable[Part], width: int, between: str = "") -> str:
    """The words of ``parts`` in one line, without those of the highest ranks as long as they exceed ``width`` columns.

    ``between``: what separates them.
    """
    shown = [part for part in parts if part[0]]
    while cell_len(line := between.join(words for words, _ in shown)) > width and any(rank for _, rank in shown):
        shown.remove(max(shown, key=lambda part: part[1]))
    return line


class LiveText:
    """Shows ``rows`` while the block runs: live on a terminal, elsewhere in one line after ``quiet_s`` without output.

    A log that stands still looks dead.
    """

    def __init__(self, console: Console, rows: Rows, quiet_s: float = QUIET_S) -> None:
        self._console, self._rows, self._quiet_s = console, rows, quiet_s
        self._live = (
            Live(console=console, get_renderable=self._block, transient=True, refresh_per_second=_LIVE_PER_S)
            if console.is_terminal
            else None
        )
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> LiveText:
        (self._live or self._thread).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        with suppress(OSError):  # a terminal that is gone
            if self._live:
                self._live.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _block(self) -> Text:
        return Text("\n".join(self._rows(self._console.width)), no_wrap=True, overflow="ellipsis")

    def printed(self) -> None:
        """Notes that something else was printed just now."""
        self._last = time.monotonic()

    def _beat(self) -> None:
        while not self._ended.wait(max(0.01, self._last + self._quiet_s - time.monotonic())):
            if time.monotonic() - self._last < self._quiet_s:
                continue
            self._last = time.monotonic()
            with suppress(OSError):  # nobody reads on
                print_plain(self._console, f"  {', '.join(self._rows(_NO_LIMIT))}")


@contextmanager
def status_line(
    console: Console, text: str, quiet_s: float = QUIET_S, more: Rows = lambda width: ()
) -> Iterator[Callable[[str | Callable[[], str]], None]]:
    """Shows ``text`` and the rows ``more`` while the block runs, as ``LiveText`` does.

    Calling what it yields replaces the text, by another or by a function that is asked whenever the text is shown.
    """
    shown: list[str | Callable[[], str]] = [text]

    def update(other: str | Callable[[], str]) -> None:
        shown[0] = other

    def rows(width: int) -> Sequence[str]:
        return (shown[0] if isinstance(shown[0], str) else shown[0](), *more(width))

    with LiveText(console, rows, quiet_s):
        yield update


def print_plain(console: Console, text: str) -> None:
    """Prints ``text`` without markup, colours or line breaks of rich's own, so that it can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def make_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    numbers_from: int = 1,
    title: str = "",
    tight: bool = False,
) -> Table:
    """A table whose entries are never read as markup. Columns before ``numbers_from`` may fold, the others do not.

    ``tight``: one space between columns, for a table that is to fit 80 characters.
    """
    made = Table(
        title=Text(title) if title else None, title_justify="left", header_style="bold", box=SIMPLE_HEAD,
        pad_edge=False, padding=(0, 0 if tight else 1), collapse_padding=True,
    )  # fmt: skip
    for i, head in enumerate(heads):
        is_number = i >= numbers_from
        made.add_column(head, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        made.add_row(*(entry if isinstance(entry, Text) else Text(entry) for entry in row))
    return made


def print_table(console: Console, table: Table, *, drop_first: Sequence[str] = ()) -> None:
    """Prints ``table`` with whole columns only, since a cut one would hide numbers.

    On a terminal (or in ``COLUMNS``) columns that do not fit are left out and named: those headed ``drop_first``, then
    from the right, never the first two. Elsewhere the table is as wide as it needs to be.
    """
    usual, wide, hidden = console.width, console.options.update(max_width=_NO_LIMIT), []
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells)
            column.min_width = max(console.measure(cell, options=wide).maximum for cell in cells)
    if console.is_terminal or os.environ.get("COLUMNS"):
        rest = [column for column in reversed(table.columns[2:]) if column.header not in drop_first]
        first = [column for head in drop_first for column in table.columns if column.header == head]
        for column in (*first, *rest):
            if console.measure(table, options=wide).minimum <= usual:
                break
            table.columns.remove(column)
            hidden.append(column)
    size = console.measure(table, options=wide)
    console.width = usual if size.minimum <= usual else size.maximum
    try:
        console.print(table)
    finally:
        console.width = usual
    if hidden:
        names = [" ".join(str(column.header).split()) for column in sorted(hidden, key=lambda column: column._index)]
        print_plain(console, f"not shown at this width: {', '.join(names)}")
