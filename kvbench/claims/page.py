"""The claims as a page that works offline, and as Markdown, from claims.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.claims.judges import VERDICTS
from kvbench.claims.run import summary
from kvbench.common.text import listing, markdown_table, upper_first
from kvbench.report.page import render

HEADS = ("claim", "verdict", "measured", "source")


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row a claim, see ``HEADS``."""
    return [
        (
            f"{each['says']} ({each['name']})",
            each["verdict"] + (f": {each['reason']}" if each["reason"] else ""),
            each["evidence"],
            each["source"],
        )
        for each in result["claims"]
    ]


def about(result: Mapping[str, Any]) -> list[str]:
    """On what, when and with what it was measured."""
    cpu, git = result.get("cpu") or {}, result.get("git") or {}
    engines = {name: listing(values) for name, values in result["engines"].items() if values}
    weights = "random weights" if engines.get("load_format") == "dummy" else "its own weights"
    threads = f", {engines['num_threads']} thread an engine" if "num_threads" in engines else ""
    return [
        f"{summary(result)} on {cpu.get('model', 'an unknown processor')}, {result['profile']} profile, commit "
        f"{git.get('short_sha') or 'unknown'}, {result['started']}.",
        f"Model {engines.get('model', 'unknown')} with {weights}, in {engines.get('dtype', 'its own dtype')}{threads}.",
        "Speeds are in engine time: engines take turns step by step, without HTTP. In brackets 95 % intervals. A "
        "verdict rests on an interval on one side of its rule's limit, or on exact counts. Loads are short, from "
        "an empty engine to an empty engine. The verdicts are of this machine, this model and these loads.",
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The whole text, as in docs/claims.md."""
    table = markdown_table(HEADS, rows(result), numbers_from=len(HEADS))
    lines = ["# The folklore, measured", "", *(text + "\n" for text in about(result)), *table]
    lines += ["", "Measure it yourself: `kvbench claims`, or one: `kvbench claims --only page-16`."]
    return "\n".join(lines) + "\n"


def page(result: Mapping[str, Any]) -> str:
    """The whole page, the claims by verdict."""
    by_verdict = [(upper_first(word), [c for c in result["claims"] if c["verdict"] == word]) for word in VERDICTS]
    claims = [(word, group) for word, group in by_verdict if group]
    return render("claims.html.j2", (), title="The folklore, measured", about=about(result), claims=claims)
