"""Fewer kernels a decoder layer, with the arithmetic of transformers' own modules: what is recognised and tried out.

RMSNorms, attention modules, gated MLPs and whole layers get another ``forward``, made of the ``LayerKernels`` of a
device: cuda_layers.py and cpu_layers.py. Each is tried out first, on small and large numbers, attention at the first
and the last positions, and keeps its own forward unless both give the same within the rounding of its dtype. Weights
that are read together are joined in memory, the originals are views of them. At the end the whole model must give the
logits that it gave before.

    layer   norm │ attention │ residual sum + norm │ MLP, its last product added to the residual
    attention    Q, K, V product │ norm + rotation + KV write │ attention (1 or 2) │ output product
    MLP          gate and up product │ act(gate) * up │ down product; the first two are one on a CPU
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench_engine.kv.budget import KVShape
from kvbench_engine.model.attention import FUSION, HOST, NAME, install
from kvbench_engine.model.support_check import logits_differ, paged_logits
from kvbench_engine.model.try_out import (
    PROBE_SIZES,
    PROBE_TOKENS,
    Call,
    RecordingHost,
    calls_at,
    named,
    probe_starts,
    same_call,
    same_numbers,
)
from kvbench_kernels.api import AttentionBackend, AttentionOptions, KVCache, KVPair
from kvbench_kernels.layer_parts import ACTIVATIONS, Heads, Norm, Rotation

_NO_KERNELS = "no kernels of its shape"
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_OFFSETS = (0.0, 1.0)  # Gemma's norms multiply by 1 + weight
_QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUT_NAMES = ("o_proj", "out_proj", "dense")
_GATED_NAMES = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACT_NAMES = ("act_fn", "activation_fn", "act")
# Norms before attention, after it, before the MLP, after it.
_LAYER_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
_TORCH_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
assert set(_TORCH_ACTIVATIONS) == set(ACTIVATIONS)

_log = logging.getLogger(__name__)


class Product(Protocol):
    """Linear layers that read the same input, as one: ``[T, K]`` -> ``[T, N]``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add the product to ``residual [T, N]``, which may be overwritten."""
        ...

    def adopt(self) -> None:
        """Let the original layers read the weights that the product reads, which frees their own."""
        ...


class GatedProduct(Protocol):
    """The gated product ``act(gate(rows)) * up(rows)``: ``[T, K]`` -> ``[T, N]``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def adopt(self) -> None:
        """Let the original layers read the weights that this product reads."""
        ...


class LayerKernels(Protocol):
    """The kernels that a device has for fused forwards. None or False: none of that shape or dtype."""

    def can_norm(self, weight: torch.Tensor) -> bool: ...

    def add_norm(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None = None, post: Norm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``residual + post(x)`` and its ``norm`` from ``x [T, C]``; see triton_layers.add_norm."""
        ...

    def product(self, module: nn.Module, names: tuple[str, ...]) -> Product | None:
        """Make the product of the linear layers of these names."""
        ...

    def gated(self, module: nn.Module, names: tuple[str, ...], activation: str) -> GatedProduct | None:
        """Make the gated product of gate and up, or of one layer that holds both."""
        ...

    def can_rotate(self, heads: Heads, rotation: Rotation, width: int) -> bool:
        """Tests whether ``rotate_and_write`` serves these heads. ``width``: columns of cos and sin."""
        ...

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        heads: Heads,
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
        k_cache: KVCache,
        v_cache: KVCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, KVPair | None]:
        """Q ``[T, H, D]`` and, where attention can read them, the new K and V; see kvbench_kernels.triton_layers."""
        ...


class Fusion:
    """The fused modules of a model. ``on``: whether the engine that uses the model now wants them.

    ``fused``: kind -> modules; ``left``: (kind, why) -> modules. ``wanted [N]``: the tokens whose logits the running
    call wants, if few; the last layer computes no others.
    """

    def __init__(self, config: PreTrainedConfig, kernels: LayerKernels) -> None:
        self._config = config
        self.kernels = kernels
        self.on = False
        self.fused: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.modules: dict[nn.Module, _Fused] = {}
        self.wanted: torch.Tensor | None = None

    @property
    def active(self) -> bool:
        """Tests whether fused forwards serve: never while the model has attention of transformers' own."""
        return self.on and self._config._attn_implementation == NAME

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def for_tokens(self, wanted: torch.Tensor | int, tokens: int) -> Iterator[None]:
        """Run a call on ``tokens`` tokens whose logits at ``wanted`` are used, all at 0."""
        few = isinstance(wanted, torch.Tensor) and 0 < 2 * len(wanted) <= tokens
        self.wanted = wanted if few else None
        try:
            yield
        finally:
            self.wanted = None

    def use(self, kind: str, fused: _Fused) -> None:
        """Give the module its new forward."""
        self.modules[fused.module] = fused
        fused.module.forward = fused.forward
        self.fused[kind] += 1

    def undo(self, why: str) -> None:
        """Give every module its own forward again."""
        for fused in self.modules.values():
            fused.module.forward = fused.own
        self.left.update({(kind, why): count for kind, count in self.fused.items()})
        self.fused.clear()
        self.modules.clear()

    def __str__(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.fused.items())) or "nothing"
        left = ", ".join(f"{count} {kind} ({why})" for (kind, why), count in sorted(self.left.items()))
        return f"fused {done}" + (f"; left as they are: {left}" if left else "")


class _Fused:
    """A module's forward of fewer kernels. ``own``: the module's own forward, called while ``switch`` is not active."""

    def __init__(self, module: nn.Module, switch: Fusion):
        self.module, self.switch, self.own = module, switch, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FusedNorm(_Fused):
    """RMSNorm as one kernel."""

    def __init__(self, module: nn.Module, switch: Fusion, norm: Norm):
        super().__init__(module, switch)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.switch.active or x.dtype != self.norm.weight.dtype:
            return self.own(x)
        return self.switch.kernels.add_norm(x.reshape(-1, x.shape[-1]), self.norm)[1].view(x.shape)


class FusedMLP(_Fused):
    """The MLP ``down(act(gate(x)) * up(x))``, gate and up as one product."""

    def __init__(self, module: nn.Module, switch: Fusion, product: GatedProduct, down: Product):
        super().__init__(module, switch)
        self._product, self._down = product, down

    def adopt(self) -> None:
        self._product.adopt()
        self._down.adopt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.switch.active:
            return self.own(x)
        return self._down(self._product(x.reshape(-1, x.shape[-1]))).view(x.shape)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The result for ``rows [T, C]`` added to ``residual``, which may be overwritten."""
        return self._down.add_to(residual, self._product(rows))


class FusedAttention(_Fused):
    """Q, K and V as one product; norm, rotation and KV write as one kernel. With any other attention it calls ``own``.

    Q and K may pass a norm per head.
    """

    def __init__(
        self,
        module: nn.Module,
        switch: Fusion,
        joint: Product,
        out: Product,
        heads: Heads,
        norms: tuple[Norm, Norm] | None,
        options: AttentionOptions,
    ):
        super().__init__(module, switch)
        self._joint, self._out, self._layer = joint, out, module.layer_idx
        self._heads, self._norms, self._options = heads, norms, options
        self.rotation = Rotation(0)

    def adopt(self) -> None:
        self._joint.adopt()
        self._out.adopt()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``hidden_states [1, T, C]`` -> ``[1, T, C]``, as the module's own forward does."""
        ours = self.switch.active and len(hidden_states) == 1
        if not ours or not _is_plain(position_embeddings, attention_mask, past_key_values):
            return self.own(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return self.attend(hidden_states[0], position_embeddings)[None], None

    def attend(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend: ``x [T, C]`` -> ``[T, C]``, or the rows ``wanted``. ``angles``: cos and sin ``[1, T, width]``."""
        host, layer = getattr(self.module, HOST), self._layer
        cos, sin = angles
        q, new_kv = self.switch.kernels.rotate_and_write(
            self._joint(x), (cos[0], sin[0]), self._heads, self.rotation, self._norms, *host.destination(layer)
        )
        mixed = host.attend(layer, q, self._options, new_kv).view(len(x), -1)
        return self._out(mixed if wanted is None else mixed[wanted])


def _is_plain(
    position_embeddings: Any = None, attention_mask: Any = None, past_key_values: Any = None, **_: Any
) -> bool:
    """Tests whether an attention module is called as our engine calls it."""
    return past_key_values is None and attention_mask is None and position_embeddings is not None


class FusedLayer(_Fused):
    """A decoder layer whose residual sums are part of a norm or of a matrix product.

    ``norms``: before attention, after it, before the MLP, after it; None where there is none. ``is_last``: no layer
    reads its result. Then only the rows ``Fusion.wanted`` are computed, and the others keep the layer's input.
    """

    def __init__(self, module: nn.Module, switch: Fusion, norms: tuple[Norm | None, ...]):
        super().__init__(module, switch)
        self._norms = norms
        attention, mlp = switch.modules.get(module.self_attn), switch.modules.get(module.mlp)
        self._attention = attention if isinstance(attention, FusedAttention) else None
        self._mlp = mlp if isinstance(mlp, FusedMLP) else None
        self.is_last = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute ``[1, T, C]`` -> ``[1, T, C]``. The input is not changed."""
        if not self.switch.active or args or len(hidden_states) != 1 or hidden_states.dim() != 3:
            return self.own(hidden_states, *args, **kwargs)
        add_norm = self.switch.kernels.add_norm
        before, after, before_mlp, after_mlp = self._norms
        rows, wanted = hidden_states[0], None
        x = rows if before is None else add_norm(rows, before)[1]
        if self._attention is not None and _is_plain(**kwargs):
            wanted = self.switch.wanted if self.is_last else None
            mixed = self._attention.attend(x, kwargs["position_embeddings"], wanted)
        else:
            mixed = self.module.self_attn(hidden_states=x[None], **kwargs)[0][0]
        residual, x = add_norm(mixed, before_mlp, rows if wanted is None else rows[wanted], after)
        if self._mlp is not None and after_mlp is None:
            result = self._mlp.add_to(residual, x)
        else:
            result = add_norm(self.module.mlp(x[None])[0], None, residual, after_mlp)[0]
        return (result if wanted is None else rows.index_copy(0, wanted, result))[None]


@torch.no_grad()
def fuse_layers(
    model: PreTrainedModel,
    kernels: LayerKernels,
    backend: AttentionBackend,
    kv_shape: KVShape,
    query_heads: tuple[int, ...],
) -> Fusion:
    """Give the modules of ``model`` forwards of ``kernels`` where that changes no numbers; once a model.

    They are used while a host with ``fused_layers`` is installed. Afterwards a dummy host is installed.
    """
    earlier = getattr(model, FUSION, None)
    if earlier is not None:
        return earlier
    expected = paged_logits(model, backend, kv_shape)
    fuser = _Fuser(model, kernels, kv_shape, query_heads)
    fuser.fuse_norms()
    fuser.fuse_attention()
    fuser.fuse_mlps()
    fuser.fuse_whole_layers()
    fusion = fuser.fusion
    setattr(model, FUSION, fusion)
    try:
        fuser.shorten_last_layer()
        got = paged_logits(model, backend, kv_shape, fused_layers=True)
        differ = logits_differ(expected, got, next(model.parameters()).dtype)
        why = None if differ is None else f"the logits differ {differ}"
    except Exception as error:  # what was tried alone may fail together
        why = _failure(error)
    if why is not None:
        fusion.undo(why)
    install(model, RecordingHost())
    if why or fuser.failed:
        _log.warning("%s", fusion)
    return fusion


def _failure(error: Exception) -> str:
    """The reason for which a try-out ended, on one line: a compiler says on its last line what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__, *lines[:1], *lines[1:][-1:]])


class _Fuser:
    """Tries out the modules of one model."""

    def __init__(self, model: PreTrainedModel, kernels: LayerKernels, kv_shape: KVShape, query_heads: tuple[int, ...]):
        self.model, self.kernels = model, kernels
        self.fusion = Fusion(model.config, kernels)
        self.norms: dict[nn.Module, Norm] = {}
        self.failed = False  # a kernel could not be compiled or run, which is no matter of numbers
        self._heads = [
            Heads(query, layer.kv_heads, layer.head_dim, layer.value_dim)
            for query, layer in zip(query_heads, kv_shape.layers, strict=True)
        ]
        like = next(model.parameters())
        self._dtype = like.dtype
        self._host = RecordingHost(
            [
                tuple(like.new_empty(PROBE_TOKENS, heads.kv, dim) for dim in (heads.dim, heads.value_dim))
                for heads in self._heads
            ]
        )
        install(model, self._host)
        modules = [module for module in model.modules() if module is not model]
        self._probes = [calls_at(model, first, modules) for first in probe_starts(model)]

    def _calls(self, module: nn.Module, *, named: bool) -> list[Call] | None:
        """The calls of ``module``, one a probe.

        None unless its hidden states came as ``hidden_states`` alone (``named``), or as the only argument.
        """
        calls = [probe[module] for probe in self._probes if module in probe]
        fits = all(
            (not args and "hidden_states" in kwargs) if named else (len(args) == 1 and not kwargs)
            for args, kwargs in calls
        )
        return calls if calls and fits else None

    def _try(
        self, kind: str, fused: _Fused, calls: list[Call], layer: int = -1, *, children_fused: bool = False
    ) -> str | None:
        """Use ``fused`` if it gives what the module's own forward gives; else return why not.

        The module's own forward may call fused children.
        """

        def ours(*args: Any, **kwargs: Any) -> Any:
            with self.fusion.turned_on():
                return fused.forward(*args, **kwargs)

        def own(*args: Any, **kwargs: Any) -> Any:
            with self.fusion.turned_on() if children_fused else nullcontext():
                return fused.own(*args, **kwargs)

        try:
            same = all(
                same_call(own, ours, call, size, self._host, layer)
                for call in calls
                for size in PROBE_SIZES[self._dtype]
            )
        except AssertionError:  # of a kernel, which does not take these shapes or dtypes
            return _NO_KERNELS
        except Exception as error:  # shapes that only look alike; a kernel that this shape is too large for
            return self._failure_of(fused.module, error)
        if not same:
            return "other numbers"
        self.fusion.use(kind, fused)
        return None

    def _failure_of(self, module: nn.Module, error: Exception) -> str:
        self.failed = True
        _log.debug("the try-out of a %s", type(module).__name__, exc_info=error)
        return _failure(error)

    def _leave(self, kind: str, why: str) -> None:
        self.fusion.left[kind, why] += 1

    def fuse_norms(self) -> None:
        """Fuse the norms. A norm's function is found in float32: half precision rounds different ones to the same."""
        for _, module in named(self.model, self._may_be_norm):
            calls = self._calls(module, named=False)
            if calls is None:
                continue
            try:
                norm, why = self._norm_of(module), "other numbers"
            except Exception as error:
                norm, why = None, self._failure_of(module, error)
            if norm is not None:
                why = self._try("norms", FusedNorm(module, self.fusion, norm), calls[:1])  # it knows no positions
            if why is None:
                self.norms[module] = norm
            else:
                self._leave("norms", why)

    def _may_be_norm(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return (
            [name for name, _ in module.named_parameters()] == ["weight"]
            and weight.dim() == 1
            and weight.dtype == self._dtype
            and self.kernels.can_norm(weight)
            and any(isinstance(getattr(module, name, None), float) for name in _EPS_NAMES)
        )

    def _norm_of(self, module: nn.Module) -> Norm | None:
        eps = next(getattr(module, name) for name in _EPS_NAMES if isinstance(getattr(module, name, None), float))
        exact = copy.deepcopy(module).float()
        weight = exact.weight.data
        x = torch.randn(PROBE_TOKENS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
        for offset in _OFFSETS:
            norm = Norm(weight, eps, offset)
            sizes = PROBE_SIZES[torch.float32]
            if all(same_numbers(exact(x * size), self.kernels.add_norm(x * size, norm)[1]) for size in sizes):
                return Norm(module.weight.data, eps, offset)
        return None

    def fuse_attention(self) -> None:
        for _, module in named(self.model, lambda module: hasattr(module, "layer_idx") and hasattr(module, HOST)):
            if module.layer_idx not in self._host.options or not any(module in probe for probe in self._probes):
                continue
            names, children = _children(module, _QKV_NAMES)
            if names is None or len(children & set(_OUT_NAMES)) != 1:
                if children & {"self_attn", "mlp"}:
                    continue  # a layer, not its attention
                self._leave("attention", "other projections")
            elif children - {*names, *_OUT_NAMES, "q_norm", "k_norm"} or any(
                type(getattr(module, name)) is not nn.Linear for name in children & set(_OUT_NAMES)
            ):
                self._leave("attention", "more than projections and norms of Q and K")
            else:
                self._fuse_one_attention(module, names, children)

    def _fuse_one_attention(self, module: nn.Module, names: tuple[str, ...], children: set[str]) -> None:
        calls, heads = self._calls(module, named=True), self._heads[module.layer_idx]
        widths = (heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.value_dim)
        features = tuple(getattr(module, name).out_features for name in names)
        norms = [self.norms.get(getattr(module, name)) for name in ("q_norm", "k_norm") if name in children]
        if any(norm is None or len(norm.weight) != heads.dim for norm in norms) or len(norms) == 1:
            return self._leave("attention", "norms of Q and K that are not an RMSNorm of each head")
        if features not in (widths, (sum(widths),)) or calls is None or (angles := _angle_width(calls)) is None:
            return self._leave("attention", "calls with other arguments")
        rotations = [one for one in _rotations(angles, heads.dim) if self.kernels.can_rotate(heads, one, angles)]
        joint = self.kernels.product(module, names) if rotations else None
        out = joint and self.kernels.product(module, tuple(name for name in _OUT_NAMES if name in children))
        if joint is None or out is None:
            return self._leave("attention", _NO_KERNELS)
        options = self._host.options[module.layer_idx]
        fused = FusedAttention(module, self.fusion, joint, out, heads, tuple(norms) or None, options)
        for rotation in rotations:
            fused.rotation = rotation
            why = self._try("attention", fused, calls, module.layer_idx)
            if why is None:
                return fused.adopt()
        return self._leave("attention", why)

    def fuse_mlps(self) -> None:
        for _, module in named(self.model, lambda module: hasattr(module, "down_proj")):
            names, children = _children(module, _GATED_NAMES)
            calls = self._calls(module, named=False)
            linear = names is not None and type(module.down_proj) is nn.Linear
            if not linear or children - {*names, "down_proj", *_ACT_NAMES} or list(module.named_parameters("", False)):
                if any(module in probe for probe in self._probes):
                    self._leave("MLPs", "not gate, up and down")
                continue
            activation = _activation_of(module)
            if activation is None:
                self._leave("MLPs", "another activation")
                continue
            if calls is None or len(inspect.signature(module.forward).parameters) != 1:
                self._leave("MLPs", "calls with other arguments")
                continue
            product = self.kernels.gated(module, names, activation)
            down = self.kernels.product(module, ("down_proj",))
            if product is None or down is None:
                self._leave("MLPs", _NO_KERNELS)
                continue
            fused = FusedMLP(module, self.fusion, product, down)
            if (why := self._try("MLPs", fused, calls[:1])) is None:  # it knows no positions
                fused.adopt()
            else:
                self._leave("MLPs", why)

    def fuse_whole_layers(self) -> None:
        for _, module in named(self.model, lambda module: hasattr(module, "self_attn") and hasattr(module, "mlp")):
            children = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
            forms = [form for form in _LAYER_NORMS if children == {"self_attn", "mlp", *form} - {None}]
            calls = [probe[module] for probe in self._probes if module in probe]
            if not calls:
                continue
            if len(forms) != 1 or any(len(args) != 1 for args, _ in calls):
                self._leave("layers", "other parts")
                continue
            norms = tuple(name and self.norms.get(getattr(module, name)) for name in forms[0])
            if any(name and norm is None for name, norm in zip(forms[0], norms, strict=True)):
                self._leave("layers", "norms that are not fused")
                continue
            fused = FusedLayer(module, self.fusion, norms)
            # Fused children round differently already: what is tried out here is how they are put together.
            why = self._try("layers", fused, calls, module.self_attn.layer_idx, children_fused=True)
            if why is not None:
                self._leave("layers", why)

    def shorten_last_layer(self) -> None:
        """Let the last layer leave out the tokens whose logits nobody wants, if that changes no other logits."""
        layers = [fused for fused in self.fusion.modules.values() if isinstance(fused, FusedLayer)]
        last = next((one for one in layers if one.module.self_attn.layer_idx == len(self._heads) - 1), None)
        if last is None:
            return
        ids = torch.arange(PROBE_TOKENS, device=self.model.device)
        wanted = ids[1::3]
        call = {"input_ids": ids[None], "position_ids": ids[None], "use_cache": False, "logits_to_keep": wanted}
        with self.fusion.turned_on():
            expected = self.model(**call).logits
            last.is_last = True
            with self.fusion.for_tokens(wanted, PROBE_TOKENS):
                last.is_last = same_numbers(expected, self.model(**call).logits)


def _children(module: nn.Module, choices: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...] | None, set[str]]:
    """The ``choices`` that are linear layers of ``module`` (None: none), and its other children's names.

    Children that do nothing are left out.
    """
    children = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    for names in choices:
        if all(type(getattr(module, name, None)) is nn.Linear for name in names):
            return names, children
    return None, children


def _angle_width(calls: list[Call]) -> int | None:
    """Columns of cos and sin, the same in all ``calls``; None if they do not come as ``[1, T, columns]``."""
    widths = set()
    for _, kwargs in calls:
        angles = kwargs.get("position_embeddings")
        if not isinstance(angles, tuple) or len(angles) != 2 or any(x.dim() != 3 or len(x) != 1 for x in angles):
            return None
        widths.add(angles[0].shape[-1])
    return widths.pop() if len(widths) == 1 else None


def _rotations(width: int, dim: int) -> list[Rotation]:
    """The rotations that a head of ``dim`` may have with cos and sin of ``width`` columns."""
    rotations = [Rotation(width), Rotation(width, pairs=True), Rotation(width, pairs=True, angle="pair"), Rotation(0)]
    rotations += [Rotation(2 * width), Rotation(2 * width, pairs=True, angle="pair")]
    return [rotation for rotation in rotations if rotation.size <= dim and rotation.size % 2 == 0]


def _activation_of(module: nn.Module) -> str | None:
    """The name in ``ACTIVATIONS`` of the module's activation, found in float32."""
    act = next((getattr(module, name) for name in _ACT_NAMES if hasattr(module, name)), None)
    x = torch.cat([torch.linspace(-6, 6, 97), torch.tensor([-50.0, 50.0])])
    if not callable(act):
        return None
    try:
        values = act(x)
    except Exception:
        return None
    for name, function in _TORCH_ACTIVATIONS.items():
        if isinstance(values, torch.Tensor) and same_numbers(function(x), values):
            return name
    return None
