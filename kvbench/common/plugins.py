"""Plug-ins: what packages add to kvbench by entry points, and what kvbench itself registers in the same way.

The groups are ``kvbench.commands``, ``targets``, ``trace_formats``, ``metrics``, ``figures``, ``claims`` and
``instruments``, which docs/extending.md explains. Two more connect kvbench's own rooms: ``executors`` (where the cells
of a sweep run) and ``after_sweep`` (what follows the loads of a sweep).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping, MutableMapping
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points
from typing import Any

from kvbench.common.errors import UsageError, say
from kvbench.common.packages import REPOSITORY
from kvbench.common.text import did_you_mean

_OWN = "kvbench"


@functools.cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Returns the entry points of a group by name: kvbench's own, then those of other packages.

    A name that is taken is left out with a note. Nothing is imported.
    """
    group = f"{_OWN}.{group}"
    entries = {entry.name: entry for entry in _shipped().select(group=group)}
    for entry in _installed().select(group=group):
        if _package(entry) == _OWN:
            continue
        if entry.name in entries:
            other = _package(entries[entry.name])
            say(f"note: {_problem(entry, f'the name is taken by {other}')}")
        entries.setdefault(entry.name, entry)
    return entries


def load_plugin(entry: EntryPoint, fits: type | Callable[[object], bool]) -> Any:
    """Imports a plug-in. ``fits``: its type, or a test of it. Raises UsageError with the package and the reason."""
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as error:  # whatever a foreign module raises when it is imported
        raise UsageError(
            _problem(entry, f"{entry.value} cannot be imported ({type(error).__name__}: {error})")
        ) from error
    if not (isinstance(plugin, fits) if isinstance(fits, type) else fits(plugin)):
        kind = type(plugin).__name__
        raise UsageError(_problem(entry, f"{entry.value} is a {kind}, and docs/extending.md says what it must be"))
    last_word = entry.name.split()[-1]  # `dev tune` is the command tune
    if (name := getattr(plugin, "name", last_word)) != last_word:
        raise UsageError(_problem(entry, f"{entry.value} calls itself {name!r}, and both names must be the same"))
    return plugin


def add_plugins(registry: MutableMapping[str, Any], group: str, fits: type | Callable[[object], bool]) -> None:
    """Adds what other packages have in a group to ``registry``, by name.

    A plug-in that cannot be used is left out with a note: a broken package stops no command that does without it.
    """
    for name, entry in plugins(group).items():
        try:
            if name in registry:
                raise UsageError(_problem(entry, f"the name is taken by {_OWN}"))
            registry[name] = load_plugin(entry, fits)
        except UsageError as error:
            say(f"note: {error}")


def find_plugin(group: str, name: str, option: str, fits: type | Callable[[object], bool] = callable) -> Any:
    """Imports the plug-in of this name. ``option``: what named it, for the UsageError where it cannot be used."""
    entries = plugins(group)
    if name not in entries:
        raise UsageError(f"{option} {name!r} is not known{did_you_mean(name, entries)}")
    return load_plugin(entries[name], fits)


@functools.cache
def _shipped() -> EntryPoints:
    """Returns kvbench's own entry points: those of the checkout it runs from, else of its package."""
    file = REPOSITORY / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == _OWN:
            groups = project["entry-points"].items()
            return EntryPoints(
                EntryPoint(name, value, group) for group, names in groups for name, value in names.items()
            )
    try:
        return distribution(_OWN).entry_points
    except PackageNotFoundError:
        return EntryPoints()


_installed = functools.cache(entry_points)


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else _OWN


def _problem(entry: EntryPoint, reason: str) -> str:
    package = _package(entry)
    return f"{entry.group} {entry.name!r} of package {package} cannot be used: {reason}; fix or uninstall {package}"
