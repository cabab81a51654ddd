"""The engine's settings as the harness knows them, and the names of a configuration: for cell ids and for people.

The harness knows engines only from outside, so this is a table and not an import; a test holds it against the engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""Engine settings by name, as a workload file has them; which there are, the engine knows."""


@dataclass(frozen=True)
class _Setting:
    """One setting of ``EngineConfig``.

    ``title``: for people; None: its name.
    ``short``: what cell ids have before the value (of a flag: in place of true and false); None: its name.
    ``default``: its value when it is left out; None: not known here.
    ``only_with``: the other setting and value that give it a meaning. Elsewhere it is dropped, so that no cell is run
    twice and none is refused for a setting that it does not use.
    """

    title: str | None = None
    short: str | tuple[str, str] | None = None
    default: Any = None
    only_with: tuple[str, Any] | None = None


_SETTINGS: Mapping[str, _Setting] = {
    "layout": _Setting("layout", default="paged"),
    "page_size": _Setting("page size", "p", 16, only_with=("layout", "paged")),
    "reservation": _Setting("reservation", "", "max", ("layout", "contiguous")),
    "kv_budget": _Setting("KV budget", "kv"),
    "kv_cache_dtype": _Setting("KV dtype", "", "auto"),
    "enable_prefix_caching": _Setting("prefix caching", ("prefix", "noprefix"), False, ("layout", "paged")),
    "free_outside_window": _Setting("freeing of KV outside windows", ("freed", "kept"), True),
    "latent_kv": _Setting("latent KV rows", ("latent", "unfolded"), True),
    "enable_chunked_prefill": _Setting("chunked prefill", ("chunked", "unchunked"), True),
    "max_num_partial_prefills": _Setting("partial prefills", "partial", 1, ("enable_chunked_prefill", True)),
    "max_num_seqs": _Setting(None, "seqs"),
    "max_num_batched_tokens": _Setting(None, "tokens"),
    "max_num_waiting": _Setting("waiting limit", "waiting"),
    "watermark": _Setting("watermark", "watermark", None, ("layout", "paged")),
    "max_model_len": _Setting(None, "len"),
    "scheduling_policy": _Setting("scheduling", "", "fcfs"),
    "preemption_mode": _Setting("preemption", "", "recompute"),
    "swap_space": _Setting("swap space", "host", None, ("preemption_mode", "swap")),
    "kernel_backend": _Setting(short=""),
    "dtype": _Setting(short=""),
}
DEFAULTS = {name: setting.default for name, setting in _SETTINGS.items() if setting.default is not None}
DEFAULTS_ON = {  # by device; with any other, the server's machine decides
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
}
ONLY_WITH = {name: setting.only_with for name, setting in _SETTINGS.items() if setting.only_with is not None}
IN_LAYOUT = ("layout", "page_size", "reservation")  # named with the layout where they are given
_MOST_ID = 80  # characters: file systems allow 255 bytes for a name; a terminal table does not
_VALUES: Mapping[tuple[str, Any], str] = {
    ("kv_cache_dtype", "auto"): "KV in the model's dtype",
    ("kv_cache_dtype", "fp8_e4m3"): "FP8 KV (e4m3)",
    ("kv_cache_dtype", "fp8_e5m2"): "FP8 KV (e5m2)",
    ("kv_cache_dtype", "int8_per_token_head"): "INT8 KV",
    ("kv_cache_dtype", "int4_per_token_head"): "INT4 KV",
    ("scheduling_policy", "fcfs"): "FCFS",
    ("scheduling_policy", "priority"): "priority scheduling",
}


def canonical(name: str, value: Any) -> Any:
    """The value under the name that kvbench writes: ``fp8`` is ``fp8_e4m3``, as in vLLM."""
    return "fp8_e4m3" if (name, value) == ("kv_cache_dtype", "fp8") else value


def named_twice(name: str, values: Iterable[Any], engine: Settings) -> str | None:
    """Says which value of a setting stands twice in ``values``, beside the settings of ``engine``; None: none does."""
    seen: set[tuple[type, Any]] = set()
    for value in values:
        settled = effective({**engine, name: value}, name)
        if (type(settled), settled) in seen:
            meaning = "" if value is not None else f" (null is the default, {settled})"
            return f"names {settled} twice{meaning}: leave one out"
        seen.add((type(settled), settled))
    return None


def defaults_beside(settings: Settings) -> dict[str, Any]:
    """The known defaults of an engine with these ``settings``."""
    return {**DEFAULTS, **DEFAULTS_ON.get(settings.get("device", "auto"), {})}


def effective(settings: Settings, name: str) -> Any:
    """A setting's value, or what holds where it is left out (None: the server's own choice)."""
    value = settings.get(name)
    return defaults_beside(settings).get(name) if value is None else value


def applies(name: str, settings: Settings) -> bool:
    """Tests whether the setting ``name`` means anything beside ``settings``."""
    if name not in ONLY_WITH:
        return True
    other, needed = ONLY_WITH[name]
    return effective(settings, other) == needed


ENGINE_POLICY = (  # decisions on which engines differ by default; see docs/engines.md
    "watermark", "preemption_mode", "scheduling_policy", "enable_prefix_caching", "max_num_seqs",
    "max_num_batched_tokens",
)  # fmt: skip


def setting_title(name: str) -> str:
    """A setting for people: ``kv_cache_dtype`` -> KV dtype."""
    return (_SETTINGS[name].title if name in _SETTINGS else None) or name


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


def _naming(settings: Settings, varied: Settings) -> list[tuple[str, Any]]:
    """The settings that name a configuration after its layout: page size or reservation, then what varies."""
    layout = settings.get("layout")
    beside = "reservation" if layout == "contiguous" else "page_size"
    first = [(beside, settings[beside])] if beside in settings and layout in ("contiguous", "paged", None) else []
    return first + [(name, value) for name, value in varied.items() if name not in IN_LAYOUT]


def config_id_of(settings: Settings, varied: Settings) -> str:
    """A configuration in cell ids: its layout with page size or reservation, then what varies.

    The layout is missing where a server was launched by a command that does not say it.
    """
    if "target" in settings:  # a server that runs already: its settings are not known
        return "target"
    parts = [slug(settings.get("layout") or "launched")]
    for name, value in _naming(settings, varied):
        short = _SETTINGS[name].short if name in _SETTINGS else None
        if isinstance(short, tuple) and isinstance(value, bool):
            parts.append(short[0 if value else 1])
        else:
            parts.append(f"{short if isinstance(short, str) else name.replace('_', '') + '_'}{slug(value)}")
    config_id = "-".join(parts)
    if len(config_id) > _MOST_ID:
        config_id = f"{config_id[: _MOST_ID - 7]}-{hashlib.sha256(config_id.encode()).hexdigest()[:6]}"
    return config_id


def slug(value: Any) -> str:
    """Letters, digits, dot and underscore only: safe in a file name, a URL and a shell on any system."""
    text = re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("._")
    return text or "none"


def label_of(settings: Settings, varied: Settings) -> str:
    """A configuration for people."""
    if "target" in settings:
        return str(settings["target"])
    named = (f"page {v}" if name == "page_size" else phrase(name, v) for name, v in _naming(settings, varied))
    return ", ".join([str(settings.get("layout") or "launched server"), *named])
