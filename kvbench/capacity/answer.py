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
from kvbench.capacity.sentences import say
from kvbench.capacity.weights import Weights, weights_of
from kvbench.common.console import make_table
from kvbench.common.errors import UsageError
from kvbench.common.text import count, data_size, decimal, listing, plural

_LENGTHS = (1024, 4096, 8192, 32768, 131072)
_DEFAULT_CONTEXT = 4096
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
        named_hold = self.memory is not None and not self.picked and self.memory.fits(self.load)
        return bool(self.fitting) and not named_hold

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
    """Plans a model's memory.

    Raises UsageError for a context beyond the model's limit, or GPUs that cannot split the model.
    """
    limit = max_model_len or model.spec.max_positions or max(context or 0, _DEFAULT_CONTEXT)
    context = context or min(_DEFAULT_CONTEXT, limit)
    if context > limit:
        raise UsageError(say("load.too_long", max_model_len is None, context=context, limit=limit, model=model.name))
    load, weights, prices = PlannedLoad(context, concurrency, limit), weights_of(model, quantization), prices or {}
    fitting = smallest_fits(model, weights, known_gpus(vendor), settings, load)
    fitting.sort(
        key=lambda m: (m.gpu.name not in prices, m.count * prices.get(m.gpu.name, 0), m.count * m.gpu.memory_bytes)
    )
    memory = pick(fitting, prices) if choose else None
    if gpus is not None:
        memory = memory_of(model, weights, gpus[1], gpus[0], settings, concurrency)
    return MemoryPlan(model, weights, settings, load, fitting, prices, memory, choose and memory is not None, vendor)


def sentences(plan: MemoryPlan) -> list[str]:
    """Lists first whether it fits, then what else there is to know."""
    if (memory := plan.memory) is None:
        return [_without_gpus(plan)]
    lines, gpu = [_on_gpus(plan, memory)], memory.gpu
    if memory.kv <= 0:
        if memory.weights < memory.taken:
            lines.append(say("hint.make_room"))
    else:
        if memory.at_once(plan.load.max_model_len) == 0:
            lines.append(say("hint.shorter_limit", limit=count(plan.load.max_model_len), context=plan.load.context))
        if memory.at_once(plan.load.context) > memory.step.sequences:
            lines.append(say("hint.at_once", sequences=count(memory.step.sequences)))
    if not gpu.bfloat16 and plan.model.spec.default_dtype == "bfloat16":
        lines.append(say("hint.no_bfloat16", gpu=gpu.name))
    if plan.converts(gpu):
        lines.append(say("hint.converts", gpu=gpu.name))
    return lines


def _asked(plan: MemoryPlan) -> dict[str, str]:
    """Writes the model, the load and what they need, for every answer."""
    sequences = plural(plan.load.concurrency, "sequence")
    return {
        "model": plan.model.name,
        "load": say("load.sequences", sequences=sequences, context=count(plan.load.context)),
        "needs": say("load.needs", weights=_size(plan.weights.total_bytes), kv=_size(plan.kv_bytes)),
    }


def _without_gpus(plan: MemoryPlan) -> str:
    asked = _asked(plan)
    if not plan.fitting:
        vendor = say("answer.vendor", plan.vendor is not None, vendor=(plan.vendor or "").upper())
        return say("answer.nothing_holds", vendor=vendor, **asked)
    if plan.prices and not any(memory.gpu.name in plan.prices for memory in plan.fitting):
        return say("answer.nothing_priced_holds", **asked)
    return say("answer.some_hold", **asked)


def _on_gpus(plan: MemoryPlan, memory: GpuMemory) -> str:
    asked = {**_asked(plan), "gpus": say("memory.gpus", count=memory.count, gpu=memory.gpu.name)}
    if memory.kv <= 0:
        sizes = {"weights": memory.weights, "used": memory.taken - memory.kv, "taken": memory.taken}
        sizes = {name: _size(value) for name, value in sizes.items()}
        return say("answer.no_room", n=memory.count, model=asked["model"], gpus=asked["gpus"], **sizes)
    asked["room"] = say("answer.room", kv=_size(memory.kv), at_once=count(memory.at_once(plan.load.context)))
    if not memory.fits(plan.load):
        return say("answer.too_small", n=memory.count, **asked)
    if not plan.picked:
        return say("answer.holds", n=memory.count, **asked)
    if price := plan.prices.get(memory.gpu.name):
        return say("answer.take", "price", price=memory.count * price, **asked)
    return say("answer.take", "size", **asked)


def model_table(plan: MemoryPlan) -> Table:
    """Makes the table of what the model takes, whatever the GPU."""
    one = count(plan.model.token_bytes(plan.settings.kv_cache_dtype))
    number, layers = plan.model.page_groups
    pages = say("model.pages", number > 1, size=plan.settings.page_size, number=number, layers=layers)
    rows = [
        ("KV of a token", say("model.token", size=one), _attention_words(plan)),
        (say("model.sequence", tokens=count(plan.load.context)), _size(plan.sequence_bytes), pages),
    ]
    if plan.load.concurrency > 1:
        rows.append((say("model.sequences", n=count(plan.load.concurrency)), _size(plan.kv_bytes), ""))
    billions = plan.weights.parameters.total / 1e9
    parameters = say("model.parameters", billions=billions, source=plan.weights.source)
    rows.append(("weights", _size(plan.weights.total_bytes), parameters))
    return _with_notes(make_table(["", plan.model.name, "counted as"], rows))


def _attention_words(plan: MemoryPlan) -> str:
    dtype = plan.settings.kv_cache_dtype
    stored = plan.model.spec.default_dtype if dtype == "auto" else dtype
    words = say("model.attention", plan.model.layers[0].kv.latent, dtype=stored)
    if windowed := [group for group in plan.model.layers if group.window is not None]:
        windows = listing([count(window) for window in sorted({group.window for group in windowed})])
        size = count(sum(plan.model.group_bytes(group, dtype) for group in windowed))
        words += say("model.windows", len(windowed) == len(plan.model.layers), size=size, windows=windows)
    return words


def memory_table(plan: MemoryPlan, m: GpuMemory) -> Table:
    """Makes the table of where the memory of each GPU goes."""
    rows = [
        ("memory", m.gpu.memory_bytes, "as the driver tells it"),
        ("taken", m.taken, say("memory.utilization", share=plan.settings.gpu_memory_utilization)),
        ("- weights", m.weights, say("memory.split", n=m.count)),
        ("- activations", m.activations,
         say("memory.step", tokens=count(m.step.tokens), sequences=count(m.step.sequences))),
        ("- context", m.context, say("memory.context", n=m.count)),
        ("left for KV", m.kv, ""),
    ]  # fmt: skip
    entries = [(name, format(size / GIB, ".2f"), note) for name, size, note in rows]
    return _with_notes(make_table([say("memory.gpus", count=m.count, gpu=m.gpu.name), "GiB a GPU", ""], entries))


def _with_notes(table: Table) -> Table:
    """Lets the last column, which has words, fold."""
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def concurrency_table(plan: MemoryPlan, memory: GpuMemory) -> Table:
    """Makes the table of the most sequences at once by length, paged beside contiguous."""
    heads = ["sequences of", "paged", say("memory.reserving", tokens=count(plan.load.max_model_len))]
    rows = [tuple(map(count, row)) for row in _by_length(plan, memory)]
    return make_table(heads, rows, title="How many sequences are in memory at once, at most")


def gpus_table(plan: MemoryPlan) -> Table:
    """Makes the table of the fewest GPUs of each kind that hold the load; with prices only the priced kinds."""
    heads = ["GPUs", "left for KV,\nGiB a GPU", "sequences\nat once", "memory\nGiB", "at best\ntokens/s"]
    entries, fitting = [], plan.fitting_gpus()
    for row in [priced for priced in fitting if priced.price] or fitting:
        name = say("gpus.name", row.converts_fp8, count=row.count, gpu=row.gpu)
        numbers = (decimal(row.kv_gib), count(row.at_once), decimal(row.memory_gib), count(row.tokens_per_s_at_best))
        prices = [say("gpus.price", row.price is not None, price=row.price)] if plan.prices else []
        entries.append([name, *prices, *numbers])
    if plan.prices:
        heads.insert(1, "price\nan hour")
    title = say("gpus.title", sequences=count(plan.load.concurrency), tokens=count(plan.load.context))
    return make_table(heads, entries, title=title)


def footnote(plan: MemoryPlan) -> str:
    """Says which engine the arithmetic is for, and what the words of the table of GPUs mean."""
    dtype = plan.settings.kv_cache_dtype
    notes = [say("hint.engine", dtype in _OF_VLLM, dtype=dtype)]
    if plan.shows_gpus:
        notes.insert(0, say("hint.best"))
        if any(plan.converts(memory.gpu) for memory in plan.fitting):
            notes.insert(0, say("hint.converts", gpu="*"))
    return "\n".join(notes)


def as_dict(plan: MemoryPlan) -> dict[str, Any]:
    """The same figures for scripts; sizes in bytes but for those named gib."""
    m = plan.memory
    return {
        "model": plan.model.name,
        "answer": sentences(plan)[0],
        "kv_cache_dtype": plan.settings.kv_cache_dtype,
        "context": plan.load.context,
        "concurrency": plan.load.concurrency,
        "max_model_len": plan.load.max_model_len,
        "bytes_per_token": plan.model.token_bytes(plan.settings.kv_cache_dtype),
        "sequence_bytes": plan.sequence_bytes,
        "kv_bytes": plan.kv_bytes,
        "parameters": plan.weights.parameters.total,
        "weight_bytes": plan.weights.total_bytes,
        "gpus": [dataclasses.asdict(row) for row in plan.fitting_gpus()],
        "memory": m and {
            "gpu": m.gpu.name, "count": m.count, "fits": m.fits(plan.load), "picked": plan.picked,
            "memory_bytes": m.gpu.memory_bytes, "taken_bytes": m.taken, "weight_bytes": m.weights,
            "activation_bytes": m.activations, "context_bytes": m.context, "kv_bytes": m.kv,
            "max_num_batched_tokens": m.step.tokens, "max_num_seqs": m.step.sequences,
            "at_once": [dict(zip(("tokens", "paged", "contiguous"), row, strict=True)) for row in _by_length(plan, m)],
        },
    }  # fmt: skip


def _by_length(plan: MemoryPlan, memory: GpuMemory) -> list[tuple[int, int, int]]:
    """Lengths, and the most sequences of each at once: in pages, and each in one piece."""
    limit = plan.load.max_model_len
    lengths = sorted({length for length in (*_LENGTHS, plan.load.context, limit) if length <= limit})
    contiguous = memory.at_once(limit, contiguous=True)
    return [(length, memory.at_once(length), contiguous) for length in lengths]
