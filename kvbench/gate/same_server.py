"""Whether base and candidate serve the same model on the same device: only then is a difference the change's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.plan import Match

# What must be equal, by section of /server_info, and the engine setting that makes a difference an intended one.
_FACTS: Mapping[str, Mapping[str, str | None]] = {
    "served_model": {"vocab_size": "model", "max_model_len": "max_model_len"},
    "model": {"weights_fingerprint": "model", "num_parameters": "model"},
    "resolved": {
        "device": "device",
        "device_name": "device",
        "dtype": "dtype",
        "kernel_backend": "kernel_backend",
        "num_threads": "num_threads",
    },
}


def differences(left: Mapping[str, Any], right: Mapping[str, Any], varied: frozenset[str]) -> list[str]:
    """What the servers of two sides say that differs and was not meant to; what either does not tell is not compared.

    ``varied``: engine settings in which the sides differ on purpose. Versions of packages are all compared.
    """
    found = []
    for section, keys in _FACTS.items():
        a, b = left.get(section) or {}, right.get(section) or {}
        for key, setting in keys.items():
            if a.get(key) is not None and b.get(key) is not None and a[key] != b[key] and setting not in varied:
                found.append(f"{key} ({a[key]} and {b[key]})")
    versions = (left.get("versions") or {}, right.get("versions") or {})
    for name in sorted(versions[0].keys() & versions[1].keys()):
        if versions[0][name] != versions[1][name]:
            found.append(f"version of {name} ({versions[0][name]} and {versions[1][name]})")
    return found


def require_comparable(left: Mapping[str, Any], right: Mapping[str, Any], match: Match, *, force: bool) -> list[str]:
    """The differences, for the record. Raises UsageError when there are any and ``force`` is not given."""
    a, b = match.base.settings, match.candidate.settings
    varied = frozenset(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    found = differences(left, right, varied)
    if found and not force:
        raise UsageError(
            f"base and candidate are not the same in what must be equal: {'; '.join(found)}. Make them so, or add "
            "--force to judge them all the same: the verdict then says what differed"
        )
    return found
