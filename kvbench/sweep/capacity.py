"""The table of ``kvbench plan``: what the KV budget of each configuration holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvbench.common.console import make_table
from kvbench.workload.design import Configuration, Design
from kvbench.workload.settings import effective

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


def capacity_table(
    title: str, design: Design, capacity: Mapping[str, Mapping[str, Any]]
) -> tuple[Table, tuple[str, ...]]:
    """The table, a row a configuration, and the notes beneath it. ``capacity``: config id -> check_configuration."""
    sized = [known for known in capacity.values() if "num_pages" in known]
    columns = [c for c in _COLUMNS if c[1] not in _OPTIONAL or any(known[c[1]] for known in sized)]
    heads = ["configuration", *(heading for heading, *_ in columns)]
    table = make_table(heads, title=f"{title}: what the KV budget holds")
    table.columns[0].no_wrap = True
    for configuration in design.configurations:
        known = capacity[configuration.config_id]
        entries = ["at start"] * len(columns)  # the GPU's free memory decides
        if "num_pages" in known:
            entries = [form.format(known[name] / unit) for _, name, unit, form in columns]
            if (kind := _reserved_by_length(configuration)) is not None:  # of any size, so of no number
                by_name = {"page_size": kind, "num_pages": "–"}
                entries = [by_name.get(c[1], entry) for c, entry in zip(columns, entries, strict=True)]
        table.add_row(configuration.config_id, *entries)
    lengths = sorted({known["max_model_len"] for known in capacity.values()})
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
