"""Rows of a trace, collected one by one, become a ``Trace`` in order of arrival."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from kvbench.traces.model import UNKNOWN, Prompt, Trace, count_turns, find_tick
from kvbench.traces.page_size import PageSize
from kvbench.traces.source import short


class Rows:
    """Collects requests. A request's fields are those of ``Trace``; sessions go by any key, page ids by any id."""

    def __init__(self, fit: PageSize | None = None):
        self.fit = fit
        self.left_out: Counter[str] = Counter()
        self._tokens: list[tuple[int, int]] = []
        self._times: list[float] = []
        self._think: list[float] = []
        self._sessions: list[Any] = []
        self._scopes: list[int] = []
        self._page_ids: list[array] = []
        self._prompts: list[Prompt | None] = []
        self._replies: list[str | None] = []
        self._numbers: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

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
        if self.fit is not None:
            for i in check_page_ids(page_ids):
                if type(i) is not int and type(i) is not str:
                    raise ValueError(f"the page id {short(i)} is neither a whole number nor a text: mend it")
            self.fit.add(len(page_ids), prompt_tokens)
            numbers = self._numbers
            self._page_ids.append(array("q", [numbers.setdefault((scope, i), len(numbers)) for i in page_ids]))
        self._tokens.append((prompt_tokens, output_tokens))
        self._times.append(np.nan if time_s is None else time_s)
        self._think.append(np.nan if think_s is None else think_s)
        self._sessions.append(session)
        self._scopes.append(scope)
        self._prompts.append(prompt)
        self._replies.append(reply)

    def trace(self, name: str, path: object, *, same_clock: bool = True) -> Trace:
        """Everything collected. ``same_clock``: False when times cannot be compared from file to file.

        Raises ValueError when there is nothing, or no page size can be told.
        """
        if not self._tokens:
            why = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            raise ValueError(f"{path} has no request to send{f': {why}' if why else ''}")
        size, size_from = None, ""
        if self.fit is not None:
            if not self._numbers:
                raise ValueError(f"{path} has no request with a full page: there is nothing to share")
            size, size_from = self.fit.choose(path)
        order, arrival = self._order(same_clock)
        session, turn = self._turns(order)
        think = np.array(self._think)[order]
        tokens = np.array(self._tokens, dtype=np.int64)[order]
        has_text = any(p is not None for p in self._prompts)
        return Trace(
            name,
            tokens[:, 0],
            tokens[:, 1],
            arrival_s=arrival,
            page_ids=tuple(self._page_ids[i] for i in order) if self.fit else None,
            page_size=size,
            page_size_from=size_from,
            session=session,
            turn=turn,
            think_s=None if session is None or np.isnan(think).all() else np.nan_to_num(think),
            prompts=tuple(self._prompts[i] or () for i in order) if has_text else None,
            replies=tuple(self._replies[i] for i in order) if has_text else None,
            tick_s=None if arrival is None else find_tick(arrival),
            left_out=dict(self.left_out),
        )

    def _order(self, same_clock: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """By time, when every session's first request (and every request of no session) has one; else the file's."""
        times = np.array(self._times)
        key = times.copy()
        last: dict[Any, float] = {}
        for i, session in enumerate(self._sessions):
            if session is not None:
                key[i] = last.get(session, np.nan) if np.isnan(key[i]) else key[i]
                last[session] = key[i]
        if np.isnan(key).any():
            return np.arange(len(times)), None
        if not same_clock:
            return np.lexsort((key, np.array(self._scopes))), None
        order = np.argsort(key, kind="stable")
        return order, times[order] - key[order[0]]

    def _turns(self, order: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Sessions numbered as they begin; a request of none is a session of its own."""
        if all(s is None for s in self._sessions):
            return None, None
        numbers: dict[Any, int] = {}
        keys = [(0, i) if self._sessions[i] is None else (1, self._sessions[i]) for i in order]
        session = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        return session, count_turns(session)


def check_page_ids(value: Any) -> list[Any]:
    """Raises ValueError for what is no list."""
    if not isinstance(value, list):
        raise ValueError(f"no list of page ids in hash_ids ({short(value)}): mend or remove the request")
    return value
