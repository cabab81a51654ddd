"""The rules on which options of a command line go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from kvbench.common.errors import UsageError

_TLS = ("tls_ca_file", "no_tls_verify")

RAY_OPTIONS = dict.fromkeys(("ray_address", "device_resource", "ray_wait"), ("--executor ray",))


def flag(name: str) -> str:
    """Writes ``max_runs`` as it is typed."""
    return f"--{name.replace('_', '-')}"


def check_goes_with(
    given: Collection[str],
    needs: Mapping[str, Collection[str]],
    present: Collection[str],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises UsageError for an option that does nothing without something that is not present.

    ``needs``: by option, the things of which one must be in ``present``; ``instead``: by option, what else to do.
    """
    for name in given:
        if name in needs and not set(needs[name]) & set(present):
            way = f", or {instead[name]}" if name in instead else ""
            raise UsageError(f"{flag(name)} goes with {' or '.join(needs[name])} only: leave it out{way}")


def check_exclusive(given: Collection[str], pairs: Mapping[tuple[str, str], str]) -> None:
    """Raises UsageError for two options of which only one can be given; ``pairs``: with the reason."""
    for (one, other), why in pairs.items():
        if one in given and other in given:
            raise UsageError(f"{flag(one)} and {flag(other)} exclude each other: {why}")


def check_tls(given: Collection[str], url_flag: str, url: str) -> None:
    """Raises UsageError for options of TLS that contradict each other, or the URL of ``url_flag``."""
    check_exclusive(given, {_TLS: "one trusts the certificates in a file, the other any"})
    if (tls := [name for name in _TLS if name in given]) and url.lower().startswith("http://"):
        raise UsageError(f"{flag(tls[0])} goes with https://, and {url_flag} is {url}: change one of them")
