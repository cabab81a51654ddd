"""The file claims.json: every verdict with what it was measured on; the same as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ConfigDict

from kvbench.claims.judges import VERDICTS
from kvbench.common.records import Record
from kvbench.common.text import clock, listing, markdown_table, upper_first
from kvbench.report.page import render
from kvbench.runs.results import GitState, Processor

FILE = "claims.json"
_HEADS = ("claim", "verdict", "measured", "source")


class Engines(Record):
    """The settings that claims were measured with, each value once."""

    model: tuple[str, ...] = ()
    load_format: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    num_threads: tuple[str, ...] = ()


class ClaimResult(Record):
    """A claim and its verdict. ``measured``: launches of each measurement; None where it has none."""

    name: str
    says: str
    source: str
    rule: str
    verdict: str
    evidence: str
    reason: str
    measured: dict[str, int | None]


class ClaimsResult(Record):
    """The content of claims.json, beside which ``environment`` stands."""

    model_config = ConfigDict(extra="allow")
    FORMAT = 1
    started: str
    ended: str
    seconds: float
    finished: bool
    profile: str
    target: str | None = None
    target_python: str | None = None
    target_args: str | None = None
    engine_versions: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    engines: Engines
    claims: tuple[ClaimResult, ...]
    cpu: Processor = Processor()
    git: GitState = GitState()

    @property
    def summary(self) -> str:
        """Writes ``9 held, 5 did not hold, 2 depends, 1 undecided; 14:12``."""
        words = [claim.verdict for claim in self.claims]
        counts = [f"{words.count(word)} {word}" for word in VERDICTS if word in words]
        return f"{', '.join(counts)}; {clock(self.seconds)}"


def about(result: ClaimsResult) -> list[str]:
    """The sentences on what, when and with what it was measured."""
    engines = result.engines
    weights = "random weights" if engines.load_format == ("dummy",) else "its own weights"
    threads = f", {listing(engines.num_threads)} thread an engine" if engines.num_threads else ""
    versions = ", ".join(f"{name} {version}" for name, version in result.engine_versions.items())
    engine = f"Engine: {result.target} ({versions or 'of an unknown version'}). " if result.target else ""
    model, dtype = listing(engines.model) or "unknown", listing(engines.dtype) or "its own dtype"
    return [
        f"{result.summary} on {result.cpu.model or 'an unknown processor'}, {result.profile} profile, commit "
        f"{result.git.short_sha or 'unknown'}, {result.started}.",
        f"{engine}Model {model} with {weights}, in {dtype}{threads}.",
        "Speeds are in engine time: engines take turns step by step, without HTTP. In brackets 95 % intervals. A "
        "verdict rests on an interval on one side of its rule's limit, or on exact counts. Loads are short, from "
        "an empty engine to an empty engine. The verdicts are of this machine, this model and these loads.",
        *result.notes,
    ]


def markdown(result: ClaimsResult) -> str:
    """The whole text, as in docs/claims.md."""
    rows = []
    for claim in result.claims:
        verdict = ": ".join(filter(None, [claim.verdict, claim.reason]))
        rows.append((f"{claim.says} ({claim.name})", verdict, claim.evidence, claim.source))
    table = markdown_table(_HEADS, rows, numbers_from=len(_HEADS))
    lines = ["# The folklore, measured", "", *(text + "\n" for text in about(result)), *table]
    lines += ["", "Measure it yourself: `kvbench claims`, or one: `kvbench claims --only page-16`."]
    return "\n".join(lines) + "\n"


def page(result: ClaimsResult) -> str:
    """The whole page, the claims by verdict."""
    by_verdict = {word: [claim for claim in result.claims if claim.verdict == word] for word in VERDICTS}
    claims = [(upper_first(word), group) for word, group in by_verdict.items() if group]
    return render("claims.html.j2", (), title="The folklore, measured", about=about(result), claims=claims)
