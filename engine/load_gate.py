"""May this model run through our attention? Checked by trying, because flags alone lie.

transformers' ``_supports_attention_backend`` is true for families that then pass our function the wrong thing (chunked
attention, differential attention, recurrent layers) and would be silently wrong. So a model must pass four looks at
what it says of itself and one comparison of logits, or it is refused by the name of the check.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.attention import AttentionHost, ShapeRecorder, StepTensors, install
from engine.kv_budget import KVShape
from kernels.api import AttentionBackend

SAFE_LAYER_TYPES = {"full_attention", "sliding_attention"}
# longrope and dynamic choose their frequencies from the longest sequence of the batch, so that a sequence's
# positions would depend on its batch-mates
SAFE_ROPE_TYPES = {"default", "linear", "yarn", "llama3", "proportional"}

_PROBE_TOKENS = 23
_PROBE_PAGE_SIZE = 4
# relative to the spread of the logits; rounding differs between attention orders, an error of layout is of order 1
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def refuse(model: PreTrainedModel, check: str, why: str) -> ValueError:
    return ValueError(
        f"model type {model.config.model_type!r} is refused by the load gate, check {check!r}: {why}; serve it with "
        "another engine and point kvbench at its URL"
    )


def check_family(model: PreTrainedModel) -> None:
    """What the model says of itself: attention backend, layer types, RoPE."""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise refuse(model, "attention backend", "its code does not take its attention function by name")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refuse(model, "decoder only", "it is an encoder-decoder model")
    strange = set(getattr(config, "layer_types", None) or ()) - SAFE_LAYER_TYPES
    if strange:
        raise refuse(model, "layer types", f"it has layers of type {', '.join(sorted(strange))}")
    unsafe = _rope_types(config) - SAFE_ROPE_TYPES
    if unsafe:
        raise refuse(model, "rope type", f"RoPE type {', '.join(sorted(unsafe))} depends on the other sequences")


def _rope_types(config) -> set[str]:
    """``rope_parameters`` is one dict, or one per layer type; older configs have ``rope_scaling``."""
    found: set[str] = set()
    for parameters in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if not isinstance(parameters, dict):
            continue
        nested = [value for value in parameters.values() if isinstance(value, dict)]
        for one in nested or [parameters]:
            found.add(one.get("rope_type") or one.get("type") or "default")
    return found


@torch.inference_mode()
def measure_kv(model: PreTrainedModel, dtype_bytes: int) -> tuple[KVShape, tuple[int, ...]]:
    """KV shape of each layer as the model really sends it, and its query heads; each layer must call exactly once."""
    recorder = ShapeRecorder()
    install(model, recorder)
    ids, positions = _probe_batch(model)
    try:
        model(input_ids=ids[:, :2], position_ids=positions[:, :2], use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise refuse(model, "forward", f"its forward fails with our attention ({error})") from error
    layers = model.config.get_text_config().num_hidden_layers
    calls = [recorder.calls[index] for index in range(layers)]
    if calls != [1] * layers or len(recorder.calls) != layers:
        raise refuse(model, "one attention call a layer", f"its {layers} layers call {dict(recorder.calls)} times")
    order = range(layers)
    return KVShape(tuple(recorder.layers[i] for i in order), dtype_bytes), tuple(recorder.query_heads[i] for i in order)


@torch.inference_mode()
def check_logits(model: PreTrainedModel, backend: AttentionBackend, kv_shape: KVShape) -> None:
    """Eager logits of a prompt against ours, prefilled in two chunks and a last decode over scattered pages."""
    ids, positions = _probe_batch(model)
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()

    num_pages = -(-_PROBE_TOKENS // _PROBE_PAGE_SIZE)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).to(ids.device)
    page_starts = (order * _PROBE_PAGE_SIZE)[None]
    like = next(model.parameters())
    host = AttentionHost(backend, kv_shape, num_pages * _PROBE_PAGE_SIZE, _PROBE_PAGE_SIZE, like)
    install(model, host)
    chunks = [(0, 9), (9, _PROBE_TOKENS - 1), (_PROBE_TOKENS - 1, _PROBE_TOKENS)]
    got = []
    for start, stop in chunks:
        host.begin(_probe_step(page_starts, start, stop))
        kept = torch.arange(stop - start, device=ids.device)
        output = model(
            input_ids=ids[:, start:stop],
            position_ids=positions[:, start:stop],
            use_cache=False,
            logits_to_keep=kept,
        )
        got.append(output.logits[0].float())
    if sum(part.shape[0] for part in got) != _PROBE_TOKENS:
        raise refuse(model, "logits_to_keep", "it does not return the logits of the tokens asked for")
    spread = float(expected.std()) or 1.0
    error = float((torch.cat(got) - expected).abs().max()) / spread
    if not error <= _TOLERANCE[like.dtype]:
        raise refuse(
            model,
            "logits",
            f"its logits differ from its own eager attention by {error:.2g} of their spread, the limit for "
            f"{str(like.dtype).removeprefix('torch.')} is {_TOLERANCE[like.dtype]:.2g}",
        )


def _probe_batch(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """``[1, tokens]`` ids spread over the vocabulary, and their positions."""
    device = next(model.parameters()).device
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_PROBE_TOKENS, device=device) * 7919 + 3) % vocab
    return ids[None], torch.arange(_PROBE_TOKENS, device=device)[None]


def _probe_step(page_starts: torch.Tensor, start: int, stop: int) -> StepTensors:
    device = page_starts.device
    positions = torch.arange(start, stop, device=device)
    slots = page_starts[0, positions // _PROBE_PAGE_SIZE] + positions % _PROBE_PAGE_SIZE
    length = torch.tensor([stop], device=device)
    decode = stop - start == 1
    none = slice(0, 0)
    return StepTensors(
        num_decodes=int(decode),
        slots=slots,
        decode_page_starts=page_starts if decode else page_starts[none],
        decode_seq_lens=length if decode else length[none],
        prefill_page_starts=page_starts[none] if decode else page_starts,
        prefill_seq_lens=length[none] if decode else length,
        query_starts=torch.tensor([0] if decode else [0, stop - start], device=device),
    )
