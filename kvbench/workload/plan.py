"""Which cells and blocks a sweep of a workload has, and which of them the engine or the target refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.workload.design import Block, Design, make_design, plan_blocks, select, without
from kvbench.workload.file import Workload

Check = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def plan_sweep(
    workload: Workload,
    only: Sequence[str] = (),
    check: Check | None = None,
    *,
    refuses: Callable[[Mapping[str, Any]], str | None] | None = None,
    fresh: Callable[[Mapping[str, Any]], bool] = lambda settings: False,
) -> tuple[Design, tuple[Block, ...]]:
    """Cells and blocks in the order in which they run; ``only``, ``check`` and the rest: of ``SweepOptions``."""
    design = make_design(workload.engine, workload.sweep, workload.load_points, workload.design)
    if refuses is not None:
        design = without_refused(design, refuses)
    elif check is not None and workload.design == "full":
        design = without_impossible(design, check)
    design = select(design, only)
    blocks = plan_blocks(design, workload.load.repeats, workload.seed)
    if workload.load.cache_state != "steady":
        blocks = tuple(part for b in blocks for part in (b.split() if fresh(b.configuration.settings) else (b,)))
    return design, blocks


def without_refused(design: Design, refuses: Callable[[Mapping[str, Any]], str | None]) -> Design:
    """A design without the configurations that the target cannot have, each named with the reason.

    The baseline is not asked: whether it can be had is settled before there is a design.
    """
    found = {c.config_id: refuses(c.settings) for c in design.configurations if not c.is_baseline}
    skipped = {config_id: reason for config_id, reason in found.items() if reason is not None}
    return without(design, skipped, [f"skipped {config_id}: {reason}" for config_id, reason in skipped.items()])


def without_impossible(design: Design, check: Check) -> Design:
    """A full design without the combinations that the engine refuses, each named with the engine's reason.

    A refusal is skipped only where all swept values of the combination are accepted in others: it is the combination
    that cannot be. A value that is refused everywhere is a mistake of the file, and stays, for ``preflight`` to raise.
    """
    refused: dict[str, str] = {}
    accepted: set[tuple[str, str]] = set()
    for configuration in design.configurations:
        try:
            check(configuration.settings)
        except ValueError as error:
            refused[configuration.config_id] = str(error)
        else:
            accepted |= {(key, repr(value)) for key, value in configuration.settings.items()}
    reasons: dict[str, list[str]] = {}
    for configuration in design.configurations:
        values = {(key, repr(value)) for key, value in configuration.settings.items()}
        if configuration.config_id in refused and values <= accepted and not configuration.is_baseline:
            reasons.setdefault(refused[configuration.config_id], []).append(configuration.config_id)
    notes = [f"skipped {', '.join(ids)}: {reason}" for reason, ids in reasons.items()]
    return without(design, {one for ids in reasons.values() for one in ids}, notes)


def capacities(design: Design, check: Check) -> dict[str, dict[str, Any]]:
    """What ``check`` tells of each configuration, by its id. Raises UsageError for one that cannot be."""
    found = {}
    for configuration in design.configurations:
        try:
            found[configuration.config_id] = dict(check(configuration.settings))
        except ValueError as error:
            raise UsageError(f"configuration {configuration.config_id}: {error}") from None
    return found
