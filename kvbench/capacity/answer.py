"""The answer of ``kvbench plan MODEL``: its figures, its first sentence and its tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from kvbench.capacity.fit import GIB, GpuMemory, PlannedLoad, Settings, memory_of, pick, smallest_fits
from kvbench.capacity.gpus import GPU, known_gpus
from kvbench.capacity.model import PlannedModel
from kvbench.capacity.weights import Weights, weights_of
from kvbench.common.console import make_table
from kvbench.common.errors import UsageError
from kvbench.common.text import count, data_size, decimal, listing, plural

_LENGTHS = (1024, 4096, 8192, 32768, 131072)
_DEFAULT_CONTEXT = 4096
_CONVERTS = "has no FP8 in hardware: the kernel has to convert the KV, which not every engine does"
_OF_VLLM = ("auto", "fp8_e4m3", "fp8_e5m2")  # KV dtypes that vLLM has too
_size = partial(data_size, decimals=2)  # so that products can be checked by hand
DROP_FIRST = ("at best\ntokens/s", "memory\nGiB")  # of the table of GPUs, on a narrow terminal


@dataclass(frozen=True)
class FittingGPUs:
    """GPUs that hold the load, as the table and ``--json`` have them; price: of all of them, None: not given."""

    gpu: str
    count: int
    memory_gib: float
    kv_gib: float
    at_once: int
    tokens_per_s_at_best: float
    price: float | None
    converts_fp8: bool


@dataclass(frozen=True)
class MemoryPlan:
    """A question about a model's memory, and its answer.

    fitting: by kind of GPU the fewest that hold the load
    prices: of one GPU, by name
    memory: of the GPUs that were asked for or picked; None without
    vendor: of those in ``fitting``; None: of any
    """

    model: PlannedModel
    weights: Weights
    settings: Settings
    load: PlannedLoad
    fitting: Sequence[GpuMemory]
    prices: Mapping[str, float]
    memory: GpuMemory | None
    picked: bool
    vendor: str | None = None

    @property
    def sequence_bytes(self) -> int:
        return self.model.sequence_bytes(
            self.load.context, self.settings.kv_cache_dtype, page_size=self.settings.page_size
        )

    @property
    def kv_bytes(self) -> int:
        """The KV of the whole load."""
        return self.load.concurrency * self.sequence_bytes

    @property
    def shows_gpus(self) -> bool:
        """Tests whether the table of GPUs helps: not where named ones hold the load."""
        named = None if self.picked else self.memory
        return bool(self.fitting) and not (named and named.fits(self.load))

    def converts(self, gpu: GPU) -> bool:
        """Tests whether the KV is FP8 and ``gpu`` does not compute in it."""
        return self.settings.kv_cache_dtype.startswith("fp8") and not gpu.fp8

    def fitting_gpus(self) -> list[FittingGPUs]:
        return [
            FittingGPUs(
                gpu=m.gpu.name,
                count=m.count,
                memory_gib=m.count * m.gpu.memory_bytes / GIB,
                kv_gib=m.kv / GIB,
                at_once=m.at_once(self.load.context),
                tokens_per_s_at_best=m.tokens_per_s(self.load),
                price=m.count * self.prices[m.gpu.name] if m.gpu.name in self.prices else None,
                converts_fp8=self.converts(m.gpu),
            )
            for m in self.fitting
        ]


def answer(
    model: PlannedModel,
    settings: Settings,
    *,
    context: int | None = None,
    concurrency: int = 1,
    max_model_len: int | None = None,
    gpus: tuple[int, GPU] | None = None,
    vendor: str | None = None,
    prices: Mapping[str, float] | None = None,
    quantization: str | None = None,
    choose: bool = False,
) -> MemoryPlan:
    """Raises UsageError for a context beyond the model's limit, or GPUs that cannot split the model."""
    limit = max_model_len or model.spec.max_positions or max(context or 0, _DEFAULT_CONTEXT)
    context = context or min(_DEFAULT_CONTEXT, limit)
    if context > limit:
        larger, whose = ("a larger ", "") if max_model_len else ("", f", the limit of {model.name}")
        limited = f"--max-model-len {limit}" if max_model_len else str(limit)
        raise UsageError(
            f"--context {context} is more than {limited}{whose}: give a shorter one, or {larger}--max-model-len"
        )
    load, weights, prices = PlannedLoad(context, concurrency, limit), weights_of(model, quantization), prices or {}
    fitting = smallest_fits(model, weights, known_gpus(vendor), settings, load)
    fitting.sort(
        key=lambda m: (m.gpu.name not in prices, m.count * prices.get(m.gpu.name, 0), m.count * m.gpu.memory_bytes)
    )
    memory = pick(fitting, prices) if choose else None
    if gpus is not None:
        memory = memory_of(model, weights, gpus[1], gpus[0], settings, concurrency)
    return MemoryPlan(model, weights, settings, load, fitting, prices, memory, choose and memory is not None, vendor)


def sentences(a: MemoryPlan) -> list[str]:
    """First whether it fits, then what there is to know about it."""
    load = f"{plural(a.load.concurrency, 'sequence')} of {count(a.load.context)} tokens"
    needed = f"{_size(a.weights.total_bytes)} of weights and {_size(a.kv_bytes)} of KV"
    if (memory := a.memory) is None:
        return [_without_gpus(a, load, needed)]
    lines, gpu = [_on_gpus(a, memory, load, needed)], memory.gpu
    if memory.kv <= 0:
        if memory.weights < memory.taken:
            lines.append("A larger --gpu-memory-utilization or a smaller --max-num-seqs can make room.")
    else:
        if memory.at_once(a.load.max_model_len) == 0:
            lines.append(
                f"vLLM starts only with room for one sequence of its max_model_len ({count(a.load.max_model_len)}): "
                f"start it with --max-model-len {a.load.context} or a little more."
            )
        if memory.at_once(a.load.context) > memory.step.sequences:
            lines.append(
                f"Of these, vLLM runs {count(memory.step.sequences)} at once, its max_num_seqs here; a larger "
                "--max-num-seqs takes memory for activations."
            )
    if not gpu.bfloat16 and a.model.spec.default_dtype == "bfloat16":
        lines.append(f"{gpu.name} has no bfloat16: start the engine with --dtype half.")
    if a.converts(gpu):
        lines.append(f"{gpu.name} {_CONVERTS}.")
    return lines


def _without_gpus(a: MemoryPlan, load: str, needed: str) -> str:
    if not a.fitting:
        vendor = f"{a.vendor.upper()} " if a.vendor else ""
        return (
            f"No: {a.model.name} with {load} needs {needed}, and neither 1, 2, 4 nor 8 of any {vendor}GPU that "
            "kvbench knows hold that."
        )
    if a.prices and not any(memory.gpu.name in a.prices for memory in a.fitting):
        return f"None of the GPUs with a price holds {a.model.name} with {load}: it needs {needed}."
    return f"{a.model.name} with {load} needs {needed}; the table has the GPUs that hold it."


def _on_gpus(a: MemoryPlan, memory: GpuMemory, load: str, needed: str) -> str:
    gpus = f"{memory.count} x {memory.gpu.name}"
    has, does, hold = ("has", "does", "holds") if memory.count == 1 else ("have", "do", "hold")
    if memory.kv <= 0:
        return (
            f"No: {gpus} {has} no room for KV: weights ({_size(memory.weights)}), activations and context of "
            f"{a.model.name} take {_size(memory.taken - memory.kv)} a GPU, and the engine may take "
            f"{_size(memory.taken)}."
        )
    room = f"{_size(memory.kv)} a GPU is left for KV, enough for {count(memory.at_once(a.load.context))} at once"
    if not memory.fits(a.load):
        return f"No: {gpus} {does} not hold {a.model.name} with {load}, which needs {needed}; {room}."
    if a.picked:
        price = a.prices.get(memory.gpu.name)
        why = f"the cheapest at {memory.count * price:.2f} an hour" if price else "the fewest and smallest GPUs"
        return f"Take {gpus}, {why} to hold {a.model.name} with {load}: {needed}; {room}."
    return f"Yes: {gpus} {hold} {a.model.name} with {load}: {needed}; {room}."


def model_table(a: MemoryPlan) -> Table:
    """Makes the table of what the model takes, whatever the GPU."""
    one = count(a.model.token_bytes(a.settings.kv_cache_dtype))
    rows = [
        ("KV of a token", f"{one} bytes", _attention_words(a)),
        (f"a sequence of {count(a.load.context)} tokens", _size(a.sequence_bytes), f"pages of {a.settings.page_size}"),
    ]
    if a.load.concurrency > 1:
        rows.append((f"{count(a.load.concurrency)} of them", _size(a.kv_bytes), ""))
    parameters = f"{a.weights.parameters.total / 1e9:.2f} billion parameters; {a.weights.source}"
    rows.append(("weights", _size(a.weights.total_bytes), parameters))
    return _with_notes(make_table(["", a.model.name, "counted as"], rows))


def _attention_words(a: MemoryPlan) -> str:
    dtype = a.settings.kv_cache_dtype
    kind = "latent (MLA): one row a layer, whole on each GPU" if a.model.layers[0].latent else "K and V of all KV heads"
    words = [kind, f"in {a.model.spec.default_dtype if dtype == 'auto' else dtype}"]
    windowed = [group for group in a.model.layers if group.window is not None]
    if windowed:
        sizes = listing([count(window) for window in sorted({group.window for group in windowed})])
        size = count(sum(a.model.group_bytes(group, dtype) for group in windowed))
        words.append(f"{size} bytes of it in layers that keep only the last {sizes} tokens")
        words.append("where the built-in engine and --simulate keep all")
    return ", ".join(words)


def memory_table(a: MemoryPlan, m: GpuMemory) -> Table:
    """Makes the table of where the memory of each GPU goes."""
    step = f"a step of {count(m.step.tokens)} tokens and {count(m.step.sequences)} sequences, as vLLM tries at start"
    talk = " and of talking to the others" if m.count > 1 else ""
    rows = [
        ("memory", m.gpu.memory_bytes, "as the driver tells it"),
        ("taken", m.taken, f"gpu_memory_utilization {a.settings.gpu_memory_utilization:g}"),
        ("- weights", m.weights, f"split over {m.count}" if m.count > 1 else ""),
        ("- activations", m.activations, step),
        ("- context", m.context, f"of CUDA{talk}; graphs are not counted"),
        ("left for KV", m.kv, ""),
    ]
    entries = [(name, f"{size / GIB:.2f}", note) for name, size, note in rows]
    return _with_notes(make_table([f"{m.count} x {m.gpu.name}", "GiB a GPU", ""], entries))


def _with_notes(table: Table) -> Table:
    """The last column has words, which fold."""
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def concurrency_table(a: MemoryPlan, memory: GpuMemory) -> Table:
    """The most sequences at once by length, paged beside contiguous."""
    heads = ["sequences of", "paged", f"contiguous, reserving {count(a.load.max_model_len)}"]
    rows = [tuple(map(count, row)) for row in _by_length(a, memory)]
    return make_table(heads, rows, title="How many sequences are in memory at once, at most")


def gpus_table(a: MemoryPlan) -> Table:
    """Makes the table of the fewest GPUs of each kind that hold the load; with prices only the priced kinds."""
    heads = ["GPUs", "left for KV,\nGiB a GPU", "sequences\nat once", "memory\nGiB", "at best\ntokens/s"]
    entries, fitting = [], a.fitting_gpus()
    for row in [priced for priced in fitting if priced.price] or fitting:
        entry = [f"{row.count} x {row.gpu}{'*' if row.converts_fp8 else ''}", f"{row.kv_gib:.1f}", count(row.at_once)]
        entry += [decimal(row.memory_gib), count(row.tokens_per_s_at_best)]
        if a.prices:
            entry.insert(1, "–" if row.price is None else f"{row.price:.2f}")
        entries.append(entry)
    if a.prices:
        heads.insert(1, "price\nan hour")
    title = f"GPUs that hold {count(a.load.concurrency)} x {count(a.load.context)} tokens"
    return make_table(heads, entries, title=title)


def footnote(a: MemoryPlan) -> str:
    """Returns what the arithmetic stands for, and the words of the table of GPUs."""
    notes = []
    if a.shows_gpus:
        notes += [f"* {_CONVERTS}."] if any(a.converts(memory.gpu) for memory in a.fitting) else []
        notes.append(
            "At best: weights and KV read once a decode step, at the memory's full bandwidth; no engine reaches it."
        )
    engine = "For vLLM with its defaults"
    if a.settings.kv_cache_dtype not in _OF_VLLM:
        engine = f"For vLLM's memory with the built-in engine's {a.settings.kv_cache_dtype}, its scales counted"
    return "\n".join([*notes, f"{engine}, tensor parallel. How it is counted: docs/commands.md, What fits."])


def as_dict(a: MemoryPlan) -> dict[str, Any]:
    """The same figures for scripts; sizes in bytes but for those named gib."""
    m = a.memory
    return {
        "model": a.model.name,
        "answer": sentences(a)[0],
        "kv_cache_dtype": a.settings.kv_cache_dtype,
        "context": a.load.context,
        "concurrency": a.load.concurrency,
        "max_model_len": a.load.max_model_len,
        "bytes_per_token": a.model.token_bytes(a.settings.kv_cache_dtype),
        "sequence_bytes": a.sequence_bytes,
        "kv_bytes": a.kv_bytes,
        "parameters": a.weights.parameters.total,
        "weight_bytes": a.weights.total_bytes,
        "gpus": [dataclasses.asdict(row) for row in a.fitting_gpus()],
        "memory": m and {
            "gpu": m.gpu.name, "count": m.count, "fits": m.fits(a.load), "picked": a.picked,
            "memory_bytes": m.gpu.memory_bytes, "taken_bytes": m.taken, "weight_bytes": m.weights,
            "activation_bytes": m.activations, "context_bytes": m.context, "kv_bytes": m.kv,
            "max_num_batched_tokens": m.step.tokens, "max_num_seqs": m.step.sequences,
            "at_once": [dict(zip(("tokens", "paged", "contiguous"), row, strict=True)) for row in _by_length(a, m)],
        },
    }  # fmt: skip


def _by_length(a: MemoryPlan, memory: GpuMemory) -> list[tuple[int, int, int]]:
    """Lengths, and the most sequences of each at once: in pages, and each in one piece."""
    limit = a.load.max_model_len
    lengths = sorted({length for length in (*_LENGTHS, a.load.context, limit) if length <= limit})
    contiguous = memory.at_once(limit, contiguous=True)
    return [(length, memory.at_once(length), contiguous) for length in lengths]
