"""Plans a sweep before the first launch: what is refused, the KV of each configuration, the order and the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvbench.common.console import make_table, print_plain
from kvbench.common.errors import UsageError
from kvbench.common.text import and_more, clock, count, listing, plural
from kvbench.measure.http import HttpInstrument
from kvbench.measure.instrument import Instrument
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import canaries_of
from kvbench.requests.request import RequestSpec, distinct_prefixes
from kvbench.runs.results import Capacity
from kvbench.workload.design import Block, Check, Configuration, Design, LoadPoint, capacities
from kvbench.workload.file import Workload
from kvbench.workload.settings import effective

_UNKNOWN = 2**20  # a limit that only the server knows is checked once it runs
_COLUMNS = (  # heading, figure of check_configuration, divided by, format
    ("budget MiB", "kv_budget_bytes", 2**20, "{:,.1f}"),
    ("bytes/\ntoken", "bytes_per_token", 1, "{:,.0f}"),
    ("of it\nscales", "scale_bytes_per_token", 1, "{:,.0f}"),
    ("page\nsize", "page_size", 1, "{:,.0f}"),
    ("pages", "num_pages", 1, "{:,.0f}"),
    ("tokens", "capacity_tokens", 1, "{:,.0f}"),
    ("page table\nKiB", "page_table_bytes", 1024, "{:,.1f}"),
    ("at once*", "max_concurrency_at_max_len", 1, "{:,.0f}"),
    ("swap\nMiB", "swap_space_bytes", 2**20, "{:,.1f}"),
    ("swap\ntokens", "swap_tokens", 1, "{:,.0f}"),
)
_WHAT_FITS = ("capacity_tokens", "max_concurrency_at_max_len")
DROP_FIRST = tuple(heading for heading, name, *_ in reversed(_COLUMNS) if name not in _WHAT_FITS)  # if too narrow
_OPTIONAL = ("scale_bytes_per_token", "swap_space_bytes", "swap_tokens")  # shown where one of them is not 0


def capacity_table(title: str, design: Design, capacity: Mapping[str, Capacity]) -> tuple[Table, tuple[str, ...]]:
    """The table, a row a configuration, and the notes beneath it. ``capacity``: config id -> check_configuration."""
    sized = [limits for limits in capacity.values() if limits.num_pages is not None]
    columns = [c for c in _COLUMNS if c[1] not in _OPTIONAL or any(getattr(limits, c[1]) for limits in sized)]
    heads = ["configuration", *(heading for heading, *_ in columns)]
    table = make_table(heads, title=f"{title}: what the KV budget holds")
    table.columns[0].no_wrap = True
    for configuration in design.configurations:
        limits = capacity[configuration.config_id]
        entries = ["at start"] * len(columns)  # the GPU's free memory decides
        if limits.num_pages is not None:
            entries = [form.format(getattr(limits, name) / unit) for _, name, unit, form in columns]
            if (kind := _reserved_by_length(configuration)) is not None:  # of any size, so of no number
                by_name = {"page_size": kind, "num_pages": "–"}
                entries = [by_name.get(c[1], entry) for c, entry in zip(columns, entries, strict=True)]
        table.add_row(configuration.config_id, *entries)
    lengths = sorted({limits.max_model_len for limits in capacity.values()})
    return table, (_explanation(design, lengths),)


def _reserved_by_length(configuration: Configuration) -> str | None:
    """The reservation of a contiguous layout that is not of the maximum: pow2 or oracle."""
    if configuration.settings.get("layout") != "contiguous":
        return None
    reservation = effective(configuration.settings, "reservation")
    return None if reservation == "max" else reservation


def _explanation(design: Design, lengths: Sequence[int]) -> str:
    text = f"* sequences of max_model_len ({', '.join(map(str, lengths))}) tokens that fit at once."
    contiguous = [c.settings for c in design.configurations if c.settings.get("layout") == "contiguous"]
    reservations = {effective(settings, "reservation") for settings in contiguous}
    if "max" in reservations:
        text += " Contiguous reserves that much for every sequence, however short (the page size shown)"
        text += "; paged takes pages as a sequence grows." if len(contiguous) < len(design.configurations) else "."
    if reservations & {"pow2", "oracle"}:
        text += (
            " The reservation pow2 is the prompt and the next power of two of the output, oracle the prompt and the "
            "output exactly: shorter sequences fit in larger numbers, as far as the holes between them let."
        )
    return text


_KV_OF_MODELS = {"latent_kv", "free_outside_window"}  # settings about what only some models have
_MAKE_ROOM = {"kv_cache_dtype": "a smaller KV dtype", "page_size": "another page size", "kv_budget": "a larger budget"}


@dataclass(frozen=True)
class Lengths:
    """Tokens of a load's requests: ``prompts``, ``outputs`` and, of the prompts, the ``prefixes`` that others share.

    ``distinct``: of all shared prefixes, each once. ``widths``: sequences that a request runs side by side; each has an
    output of its own, and in pages they share the prompt.
    """

    prompts: np.ndarray
    outputs: np.ndarray
    prefixes: np.ndarray
    distinct: int
    widths: np.ndarray | int = 1


def lengths_of(requests: Sequence[RequestSpec]) -> Lengths:
    """The lengths of a load's requests."""
    rows = [(len(r.prompt_token_ids or ()), r.max_tokens, r.prefix_tokens, r.width) for r in requests]
    prompts, outputs, prefixes, widths = np.array(rows).T
    return Lengths(prompts, outputs, prefixes, sum(map(len, distinct_prefixes(requests))), widths)


def memory_notes(design: Design, capacity: Mapping[str, Capacity], lengths: Mapping[str, Lengths]) -> list[str]:
    """Tells of each load whether its requests fit into each configuration's KV at once; ``lengths``: by load id.

    Nothing where the budget is known at start only. Last, what the engine keeps of layers with a sliding window, and
    settings that change no KV of this model.
    """
    sized = [c for c in design.configurations if capacity[c.config_id].num_pages is not None]
    loads = list(dict.fromkeys(cell.load for cell in design.cells))
    windows = dict.fromkeys(note for limits in capacity.values() if (note := limits.window_note))
    memory = (_memory_note(sized, capacity, load, lengths[load.load_id]) for load in loads if sized)
    return [*memory, *windows, *_same_kv(sized, capacity)]


def _same_kv(sized: Sequence[Configuration], capacity: Mapping[str, Capacity]) -> Iterator[str]:
    """Names the configurations with the baseline's KV, because the model has nothing that their setting is about."""
    for configuration in sized:
        names = set(configuration.varied)
        if names and names <= _KV_OF_MODELS and capacity[configuration.config_id] == capacity[sized[0].config_id]:
            yield (
                f"{configuration.config_id} keeps the KV of {sized[0].config_id}: {listing(sorted(names))} "
                "changes nothing with this model and length"
            )


def _memory_note(
    sized: Sequence[Configuration], capacity: Mapping[str, Capacity], load: LoadPoint, lengths: Lengths
) -> str:
    totals = lengths.prompts + lengths.widths * lengths.outputs
    mean = f"{totals.mean():,.0f}" + ("" if totals.min() == totals.max() else f" (mean; {totals.max():,} at most)")
    held = {c.config_id: at_once(c, capacity[c.config_id], lengths) for c in sized}
    counts = {config_id: f"{config_id} (about {count(np.floor(n))} at once)" for config_id, (n, _) in held.items()}
    if load.mode == "open" and load.request_rate != math.inf:
        more = "memory limits once more are in flight than fit"
        return f"{load.load_id}: a request needs {mean} tokens; {more}: {and_more(list(counts.values()), 6)}"
    users = load.concurrency or len(totals)
    needed = f"{load.load_id}: {users} x {mean} = {users * totals.mean():,.0f} tokens"
    widest = int(np.max(lengths.widths))
    seqs = {c.config_id: int(effective(c.settings, "max_num_seqs") or users * widest) for c in sized}
    most = {config_id: min(users, number // widest) for config_id, number in seqs.items()}
    full = [config_id for config_id, (_, share) in held.items() if share(most[config_id]) > 1]
    parts = [_limits(full, held, most, counts) if full else _no_limits(sized, capacity)]
    if capped := [f"{config_id} ({n})" for config_id, n in most.items() if n < users]:
        parts.append(f"max_num_seqs admits fewer than {users} to {and_more(capped, 6)}")
    return f"{needed}; {'; '.join(parts)}"


def _limits(full: Sequence[str], held: Mapping[str, Any], most: Mapping[str, int], counts: Mapping[str, str]) -> str:
    """Names the configurations that are too small, for the mean request or the longest ones only, and the others."""
    some = [counts[config_id] for config_id in full if held[config_id][0] < most[config_id]]
    rare = [config_id for config_id in full if held[config_id][0] >= most[config_id]]
    rest = [config_id for config_id in held if config_id not in full]
    parts = [f"memory limits {and_more(some, 6)}"] if some else []
    parts += [f"only the longest requests together outgrow {and_more(rare, 6)}"] if rare else []
    parts += [f"{and_more(rest, 6)}: room for all"] if rest else []
    return "; ".join(parts)


def _no_limits(sized: Sequence[Configuration], capacity: Mapping[str, Capacity]) -> str:
    least = min(sized, key=lambda c: capacity[c.config_id].capacity_tokens)
    helps = [words for key, words in _MAKE_ROOM.items() if any(key in c.varied for c in sized)]
    room = f", so {listing(helps)} cannot help by making room" if helps else ""
    tokens = count(capacity[least.config_id].capacity_tokens)
    return f"{least.config_id} holds {tokens}: memory is not what limits this load{room}"


def at_once(configuration: Configuration, capacity: Capacity, lengths: Lengths) -> tuple[float, Callable[[int], float]]:
    """Counts requests of mean size that fit at once, and the KV share that the ``n`` largest take.

    With prefix caching a shared prefix is there once.
    """
    room, prompts, widths = float(capacity.num_slots or capacity.capacity_tokens), lengths.prompts, lengths.widths
    windows, size = capacity.windows or (None,), capacity.page_size
    if configuration.settings.get("layout") != "contiguous":
        if effective(configuration.settings, "enable_prefix_caching"):
            room, prompts = room - lengths.distinct * windows.count(None), prompts - lengths.prefixes
        sizes = np.zeros(len(prompts))
        for window in windows:  # of a shared prefix, each sequence is taken to have its own window
            before = prompts if window is None else lengths.prompts
            most = np.inf if window is None else -(-(window - 1) // size) + 1
            pages = np.minimum(-(-(before + lengths.outputs) // size), most)
            own = np.minimum(-(-(before + lengths.outputs) // size) - before // size, most)
            sizes += pages + (widths - 1) * own
        room //= size
    elif (kind := _reserved_by_length(configuration)) is None:
        room, sizes = float(capacity.num_pages), widths * np.ones(len(prompts))
    else:
        outputs = 2 ** np.ceil(np.log2(lengths.outputs)) if kind == "pow2" else lengths.outputs
        tokens = np.minimum(prompts + outputs, capacity.max_model_len or np.inf)
        sizes = widths * sum(np.minimum(tokens, slots) for slots in capacity.group_slots or (np.inf,))
    room, largest = max(room, 1.0), np.sort(sizes)[::-1]
    return room / sizes.mean(), lambda n: float(largest[:n].sum()) / room


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
        limits = capacity[cell.configuration.config_id]
        limit = int(limits.max_model_len or cell.configuration.settings.get("max_model_len", _UNKNOWN))
        vocab = limits.vocab_size or _UNKNOWN
        if (key := (cell.load.load_id, limit, vocab)) in drawn:
            continue
        drawn.add(key)
        try:
            canaries, model = None, cell.configuration.settings.get("model")
            if model is not None or (workload.load.canaries and workload.load.canaries.file):
                canaries = canaries_of(workload.load, str(model or ""))  # else only the server tells its model
            for repeat in range(1, workload.load.repeats + 1):
                draw = LoadDraw(
                    workload.load, vocab_size=vocab, max_model_len=limit, seed=workload.seed, repeat=repeat,
                    concurrency=cell.load.concurrency, rate=cell.load.request_rate, canaries=canaries,
                )  # fmt: skip
                requests = build_requests(draw)
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
