"""One packed forward pass of the model: eager, compiled, or a replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.execution.graphs import Capture, DecodeGraphs
from engine.model.attention import NAME, AttentionHost, StepTensors, install
from engine.model.attention import forward as attention_forward


class ModelForward:
    """``(ids [T], positions [T], step, last_tokens [N])`` -> logits ``[N, vocab]`` of those of the T tokens.

    Several of them may share a model, each with a KV cache of its own: every pass sees to it that the model's
    attention goes to this one's ``host``. ``compiler``: makes of the model what is called in its place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        host: AttentionHost,
        compiler: Callable[[PreTrainedModel], Callable[..., Any]] | None = None,
    ):
        self.model = model
        self.host = host
        self._call = model if compiler is None else compiler(model)
        self._graphs: DecodeGraphs | None = None
        install(model, host)

    def capture_decodes(
        self, page_table_shape: tuple[int, int], max_model_len: int, capture: Capture, required: bool = False
    ) -> bool:
        """From now on steps of single tokens replay graphs; False, and nothing changes, if the model cannot.

        Raises:
            ValueError: the model cannot, and graphs are ``required``.
        """
        device = next(self.model.parameters()).device
        graphs = DecodeGraphs(self._all_tokens, page_table_shape, max_model_len, device, capture)
        self._graphs = graphs if graphs.capture(required) else None
        return self._graphs is not None

    @property
    def replays_graphs(self) -> bool:
        """Whether steps of single tokens are replayed."""
        return self._graphs is not None

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """On the device, not waited for. Of a replayed graph: good until the next call."""
        if self._graphs is not None:
            logits = self._graphs.run(ids, positions, step)
            if logits is not None:  # a prompt's last chunk but one may be a single token too, and draws nothing
                return logits if len(last_tokens) == len(logits) else logits[last_tokens]
        return self._eager(ids, positions, step, last_tokens)

    def _all_tokens(self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors) -> torch.Tensor:
        return self._eager(ids, positions, step, 0)  # 0: transformers' word for all

    def _eager(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, keep: torch.Tensor | int
    ) -> torch.Tensor:
        install(self.model, self.host)
        self.host.begin(step)
        output = self._call(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        return output.logits[0]


def compile_model(model: PreTrainedModel, backend: str = "inductor") -> Callable[..., Any]:
    """torch.compile for any number of tokens; our attention, which keeps a state of its own, stays outside."""
    AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    return torch.compile(model, dynamic=True, backend=backend)


def check_compiler(device: torch.device) -> None:
    """Compile next to nothing, so that a missing compiler shows before a model is loaded.

    Raises:
        ValueError: torch.compile does not work here; the text says why.
    """
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # dynamo's, inductor's, Triton's or the compiler's own
        raise cannot_compile(device, error) from error


def first_sentence(error: Exception) -> str:
    """The first line of what a library says, and the second where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def cannot_compile(device: torch.device, error: Exception) -> ValueError:
    return ValueError(
        f"torch_compile cannot be true on device {device.type!r} here, because compiling fails "
        f"({first_sentence(error)}): install a "
        "C++ compiler that torch.compile finds, or leave torch_compile out"
    )
