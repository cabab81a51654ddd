"""Which cells a sweep has, and in which order they run: pure functions of the workload.

A *configuration* is one set of engine settings, a *load point* one concurrency or rate, a *cell* the pair of them.
A *block* is one fresh server of one configuration in one repeat, with the loads that run against it.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import UsageError

# Settings that mean something in one layout only: the other layout drops them, so that no cell is run twice.
LAYOUT_ONLY = {
    "page_size": "paged",
    "enable_prefix_caching": "paged",
    "reservation": "contiguous",
}
# Short words for cell ids; anything else is spelled out.
_SHORT = {
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "max_model_len": "len",
    "kv_budget": "kv",
    "kv_cache_dtype": "",
    "preemption_mode": "preempt",
    "kernel_backend": "",
    "reservation": "",
    "dtype": "",
}
_FLAG = {
    "enable_prefix_caching": ("prefix", "noprefix"),
    "enable_chunked_prefill": ("chunked", "unchunked"),
}
_MAX_ID = 80  # file systems allow 255 bytes for a name; a terminal table does not


@dataclass(frozen=True)
class Configuration:
    """One set of engine settings. ``varied`` holds what differs from the baseline."""

    config_id: str
    label: str
    settings: Mapping[str, Any]
    varied: Mapping[str, Any]
    is_baseline: bool


@dataclass(frozen=True)
class LoadPoint:
    """One load: ``concurrency`` users (closed) or ``request_rate`` requests/s (open; None: the trace's own)."""

    load_id: str
    mode: str
    concurrency: int | None
    request_rate: float | None
    num_requests: int | None


@dataclass(frozen=True)
class Cell:
    """One configuration under one load point."""

    cell_id: str
    configuration: Configuration
    load: LoadPoint


@dataclass(frozen=True)
class Block:
    """One server launch: ``cells`` share a configuration and run in this order. ``repeat`` counts from 1."""

    repeat: int
    configuration: Configuration
    cells: tuple[Cell, ...]

    @property
    def block_id(self) -> str:
        return f"{self.configuration.config_id}-{self.repeat}"


@dataclass(frozen=True)
class Design:
    """All cells in table order, and sentences about what was left out."""

    configurations: tuple[Configuration, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = field(default=())


def normalise(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` without those that its layout does not have, and without None, which is the default."""
    layout = settings.get("layout", "paged")
    return {k: v for k, v in settings.items() if v is not None and LAYOUT_ONLY.get(k, layout) == layout}


def _changed(settings: Mapping[str, Any], baseline: Mapping[str, Any], swept: Sequence[str]) -> dict[str, Any]:
    """The swept settings that this layout has and that differ from the baseline; None: back to the default."""
    layout = settings.get("layout", "paged")
    had = {k: baseline.get(k) for k in swept}
    return {k: settings.get(k) for k in swept if LAYOUT_ONLY.get(k, layout) == layout and settings.get(k) != had[k]}


def make_design(
    engine: Mapping[str, Any], sweep: Mapping[str, Sequence[Any]], loads: Sequence[LoadPoint], design: str
) -> Design:
    """Baseline plus one variable at a time, or the full product, each under every load point.

    The baseline's own value need not be listed under ``sweep``. Configurations that differ only in settings which
    their layout does not have are the same configuration; the notes say how many were dropped.
    """
    if design not in ("one_at_a_time", "full"):
        raise UsageError(f"design cannot be {design!r}: choose one_at_a_time or full")
    baseline = dict(engine)
    values = {
        key: ([baseline[key]] if key in baseline else []) + [v for v in listed if v != baseline.get(key, object())]
        for key, listed in sweep.items()
    }
    candidates = [baseline]
    if design == "one_at_a_time":
        candidates += [{**baseline, key: value} for key, listed in values.items() for value in listed]
    else:
        keys = list(values)
        candidates += [
            {**baseline, **dict(zip(keys, combo, strict=True))} for combo in itertools.product(*values.values())
        ]
    unique: list[dict[str, Any]] = []
    dropped = 0
    for candidate in map(normalise, candidates):
        if candidate not in unique:
            unique.append(candidate)
        elif candidate != normalise(baseline):
            dropped += 1
    notes = [_dropped_note(dropped)] if dropped else []
    notes += _useless_settings(normalise(baseline), values, unique)
    configurations = _name(unique, tuple(sweep))
    cells = tuple(
        Cell(f"{configuration.config_id}-{load.load_id}", configuration, load)
        for configuration in configurations
        for load in loads
    )
    return Design(configurations, cells, tuple(notes))


def _dropped_note(dropped: int) -> str:
    return (
        f"{dropped} of the configurations asked for differ only in settings that their layout does not have "
        "(contiguous has no page_size and no prefix caching) and are run once"
    )


def _useless_settings(
    baseline: Mapping[str, Any], values: Mapping[str, Sequence[Any]], unique: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A sweep over a setting that no configuration has ends up with nothing; say so rather than stay silent."""
    return [
        f"sweeping {key} changes nothing: only layout {LAYOUT_ONLY[key]!r} has it and the baseline's layout is "
        f"{baseline.get('layout', 'paged')!r}"
        for key in values
        if key in LAYOUT_ONLY and not any(key in settings for settings in unique)
    ]


def _name(unique: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> tuple[Configuration, ...]:
    baseline = unique[0]
    taken: set[str] = set()
    named = []
    for settings in unique:
        varied = _changed(settings, baseline, swept)
        config_id = _config_id(settings, varied)
        if config_id.lower() in taken:  # also on file systems that fold case
            digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:6]
            config_id = f"{config_id}-{digest}"
        taken.add(config_id.lower())
        named.append(Configuration(config_id, _label(settings, varied), dict(settings), varied, settings is baseline))
    return tuple(named)


def _config_id(settings: Mapping[str, Any], varied: Mapping[str, Any]) -> str:
    if "target" in settings:  # a server that runs already: its settings are not ours to name
        return "target"
    layout = settings.get("layout", "paged")
    parts = [_slug(layout)]
    if layout == "paged" and "page_size" in settings:
        parts.append(f"p{_slug(settings['page_size'])}")
    for key, value in varied.items():
        if key in ("layout", "page_size"):
            continue
        if key in _FLAG and isinstance(value, bool):
            parts.append(_FLAG[key][0 if value else 1])
        else:
            parts.append(f"{_SHORT.get(key, key.replace('_', '') + '_')}{_slug(value)}")
    config_id = "-".join(parts)
    if len(config_id) > _MAX_ID:
        config_id = f"{config_id[: _MAX_ID - 7]}-{hashlib.sha256(config_id.encode()).hexdigest()[:6]}"
    return config_id


def _slug(value: Any) -> str:
    """Letters, digits, dot and underscore only: safe in a file name, a URL and a shell on any system."""
    text = re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("._")
    return text or "none"


def _label(settings: Mapping[str, Any], varied: Mapping[str, Any]) -> str:
    if "target" in settings:
        return str(settings["target"])
    layout = settings.get("layout", "paged")
    words = [str(layout)]
    if layout == "paged" and "page_size" in settings:
        words.append(f"page {settings['page_size']}")
    for key, value in varied.items():
        if key == "enable_prefix_caching":
            words.append("prefix caching" if value else "no prefix caching")
        elif key not in ("layout", "page_size"):
            words.append(f"{key} {value}")
    return ", ".join(words)


def load_point(mode: str, *, concurrency: int | None, rate: float | None, num_requests: int | None) -> LoadPoint:
    """The load point with its id: ``c24`` for 24 users, ``r4`` for 4 requests/s, ``trace`` for a trace's own rate."""
    open_id = "trace" if rate is None else f"r{_slug(f'{rate:g}')}"
    load_id = f"c{concurrency}" if mode == "closed" else open_id
    return LoadPoint(load_id, mode, concurrency, rate, num_requests)


def select(design: Design, patterns: Sequence[str]) -> Design:
    """The cells that match any of the globs (all, when there is none).

    Raises UsageError with the list of cells when a glob matches nothing: a typo must not shrink a sweep silently.
    """
    if not patterns:
        return design
    ids = [cell.cell_id for cell in design.cells]
    for pattern in patterns:
        if not fnmatch.filter(ids, pattern):
            raise UsageError(f"--only {pattern!r} matches no cell: the cells are {', '.join(ids)}")
    cells = tuple(c for c in design.cells if any(fnmatch.fnmatchcase(c.cell_id, p) for p in patterns))
    kept = {cell.configuration.config_id for cell in cells}
    return Design(tuple(c for c in design.configurations if c.config_id in kept), cells, design.notes)


def plan_blocks(design: Design, repeats: int, seed: int) -> tuple[Block, ...]:
    """Every (cell, repeat) once, grouped by server launch, in an order that depends on ``seed`` only.

    The order is random within each repeat, so that drift of the machine spreads over the configurations, and
    repeats follow each other, so that an interrupted sweep has whole repeats. Within a repeat all configurations get
    their loads in the same order: what an earlier load left behind (a cache in the state ``steady``, a warm
    processor) is then the same for both sides of a paired comparison.
    """
    blocks = []
    for repeat in range(1, repeats + 1):
        rng = random.Random(f"kvbench-order/{seed}/{repeat}")
        configurations = list(design.configurations)
        rng.shuffle(configurations)
        ordered = sorted(design.cells, key=functools.partial(_rank, seed, repeat))
        for configuration in configurations:
            cells = [c for c in ordered if c.configuration.config_id == configuration.config_id]
            blocks.append(Block(repeat, configuration, tuple(cells)))
    return tuple(blocks)


def _rank(seed: int, repeat: int, cell: Cell) -> float:
    """A random place for the cell's load, of its own and not drawn in turn: ``--only`` keeps the order of the rest."""
    return random.Random(f"kvbench-loads/{seed}/{repeat}/{cell.load.load_id}").random()
