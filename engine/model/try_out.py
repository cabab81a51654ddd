"""Tries a faster module out before it replaces a model's own: same calls, same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench_kernels.api import AttentionOptions, KVCache, KVPair

PROBE_TOKENS = 5
# Sizes of activations: clamps, clips and epsilons show at one of them. float16 ends at 65504.
PROBE_SIZES = {torch.float32: (1.0, 1e-3, 1e3), torch.bfloat16: (1.0, 1e-3, 1e3), torch.float16: (1.0, 1e-2, 16.0)}
# Largest RMS of a difference, relative: float32 sums in another order are off by about 1e-7, and each rounding to half
# precision by 2**-9.8 (bfloat16) or 2**-12.8.
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

Call = tuple[tuple, dict[str, Any]]  # args, kwargs


@dataclass
class RecordingHost:
    """A stand-in for the host that keeps what a layer sends, and returns numbers made from it.

    ``caches``: K and V of each layer, ``[PROBE_TOKENS, heads, dim]``, for layers that write their KV themselves.
    """

    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    options: dict[int, AttentionOptions] = field(default_factory=dict)
    sent: list[torch.Tensor] = field(default_factory=list)
    fused_layers: bool = False

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.options[layer] = options
        self.sent = [x.clone() for x in (q, k, v)]
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def destination(self, layer: int) -> tuple[KVCache, KVCache, torch.Tensor]:
        """See AttentionHost.destination: token i goes to slot i of caches that hold NaN."""
        for cache in self.caches[layer]:
            cache.fill_(torch.nan)
        k, v = self.caches[layer]
        return k, v, torch.arange(len(k), device=k.device)

    def attend(
        self, layer: int, q: torch.Tensor, options: AttentionOptions, new_kv: KVPair | None = None
    ) -> torch.Tensor:
        """See AttentionHost.attend; the KV is read back from the cache."""
        return self(layer, q, *self.caches[layer], options)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tests whether shapes and dtypes are equal, and the RMS difference is within a's rounding. NaN: False."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    limit, a, b = _LIMITS[a.dtype], a.float(), b.float()
    return bool((a - b).square().mean().sqrt() <= limit * a.square().mean().sqrt())


def same_call(own: Callable, ours: Callable, call: Call, size: float, host: RecordingHost, layer: int) -> bool:
    """Tests whether both modules send ``host`` the same and return the same for a scaled ``call``.

    ``size``: the factor of its hidden states. ``host``: None for modules without attention, which send nothing.
    """
    args, kwargs = scaled(call, size)
    host.sent = []
    theirs = own(*args, **kwargs)
    expected = [_first(theirs), *host.sent]
    sent = host.options.get(layer)
    host.sent = []
    result = ours(*args, **kwargs)
    got = [_first(result), *host.sent]
    if isinstance(theirs, tuple) != isinstance(result, tuple):
        return False
    if sent is not None and not same_options(sent, host.options[layer]):
        return False
    return len(got) == len(expected) and all(same_numbers(a, b) for a, b in zip(expected, got, strict=True))


def same_options(a: AttentionOptions, b: AttentionOptions) -> bool:
    """Tests whether the options are equal; sinks must be the same tensor."""
    return (a.scale, a.sliding_window, a.softcap) == (b.scale, b.sliding_window, b.softcap) and a.sinks is b.sinks


def scaled(call: Call, size: float) -> Call:
    """Scale the hidden states of ``call`` by ``size``; they are its first argument or have that name."""
    args, kwargs = call
    if args:
        return (args[0] * size, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * size}


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def named(model: nn.Module, fits: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """Names and modules of ``model``, itself left out."""
    return [(name, module) for name, module in model.named_modules() if name and fits(module)]


def probe_starts(model: PreTrainedModel) -> tuple[int, ...]:
    """First positions of the probes: the model's first and its last tokens."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    return (0, max(0, longest - PROBE_TOKENS))


def calls_at(model: PreTrainedModel, first: int, modules: list[nn.Module]) -> dict[nn.Module, Call]:
    """The call of each of ``modules`` when the model sees PROBE_TOKENS tokens from position ``first`` on."""
    calls: dict[nn.Module, Call] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        calls[module] = args, kwargs

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        weight = model.get_input_embeddings().weight
        index = torch.arange(PROBE_TOKENS, device=weight.device)[None]
        model(input_ids=index * 101 % len(weight), position_ids=first + index, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
