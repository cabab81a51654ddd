"""The use of the KV bytes: the ledger as table and sentence, and what the memory is divided into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvbench.common import text as words
from kvbench.report import tables
from kvbench.report.comparisons import Comparisons, best
from kvbench.report.quality import times
from kvbench.report.tables import NONE, Column, Part, ReportTable, Section, Value
from kvbench.report.wording import say
from kvbench.runs.kv_ledger import Ledger, bytes_per_slot, ledger, scale_bytes_per_slot, swapped_bytes
from kvbench.runs.model import DOUBTS, MeasuredCell, number
from kvbench.runs.results import Manifest
from kvbench.workload.settings import effective

USES = {
    "tokens": "tokens", "waste": "reserved, empty", "cached": "cached", "pinned": "pinned", "free": "free",
    "fragmented": "free, scattered", "table": "page table", "rest": "left over",
}  # fmt: skip
"""A use of the budget's bytes -> its title; what it is: ``tables.hint`` in the file of sentences."""
_BESIDE = ("kv_saved", "swapped", "recomputed_tokens")  # columns that are shown where they are not 0 throughout
_SAID = ("fragmented", "cached", "free")  # uses that a sentence names beside tokens and waste, from 1 % on

Ledgers = Mapping[str, Ledger]  # by cell id


def ledgers_of(cells: Sequence[MeasuredCell]) -> dict[str, Ledger]:
    """Returns the ledger of each cell whose server tells its uses, by cell id."""
    return {cell.cell_id: uses for cell in cells if (uses := ledger(cell)) is not None}


def kv_parts(comparisons: Comparisons, manifest: Manifest) -> Iterator[Part]:
    """The chapter on the KV's bytes: sentences and tables."""
    ledgers = ledgers_of(comparisons.by_load)
    yield ledger_sentence(comparisons, ledgers)
    yield from (reservation(contiguous) for _, contiguous in list(comparisons.pairs.values())[-1:])
    table = ledger_table(comparisons.by_load, ledgers)
    notes = [say("kv.note"), *(say("kv.column_note", shown.key) for shown in table.columns if shown.key in _BESIDE)]
    yield Section("ledger", "Use by use", table, " ".join(notes))
    memory = memory_table(comparisons.cells, manifest)
    yield Section("memory", "Bytes a token, scales and page table", memory)


# --- Tables ---


def _token_bytes(cell: MeasuredCell) -> float | None:
    """The bytes of a token's KV: a slot's, or the mean over a sequence where windows let go of tokens."""
    return cell.capacity.bytes_per_token if cell.capacity.has_windows else bytes_per_slot(cell)


def _token_scale_bytes(cell: MeasuredCell) -> float | None:
    """The part of ``_token_bytes`` that scales take."""
    return cell.capacity.scale_bytes_per_token if cell.capacity.has_windows else scale_bytes_per_slot(cell)


def ledger_table(cells: Sequence[MeasuredCell], ledgers: Ledgers) -> ReportTable:
    """Configuration, load, the uses that have any bytes, the budget, and what is no part of the budget."""

    def use_column(use: str) -> Column:
        def value(cell: MeasuredCell) -> Value:
            uses = ledgers[cell.cell_id]
            size, share = uses.parts[use], uses.share(use)
            scales = uses.scales * (use == "tokens") or None
            note = say("kv.with_scales", bool(size), size=size, scales=scales)
            return tables.entry(share, words.percent(share), note)

        return tables.column(f"kv_{use}", USES[use], value)

    columns = [
        *tables.identity_columns(),
        *(use_column(use) for use in USES if any(uses.parts[use] > 0 for uses in ledgers.values())),
        tables.number_column("kv_budget", "budget", lambda cell: ledgers[cell.cell_id].budget, _size),
        tables.number_column("kv_saved", "saved by sharing", lambda cell: ledgers[cell.cell_id].saved, _size),
        tables.column("swapped", "swapped out", _swapped),
        tables.recomputed_column(),
    ]
    return tables.cell_table(columns, [cell for cell in cells if cell.cell_id in ledgers], not_zero=_BESIDE)


def memory_table(measured: Sequence[MeasuredCell], manifest: Manifest) -> ReportTable:
    """A row a configuration on its KV budget: bytes a token, scales, page table, tokens it holds.

    Of the highest load of each; empty where neither the server nor the arithmetic before the sweep tells.
    """
    last = {cell.name: cell for cell in measured}  # loads ascend

    def outliers(cell: MeasuredCell) -> Value:
        facts = manifest.server_of(cell.config_id).kv_outliers
        if facts.k is None or facts.v is None:
            return NONE
        return tables.entry(facts.k, times(facts.k), say("kv.of_v", ratio=times(facts.v)))

    def capacity(cell: MeasuredCell) -> float | None:
        return number(cell.capacity.capacity_tokens)

    columns = [
        tables.identity_columns()[0],
        tables.number_column("kv_token", "a token", _token_bytes, _size),
        tables.number_column("kv_token_scales", "of it scales", _token_scale_bytes, _size),
        tables.number_column("kv_capacity", "capacity, tokens", capacity, words.count),
        tables.column("kv_page_table", "page table", _page_table),
        tables.column("kv_outliers", "largest channel", outliers),
    ]
    return tables.cell_table(
        columns, [cell for cell in last.values() if bytes_per_slot(cell) is not None], numbers_from=1
    )


def _size(value: float | None) -> str:
    return "0" if value == 0 else words.data_size(value)


def _page_table(cell: MeasuredCell) -> Value:
    size = max(cell.observed("page_table_bytes").values(), default=number(cell.capacity.page_table_bytes))
    budget = cell.capacity.kv_budget_bytes
    return tables.entry(size, _size(size), f"{size / budget * 100:.2g} %" if size and budget else "")


def _swapped(cell: MeasuredCell) -> Value:
    out, back = swapped_bytes(cell), swapped_bytes(cell, "in")
    if not out:
        return tables.entry(out, "0")
    lost = cell.counter("swap_lost_slots_total") or 0.0
    lost_words = words.plural(lost, "token") * bool(lost)
    return tables.entry(out, words.data_size(out), say("kv.back", size=back, lost=lost_words))


# --- Sentences ---


def reservation(contiguous: MeasuredCell) -> str:
    """Says what contiguous reserves for a request and what requests needed; empty where not known."""
    slots = contiguous.settings.get("max_model_len") or contiguous.capacity.max_model_len
    requests = contiguous.requests()
    if effective(contiguous.settings, "reservation") != "max" or not slots or requests.empty:
        return ""
    tokens = requests["prompt_tokens"] + requests["output_tokens"]
    longest = words.plural(int(tokens.max()), "token")
    return say("kv.reservation", name=contiguous.name, slots=slots, longest=longest, mean=float(tokens.mean()))


def ledger_sentence(comparisons: Comparisons, ledgers: Ledgers) -> str:
    """Says where the bytes of the headline's pair went, else of the baseline or the best; "" without data."""
    for paged, contiguous in reversed(comparisons.pairs.values()):
        if paged.cell_id in ledgers and contiguous.cell_id in ledgers:
            doubt = min(filter(None, (paged.doubt, contiguous.doubt)), key=DOUBTS.index, default="valid")
            first = _filled(contiguous, ledgers[contiguous.cell_id], " of the KV budget")
            second = _filled(paged, ledgers[paged.cell_id])
            text = say("kv.pair", load=paged.load.label, first=first, second=second)
            return text + say("kv.doubt", doubt)
    for load in reversed(comparisons.loads):
        cell = comparisons.baselines[load] or best(comparisons.at(load))
        if cell is not None and cell.cell_id in ledgers:
            return say("kv.alone", load=load.label, cell=_filled(cell, ledgers[cell.cell_id], " of the KV budget"))
    return ""


def _filled(cell: MeasuredCell, uses: Ledger, whole: str = "") -> str:
    """Writes `contiguous held tokens in 12 % of the KV budget and wasted 76 % on reserved, empty slots (12 % free)`."""
    named = [use for use in _SAID if uses.share(use) >= 0.01]
    more = ", ".join(say("kv.named", use, share=uses.share(use), use=use) for use in named)
    shares = {use: uses.share(use) for use in ("tokens", "waste")}
    return say("kv.filled", name=cell.name, whole=whole, more=more, **shares)
