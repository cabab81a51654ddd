"""The servers that kvbench knows by name: one module each, see ``kvbench/targets/presets/preset.py``."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.targets.presets.llamacpp import LLAMACPP
from kvbench.targets.presets.preset import Preset, Reset
from kvbench.targets.presets.sglang import SGLANG
from kvbench.targets.presets.tgi import TGI
from kvbench.targets.presets.transformers import TRANSFORMERS
from kvbench.targets.presets.vllm import VLLM
from kvbench.targets.prometheus import OURS, MetricNames

PRESETS: Mapping[str, Preset] = {each.name: each for each in (VLLM, SGLANG, TGI, LLAMACPP, TRANSFORMERS)}
GENERIC = Preset(  # the built-in server, and what is assumed of one that nobody has named
    name="openai",
    title="the server",
    reset=Reset("/reset_prefix_cache", success_key="success", busy=(409,)),
)

METRIC_KINDS: tuple[MetricNames, ...] = (
    *(each.metrics for each in PRESETS.values() if each.metrics is not OURS),
    OURS,
)
