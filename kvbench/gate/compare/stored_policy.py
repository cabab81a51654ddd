"""The rules of a comparison as data of its manifest: it is gone on with, and judged again, by what it began with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.gate.policy import Policy
from kvbench.gate.timing.rules import Look, MetricRule, TimingRules

_SHOWN = 12  # hexadecimal digits


def stored_policy(policy: Policy) -> dict[str, Any]:
    """For a manifest: ``file`` (None: kvbench's own rules), ``digest`` of the timing rules, and these ``rules``.

    Limits are left out, since a comparison has none.
    """
    rules = dataclasses.asdict(policy.timing)
    return {"file": str(policy.source) if policy.source else None, "digest": digest(policy), "rules": rules}


def digest(policy: Policy) -> str:
    """Equal for policies that judge pairs alike, whatever their files are called."""
    told = json.dumps(dataclasses.asdict(policy.timing))  # in its order: of the classes the first that matches counts
    return hashlib.sha256(told.encode()).hexdigest()[:_SHOWN]


def policy_of(stored: Mapping[str, Any]) -> Policy:
    """The policy that ``stored_policy`` put down."""
    rules = stored["rules"]
    metrics = tuple(MetricRule(**each) for each in rules["metrics"])
    classes = rules["classes"] and {name: tuple(globs) for name, globs in rules["classes"].items()}
    timing = TimingRules(metrics, tuple(Look(**each) for each in rules["looks"]), classes)
    return Policy(timing, source=Path(stored["file"]) if stored["file"] else None)


def policy_facts(policy: Policy) -> dict[str, str]:
    """Which policy judged, for a verdict."""
    return {"policy": str(policy.source) if policy.source else "kvbench's own rules", "policy_digest": digest(policy)}
