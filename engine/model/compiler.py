"""Compiles the model's forward with torch.compile, and writes its errors as one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvbench_engine.model.attention import NAME
from kvbench_engine.model.attention import forward as attention_forward


def compile_model(model: PreTrainedModel, backend: str = "inductor") -> Callable[..., Any]:
    """Compile ``model`` for any number of tokens; our attention, which has state, is left out."""
    AttentionInterface.register(NAME, torch.compiler.disable(attention_forward))
    return torch.compile(model, dynamic=True, backend=backend)


def check_compiler(device: torch.device) -> None:
    """Compile a tiny function, to find a missing compiler before a model is loaded.

    Raises:
        ValueError: torch.compile does not work here; the text says why.
    """
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # dynamo's, inductor's, Triton's or the compiler's own
        raise cannot_compile(device, error) from error


def first_sentence(error: Exception) -> str:
    """The first line of an error message, and the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def cannot_compile(device: torch.device, error: Exception) -> ValueError:
    return ValueError(
        f"torch_compile cannot be true on device {device.type!r} here, because compiling fails "
        f"({first_sentence(error)}): install a C++ compiler that torch.compile finds, or leave torch_compile out"
    )
