"""What a sweep will run: cells and blocks, what is refused before a launch, and the plan of --dry-run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.common.errors import UsageError
from kvbench.common.text import clock, plural
from kvbench.load import launch as loadrun
from kvbench.runs.folder import RunFolder
from kvbench.workload.design import Block, Check, Configuration, Design, capacities, plan_sweep
from kvbench.workload.file import Workload
from kvbench.workload.settings import effective

START_GUESS_S = 8.0  # a launch of the built-in server, until one is measured
_GUESS_TOKENS_PER_S = {"cpu": 400.0, "gpu": 4000.0}  # until the first load is measured
_CAPACITY = ("num_pages", "capacity_tokens", "kv_budget_bytes", "bytes_per_token")
_UNKNOWN = 2**20  # a limit that only the server knows is checked once it runs


@dataclass(frozen=True)
class SweepOptions:
    """What the command line adds to the workload."""

    only: tuple[str, ...] = ()
    output_dir: Path = Path("results")
    report: Callable[[Path, Console], None] | None = None  # writes and shows the report of a finished run
    force: bool = False  # resume although something differs
    calibrate: bool = True  # the load client, before its first load
    check: Check = lambda settings: {}
    """Engine-side check of one configuration's settings; returns its capacity, raises ValueError."""
    refuses: Callable[[Mapping[str, Any]], str | None] | None = None
    """Why another engine cannot have a configuration, which is then skipped with that reason."""
    fresh: Callable[[Mapping[str, Any]], bool] = lambda settings: False
    """Whether a configuration's prefix cache is empty on a new server only."""
    require: Callable[[Design], None] = lambda design: None
    """Raises UsageError for a design whose configurations the target cannot tell apart; after ``only``."""
    notes: tuple[str, ...] = ()
    start_guess_s: float = START_GUESS_S

    def plan(self, workload: Workload) -> tuple[Design, tuple[Block, ...]]:
        """As ``plan_sweep`` with these options; the design's notes begin with theirs."""
        design, blocks = plan_sweep(workload, self.only, self.check, refuses=self.refuses, fresh=self.fresh)
        self.require(design)
        return dataclasses.replace(design, notes=(*self.notes, *design.notes)), blocks


def preflight(workload: Workload, design: Design, options: SweepOptions) -> tuple[dict[str, Any], dict[str, float]]:
    """Everything that can be refused before a launch: each configuration, and the prompts of each load.

    Returns capacity by configuration id and guessed seconds by load id. Raises UsageError.
    """
    capacity = capacities(design, options.check)
    rate = _GUESS_TOKENS_PER_S.get(workload.profile, _GUESS_TOKENS_PER_S["cpu"])
    guesses: dict[str, float] = {}
    drawn: set[tuple[Any, ...]] = set()
    for cell in design.cells:
        known = capacity[cell.configuration.config_id]
        limit = int(known.get("max_model_len") or cell.configuration.settings.get("max_model_len", _UNKNOWN))
        vocab = int(known.get("vocab_size") or _UNKNOWN)
        if (key := (cell.load.load_id, limit, vocab)) in drawn:
            continue
        drawn.add(key)
        for repeat in range(1, workload.load.repeats + 1):
            try:
                requests = loadrun.make_requests(
                    workload.load, cell.load, vocab_size=vocab, max_model_len=limit, seed=workload.seed, repeat=repeat
                )
            except (ValueError, OSError) as error:
                raise UsageError(f"{cell.cell_id}: {error}") from None
        work = sum(r.max_tokens for r in requests) / (rate * min(1.0, (cell.load.concurrency or 8) / 4))
        arrivals = max((r.arrival_s or 0.0 for r in requests), default=0.0)
        guesses[cell.load.load_id] = max(work, arrivals) + 3.0
    return capacity, guesses


def capacity_note(configurations: Sequence[Configuration], capacity: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What the same budget holds in either layout, and what a smaller KV dtype or a swap space adds.

    None when a size is not known.
    """
    known = [
        (c, told) for c in configurations if all((told := capacity.get(c.config_id, {})).get(key) for key in _CAPACITY)
    ]
    firsts = [
        next(((c, told) for c, told in known if c.settings.get("layout") == layout), None)
        for layout in ("contiguous", "paged")
    ]
    parts = [_holds(c, told) for c, told in filter(None, firsts)]
    if not parts:
        return None
    most = max(told["bytes_per_token"] for _, told in known)
    for c, told in known:
        if (c, told) in firsts:
            continue
        if told["bytes_per_token"] < most:
            parts.append(f"{c.config_id} holds {told['capacity_tokens']:,} tokens")
        if told.get("swap_tokens"):
            host = f"{told['swap_space_bytes'] / 2**20:,.0f} MiB of host memory"
            parts.append(f"{c.config_id} swaps up to {told['swap_tokens']:,} more to {host}")
    budget = next(told for _, told in filter(None, firsts))["kv_budget_bytes"]
    return f"capacity: {budget / 2**20:,.0f} MiB of KV: {'; '.join(parts)}"


def _holds(configuration: Configuration, known: Mapping[str, Any]) -> str:
    name, pages, slots = configuration.config_id, known["num_pages"], known["capacity_tokens"]
    if configuration.settings.get("layout") != "contiguous":
        return f"{name} holds {slots:,} tokens of any number of requests ({pages:,} pages)"
    reservation = effective(configuration.settings, "reservation")
    if reservation == "max":
        return f"{name} holds {pages:,} requests at once, however short (reservations of {known['max_model_len']:,})"
    return f"{name} holds {slots:,} slots, reserved by the {reservation} of each request's output"


def describe_plan(
    workload: Workload,
    design: Design,
    blocks: Sequence[Block],
    seconds: float,
    console: Console,
    *,
    start_guess_s: float = START_GUESS_S,
) -> None:
    """The plan of --dry-run: cells, order, time; ``seconds`` count ``start_guess_s`` for each launch."""
    loads = sum(len(b.cells) for b in blocks)
    console.print(
        f"{workload.name} ({workload.profile} profile, seed {workload.seed}): "
        f"{plural(len(design.configurations), 'configuration')}, {plural(len(design.cells), 'cell')}, "
        f"{len(blocks)} server launch{'' if len(blocks) == 1 else 'es'}, {plural(loads, 'load')}, "
        f"about {clock(seconds)} (a guess until it is measured; {start_guess_s:g} s for each launch)",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    console.print("cells:", highlight=False)
    for cell in design.cells:
        point = cell.load
        what = "conversations" if workload.load.sessions else "requests"
        offered = f"{point.request_rate:g} {what}/s" if point.request_rate else f"arrivals: {point.arrivals}"
        asked = f"{point.concurrency} users" if point.mode == "closed" else offered
        count = f", {point.num_requests} requests" if point.num_requests else ""
        mark = "  (baseline)" if cell.configuration.is_baseline else ""
        console.print(
            f"  {cell.cell_id}: {cell.configuration.label}; {asked}{count}{mark}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print("order:", highlight=False)
    for number, block in enumerate(blocks, 1):
        cells = ", ".join(c.load.load_id for c in block.cells)
        console.print(
            f"  {number}. repeat {block.repeat}: {block.configuration.config_id}: {cells}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for note in design.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def planned_blocks(workload: Workload, manifest: Mapping[str, Any]) -> tuple[Block, ...]:
    planned = {cell_id for block in manifest["plan"] for cell_id in block["cells"]}
    _, blocks = plan_sweep(workload)
    return tuple(dataclasses.replace(b, cells=tuple(c for c in b.cells if c.cell_id in planned)) for b in blocks)


def without_done(run: RunFolder, blocks: Sequence[Block]) -> list[Block]:
    """The blocks with the loads that are not finished."""
    left = [
        dataclasses.replace(b, cells=tuple(c for c in b.cells if not run.is_done(c.cell_id, b.repeat))) for b in blocks
    ]
    return [b for b in left if b.cells]
