"""The engine's settings as the harness knows them: what needs what, what holds when nothing is said, and words.

The harness knows engines only from outside, so this is a table and not an import; a test holds it against the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a setting is when it is left out, for those that a sweep changes.
DEFAULTS: Mapping[str, Any] = {
    "layout": "paged",
    "reservation": "max",
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": False,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "enable_chunked_prefill": True,
    "max_num_partial_prefills": 1,
    "scheduling_policy": "fcfs",
    "preemption_mode": "recompute",
}

# Settings that mean something only beside another setting's value: elsewhere they are dropped, so that no cell is run
# twice and none is refused for a setting that it does not use.
ONLY_WITH: Mapping[str, tuple[str, Any]] = {
    "page_size": ("layout", "paged"),
    "enable_prefix_caching": ("layout", "paged"),
    "reservation": ("layout", "contiguous"),
    "swap_space": ("preemption_mode", "swap"),
    "max_num_partial_prefills": ("enable_chunked_prefill", True),
}

IN_LAYOUT = ("layout", "page_size", "reservation")  # named with the layout where they are given

TITLES: Mapping[str, str] = {
    "layout": "layout",
    "reservation": "reservation",
    "page_size": "page size",
    "kv_budget": "KV budget",
    "kv_cache_dtype": "KV dtype",
    "enable_prefix_caching": "prefix caching",
    "enable_chunked_prefill": "chunked prefill",
    "max_num_partial_prefills": "partial prefills",
    "max_num_waiting": "waiting limit",
    "scheduling_policy": "scheduling",
    "preemption_mode": "preemption",
    "swap_space": "swap space",
}
_VALUES: Mapping[tuple[str, Any], str] = {
    ("kv_cache_dtype", "auto"): "KV in the model's dtype",
    ("kv_cache_dtype", "fp8_e4m3"): "FP8 KV (e4m3)",
    ("kv_cache_dtype", "fp8_e5m2"): "FP8 KV (e5m2)",
    ("kv_cache_dtype", "int8_per_token_head"): "INT8 KV",
    ("kv_cache_dtype", "int4_per_token_head"): "INT4 KV",
    ("scheduling_policy", "fcfs"): "FCFS",
    ("scheduling_policy", "priority"): "priority scheduling",
}


def effective(settings: Mapping[str, Any], name: str) -> Any:
    """A setting's value, or what holds where it is left out (None: the server's own choice)."""
    value = settings.get(name)
    return DEFAULTS.get(name) if value is None else value


def applies(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the setting ``name`` means anything beside ``settings``."""
    if name not in ONLY_WITH:
        return True
    other, needed = ONLY_WITH[name]
    return effective(settings, other) == needed


def setting_title(name: str) -> str:
    """A setting for people: ``kv_cache_dtype`` -> KV dtype."""
    return TITLES.get(name, name)


def value_words(name: str, value: Any) -> str:
    """A value beside its setting's title: on, 8, FP8 KV (e4m3), swap; None: what holds where nothing is said."""
    settled = DEFAULTS.get(name) if value is None else value
    if settled is None:
        return "the default"
    if isinstance(settled, bool):
        return "on" if settled else "off"
    return _VALUES.get((name, settled), str(settled))


def phrase(name: str, value: Any) -> str:
    """A value that stands alone, in the name of a configuration: prefix caching, FP8 KV (e4m3), page size 8."""
    words = value_words(name, value)
    if words in ("on", "off"):
        return f"{'' if words == 'on' else 'no '}{setting_title(name)}"
    if name == "preemption_mode" or words in _VALUES.values():
        return words
    if words == "the default":
        return f"default {setting_title(name)}"
    return f"{words} reservation" if name == "reservation" else f"{setting_title(name)} {words}"
