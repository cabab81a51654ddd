"""Rows of a trace, collected one by one, become a ``Trace`` in order of arrival; the page size is given or found."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvbench.common.text import and_more
from kvbench.traces.model import MOST_TOKENS, UNKNOWN, Prompt, Trace, count_turns, find_tick
from kvbench.traces.source import Row, Source, short

_OPTION = "--page-size"


class PageSize:
    """The page sizes under which every request so far has as many pages as the trace says.

    Traces differ in whether the last page has an id when it is partly filled (Mooncake: yes, WEKA: no), or holds the
    first output token (Bailian). So ``n`` ids stand for ``n`` or ``n - 1`` full pages of the prompt.

    Args:
        by_user: what the user says. by_file: what the file says. usual: the format's own, used where the lengths leave
            a choice that includes it.
    """

    def __init__(self, by_user: int | None, by_file: int | None = None, usual: int | None = None):
        self.given = by_user or by_file
        self.source = _OPTION if by_user else "the trace's block_size"
        self.usual = usual
        self.low, self.high = (self.given, self.given) if self.given else (1, MOST_TOKENS)

    def add(self, pages: int, tokens: int) -> None:
        """Narrow down. Raises ValueError when nothing is left."""
        low = max(self.low, tokens // (pages + 1) + 1)
        high = min(self.high, tokens // (pages - 1)) if pages > 1 else self.high
        if low <= high:
            self.low, self.high = low, high
            return
        if self.given:
            way_out = "leave it out to have it found" if self.source == _OPTION else "mend or remove the request"
            raise ValueError(
                f"{pages} page ids for {tokens} tokens, but at {self.source} {self.given} there would be "
                f"{-(-tokens // self.given)}: {way_out}"
            )
        raise ValueError(
            f"{pages} page ids for {tokens} tokens, which fits no page size that fits the requests before it "
            f"({self._span()} tokens): mend or remove the request"
        )

    def choose(self, path: object) -> tuple[int, str]:
        """The page size and how it is known: given, the only one that fits, the format's own, or a power of two.

        Raises ValueError when the lengths leave a choice.
        """
        if self.given:
            return self.given, f"given by {self.source}"
        if self.low == self.high:
            return self.low, "found: the only one that fits every length"
        if self.usual and self.low <= self.usual <= self.high:
            return self.usual, f"the format's own; the lengths would fit {self._span()} tokens"
        powers = [2**k for k in range(MOST_TOKENS.bit_length()) if self.low <= 2**k <= self.high]
        if len(powers) == 1:
            return powers[0], f"guessed: the only power of two among the {self._span()} tokens that the lengths fit"
        raise ValueError(
            f"the page size of {path} cannot be told from its lengths, which {self._span()} tokens would fit: give it "
            f"with {_OPTION} (in a workload: load.prompts.page_size)"
        )

    def _span(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} or more" if self.high == MOST_TOKENS else f"{self.low} to {self.high}"


class Rows:
    """Collects requests. A request's fields are those of ``Trace``; sessions go by any key, page ids by any id."""

    def __init__(self, page_size: PageSize | None = None):
        self.page_size = page_size
        self.left_out: Counter[str] = Counter()
        self._rows: list[tuple] = []
        self._numbers: dict[Any, int] = {}  # of page ids

    def add(
        self,
        prompt_tokens: int = UNKNOWN,
        output_tokens: int = UNKNOWN,
        *,
        time_s: float | None = None,
        page_ids: Any = None,
        scope: int = 0,
        session: Any = None,
        think_s: float | None = None,
        prompt: Prompt | None = None,
        reply: str | None = None,
    ) -> None:
        """One request. ``scope``: the file within which its page ids mean the same. Raises ValueError for bad ids."""
        ids = None
        if self.page_size is not None:
            if not isinstance(page_ids, list):
                raise ValueError(f"no list of page ids in hash_ids ({short(page_ids)}): mend or remove the request")
            for i in page_ids:
                if type(i) is not int and type(i) is not str:
                    raise ValueError(f"the page id {short(i)} is neither a whole number nor a text: mend it")
            self.page_size.add(len(page_ids), prompt_tokens)
            numbers = self._numbers
            ids = array("q", [numbers.setdefault((scope, i), len(numbers)) for i in page_ids])
        time = np.nan if time_s is None else time_s
        think = np.nan if think_s is None else think_s
        self._rows.append((prompt_tokens, output_tokens, time, ids, scope, session, think, prompt, reply))

    def trace(self, name: str, path: object, *, same_clock: bool = True) -> Trace:
        """Everything collected, by time when all requests (of a session: its first) have one; else in the file's order.

        ``same_clock``: False when times cannot be compared from file to file. Raises ValueError when there is nothing,
        or no page size can be found.
        """
        if not self._rows:
            why = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            raise ValueError(f"{path} has no request to send{f': {why}' if why else ''}")
        size, size_from = None, ""
        if self.page_size is not None:
            if not self._numbers:
                raise ValueError(f"{path} has no request with a full page: there is nothing to share")
            size, size_from = self.page_size.choose(path)
        prompt_tokens, output_tokens, times, ids, scopes, keys, thinks, prompts, replies = zip(*self._rows, strict=True)
        begin = np.array(times)  # a turn without a time comes with the one before it
        last: dict[Any, float] = {}
        for i, key in enumerate(keys):
            if key is not None:
                begin[i] = last.get(key, np.nan) if np.isnan(begin[i]) else begin[i]
                last[key] = begin[i]
        order, arrival = np.arange(len(begin)), None
        if not np.isnan(begin).any():
            order = np.lexsort((begin,) if same_clock else (begin, scopes))
            arrival = np.array(times)[order] - begin[order[0]] if same_clock else None
        session, think = None, None
        if any(key is not None for key in keys):  # numbered as they begin; a request of none is one of its own
            numbers: dict[Any, int] = {}
            owners = [(0, i) if keys[i] is None else (1, keys[i]) for i in order]
            session = np.array([numbers.setdefault(owner, len(numbers)) for owner in owners], dtype=np.int64)
            think = np.array(thinks)[order]
        has_text = any(p is not None for p in prompts)
        return Trace(
            name,
            np.array(prompt_tokens, dtype=np.int64)[order],
            np.array(output_tokens, dtype=np.int64)[order],
            arrival_s=arrival,
            page_ids=tuple(ids[i] for i in order) if self.page_size else None,
            page_size=size,
            page_size_from=size_from,
            session=session,
            turn=None if session is None else count_turns(session),
            think_s=None if think is None or np.isnan(think).all() else np.nan_to_num(think),
            prompts=tuple(prompts[i] or () for i in order) if has_text else None,
            replies=tuple(replies[i] for i in order) if has_text else None,
            tick_s=None if arrival is None else find_tick(arrival),
            left_out=dict(self.left_out),
        )


def read_rows(
    name: str,
    sources: list[Source],
    add: Callable[[Rows, Row, Any], object],
    page_size: PageSize | None = None,
    items: Callable[[Source], Iterable[tuple[str, Row]]] = Source.rows,
    *,
    same_clock: bool = True,
) -> Trace:
    """The trace of all ``items`` (place, row) of the files: ``add(rows, row, (file's number, place))`` adds requests.

    Raises ValueError with the place.
    """
    rows = Rows(page_size)
    for number, source in enumerate(sources):
        for where, row in items(source):
            try:
                add(rows, row, (number, where))
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace(name, and_more([source.path for source in sources], 1), same_clock=same_clock)
