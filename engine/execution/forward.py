"""One packed forward pass of the model: eager, compiled, or a replay of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench_engine.execution.graphs import Capture, GraphSizes, StepGraphs
from kvbench_engine.model.attention import FUSION, AttentionHost, StepTensors, install
from kvbench_engine.model.fused_layers import Fusion


class ModelForward:
    """Computes ``(ids [T], positions [T], step, last_tokens [N])`` -> logits ``[N, vocab]`` of the last tokens.

    Several may share a model, each with its own KV cache: every call first routes the model's attention to its
    ``host``. ``compiler``: makes of the model what is called in its place.
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
        self._graphs: StepGraphs | None = None
        self.num_replayed = 0  # calls
        install(model, host)

    def capture_graphs(
        self,
        sizes: GraphSizes,
        page_starts: torch.Tensor,
        max_model_len: int,
        capture: Capture,
        required: bool = False,
    ) -> bool:
        """Replay the steps that fit ``sizes`` from graphs from now on; False, with no change, if the model cannot.

        ``page_starts [groups, rows, pages]``: the page tables that the steps of decodes come with. ``max_model_len``:
        tokens.

        Raises:
            ValueError: the model cannot, and graphs are ``required``.
        """
        device = next(self.model.parameters()).device
        graphs = StepGraphs(self._eager, sizes, page_starts, max_model_len, device, capture)
        self._graphs = graphs if graphs.capture(required) else None
        return self._graphs is not None

    @property
    def replays_graphs(self) -> bool:
        """Tests whether any steps are replayed."""
        return self._graphs is not None

    @property
    def graph_sizes(self) -> GraphSizes | None:
        """The sizes of the captured graphs; None where no step is replayed."""
        return None if self._graphs is None else self._graphs.sizes

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Compute the logits; does not wait for the device. A replayed graph's are valid until the next call."""
        if self._graphs is not None:
            logits = self._graphs.run(ids, positions, step, last_tokens)
            if logits is not None:
                self.num_replayed += 1
                return logits
        return self._eager(ids, positions, step, last_tokens)

    def _eager(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepTensors, keep: torch.Tensor | int
    ) -> torch.Tensor:
        install(self.model, self.host)
        self.host.begin(step)
        fusion: Fusion | None = getattr(self.model, FUSION, None)
        with nullcontext() if fusion is None else fusion.for_tokens(keep, len(ids)):
            output = self._call(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        return output.logits[0]
