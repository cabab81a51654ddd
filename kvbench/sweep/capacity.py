"""The table of ``kvbench plan``: what the KV budget of each configuration holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvbench.workload.design import Configuration, Design
from kvbench.workload.settings import effective

_UNKNOWN = "at start"  # the GPU's free memory decides


@dataclass(frozen=True)
class _Column:
    """``optional``: shown only where a configuration has something other than 0 there. ``by_length``: what stands there
    for reservations by a request's own length, of which no size and no number is known: given their kind."""

    title: str
    of: Callable[[Mapping[str, Any]], float]
    render: Callable[[float], str] = "{:,.0f}".format
    optional: bool = False
    by_length: Callable[[str], str] | None = None


_COLUMNS = (
    _Column("budget MiB", lambda k: k["kv_budget_bytes"] / 2**20, "{:,.1f}".format),
    _Column("bytes/\ntoken", lambda k: k["bytes_per_token"]),
    _Column("of it\nscales", lambda k: k["scale_bytes_per_token"], optional=True),
    _Column("page\nsize", lambda k: k["page_size"], by_length=str),
    _Column("pages", lambda k: k["num_pages"], by_length=lambda kind: "–"),
    _Column("tokens", lambda k: k["capacity_tokens"]),
    _Column("page table\nKiB", lambda k: k["page_table_bytes"] / 1024, "{:,.1f}".format),
    _Column("at once*", lambda k: k["max_concurrency_at_max_len"]),
    _Column("swap\nMiB", lambda k: k["swap_space_bytes"] / 2**20, "{:,.1f}".format, optional=True),
    _Column("swap\ntokens", lambda k: k["swap_tokens"], optional=True),
)


def capacity_table(
    what: str, design: Design, capacity: Mapping[str, Mapping[str, Any]]
) -> tuple[Table, tuple[str, ...]]:
    """The table, a row a configuration, and the notes beneath it. ``capacity``: config id -> check_configuration."""
    sized = [known for known in capacity.values() if "num_pages" in known]
    shown = [c for c in _COLUMNS if not c.optional or any(c.of(known) for known in sized)]
    table = Table(title=f"{what}: what the KV budget holds")
    table.add_column("configuration", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    for configuration in design.configurations:
        known = capacity[configuration.config_id]
        if "num_pages" in known:
            entries = [_entry(column, configuration, known) for column in shown]
        else:
            entries = [_UNKNOWN] * len(shown)
        table.add_row(configuration.config_id, *entries)
    lengths = sorted({known["max_model_len"] for known in capacity.values()})
    return table, (_explanation(design, lengths),)


def _entry(column: _Column, configuration: Configuration, known: Mapping[str, Any]) -> str:
    settings = configuration.settings
    if column.by_length and settings.get("layout") == "contiguous":
        reservation = effective(settings, "reservation")
        if reservation != "max":
            return column.by_length(reservation)
    return column.render(column.of(known))


def _explanation(design: Design, lengths: list[int]) -> str:
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
