"""An attention module whose Q, K and V come from one product and are rotated in place. See engine.model.cpu_layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.attention import HOST, NAME, install
from engine.model.try_out import PROBE_SIZES, Call, RecordingHost, calls_at, named, probe_starts, same_call
from kernels.api import AttentionOptions
from kernels.cpu_memory import HugeArena
from kernels.layers_cpu import PackedLinear, can_pack, can_rotate, rotate
from kernels.numba_gemm import PANEL

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class JointAttention(nn.Module):
    """Computes the module ``own`` while our attention is installed; with any other attention it calls ``own``.

    ``own`` keeps its projections as views of the same packed weights. Q and K may pass a norm per head.
    """

    def __init__(self, own: nn.Module, options: AttentionOptions, arena: HugeArena):
        super().__init__()
        self.own, self.layer_idx, self.options, self._config = own, own.layer_idx, options, own.config
        projections = [getattr(own, name) for name in _PROJECTIONS]
        self.head_dim = own.head_dim
        self.heads = [projection.out_features // self.head_dim for projection in projections]
        self.joint = PackedLinear(projections, arena)
        self.originals = dict(zip(_PROJECTIONS, projections, strict=True))

    def free_originals(self) -> None:
        """Let ``own`` read the packed weights too, and free its original ones."""
        start = 0
        for name, original in self.originals.items():
            setattr(self.own, name, self.joint.part(start, start + original.out_features))
            start += original.out_features
        self.originals = {}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``hidden_states [1, T, C]`` -> ``[1, T, C]``, as the replaced module."""
        ours = self._config._attn_implementation == NAME and len(hidden_states) == 1
        if not ours or past_key_values is not None or attention_mask is not None or position_embeddings is None:
            return self.own(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        rows = self.joint(hidden_states[0])  # [T, (H + 2 Hkv) * D]
        rows = rows.view(len(rows), -1, self.head_dim)
        q, k, v = rows.split(self.heads, 1)
        cos, sin = (x[0] for x in position_embeddings)
        if hasattr(self.own, "q_norm"):
            q, k = self.own.q_norm(q), self.own.k_norm(k)
            rotate(q, cos, sin)
            rotate(k, cos, sin)
        else:
            rotate(rows[:, : self.heads[0] + self.heads[1]], cos, sin)
        out = getattr(self, HOST)(self.layer_idx, q, k, v, self.options)
        return self.own.o_proj(out.reshape(1, len(rows), -1)), None


def join_attention(model: PreTrainedModel, arena: HugeArena) -> None:
    """Replace attention modules by ``JointAttention`` where it sends the same Q, K and V and returns the same for every
    probe. Afterwards our attention is installed in ``model`` with a dummy host.
    """
    host = RecordingHost()
    install(model, host)
    found = named(model, _may_join)
    probes = [calls_at(model, first, [module for _, module in found]) for first in probe_starts(model)]
    for name, own in found:
        calls = [probe[own] for probe in probes if own in probe]
        if len(calls) < len(probes) or not all(_can_call(*call, own.head_dim) for call in calls):
            continue
        joint = JointAttention(own, host.options[own.layer_idx], arena)
        setattr(joint, HOST, host)
        if all(_same_call(own, joint, call, size, host) for call in calls for size in PROBE_SIZES[model.dtype]):
            joint.free_originals()
            model.set_submodule(name, joint)


def _may_join(module: nn.Module) -> bool:
    children = {name for name, _ in module.named_children()}
    if not hasattr(module, "layer_idx") or not hasattr(module, "config") or not hasattr(module, "head_dim"):
        return False
    if children - {"q_norm", "k_norm"} != {*_PROJECTIONS, "o_proj"} or len(children & {"q_norm", "k_norm"}) == 1:
        return False
    projections = [getattr(module, name) for name in _PROJECTIONS]
    return all(can_pack(p) and p.out_features % max(PANEL, module.head_dim) == 0 for p in projections)


def _can_call(args: tuple, kwargs: dict, head_dim: int) -> bool:
    embeddings = kwargs.get("position_embeddings")
    if args or "hidden_states" not in kwargs or not isinstance(embeddings, tuple):
        return False
    return all(x.shape[:1] == (1,) and x.shape[-1] <= head_dim and can_rotate(x.shape[-1]) for x in embeddings)


def _same_call(own: nn.Module, joint: JointAttention, call: Call, size: float, host: RecordingHost) -> bool:
    try:
        return same_call(own, joint, call, size, host, own.layer_idx)
    except (RuntimeError, AssertionError):  # shapes that only look alike, such as a norm over all heads at once
        return False
