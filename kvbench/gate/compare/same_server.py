"""Whether base and candidate serve the same model on the same device, in every launch and under the same requests.

Only then is a difference the change's. What either side does not tell is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.timing.plan import BASE, SIDES, Match
from kvbench.runs.folder import DONE

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
_FINGERPRINT = "weights_fingerprint"


def differences(left: Mapping[str, Any], right: Mapping[str, Any], varied: frozenset[str] = frozenset()) -> list[str]:
    """What two servers say that differs and was not meant to; what either does not tell is not compared.

    ``varied``: engine settings in which they differ on purpose. Versions of packages are all compared, and the names of
    the models where the weights themselves are not told by both.
    """
    found = []
    for section, keys in _FACTS.items():
        a, b = left.get(section) or {}, right.get(section) or {}
        for key, setting in keys.items():
            if a.get(key) is not None and b.get(key) is not None and a[key] != b[key] and setting not in varied:
                found.append(f"{key} ({a[key]} and {b[key]})")
    names = [_model_name(server) for server in (left, right)]
    told = all((server.get("model") or {}).get(_FINGERPRINT) for server in (left, right))
    if not told and all(names) and names[0] != names[1] and "model" not in varied:
        found.append(f"model ({names[0]} and {names[1]})")
    versions = (left.get("versions") or {}, right.get("versions") or {})
    for name in sorted(versions[0].keys() & versions[1].keys()):
        if versions[0][name] != versions[1][name]:
            found.append(f"version of {name} ({versions[0][name]} and {versions[1][name]})")
    return found


def _model_name(server: Mapping[str, Any]) -> str | None:
    """What the model is called, without the folders that it lies in: the server's word, or ours for what we gave it."""
    name = (server.get("model") or {}).get("name") or (server.get("served_model") or {}).get("name")
    return PurePosixPath(str(name)).name if name else None


def varied_settings(match: Match) -> frozenset[str]:
    """The engine settings in which the sides of a comparison are meant to differ."""
    a, b = match.base.settings, match.candidate.settings
    return frozenset(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def hear_server(
    manifest: dict[str, Any], match: Match, side: str, told: Mapping[str, Any], *, alone: bool, force: bool
) -> None:
    """Put down what the first server of a configuration says of itself, and hold every later one to it.

    The first is also held to the other side's. ``alone``: it was launched for one load, since its prefix cache could
    not be emptied. Raises UsageError for a difference, unless ``force``, which puts it down.
    """
    names = {each: f"{match.workload}/{match.of(each).config_id}" for each in SIDES}
    servers = manifest["servers"]
    known = servers[side].setdefault(names[side], dict(told))
    if alone and side not in (apart := manifest.setdefault("apart", {}).setdefault(match.key, [])):
        apart.append(side)
    if changed := differences(known, told):
        what = f"the server of {side} is not the one that was launched before for {names[side]}: {'; '.join(changed)}"
        _settle(manifest, [what], "serve the same again, or start a new comparison", force=force)
    there = servers[SIDES[1 - SIDES.index(side)]].get(names[SIDES[1 - SIDES.index(side)]])
    if there is not None:
        left, right = (known, there) if side == BASE else (there, known)
        _settle(manifest, differences(left, right, varied_settings(match)), "make them the same", force=force)


def cache_notes(manifest: Mapping[str, Any]) -> list[str]:
    """Where the loads of one side alone had a server each, which the other side's loads had not."""
    return [
        f"{key}: the prefix cache of {sides[0]} can be emptied by a new server only, so each of its loads has one of "
        "its own, and the other side's have one together: first requests may differ by that"
        for key, sides in sorted((manifest.get("apart") or {}).items())
        if len(sides) == 1
    ]


def request_differences(folder: CompareFolder, cells: Sequence[Mapping[str, Any]], pair: int) -> list[str]:
    """The cells whose two loads of a pair were not given the same requests. ``cells``: rows of the manifest."""
    found = []
    for cell in cells:
        loads = [folder.run(side, cell["workload"]).load(cell[side], pair) / DONE for side in SIDES]
        given = [read_json(path).get("requests_sha256") if path.is_file() else None for path in loads]
        if all(given) and given[0] != given[1]:
            found.append(f"requests of {cell['name']}")
    return found


def require_same_requests(folder: CompareFolder, manifest: dict[str, Any], pair: int, *, force: bool) -> None:
    """Raises UsageError where the two halves of a pair had other requests; ``force`` puts it down instead."""
    found = request_differences(folder, manifest["cells"], pair)
    _settle(manifest, found, "give both the same vocabulary, length and kind of server", force=force)


def _settle(manifest: dict[str, Any], found: Sequence[str], way_out: str, *, force: bool) -> None:
    """The differences into the manifest. Raises UsageError when there are any and ``force`` is not given."""
    if found and not force:
        raise UsageError(
            f"base and candidate are not the same in what must be equal: {'; '.join(found)}. Either {way_out}, or add "
            "--force to judge them all the same: the verdict then says what differed"
        )
    manifest["differences"] = sorted({*manifest["differences"], *found})
