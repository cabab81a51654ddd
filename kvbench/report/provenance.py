"""What the manifest tells a reader: where the run came from, how to repeat it, what to keep in mind."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from kvbench.common import text as words
from kvbench.report.comparisons import SCATTER, scatters
from kvbench.runs.model import MeasuredCell, Run, number
from kvbench.targets.launch_plan import is_template, placeholders
from kvbench.targets.presets import GENERIC

CODE_PATHS = (
    "The layouts differ in two code paths besides the page table: on the CPU a prefill chunk reads contiguous KV in "
    "place, where paged KV is gathered first; and paged admission keeps some pages spare for the sequences that run."
)
_LONGEST_NAME = 80
SKIPPED = "skipped "  # how the note on a configuration that was not run begins
SHOWN = (
    "started",
    "ended",
    "status",
    "model",
    "profile",
    "device",
    "cpu",
    "gpus",
    "dtype",
    "seeds",
    "git",
    "versions",
)


def reproduce(run: Run) -> str:
    """The command line that made the run; empty when the manifest has none."""
    command = run.manifest.get("command")
    if isinstance(command, (list, tuple)):
        return shlex.join(str(part) for part in command)
    return str(command or "")


def brief(run: Run) -> list[str]:
    """When, which model, on what: the line under the verdict."""
    facts = run.manifest
    model = facts.get("model") or _workload_model(run)
    if isinstance(model, Mapping):
        model = model.get("name") or model.get("config") or model.get("path")
    started = re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1 \2 UTC", _text(facts.get("started")))
    return [_text(value) for value in (started, target(run), model, facts.get("device")) if _text(value)]


def target(run: Run) -> str:
    """Which server was measured, with its version: "vLLM 0.32.0"; empty for the built-in one."""
    shown: dict[str, None] = {}
    for told in _servers(run):
        server, versions = told.get("server") or {}, told.get("versions") or {}
        if server.get("title"):
            version = versions.get(server.get("kind"))
            title = _command_line(server) if server.get("kind") == GENERIC.name else str(server["title"])
            shown[f"{title} {version}" if version else title] = None
    url = run.manifest.get("target")
    return words.listing(list(shown)) or (str(url) if url else "")


def _command_line(server: Mapping[str, Any]) -> str:
    """The command of a server of which nothing else is known, as its name."""
    command = shlex.join(str(word) for word in server.get("command") or ())
    return textwrap.shorten(command, _LONGEST_NAME, placeholder=" ...") or str(server["title"])


def _workload_model(run: Run) -> Mapping[str, Any]:
    """``model:`` of the workload, where the server was given it: one that ran before has a model of its own."""
    workload, serve_cmd = run.manifest.get("workload"), str(run.manifest.get("serve_cmd") or "")
    running = "://" in str(run.manifest.get("target") or "")
    if running or (is_template(serve_cmd) and "model" not in placeholders(serve_cmd)):
        return {}
    model = workload.get("model") if isinstance(workload, Mapping) else None
    return model if isinstance(model, Mapping) else {}


def _servers(run: Run) -> list[Mapping[str, Any]]:
    servers = run.manifest.get("servers")
    return [told for told in servers.values() if isinstance(told, Mapping)] if isinstance(servers, Mapping) else []


def _told_of_target(run: Run) -> list[Mapping[str, Any]]:
    """What each server of another engine is said to be: title, command, quirks."""
    return [told["server"] for told in _servers(run) if isinstance(told.get("server"), Mapping)]


def code_paths(run: Run) -> list[str]:
    """What else than the page table tells the built-in engine's layouts apart, in a run of both; of others: unknown."""
    both = any(cell.is_contiguous for cell in run.cells) and any(cell.is_paged for cell in run.cells)
    return [CODE_PATHS] if both and run.manifest.get("backend") in (None, "kvbench") else []


def repeats_are(run: Run) -> str:
    """What one repeat is: a freshly launched server, or the one that ran before and throughout."""
    if "://" in str(run.manifest.get("target") or ""):
        return (
            "The server was running before and was the same throughout: one repeat is every load once more, with "
            "requests of its own. Repeats on one server are not independent, and their spread says less than that of "
            "freshly launched ones."
        )
    return (
        "One repeat is a freshly launched server of each configuration under identical requests; ratios are formed "
        "within a repeat. Requests of one server are not independent and never pooled for a comparison."
    )


def _notes(run: Run) -> list[str]:
    notes = run.manifest.get("notes")
    return [_text(note) for note in notes if _text(note)] if isinstance(notes, (list, tuple)) else []


def skipped_notes(run: Run) -> list[str]:
    """What was asked for and not run, with the reason, as the sweep put it down."""
    return [note for note in _notes(run) if note.startswith(SKIPPED)]


def environment(run: Run) -> list[tuple[str, str]]:
    """The facts a reader asks for first, as (name, text)."""
    facts = dict(run.manifest)
    if "model" not in facts:
        facts["model"] = _workload_model(run)
    found = [(name, text) for name in SHOWN if (text := _text(facts.get(name)))]
    budgets = {c.capacity.get("kv_budget_bytes") for c in run.cells} - {None}
    if budgets:
        found.append(("KV budget", words.listing([words.data_size(b) for b in sorted(budgets)])))
    capacities = {
        f"{words.count(c.capacity['capacity_tokens'])} tokens ({c.name})": None
        for c in run.cells
        if c.capacity.get("capacity_tokens")
    }
    if capacities:
        found.append(("KV capacity", "; ".join(capacities)))
    if name := target(run):
        found.insert(0, ("target", name))
    found += _launches(run)
    quirks = {str(quirk): None for told in _told_of_target(run) for quirk in told.get("quirks") or ()}
    if quirks:
        found.append(("of this target", "; ".join(quirks)))
    notes = {_text(cell.notes): None for cell in run.cells if cell.notes}
    if notes:
        found.append(("requests", "; ".join(notes)))
    return found


def _launches(run: Run) -> list[tuple[str, str]]:
    """The launch commands, each with the configurations that it was for where there are several; baseline first."""
    names = {c.config_id: c.name for c in sorted(run.cells, key=lambda c: not c.is_baseline)}
    servers = run.manifest.get("servers")
    servers = servers if isinstance(servers, Mapping) else {}
    commands: dict[str, list[str]] = {}
    for config_id in sorted(servers, key=lambda each: list(names).index(each) if each in names else len(names)):
        told = servers[config_id].get("server") if isinstance(servers[config_id], Mapping) else None
        if isinstance(told, Mapping) and told.get("command"):
            command = shlex.join(map(str, told["command"]))
            commands.setdefault(command, []).append(names.get(config_id, str(config_id)))
    if len(commands) == 1:
        return [("launched as", next(iter(commands)))]
    return [(f"launched as ({words.listing(of)})", command) for command, of in commands.items()]


def made_from(run: Run) -> str:
    """How the requests came about, where the workload scaled lengths or played a trace; empty elsewhere."""
    said: dict[str, list[str]] = {}
    for cell in run.cells:
        if text := _made_from(cell, _prompts(run)):
            said.setdefault(text, []).append(cell.load.short)
    if len(said) < 2:
        return "".join(said)
    return "; ".join(f"at {words.listing(list(dict.fromkeys(where)))}: {text}" for text, where in said.items())


def _made_from(cell: MeasuredCell, prompts: Mapping[str, Any]) -> str:
    notes, parts = cell.notes, []
    given = notes.get("length_scale")
    scales = [number(scale) for scale in (given if isinstance(given, list) else [given])]
    if known := [f"{scale:.3g}" for scale in scales if scale is not None]:
        parts.append("lengths x " + words.listing(known))
    if "trace" in notes:
        seconds, speed = number(prompts.get("duration_s")), number(notes.get("rate_scale"))
        piece = f"{seconds:g} s of the trace" if seconds else "the trace"
        pace = "" if speed is None else " at its own speed" if speed == 1 else f" at {speed:g} of its speed"
        parts.append(piece + pace)
        if count := number(notes.get("trace_requests")):
            parts.append(words.plural(count, "request"))
        size, recorded = number(notes.get("page_size_of_prompts")), number(notes.get("trace_page_size"))
        if size and recorded:
            parts.append(f"prompts share its pages, {recorded:g} tokens made {size:g}")
    if "text" in notes:
        parts.append(f"text of {notes['text']}")
    return ", ".join(parts)


def _prompts(run: Run) -> Mapping[str, Any]:
    workload = run.manifest.get("workload")
    load = workload.get("load") if isinstance(workload, Mapping) else None
    prompts = load.get("prompts") if isinstance(load, Mapping) else None
    return prompts if isinstance(prompts, Mapping) else {}


def warnings(run: Run) -> list[str]:
    """What limits the reach of the numbers, whatever their validity."""
    found = []
    if run.manifest.get("shared_machine"):
        found.append("Load generator and engine shared this machine and competed for its cores.")
    repeats = {len(cell.repeats) for cell in run.cells}
    if repeats and min(repeats) < 3:
        found.append(
            f"Some cells have {words.plural(min(repeats), 'repeat')} only: under 3 there is no interval, and "
            "with one there is no spread at all."
        )
    scattered = [
        f"{c.name} at {c.load.short} ({words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)})"
        for c in run.cells
        if (s := scatters(c))
    ]
    if scattered:
        found.append(
            f"The repeats scatter: output tokens/s of one cell differ by more than {SCATTER:g}x between repeats in "
            f"{words.listing(scattered)}. Other work on the machine is a common cause."
        )
    found += [f"{note[:1].upper()}{note[1:]}." for note in _notes(run) if not note.startswith(SKIPPED)]
    found += _resumed(run)
    found += _unverified(run)
    git = run.manifest.get("git")
    if isinstance(git, Mapping) and git.get("dirty"):
        found.append("The working tree had uncommitted changes: the commit alone does not reproduce this run.")
    if run.cells and any(cell.gauges().empty for cell in run.cells):
        found.append(
            "Some cells have no server metrics (a server without kvbench's /metrics): running sequences, KV "
            "usage, waste and preemptions are unknown there."
        )
    if _workload_model(run).get("load_format") == "dummy":
        found.append("The model has random weights: speeds and memory are real, the text is not.")
    return found


def _unverified(run: Run) -> list[str]:
    """Loads whose hits do not show that the prefix cache was in the declared state."""
    loads = [repeat for cell in run.cells for repeat in cell.repeats]
    doubts = [str(load.cache["unverified"]) for load in loads if load.cache.get("unverified")]
    if not doubts:
        return []
    state = (run.load_section or {}).get("cache_state", "cold")
    return [
        f"That the prefix cache was {state}, as declared, is not verified in {len(doubts)} of {len(loads)} loads: "
        f"{'; '.join(dict.fromkeys(doubts))}."
    ]


def _resumed(run: Run) -> list[str]:
    """One warning when a resumed run went on in another environment than it started in."""
    resumed = run.manifest.get("resumed")
    entries = [e for e in resumed if isinstance(e, Mapping)] if isinstance(resumed, (list, tuple)) else []
    differing: dict[str, None] = {}
    for entry in entries:
        if "differences" in entry:
            differing |= dict.fromkeys(_text(one) for one in entry["differences"] or ())
            continue
        before, after = (((facts.get("git") or {}).get("sha")) for facts in (run.manifest, entry))
        if before and after and before != after:
            differing[f"commit ({before} then, {after} later)"] = None
    if not differing:
        return []
    return [
        f"The run was resumed in another environment; different: {words.listing(list(differing))}. What was measured "
        "before and after is not comparable as it stands."
    ]


def _text(value: Any) -> str:
    if value is None or value == "" or value == {}:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items() if _text(inner))
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, (_text(inner) for inner in value)))
    return str(value)
