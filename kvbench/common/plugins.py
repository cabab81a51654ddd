"""Plug-ins: what packages add to kvbench by entry points, and what kvbench itself registers in the same way.

The groups are ``kvbench.commands``, ``targets``, ``trace_formats``, ``metrics``, ``figures``, ``claims`` and
``instruments``, which docs/extending.md explains. Two more connect kvbench's own rooms: ``executors`` (where the cells
of a sweep run) and ``after_sweep`` (what follows the loads of a sweep).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, MutableMapping
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from kvbench.common.errors import UsageError, say
from kvbench.common.packages import REPOSITORY
from kvbench.common.text import did_you_mean

_OWN = "kvbench"


@functools.cache
def shipped(group: str) -> dict[str, EntryPoint]:
    """Returns kvbench's own plug-ins of a group by name: those of the checkout it runs from, else of its package."""
    group = f"{_OWN}.{group}"
    file = REPOSITORY / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == _OWN:
            names = project["entry-points"].get(group, {})
            return {name: EntryPoint(name, value, group) for name, value in names.items()}
    try:
        return {entry.name: entry for entry in distribution(_OWN).entry_points.select(group=group)}
    except PackageNotFoundError:
        return {}


def _others(group: str) -> Iterator[EntryPoint]:
    """Yields the entry points that other packages have in a group."""
    for entry in entry_points(group=f"{_OWN}.{group}"):
        if entry.dist is None or entry.dist.name != _OWN:
            yield entry


def add_plugins(registry: MutableMapping[str, Any], group: str, fits: type | Callable[[object], bool]) -> None:
    """Adds what other packages have in a group to ``registry``, by name.

    fits: the type of a plug-in, or a test of it. One that cannot be imported, is of another type or whose name is taken
    is left out with a note, so that a broken package stops no command that does not need it.
    """
    for entry in _others(group):
        try:
            plugin = entry.load()
        except Exception as error:  # whatever a foreign module raises when it is imported
            _leave_out(entry, f"{entry.value} cannot be imported ({type(error).__name__}: {error})")
            continue
        if not (isinstance(plugin, fits) if isinstance(fits, type) else fits(plugin)):
            _leave_out(entry, f"{entry.value} is a {type(plugin).__name__}, see docs/extending.md for what it must be")
        elif entry.name in registry:
            _leave_out(entry, "the name is taken: choose another")
        elif getattr(plugin, "name", entry.name) != entry.name:
            _leave_out(entry, f"{entry.value} calls itself {plugin.name!r}: register it under that name")
        else:
            registry[entry.name] = plugin


def _leave_out(entry: EntryPoint, reason: str) -> None:
    package = entry.dist.name if entry.dist else "unknown"
    say(f"note: {entry.name!r} of package {package} ({entry.group}) is left out: {reason}")


def find_plugin(group: str, name: str, option: str) -> Any:
    """Imports the plug-in of this name, shipped or added. ``option``: the option that named it, for a UsageError."""
    entries = {entry.name: entry for entry in _others(group)} | shipped(group)
    if name not in entries:
        raise UsageError(f"{option} {name!r} is not known{did_you_mean(name, entries)}")
    entry = entries[name]
    try:
        return entry.load()
    except ImportError as error:
        raise UsageError(f"{option} {name}: cannot import {entry.value} ({error}): install what it needs") from None
