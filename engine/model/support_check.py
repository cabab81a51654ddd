"""The load gate: checks whether a model gives the right logits with our attention.

transformers' ``_supports_attention_backend`` is true for families that would be silently wrong (chunked attention,
differential attention, recurrent layers), and false for some that are right. So the config is checked, the calls of the
layers are counted, and logits are compared with the model's own eager attention. A refusal names the check that failed:

decoder only, layer types, rope type, forward, attention mask, attention backend, one attention call a layer,
sliding window, logits_to_keep, logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench_engine.kv.budget import KVShape
from kvbench_engine.model.attention import AttentionHost, ForeignMaskError, ShapeRecorder, StepTensors, install
from kvbench_engine.model.host_waits import HostWaits
from kvbench_kernels.api import AttentionBackend

SAFE_LAYER_TYPES = {"full_attention", "sliding_attention"}
# longrope and dynamic choose their frequencies from the longest sequence of the batch, so that a sequence's
# positions would depend on its batch-mates
SAFE_ROPE_TYPES = {"default", "linear", "yarn", "llama3", "proportional"}

_PROBE_TOKENS = 23
_PROBE_PAGE_SIZE = 4
_PROBE_WINDOW = 6
# (prompt, start, stop): a chunk alone, two prompts packed, a decode beside a chunk, decodes together and alone
_PROBE_STEPS = [
    [(0, 0, 9)],
    [(0, 9, 19), (1, 0, 10)],
    [(0, 19, 20), (1, 10, 19)],
    [(0, 20, 21), (1, 19, 20)],
    [(0, 21, 22), (1, 20, 21)],
    [(0, 22, 23), (1, 21, 22)],
    [(1, 22, 23)],
]
_PROBE_PARTS = [(0, 0, 9), (0, 9, 19), (0, 19, 23), (1, 0, 10), (1, 10, 19), (1, 19, 23)]  # chunks, and all decodes


@dataclass(frozen=True)
class _Limits:
    """Largest RMS error of a token's logits, relative to their spread, that ``share`` of the tokens must keep.

    All tokens in float32. In half precision a rounding can send a token to another expert, and its error is then of
    order 1 although nothing is wrong; a wrong mask, position or state gives most tokens of some part such an error.
    ``overall`` limits all tokens, ``part`` each chunk and the decodes of each prompt.
    """

    share: float
    overall: float
    part: float


_LIMITS = {
    torch.float32: _Limits(1.0, 1e-3, 1e-3),
    torch.float16: _Limits(0.5, 0.03, 0.4),
    torch.bfloat16: _Limits(0.5, 0.1, 0.4),
}


class GateError(ValueError):
    """The load gate refuses a model. ``why``: the reason alone."""

    def __init__(self, model: PreTrainedModel, check: str, why: str):
        super().__init__(
            f"model type {model.config.model_type!r} is refused by the load gate, check {check!r}: {why}; serve it "
            "with another engine and point kvbench at its URL"
        )
        self.why = why


def check_family(model: PreTrainedModel) -> None:
    """Check the model's own config: decoder, layer types, RoPE."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise GateError(model, "decoder only", "it is an encoder-decoder model")
    strange = set(getattr(config, "layer_types", None) or ()) - SAFE_LAYER_TYPES
    if strange:
        raise GateError(model, "layer types", f"it has layers of type {', '.join(sorted(strange))}")
    unsafe = _rope_types(config) - SAFE_ROPE_TYPES
    if unsafe:
        raise GateError(
            model,
            "rope type",
            f"RoPE type {', '.join(sorted(unsafe))} is not known to depend on a token's own position alone",
        )


def _rope_types(config) -> set[str]:
    """The RoPE types of a config, from ``rope_parameters`` (one dict, or one per layer type) or ``rope_scaling``."""
    types: set[str] = set()
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if not isinstance(parameters, dict):
            continue
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        for one in nested or [parameters]:
            types.add(one.get("rope_type") or one.get("type") or "default")
    return types


@torch.inference_mode()
def measure_kv(model: PreTrainedModel, dtype_bytes: int) -> tuple[KVShape, tuple[int, ...]]:
    """Measure the KV shape that each layer really sends, and its query heads.

    Each layer must call attention exactly once.
    """
    recorder, narrowed = ShapeRecorder(), ShapeRecorder()
    ids, positions = _probe_batch(model)
    try:
        install(model, recorder)
        model(input_ids=ids[:1, :2], position_ids=positions[:, :2], use_cache=False)
        install(model, narrowed)
        with _narrow_windows(model):
            model(input_ids=ids[:1, :2], position_ids=positions[:, :2], use_cache=False)
    except ForeignMaskError as error:
        raise GateError(model, "attention mask", str(error)) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise GateError(model, "forward", f"its forward fails with our attention ({error})") from error
    if not recorder.calls:
        raise GateError(model, "attention backend", "its code does not take its attention function by name")
    layers = model.config.get_text_config().num_hidden_layers
    calls = [recorder.calls[index] for index in range(layers)]
    if calls != [1] * layers or len(recorder.calls) != layers:
        why = f"its {layers} layers call {dict(recorder.calls)} times"
        raise GateError(model, "one attention call a layer", why)
    for layer, window in ((layer, kv.window) for layer, kv in narrowed.layers.items()):
        if _may_bite(window, model) and window >= _PROBE_TOKENS:
            raise GateError(
                model, "sliding window", f"layer {layer} has a window of {window} tokens that cannot be tried out"
            )
    order = range(layers)
    return KVShape(tuple(recorder.layers[i] for i in order), dtype_bytes), tuple(recorder.query_heads[i] for i in order)


@torch.no_grad()
def find_host_waits(model: PreTrainedModel) -> list[str]:
    """Operations of the model's own code that wait for its device; see kvbench_engine.model.host_waits.

    An operation that fails ends the list, as the first one on the device "meta" does. Afterwards our attention has a
    dummy host.
    """
    ids, positions = _probe_batch(model)
    ids, positions = ids[:1, :2], positions[:, :2]
    install(model, ShapeRecorder())
    with HostWaits(ids.device) as waits:
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=positions[0])
        except (RuntimeError, NotImplementedError):
            if not waits.found:
                raise
    return waits.found


def _may_bite(window: Any, model: PreTrainedModel) -> bool:
    """Tests whether a sliding window can ever hide a token: it is one, and shorter than the longest sequence."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return isinstance(window, int) and window > 0 and not (isinstance(longest, int) and window >= longest)


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make the model's sliding windows short enough to matter in a probe, in its masks and in its calls alike.

    A family that keeps the window in its eager mask and does not send it to the attention function is right below
    4,096 tokens and silently wrong above. Masks go by ``config.sliding_window``, calls by the config's or by the
    attention module's own ``sliding_window``.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not _may_bite(window, model) or window <= _PROBE_WINDOW:
        yield
        return
    holders = [config, *(module for module in model.modules() if isinstance(_own_window(module), int))]
    before = [holder.sliding_window for holder in holders]
    try:
        for holder, value in zip(holders, before, strict=True):
            # an offset between mask and call, if there is one, is the family's own and stays
            holder.sliding_window = max(1, value - window + _PROBE_WINDOW)
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.sliding_window = value


def _own_window(module: torch.nn.Module) -> Any:
    return vars(module).get("sliding_window")


@torch.inference_mode()
def check_logits(model: PreTrainedModel, backend: AttentionBackend, kv_shape: KVShape) -> None:
    """Compare eager logits of two prompts, each alone, with ours: packed, in chunks, over scattered pages."""
    ids, positions = _probe_batch(model)
    with _narrow_windows(model):
        model.set_attn_implementation("eager")
        expected = [
            model(input_ids=row[None], position_ids=positions, use_cache=False).logits[0].float() for row in ids
        ]
        got = paged_logits(model, backend, kv_shape)
    why = logits_differ(expected, got, next(model.parameters()).dtype)
    if why is not None:
        raise GateError(model, "logits", f"its logits differ from its own eager attention {why}")


def logits_differ(expected: list[torch.Tensor], got: list[torch.Tensor], dtype: torch.dtype) -> str | None:
    """The difference of the probe's logits in words, if it is beyond the limits of ``dtype``; else None."""
    spread = float(torch.cat(expected).std()) or 1.0
    errors = [(ours - theirs).square().mean(-1).sqrt() / spread for ours, theirs in zip(got, expected, strict=True)]
    limits = _LIMITS[dtype]
    overall = float(torch.cat(errors).quantile(limits.share))
    part = max(float(errors[row][start:stop].quantile(limits.share)) for row, start, stop in _PROBE_PARTS)
    # "not <=" refuses NaN too
    if overall <= limits.overall and part <= limits.part:
        return None
    return (
        f"by {overall:.2g} of their spread, {part:.2g} in the worst part of the probe; the limits for "
        f"{str(dtype).removeprefix('torch.')} are {limits.overall:.2g} and {limits.part:.2g}"
    )


@torch.no_grad()
def paged_logits(
    model: PreTrainedModel, backend: AttentionBackend, kv_shape: KVShape, fused_layers: bool = False
) -> list[torch.Tensor]:
    """The probe's logits ``[tokens, vocab]`` of each prompt, float32, as the engine would compute them."""
    ids, all_positions = _probe_batch(model)
    positions = all_positions[0]
    num_pages = -(-_PROBE_TOKENS // _PROBE_PAGE_SIZE)
    order = torch.randperm(len(ids) * num_pages, generator=torch.Generator().manual_seed(0)).to(ids.device)
    page_starts = order.view(len(ids), num_pages) * _PROBE_PAGE_SIZE
    like = next(model.parameters())
    slots = order.numel() * _PROBE_PAGE_SIZE
    host = AttentionHost(backend, kv_shape, slots, (_PROBE_PAGE_SIZE,), like, fused_layers=fused_layers)
    install(model, host)
    got: list[list[torch.Tensor]] = [[] for _ in ids]
    for items in _PROBE_STEPS:
        host.begin(_probe_step(page_starts, items))
        rows = [ids[row, start:stop] for row, start, stop in items]
        logits = model(
            input_ids=torch.cat(rows)[None],
            position_ids=torch.cat([positions[start:stop] for _, start, stop in items])[None],
            use_cache=False,
            logits_to_keep=torch.arange(sum(map(len, rows)), device=ids.device),
        ).logits[0]
        if len(logits) != sum(map(len, rows)):
            raise GateError(model, "logits_to_keep", "it does not return the logits of the tokens asked for")
        for (row, _, _), part in zip(items, logits.float().split([len(one) for one in rows]), strict=True):
            got[row].append(part)
    return [torch.cat(parts) for parts in got]


def _probe_batch(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ids ``[2, tokens]`` spread over the vocabulary, and their positions ``[1, tokens]``."""
    device = next(model.parameters()).device
    vocab = model.get_input_embeddings().weight.shape[0]
    index = torch.arange(_PROBE_TOKENS, device=device)
    return torch.stack([index * 7919 + 3, index * 104729 + 11]) % vocab, index[None]


def _probe_step(page_starts: torch.Tensor, items: list[tuple[int, int, int]]) -> StepTensors:
    """Make a step of the probe. ``items``: (prompt, start, stop) of each chunk, single tokens first."""
    device = page_starts.device
    num_decodes = sum(stop - start == 1 for _, start, stop in items)
    positions = [torch.arange(start, stop, device=device) for _, start, stop in items]
    slots = [
        page_starts[row, at // _PROBE_PAGE_SIZE] + at % _PROBE_PAGE_SIZE
        for (row, _, _), at in zip(items, positions, strict=True)
    ]
    rows = page_starts[[row for row, _, _ in items]]
    lengths = torch.tensor([stop for _, _, stop in items], device=device)
    counts = torch.tensor([0] + [stop - start for _, start, stop in items[num_decodes:]], device=device)
    return StepTensors(
        num_decodes=num_decodes,
        slots=torch.cat(slots)[None],
        decode_page_starts=rows[None, :num_decodes],
        decode_seq_lens=lengths[:num_decodes],
        prefill_page_starts=rows[None, num_decodes:],
        prefill_seq_lens=lengths[num_decodes:],
        query_starts=counts.cumsum(0),
        max_decode_tokens=max((stop for _, _, stop in items[:num_decodes]), default=0),
        max_prefill_tokens=max((stop for _, _, stop in items[num_decodes:]), default=0),
        max_queries=max((stop - start for _, start, stop in items[num_decodes:]), default=0),
    )
