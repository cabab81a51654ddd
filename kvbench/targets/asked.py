"""Whether a server has what its configuration is named and compared for: page size and KV budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.workload.settings import effective

_TOLERANCE = 0.02  # a page table; a page on top of it, for rounding to whole ones


def contradiction(settings: Mapping[str, Any], known: Mapping[str, Any], info: Mapping[str, Any] | None) -> str | None:
    """Where the server's own word differs from what was asked; None when it does not, or it says nothing.

    A capacity differs where it is off by more than 2 % and a page.

    ``settings``: of the configuration. ``known``: what is known of it before the launch (``kv_budget_bytes`` and
    ``bytes_per_token`` [of which ``scale_bytes_per_token``] where the server was given that budget,
    ``capacity_tokens`` where our arithmetic says how many fit). ``info``: the server's /server_info, or what its
    /metrics tell in that shape.
    """
    engine, capacity = ((info or {}).get(part) or {} for part in ("engine", "capacity"))
    paged = effective(settings, "layout") == "paged"
    pages, asked = capacity.get("page_size") or engine.get("page_size"), settings.get("page_size")
    if paged and asked and pages and int(pages) != int(asked):
        return (
            f"its pages have {int(pages)} tokens, and the configuration is for pages of {asked}: pass page_size on "
            f"({{page_size}} in a --serve-cmd), or ask for what it has, -o engine.page_size={int(pages)}"
        )
    told, each = capacity.get("capacity_tokens"), known.get("bytes_per_token")
    if not told or not each:
        return None
    least = known.get("capacity_tokens") or known["kv_budget_bytes"] / each
    most = least * each / (each - (known.get("scale_bytes_per_token") or 0))  # other KV formats have fewer scales
    slack = 0 if not paged else int(pages or asked or 1)
    if least * (1 - _TOLERANCE) - slack <= told <= most * (1 + _TOLERANCE) + slack:
        return None
    return (
        f"its KV cache holds {int(told):,} tokens, and the budget of {known['kv_budget_bytes']:,} bytes is "
        f"{least:,.0f}: it was not given this budget, has cut it down, or computes in another dtype (a --serve-cmd "
        "passes on {kv_budget} and {dtype})"
    )
