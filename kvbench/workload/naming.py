"""The names of a configuration: short and safe in a file name for cell ids, in words for people."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from kvbench.workload.settings import IN_LAYOUT, phrase

# Short words for cell ids; anything else is spelled out.
_SHORT = {
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "tokens",
    "max_model_len": "len",
    "kv_budget": "kv",
    "kv_cache_dtype": "",
    "preemption_mode": "",
    "swap_space": "host",
    "scheduling_policy": "",
    "max_num_partial_prefills": "partial",
    "max_num_waiting": "waiting",
    "kernel_backend": "",
    "reservation": "",
    "dtype": "",
}
_FLAG = {
    "enable_prefix_caching": ("prefix", "noprefix"),
    "enable_chunked_prefill": ("chunked", "unchunked"),
}
_MAX_ID = 80  # file systems allow 255 bytes for a name; a terminal table does not


def config_id_of(settings: Mapping[str, Any], varied: Mapping[str, Any]) -> str:
    """The name of a configuration in cell ids: the layout with its page size or reservation, then what varies.

    Without a layout: a server that was launched by a command which does not say it.
    """
    if "target" in settings:  # a server that runs already: its settings are not ours to name
        return "target"
    layout = settings.get("layout")
    parts = [slug(layout or "launched")]
    if layout in ("paged", None) and "page_size" in settings:
        parts.append(f"p{slug(settings['page_size'])}")
    if layout == "contiguous" and "reservation" in settings:
        parts.append(slug(settings["reservation"]))
    for key, value in varied.items():
        if key in IN_LAYOUT:
            continue
        if key in _FLAG and isinstance(value, bool):
            parts.append(_FLAG[key][0 if value else 1])
        else:
            parts.append(f"{_SHORT.get(key, key.replace('_', '') + '_')}{slug(value)}")
    config_id = "-".join(parts)
    if len(config_id) > _MAX_ID:
        config_id = f"{config_id[: _MAX_ID - 7]}-{hashlib.sha256(config_id.encode()).hexdigest()[:6]}"
    return config_id


def slug(value: Any) -> str:
    """Letters, digits, dot and underscore only: safe in a file name, a URL and a shell on any system."""
    text = re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("._")
    return text or "none"


def label_of(settings: Mapping[str, Any], varied: Mapping[str, Any]) -> str:
    """The name of a configuration for people."""
    if "target" in settings:
        return str(settings["target"])
    layout = settings.get("layout")
    words = [str(layout or "launched server")]
    if layout in ("paged", None) and "page_size" in settings:
        words.append(f"page {settings['page_size']}")
    if layout == "contiguous" and "reservation" in settings:
        words.append(phrase("reservation", settings["reservation"]))
    return ", ".join([*words, *(phrase(key, value) for key, value in varied.items() if key not in IN_LAYOUT)])
