"""quality.json: how far a quantised KV cache moves the model's predictions, as `kvbench quality` measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json

QUALITY, FORMAT = "quality.json", "kvbench-quality/1"
_VERSIONS = ("kvbench", "torch", "transformers")


@dataclass(frozen=True)
class QualityResult:
    """``configurations``: configuration id -> ``kv_cache_dtype``, ``positions``, and their KLD [nats]: mean, p95, p99,
    max; and ``same_argmax``, the share of positions whose likeliest token is the same."""

    workload: str
    weights: str  # of which model folder, or random ones of which seed; all of them if there are several
    configurations: Mapping[str, Mapping[str, Any]]
    weights_fingerprint: str = ""  # as the built-in server tells it; empty for several sets of weights
    git: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # device, prompts, time

    def differs_from(self, manifest: Mapping[str, Any]) -> list[str]:
        """How commit, versions and weights differ from those in a run's manifest, one phrase each."""
        there = (manifest.get("model") or {}).get("weights_fingerprint")
        weights = _different({"set of weights": self.weights_fingerprint or None}, {"set of weights": there})
        return code_differences(self.git, self.versions, manifest) + weights

    @property
    def random_weights(self) -> bool:
        """Whether some of the weights were random: such a KLD says little about quality, and ``note`` says so."""
        return bool(self.note)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.__dict__}


def code_differences(git: Mapping[str, Any], versions: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """How commit and versions differ from those in a run's manifest: ``torch 2.1, of the run 2.0``."""
    run = {"commit": (manifest.get("git") or {}).get("sha"), **(manifest.get("versions") or {})}
    return _different({"commit": git.get("sha"), **{name: versions.get(name) for name in _VERSIONS}}, run)


def _different(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """A value that one side does not tell is no difference."""
    both = {name: (str(value), str(there[name])) for name, value in here.items() if value and there.get(name)}
    return [f"{name} {ours[:12]}, of the run {theirs[:12]}" for name, (ours, theirs) in both.items() if ours != theirs]


def read_quality(folder: Path) -> QualityResult | None:
    """What was measured for the run in ``folder``; None if nothing was. Raises UsageError for a damaged file."""
    path = folder / QUALITY
    if not path.is_file():
        return None
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{path} is not of the format {FORMAT}: run `kvbench quality {folder}` again")
    try:
        return QualityResult(**{key: value for key, value in data.items() if key != "format"})
    except TypeError:
        raise UsageError(f"{path} is damaged: run `kvbench quality {folder}` again") from None
