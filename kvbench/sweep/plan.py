"""What a sweep will run: cells and blocks, what is refused before a launch, and the plan of --dry-run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from kvbench.common.console import print_plain
from kvbench.common.errors import UsageError
from kvbench.common.text import clock, plural
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Instrument
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import canaries_of
from kvbench.runs.results import Capacity
from kvbench.sweep.capacity import Lengths, lengths_of
from kvbench.workload.design import Block, Check, Design, capacities
from kvbench.workload.file import Workload

_UNKNOWN = 2**20  # a limit that only the server knows is checked once it runs


@dataclass(frozen=True)
class Preflight:
    """The facts before a launch: ``capacity`` by configuration id; ``seconds`` (guessed) and ``lengths`` by load id."""

    capacity: dict[str, Capacity]
    seconds: dict[str, float]
    lengths: dict[str, Lengths]


def preflight(
    workload: Workload, design: Design, check: Check, instrument: type[Instrument] = HttpInstrument
) -> Preflight:
    """Checks all that can be refused before a launch: each configuration, and the prompts of each load. UsageError."""
    capacity = capacities(design, check)
    guesses: dict[str, float] = {}
    lengths: dict[str, Lengths] = {}
    drawn: set[tuple[Any, ...]] = set()
    for cell in design.cells:
        known = capacity[cell.configuration.config_id]
        limit = int(known.max_model_len or cell.configuration.settings.get("max_model_len", _UNKNOWN))
        vocab = known.vocab_size or _UNKNOWN
        if (key := (cell.load.load_id, limit, vocab)) in drawn:
            continue
        drawn.add(key)
        try:
            canaries, model = None, cell.configuration.settings.get("model")
            if model is not None or (workload.load.canaries and workload.load.canaries.file):
                canaries = canaries_of(workload.load, str(model or ""))  # else only the server tells its model
            for repeat in range(1, workload.load.repeats + 1):
                requests = build_requests(LoadDraw(
                    workload.load, vocab_size=vocab, max_model_len=limit, seed=workload.seed, repeat=repeat,
                    concurrency=cell.load.concurrency, rate=cell.load.request_rate, canaries=canaries,
                ))  # fmt: skip
        except (ValueError, OSError) as error:
            raise UsageError(f"{cell.cell_id}: {error}") from None
        guesses[cell.load.load_id] = instrument.guess_s(cell.load, requests, workload.profile)
        lengths[cell.load.load_id] = lengths_of(requests)
    return Preflight(capacity, guesses, lengths)


def describe_plan(
    workload: Workload,
    design: Design,
    blocks: Sequence[Block],
    seconds: float,
    console: Console,
    start_guess_s: float,
) -> None:
    """Prints the cells of ``blocks``, their order and time; ``seconds`` count ``start_guess_s`` for each launch."""
    say = partial(print_plain, console)
    loads = sum(len(b.cells) for b in blocks)
    wanted = {c.cell_id for b in blocks for c in b.cells}
    cells = [c for c in design.cells if c.cell_id in wanted]
    say(
        f"{workload.name} ({workload.profile} profile, seed {workload.seed}): "
        f"{plural(len({c.configuration.config_id for c in cells}), 'configuration')}, {plural(len(cells), 'cell')}, "
        f"{len(blocks)} server launch{'' if len(blocks) == 1 else 'es'}, {plural(loads, 'load')}, "
        f"about {clock(seconds)} (a guess until it is measured; {start_guess_s:g} s for each launch)"
    )
    say("cells:")
    unit = "conversations" if workload.load.sessions else "requests"
    for cell in cells:
        point = cell.load
        offered = f"{point.request_rate:g} {unit}/s" if point.request_rate else f"arrivals: {point.arrivals}"
        offered = f"{point.concurrency} users" if point.mode == "closed" else offered
        count = f", {point.num_requests} requests" if point.num_requests else ""
        mark = "  (baseline)" if cell.configuration.is_baseline else ""
        say(f"  {cell.cell_id}: {cell.configuration.label}; {offered}{count}{mark}")
    say("order:")
    for number, block in enumerate(blocks, 1):
        cells = ", ".join(c.load.load_id for c in block.cells)
        say(f"  {number}. repeat {block.repeat}: {block.configuration.config_id}: {cells}")
    for note in design.notes:
        say(f"note: {note}")
