"""Counts what a GPU would be sent: torch operations that start a kernel, and launches of Triton kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

_NO_KERNEL = {"empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided"}


class Launches(TorchDispatchMode):
    """``counts``: name -> launches. An operation counts unless all it returns is memory that it was given, unchanged;
    what Triton's interpreter does inside of a kernel does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        given = {t.untyped_storage().data_ptr() for t in _tensors([args, list((kwargs or {}).values())])}
        made = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in given]
        if not self._inside and name not in _NO_KERNEL and (made or function._schema.is_mutable):
            self.counts[name] += 1
        return result

    @contextmanager
    def triton(self, patch: pytest.MonkeyPatch) -> Iterator[Launches]:
        """Count until the end of the block."""
        run = InterpretedFunction.run

        def counted(kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
            self.counts[kernel.__name__] += 1
            self._inside = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self._inside = False

        with patch.context() as inner, self:
            inner.setattr(InterpretedFunction, "run", counted)
            yield self


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
