"""One packed forward pass of the model: eager, compiled, or a replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.execution.graphs import Capture, DecodeGraphs
from engine.model.attention import AttentionHost, StepTensors, install


class ModelForward:
    """``(ids [T], positions [T], step, last_tokens [N])`` -> logits ``[N, vocab]`` of those of the T tokens.

    Several may share a model, each with its own KV cache: every call first routes the model's attention to its
    ``host``. ``compiler``: returns what is called instead of the model.
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
        """Replay steps of single tokens from graphs from now on; False, with no change, if the model cannot.

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
        """Does not wait for the device. Logits of a replayed graph are valid until the next call."""
        if self._graphs is not None:
            logits = self._graphs.run(ids, positions, step)
            if logits is not None:  # a prompt's chunk may be a single token that draws nothing
                return logits if len(last_tokens) == len(logits) else logits[last_tokens]
        return self._eager(ids, positions, step, last_tokens)

    def _all_tokens(self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors) -> torch.Tensor:
        return self._eager(ids, positions, step, 0)  # 0: all, in transformers

    def _eager(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, keep: torch.Tensor | int
    ) -> torch.Tensor:
        install(self.model, self.host)
        self.host.begin(step)
        output = self._call(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        return output.logits[0]
