"""What the manifest tells: whether the run is valid, what limits its numbers, where it came from; and the glossary."""

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
from kvbench.requests.prefix_hits import hit_notes
from kvbench.runs.manifest import resumed_differences
from kvbench.runs.model import MeasuredCell, Run, number
from kvbench.runs.results import Capacity
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.cores import core_words
from kvbench.targets.launch_plan import is_template, placeholders
from kvbench.targets.presets import GENERIC

CODE_PATHS = (
    "The layouts differ in two code paths besides the page table: on the CPU a prefill chunk reads contiguous KV in "
    "place, where paged KV is gathered first; and paged admission keeps some pages spare for the sequences that run."
)
_SIMULATED_CODE_PATHS = (
    "The layouts differ besides the page table: paged admission keeps some pages spare for sequences that run."
)
_REPEATS = {  # whether the server ran before -> what one repeat is
    True: (
        "The server was running before and was the same throughout: one repeat is every load once more, with requests "
        "of its own. Repeats on one server are not independent, and their spread says less than that of freshly "
        "launched ones."
    ),
    False: (
        "One repeat is a freshly launched server of each configuration under identical requests; ratios are formed "
        "within a repeat. Requests of one server are not independent and never pooled for a comparison."
    ),
}
_SIMULATED_REPEATS = (
    "One repeat is the same simulated engines anew under other requests, drawn from the seed, identical for all "
    "configurations; ratios are formed within a repeat. Nothing else varies between repeats."
)
_SHOWN = (
    "started", "ended", "status", "model", "profile", "device", "cpu", "gpus", "dtype", "seeds", "git", "versions",
)  # fmt: skip
_OF_THIS_MACHINE = ("cpu", "gpus")  # of which nothing depends in a simulation
SKIPPED = "skipped "  # how the note on a configuration that was not run begins


_Lenient = Annotated[float | None, BeforeValidator(number)]  # None where it is no finite number


class RequestNotes(Record):
    """The notes of a cell on how its requests were made, and on the part of a trace; None where there are none."""

    length_scale: Annotated[
        tuple[_Lenient, ...], BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,))
    ] = ()
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


@dataclass(frozen=True)
class Validity:
    """The ``status`` of a run (valid | wrong | invalid | incomplete | empty) and the reasons for it."""

    status: str
    reasons: tuple[str, ...]


def validity(run: Run) -> Validity:
    """Wrong answers outrank invalid cells, and these an incomplete run; failed requests are named in any case."""
    wrong = [
        f"WRONG ANSWERS in {c.name} at {c.load.short}: {words.and_more(c.wrong_answers, 1, '; ')}, all of them in "
        f"cells/{c.cell_id}/{WRONG_ANSWERS}"
        for c in run.cells
        if c.wrong_answers
    ]
    invalid = _grouped_reasons(run.cells)
    failed = []
    for cell in run.cells:
        if count := cell.count("failed"):
            why = failed_words(cell.failure_messages, count, cell.sent)
            less = "; the server did less work, so the cell is compared with no other" * (cell.doubt == "refused")
            failed.append(f"{cell.name} at {cell.load.short}: {why}{less}")
    incomplete = [f"planned but not measured: {', '.join(run.missing)}"] if run.missing else []
    if run.not_kept:
        cells = words.plural(len(run.missing), "cell")
        incomplete = [f"the files of its {cells} are not kept here, so nothing that was served is shown"]
    incomplete += [*run.short, *run.problems]
    if run.cells and not (wrong or invalid or incomplete) and run.status != "complete":
        incomplete = [f"the run's status is {run.status!r}"]
    status = "wrong" if wrong else "invalid" if invalid else "incomplete" if incomplete else "valid"
    return Validity(status if run.cells else "empty", tuple(wrong + invalid + incomplete + failed))


def _grouped_reasons(cells: Sequence[MeasuredCell]) -> list[str]:
    """Lists why cells are invalid, one line a kind of reason: the first in full, then the cells that have the same.

    Reasons that differ only in their numbers or their repeat are of one kind: thirty lagging loads are one finding.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for cell in cells:
        for reason in (cell.invalid_reasons or ("no reason recorded",)) if cell.doubt == "invalid" else ():
            plain = re.sub(r"^repeat \d+: ", "", reason)
            where = f"{cell.name} at {cell.load.short}"
            kinds.setdefault(re.sub(r"\d[\d.,]*", "#", plain), []).append((plain, where))
    lines = []
    for (reason, where), *others in kinds.values():
        line = f"{where}: {reason.rstrip('.')}"
        if others:
            line += f" (and {len(others)} more like it: {', '.join(dict.fromkeys(each for _, each in others))})"
        lines.append(line)
    return lines


def warnings(run: Run) -> list[str]:
    """Limits of what the numbers say, also of a valid run."""
    fewest = min((len(cell.repeats) for cell in run.cells), default=3)
    scattered = [
        f"{c.name} at {c.load.short} ({words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)})"
        for c in run.cells
        if (s := scatters(c))
    ]
    loads = [repeat for cell in run.cells for repeat in cell.repeats]
    unverified = [load.prefix_cache.unverified for load in loads if load.prefix_cache.unverified]
    hits = [notes for load in loads if (notes := hit_notes(load.prefix_cache))]
    hits_differ = list(dict.fromkeys(note for notes in hits for note in notes))
    resumed = resumed_differences(run.manifest)
    found = {
        "Load generator and engine shared this machine and competed for its cores.": run.manifest.shared_machine,
        f"Some cells have {words.plural(fewest, 'repeat')} only: under 3 there is no interval, and with one there is "
        "no spread at all.": fewest < 3,
        f"The repeats scatter: output tokens/s of one cell differ by more than {SCATTER:g}x between repeats in "
        f"{words.listing(scattered)}. Other work on the machine is a common cause.": scattered,
        **{
            f"{words.upper_first(note)}.": True
            for note in (*repeat_notes(run.manifest, run.cells), *run.manifest.notes)
            if not note.startswith(SKIPPED)
        },
        f"The run was resumed in another environment; different: {words.listing(resumed)}. "
        "What was measured before and after is not comparable as it stands.": resumed,
        f"That the prefix cache was {run.cache_state}, as declared, is not verified in {len(unverified)} of "
        f"{len(loads)} loads: {'; '.join(dict.fromkeys(unverified))}.": unverified,
        f"Prefix-cache hits in {len(hits)} of {len(loads)} loads: {words.and_more(hits_differ, 2, '; ')}.": hits,
        "The working tree had uncommitted changes: the commit alone does not reproduce this run.": (
            run.manifest.git.dirty
        ),
        "Some cells have no server metrics (a server without kvbench's /metrics): running sequences, KV usage, waste "
        "and preemptions are unknown there.": any(cell.gauges().empty for cell in run.cells),
        "The model has random weights: speeds and memory are real, the text is not.": random_weights(run),
    }
    return [text for text, holds in found.items() if holds]


def random_weights(run: Run) -> bool:
    """Tests whether the workload asks for them; a model of which nothing is known counts as trained."""
    return not run.simulated and ("load_format", "dummy") in _workload_model(run).items()


def code_paths(run: Run) -> list[str]:
    """A sentence on what besides the page table distinguishes the built-in engine's layouts, in a run of both."""
    both = any(cell.is_contiguous for cell in run.cells) and any(cell.is_paged for cell in run.cells)
    return [_SIMULATED_CODE_PATHS if run.simulated else CODE_PATHS] if both and run.is_built_in else []


def repeats_are(run: Run) -> str:
    """A sentence on what one repeat is: a freshly launched server, or the one that ran throughout."""
    return _SIMULATED_REPEATS if run.simulated else _REPEATS["://" in str(run.manifest.target)]


def reproduce(run: Run) -> str:
    """The command line that made the run; empty when the manifest has none."""
    return shlex.join(run.manifest.command)


def brief(run: Run) -> list[str]:
    """When, which server, which model, on what: the line under the headline."""
    started = re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1 \2 UTC", run.manifest.started or "")
    return [str(fact) for fact in (started, target(run), model_name(run), run.manifest.device) if fact]


def model_name(run: Run) -> str:
    """The name of the model that was served; empty where nobody told."""
    return model_of(run.manifest.model or _workload_model(run))


def model_of(model: Mapping[str, Any]) -> str:
    """A model's name, else its configuration or its path."""
    return str(next((model[key] for key in ("name", "config", "path") if model.get(key)), ""))


def target(run: Run) -> str:
    """The server that was measured, with its version: "vLLM 0.32.0"; empty for the built-in one."""
    shown = []
    for info in run.manifest.servers.values():
        server, title = info.server, info.server.title
        if server.kind == GENERIC.name:  # known by its command only
            title = textwrap.shorten(shlex.join(server.command), 80, placeholder=" ...") or title
        shown.append(" ".join(filter(None, (title, info.versions.get(server.kind)))))
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
    """Facts about the run as (name, text)."""
    stored = {"model": _workload_model(run), **run.manifest.to_json()}
    shown = [name for name in _SHOWN if name in stored and not (run.simulated and name in _OF_THIS_MACHINE)]
    budgets = sorted({c.capacity.kv_budget_bytes for c in run.cells} - {None})
    capacities = [f"{kv_capacity(c.capacity)} ({c.name})" for c in run.cells if c.capacity.capacity_tokens]
    servers, known = run.manifest.servers.values(), run.simulated
    simulated = known and {
        "simulated": f"{known.model} on {on_what(run)}", "step times": known.cost_model, "ops": known.ops,
        "calibration": known.calibration,
    }  # fmt: skip
    facts = [
        ("target", target(run)),
        *(simulated.items() if known else ()),
        *((name, stored[name]) for name in shown),
        ("KV budget", words.listing([words.data_size(b) for b in budgets])),
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
    bound = f", bound to {core_words(cores)}" if cores else ""
    return "; ".join((f"{threads}{bound}", *info.server.notes)) if threads else ""


def _launches(run: Run) -> list[tuple[str, str]]:
    """The launch commands, each with the configurations that it was for where there are several; baseline first."""
    names = {c.config_id: c.name for c in sorted(run.cells, key=lambda c: not c.is_baseline)}
    servers, commands = run.manifest.servers, {}
    for config_id in dict.fromkeys([*names, *servers]):
        if config_id in servers and (command := shlex.join(servers[config_id].server.command)):
            commands.setdefault(command, []).append(names.get(config_id, config_id))
    several = len(commands) > 1
    return [(f"launched as ({words.listing(of)})" if several else "launched as", text) for text, of in commands.items()]


def made_from(run: Run) -> str:
    """A phrase on how requests came about: scaled lengths, a trace; empty elsewhere."""
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
        speed = notes.rate_scale
        pace = "" if speed is None else " at its own speed" if speed == 1 else f" at {speed:g} of its speed"
        parts.append((f"{notes.duration_s:g} s of the trace" if notes.duration_s else "the trace") + pace)
        if notes.trace_requests:
            parts.append(words.plural(notes.trace_requests, "request"))
        if notes.page_size_of_prompts and notes.trace_page_size:
            sizes = f"{notes.trace_page_size:g} tokens made {notes.page_size_of_prompts:g}"
            parts.append(f"prompts share its pages, {sizes}")
    if notes.text is not None:
        parts.append(f"text of {notes.text}")
    if notes.endpoint:
        tokens = notes.template_tokens
        adds = "" if tokens is None else f", whose chat template adds {words.plural(int(tokens), 'token')}"
        parts.append(f"sent to {notes.endpoint}{adds}")
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
    """4xA100-80GB; empty for a measured run."""
    count = (run.simulated.tensor_parallel or 1) if run.simulated else 1
    return f"{f'{count}x' if count > 1 else ''}{(run.simulated.device or '') if run.simulated else ''}"


def title(run: Run) -> str:
    """The workload, marked where the run is simulated."""
    return f"{run.workload} (simulated)" if run.simulated else run.workload


def simulated_details(run: Run) -> list[str]:
    """Sentences on what limits the numbers of a simulated run, the most important first."""
    if not (known := run.simulated):
        return []
    source = f"{known.cost_model}{f' by {known.calibration}' if known.calibration else ', not calibrated'}"
    kinds: dict[str, str] = {}  # of sentences that differ in their numbers only the one of the highest load
    for cell in run.by_load:
        for part in RequestNotes.model_validate(cell.notes).cost_model or ():
            for note in part if isinstance(part, list) else [part]:
                kinds.setdefault(re.sub(r"[\d.,]+", "#", note), note)
    return [
        f"Nothing was measured: kvbench's own scheduler, pages and prefix cache ran on a virtual clock as "
        f"{known.model} on {on_what(run)}, with step times from a cost model ({source}).",
        *(f"Of the step times: {note}." for note in kinds.values()),
        "There is no client and no network: TTFT begins when a request reaches the engine, and no request times out.",
        "A simulation computes no answers: what a quantised KV, or any other change, does to them is for "
        "`kvbench quality`.",
    ]


# --- The words of the report ---

_SIMULATED = (
    "simulated",
    "On a virtual clock: scheduler, pages, prefix cache and swap are the built-in engine's own, and a cost model says "
    "how long each step takes on the device.",
)
_ENGINE_TIME = (
    "engine time",
    "The engine's own time, without HTTP and load client, of configurations in turns step by step. Served: as the load "
    "client saw it over HTTP.",
)


def glossary(run: Run) -> list[tuple[str, str]]:
    """(word, meaning) in the order of the page."""
    return [
        (
            "pays",
            "Output tokens/s ahead of the baseline, and neither p95 TTFT nor p95 ITL behind. Little: the gain may be "
            "smaller than what is called level.",
        ),
        ("at a risk; costs", "At a risk: ahead, and a p95 or another load behind. Costs: output tokens/s behind."),
        (
            "not decided",
            "The interval holds both a gain and a loss: the run shows neither a difference nor that there is none.",
        ),
        (
            "safe",
            "`kvbench quality` found the answers within the limits, each the noise of two equal runs and a margin; or, "
            "in full precision, all of 20 or more canaries under load were right. Not safe: outside a limit.",
        ),
        _SIMULATED if run.simulated else _ENGINE_TIME,
        ("ttft", "Time to first token of any kind, from the send (closed loop) or the intended start (open loop)."),
        ("ttfo", "Time to first output (text or tool call), shown where it is not ttft: reasoning comes before it."),
        (
            "reasoning",
            "From a request's first chunk of reasoning to its first output. Output tok/s without reasoning counts the "
            "output tokens that the usage does not call reasoning, in the chunks from the first output on.",
        ),
        ("tpot", "Time per output token of one request: (last chunk − first chunk) / (output tokens − 1)."),
        ("itl, e2el", "Each gap between two chunks, pooled over requests; and from the start to the last chunk."),
        ("client queue", "Where a cap limits the requests in flight: the wait in the client, which is part of ttft."),
        ("goodput", "Requests/s that met every limit of the workload's SLO; failed requests meet none."),
        (
            "steady window",
            "Closed loop: while the asked-for concurrency was reached. Open loop: from the end of the climb to the "
            "last arrival. Latencies are of the requests due in it, if they are 60 % of all, else of the whole run.",
        ),
        (
            "prefix hits",
            'Share of prompt tokens that the prefix cache served; "of a–b": what these prompts allow in the declared '
            "state of the cache. A share outside makes the load invalid.",
        ),
        ("waste", "Token slots reserved by a sequence and holding nothing yet, as a share of what is reserved."),
        ("free, scattered", "Contiguous layout: free slots that would hold a waiting request, but in no single hole."),
        (
            "failed",
            "A request without a finish reason, the end of its stream, or a usage that matches what was streamed. It "
            "is in no latency and no throughput.",
        ),
        ("repeat", repeats_are(run)),
        (
            f"verdict, {run.clock}",
            f"From 3 repeats on. Level: every repeat's ratio within {MARGINS[run.clock] * 100:g} % of 1. Ahead or "
            f"behind: not level, and the 95 % t interval of the mean log ratio excludes 1. All else is {NOT_TOLD}. "
            f"Repeats scatter when the largest throughput of a cell is over {SCATTER:g} times its smallest.",
        ),
        *(("layouts", text) for text in code_paths(run)),
    ]


def kv_capacity(capacity: Capacity) -> str:
    """6,144 tokens, 96 MiB of f32: what a KV cache holds, as far as it is known; empty where nothing is."""
    if not (tokens := capacity.capacity_tokens):
        return ""
    a_token, kind = capacity.bytes_per_token, capacity.kv_type
    held = capacity.kv_bytes or (tokens * a_token if a_token else None)
    size = f", {words.data_size(held)}" if held else ""
    return f"{words.count(tokens)} tokens{size}{f' of {kind}' if held and kind else ''}"
