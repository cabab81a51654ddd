"""Work for the engine's thread, and how its outcome comes back to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    work: Callable[[], Any]
    reply: asyncio.Future[Any] | None  # None: nobody waits


def resolve(replies: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    """On the event loop: give each future its result or its error."""
    for reply, result, error in replies:
        if reply.done():  # cancelled meanwhile
            continue
        if error is None:
            reply.set_result(result)
        else:
            reply.set_exception(error)


def describe(error: BaseException) -> str:
    """The error's class and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
