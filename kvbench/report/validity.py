"""Whether a run may be believed, and the sentences that say why not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.runs.model import MeasuredCell, Run


@dataclass(frozen=True)
class Validity:
    """Whether the run may be believed. `status`: valid | invalid | incomplete | empty."""

    status: str
    reasons: tuple[str, ...]


def validity(run: Run) -> Validity:
    """Invalid cells outrank an incomplete run; failed requests are named in either case."""
    invalid = grouped_reasons(run.cells)
    failed = [
        f"{c.count('failed')} of {c.count('failed') + c.count('completed')} requests failed in {c.name} "
        f"at {c.load.short}"
        for c in run.cells
        if c.count("failed")
    ]
    unfinished = [f"planned but not measured: {', '.join(run.missing)}"] if run.missing else []
    unfinished += run.short
    problems = list(run.problems)
    if not run.cells:
        return Validity("empty", tuple(unfinished + problems))
    if invalid:
        return Validity("invalid", tuple(invalid + unfinished + failed + problems))
    if unfinished or problems or run.status != "complete":
        known = unfinished or problems or [f"the run's status is {run.status!r}"]
        return Validity("incomplete", (*known, *failed, *(problems if unfinished else [])))
    return Validity("valid", tuple(failed))


def grouped_reasons(cells: Sequence[MeasuredCell]) -> list[str]:
    """Why cells are invalid, one line a kind of reason: the first in full, the like counted with their cells.

    Reasons that differ only in their numbers or their repeat are of one kind: thirty lagging loads are one finding.
    """
    kinds: dict[str, list[tuple[str, MeasuredCell]]] = {}
    for cell in cells:
        for reason in () if cell.valid else cell.invalid_reasons or ("no reason recorded",):
            plain = re.sub(r"^repeat \d+: ", "", reason)
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", plain), []).append((plain, cell))
    lines = []
    for members in kinds.values():
        (first, cell), others = members[0], members[1:]
        line = f"{cell.name} at {cell.load.short}: {first.rstrip('.')}"
        if others:
            where = list(dict.fromkeys(f"{c.name} at {c.load.short}" for _, c in others))
            line += f" (and {len(others)} more like it: {', '.join(where)})"
        lines.append(line)
    return lines
