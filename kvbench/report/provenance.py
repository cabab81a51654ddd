"""The manifest in words: whether the run is valid, what limits its numbers, where it came from; and the glossary."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from kvbench.common import text as words
from kvbench.common.records import Record
from kvbench.effects.comparison import MARGINS
from kvbench.measure.words import repeat_notes
from kvbench.metrics.canaries import WRONG_ANSWERS
from kvbench.metrics.model import failed_words
from kvbench.report.comparisons import NOT_TOLD, SCATTER, scatters
from kvbench.report.wording import say
from kvbench.requests.prefix_hits import hit_notes
from kvbench.runs.manifest import resumed_differences
from kvbench.runs.model import MeasuredCell, Run, number
from kvbench.runs.results import Capacity
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.cores import core_words
from kvbench.targets.launch_plan import is_template, placeholders
from kvbench.targets.presets import GENERIC

SKIPPED = "skipped "  # how the note on a configuration that was not run begins
_SHOWN = (
    "started", "ended", "status", "model", "profile", "device", "cpu", "gpus", "dtype", "seeds", "git", "versions",
)  # fmt: skip
_OF_THIS_MACHINE = ("cpu", "gpus")  # of which nothing depends in a simulation
_WORDS = (  # of the glossary, in the order of the page; {clock}: the one that is not served over HTTP
    "pays", "at a risk; costs", "not decided", "safe", "{clock}", "ttft", "ttfo", "reasoning", "tpot", "itl, e2el",
    "client queue", "goodput", "steady window", "prefix hits", "waste", "free, scattered", "failed", "repeat",
    "verdict",
)  # fmt: skip
_MOST_CHARACTERS = 80  # of a launch command on the first screen

_Lenient = Annotated[float | None, BeforeValidator(number)]  # None where it is no finite number


def _tuple(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


class RequestNotes(Record):
    """The notes of a cell on how its requests were made and from which part of a trace; None: none."""

    length_scale: Annotated[tuple[_Lenient, ...], BeforeValidator(_tuple)] = ()
    duration_s: _Lenient = None
    rate_scale: _Lenient = None
    trace: Any = None
    trace_requests: _Lenient = None
    trace_page_size: _Lenient = None
    page_size_of_prompts: _Lenient = None
    text: Any = None
    endpoint: Any = None
    template_tokens: _Lenient = None
    cost_model: Any = None


# --- Validity, and what limits the numbers ---


@dataclass(frozen=True)
class Validity:
    """The ``status`` of a run (valid | wrong | invalid | incomplete | empty) and the reasons for it."""

    status: str
    reasons: tuple[str, ...]


def validity(run: Run) -> Validity:
    """Judges a run: wrong answers outrank invalid cells, and these an incomplete run; failed requests are named too."""
    wrong, failed = [], []
    for cell in run.cells:
        if cell.wrong_answers:
            first = words.and_more(cell.wrong_answers, 1, "; ")
            file = f"cells/{cell.cell_id}/{WRONG_ANSWERS}"
            wrong.append(say("provenance.wrong", cell=_named(cell), first=first, file=file))
        if count := cell.count("failed"):
            why = failed_words(cell.failure_messages, count, cell.sent)
            failed.append(say("provenance.failed", cell.doubt, cell=_named(cell), why=why))
    invalid = _grouped_reasons(run.cells)
    incomplete = [say("provenance.missing", cells=", ".join(run.missing))] * bool(run.missing)
    if run.not_kept:
        incomplete = [say("provenance.not_kept", cells=words.plural(len(run.missing), "cell"))]
    incomplete += [*run.short, *run.problems]
    if run.cells and not (wrong or invalid or incomplete) and run.status != "complete":
        incomplete = [say("provenance.status", status=repr(run.status))]
    problems = {"wrong": wrong, "invalid": invalid, "incomplete": incomplete}
    status = next((name for name, reasons in problems.items() if reasons), "valid")
    return Validity(status if run.cells else "empty", (*wrong, *invalid, *incomplete, *failed))


def _named(cell: MeasuredCell) -> str:
    return f"{cell.name} at {cell.load.short}"


def _grouped_reasons(cells: Sequence[MeasuredCell]) -> list[str]:
    """Lists why cells are invalid, one line a kind of reason: the first in full, then the cells that have the same.

    Reasons that differ only in their numbers or their repeat are of one kind: thirty lagging loads are one finding.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for cell in cells:
        for reason in (cell.invalid_reasons or ("no reason recorded",)) if cell.doubt == "invalid" else ():
            plain = re.sub(r"^repeat \d+: ", "", reason)
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", plain), []).append((plain, _named(cell)))
    lines = []
    for (reason, where), *others in kinds.values():
        names = ", ".join(dict.fromkeys(name for _, name in others))
        more = say("provenance.more_like_it", bool(others), count=len(others), names=names)
        lines.append(f"{where}: {reason.rstrip('.')}{more}")
    return lines


def warnings(run: Run) -> list[str]:
    """Lists limits of what the numbers say, also of a valid run."""
    fewest = min((len(cell.repeats) for cell in run.cells), default=3)
    scattered = []
    for cell in run.cells:
        if rates := scatters(cell):
            scattered.append(f"{_named(cell)} ({words.tokens_per_s(rates.low)}–{words.tokens_per_s(rates.high)})")
    loads = [repeat.prefix_cache for cell in run.cells for repeat in cell.repeats]
    unverified = [cache.unverified for cache in loads if cache.unverified]
    hits = [notes for cache in loads if (notes := hit_notes(cache))]
    hits_differ = words.and_more(list(dict.fromkeys(note for notes in hits for note in notes)), 2, "; ")
    resumed = resumed_differences(run.manifest)
    notes = [*repeat_notes(run.manifest, run.cells), *run.manifest.notes]
    why = "; ".join(dict.fromkeys(unverified))
    cells = words.listing(scattered)
    state = run.cache_state
    sentences = {
        say("provenance.shared_machine"): run.manifest.shared_machine,
        say("provenance.few_repeats", repeats=words.plural(fewest, "repeat")): fewest < 3,
        say("provenance.scatter", times=SCATTER, cells=cells): scattered,
        **{f"{words.upper_first(note)}.": not note.startswith(SKIPPED) for note in notes},
        say("provenance.resumed", differences=words.listing(resumed)): resumed,
        say("provenance.unverified", state=state, some=len(unverified), every=len(loads), why=why): unverified,
        say("provenance.hits", some=len(hits), every=len(loads), notes=hits_differ): hits,
        say("provenance.dirty"): run.manifest.git.dirty,
        say("provenance.no_gauges"): any(cell.gauges().empty for cell in run.cells),
        say("provenance.random_weights"): random_weights(run),
    }
    return [text for text, holds in sentences.items() if holds]


def random_weights(run: Run) -> bool:
    """Tests whether the workload asks for them; a model of which nothing is known counts as trained."""
    return not run.simulated and ("load_format", "dummy") in _workload_model(run).items()


def code_paths(run: Run) -> list[str]:
    """Says what besides the page table distinguishes the built-in engine's layouts, in a run of both."""
    both = any(cell.is_contiguous for cell in run.cells) and any(cell.is_paged for cell in run.cells)
    return [say("provenance.code_paths", bool(run.simulated))] * (both and run.is_built_in)


def repeats_are(run: Run) -> str:
    """Says what one repeat is: a freshly launched server, or the one that ran throughout."""
    kinds = {"simulated": run.simulated, "running": "://" in str(run.manifest.target), "launched": True}
    return say("provenance.repeat", next(kind for kind, holds in kinds.items() if holds))


# --- Where it came from ---


def reproduce(run: Run) -> str:
    """Returns the command line that made the run; empty when the manifest has none."""
    return shlex.join(run.manifest.command)


def title(run: Run) -> str:
    """Returns the workload, marked where the run is simulated."""
    return run.workload + " (simulated)" * bool(run.simulated)


def brief(run: Run) -> list[str]:
    """Returns when, which server, which model, on what: the line under the headline."""
    started = re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1 \2 UTC", run.manifest.started or "")
    return [str(fact) for fact in (started, target(run), model_name(run), run.manifest.device) if fact]


def model_name(run: Run) -> str:
    """Returns the name of the model that was served; empty where nobody told."""
    return model_of(run.manifest.model or _workload_model(run))


def model_of(model: Mapping[str, Any]) -> str:
    """Returns a model's name, else its configuration or its path."""
    return str(next((model[key] for key in ("name", "config", "path") if model.get(key)), ""))


def target(run: Run) -> str:
    """Names the server that was measured, with its version: "vLLM 0.32.0"; empty for the built-in one."""
    shown = []
    for info in run.manifest.servers.values():
        server, name = info.server, info.server.title
        if server.kind == GENERIC.name:  # known by its command only
            name = textwrap.shorten(shlex.join(server.command), _MOST_CHARACTERS, placeholder=" ...") or name
        shown.append(" ".join(filter(None, (name, info.versions.get(server.kind)))))
    return words.listing(list(dict.fromkeys(filter(None, shown)))) or str(run.manifest.target or "")


def server_facts(run: Run, cell: MeasuredCell) -> ServerInfo:
    """Returns what the server of the cell's configuration reported of itself; empty where it is not known."""
    return run.manifest.server_of(cell.config_id)


def _workload_model(run: Run) -> Mapping[str, Any]:
    """``model:`` of the workload, where the server was given it: one that ran before has a model of its own."""
    serve_cmd = run.manifest.serve_cmd or ""
    running = "://" in str(run.manifest.target)
    if running or (is_template(serve_cmd) and "model" not in placeholders(serve_cmd)):
        return {}
    return run.spec.get("model") or {}


def environment(run: Run) -> list[tuple[str, str]]:
    """Returns facts about the run as (name, text)."""
    stored = {"model": _workload_model(run), **run.manifest.to_json()}
    shown = [name for name in _SHOWN if name in stored and not (run.simulated and name in _OF_THIS_MACHINE)]
    budgets = sorted({cell.capacity.kv_budget_bytes for cell in run.cells} - {None})
    capacities = (f"{kv_capacity(c.capacity)} ({c.name})" for c in run.cells if c.capacity.capacity_tokens)
    servers, simulated = run.manifest.servers.values(), []
    if engine := run.simulated:
        simulated = [
            ("simulated", f"{engine.model} on {on_what(run)}"), ("step times", engine.cost_model), ("ops", engine.ops),
            ("calibration", engine.calibration),
        ]  # fmt: skip
    facts = [
        ("target", target(run)),
        *simulated,
        *((name, stored[name]) for name in shown),
        ("KV budget", words.listing([words.data_size(size) for size in budgets])),
        ("KV capacity", _once(capacities)),
        *_launches(run),
        ("CPU threads", _once(map(_threads, servers))),
        ("of this target", _once(str(quirk) for info in servers for quirk in info.server.quirks)),
        ("requests", _once(_text(cell.notes) for cell in run.cells)),
    ]
    return [(name, text) for name, value in facts if (text := _text(value))]


def _once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _threads(info: ServerInfo) -> str:
    """``2, bound to cores 0 and 1``, and what is said of it; empty where the server does not tell."""
    threads, cores = info.resolved.num_threads, info.resolved.bound_cores
    if not threads:
        return ""
    bound = say("provenance.bound", bool(cores), cores=core_words(cores or ()))
    return "; ".join((f"{threads}{bound}", *info.server.notes))


def _launches(run: Run) -> list[tuple[str, str]]:
    """The launch commands, each with the configurations that it was for where there are several; baseline first."""
    names = {cell.config_id: cell.name for cell in sorted(run.cells, key=lambda cell: not cell.is_baseline)}
    servers, commands = run.manifest.servers, {}
    for config_id in dict.fromkeys([*names, *servers]):
        if config_id in servers and (command := shlex.join(servers[config_id].server.command)):
            commands.setdefault(command, []).append(names.get(config_id, config_id))
    if len(commands) < 2:
        return [("launched as", command) for command in commands]
    return [(f"launched as ({words.listing(configurations)})", command) for command, configurations in commands.items()]


def kv_capacity(capacity: Capacity) -> str:
    """Writes the size of a KV cache as far as it is known, `6,144 tokens, 96 MiB of f32`, or nothing."""
    if not (tokens := capacity.capacity_tokens):
        return ""
    size = capacity.kv_bytes or tokens * (capacity.bytes_per_token or 0)
    kind = say("provenance.kind", bool(capacity.kv_type), kind=capacity.kv_type)
    return f"{words.count(tokens)} tokens" + say("provenance.memory", bool(size), size=words.data_size(size), kind=kind)


def made_from(run: Run) -> str:
    """Says how requests came about: scaled lengths, a trace; empty elsewhere."""
    ways: dict[str, list[str]] = {}
    prompts = run.load_section.get("prompts") or {}
    for cell in run.cells:
        if text := _made_from(cell, prompts.get("duration_s")):
            ways.setdefault(text, []).append(cell.load.short)
    if len(ways) < 2:
        return "".join(ways)
    return "; ".join(f"at {words.listing(list(dict.fromkeys(where)))}: {text}" for text, where in ways.items())


def _made_from(cell: MeasuredCell, duration_s: Any) -> str:
    notes, parts = RequestNotes.model_validate({**cell.notes, "duration_s": duration_s}), []
    if scales := [scale for scale in notes.length_scale if scale]:
        parts.append("lengths x " + words.listing([f"{scale:.3g}" for scale in scales]))
    if notes.trace is not None:
        part = say("provenance.part_of_trace", bool(notes.duration_s), seconds=notes.duration_s)
        if notes.rate_scale is not None:
            part += say("provenance.speed", notes.rate_scale == 1, speed=notes.rate_scale)
        parts.append(part)
        if notes.trace_requests:
            parts.append(words.plural(notes.trace_requests, "request"))
        if notes.page_size_of_prompts and notes.trace_page_size:
            parts.append(say("provenance.pages", of=notes.trace_page_size, made=notes.page_size_of_prompts))
    if notes.text is not None:
        parts.append(f"text of {notes.text}")
    if notes.endpoint:
        parts.append(f"sent to {notes.endpoint}")
        if notes.template_tokens is not None:
            parts[-1] += say("provenance.template", tokens=words.plural(int(notes.template_tokens), "token"))
    return ", ".join(parts)


def _text(value: Any) -> str:
    """A manifest's value as text: "model Fast 1, cores 2"; empty for nothing."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, inner in value.items() if (text := _text(inner)))
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_text, value)))
    return "" if value is None else str(value)


# --- Of a simulated run: nothing in it may be taken for a measurement ---


def on_what(run: Run) -> str:
    """Names the simulated GPUs, `4xA100-80GB`; empty for a measured run."""
    if run.simulated is None:
        return ""
    count = run.simulated.tensor_parallel or 1
    return f"{count}x" * (count > 1) + (run.simulated.device or "")


def simulated_details(run: Run) -> list[str]:
    """Says what limits the numbers of a simulated run, the most important first."""
    if not (engine := run.simulated):
        return []
    source = say("provenance.calibrated", bool(engine.calibration), model=engine.cost_model, file=engine.calibration)
    kinds: dict[str, str] = {}  # of sentences that differ in their numbers only the one of the highest load
    for cell in run.by_load:
        for part in RequestNotes.model_validate(cell.notes).cost_model or ():
            for note in part if isinstance(part, list) else [part]:
                kinds.setdefault(re.sub(r"[\d.,]+", "#", note), note)
    return [
        say("provenance.simulated", model=engine.model, device=on_what(run), source=source),
        *(say("provenance.step_times", note=note) for note in kinds.values()),
        say("provenance.no_client"),
        say("provenance.no_answers"),
    ]


# --- The words of the report ---


def glossary(run: Run) -> list[tuple[str, str]]:
    """Returns (word, meaning) in the order of the page."""
    clock = "simulated" if run.simulated else "engine time"
    entries = []
    for word in (name.format(clock=clock) for name in _WORDS):
        meaning = say(
            "provenance.word", word, repeat=repeats_are(run), margin=MARGINS[run.clock] * 100, not_told=NOT_TOLD,
            scatter=SCATTER,
        )  # fmt: skip
        entries.append((f"verdict, {run.clock}" if word == "verdict" else word, meaning))
    return entries + [("layouts", text) for text in code_paths(run)]
