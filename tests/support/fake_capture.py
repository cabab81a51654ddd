"""Stands in for CUDA's graph capture on a CPU: what a body does is recorded, and a replay does exactly that again.

Recorded are the operations that torch dispatches, the calls of an attention backend and the launches of interpreted
Triton kernels, each with the tensors of the capture. The body's Python does not run again, so that a replay has the
numbers that Python made of tensors, its bounds and its new tensors as they were, as a CUDA graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from kvbench_engine.model.attention import AttentionHost

_BACKEND_CALLS = ("write_kv", "decode_attention", "prefill_attention", "plan_decode", "plan_prefill")


class FakeCapture:
    """Captures bodies that run on ``host``.

    ``fails_at``: the number of the capture that raises what a stream under capture raises when it is waited for.
    ``calls_backend``: the host's backend is called as a whole in a replay; else its own operations are recorded.
    """

    def __init__(self, host: AttentionHost, fails_at: int | None = None, calls_backend: bool = True):
        self.captured = self.replayed = 0
        self._fails_at = fails_at
        self._tape: _Tape | None = None
        if calls_backend:
            host.backend = _RecordedBackend(host.backend, self)

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        if self.captured == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.captured += 1
        body()  # as the real one, which lets kernels compile first
        tape = self._tape = _Tape()
        try:
            with tape, _recorded_launches(tape):
                body()
        finally:
            self._tape = None

        def replay() -> None:
            self.replayed += 1
            tape.play()

        return replay

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call, and record if something is being captured."""
        if self._tape is None:
            return function(*args, **kwargs)
        return self._tape.call(function, args, kwargs)


class _Tape(TorchDispatchMode):
    """Everything that ran under this mode, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._plans: dict[int, Any] = {}  # id of a recorded plan -> that of the replay

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.split("::")[1]
        writes = function._schema.is_mutable
        if name.startswith(("empty", "new_empty")) or not (writes or _new_tensors(result, args, kwargs)):
            return result  # memory without contents, or another view of the same
        self._steps.append((function, args, kwargs, None if writes else result))
        return result

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that is recorded as a whole, with the plan or the tensor that it returns."""
        with _disable_current_modes():
            result = function(*args, **kwargs)
        self._steps.append((function, args, kwargs, result))
        return result

    def play(self) -> None:
        """Do everything again on the same tensors."""
        for function, args, kwargs, before in self._steps:
            kwargs = {name: self._plans.get(id(value), value) for name, value in kwargs.items()}
            result = function(*args, **kwargs)
            if before is not None:
                self._renew(before, result)

    def _renew(self, before: Any, result: Any) -> None:
        """Give what the capture returned the replay's contents."""
        if isinstance(before, torch.Tensor):
            if before.data_ptr() != result.data_ptr():
                before.copy_(result)
        elif isinstance(before, (tuple, list)):
            for old, new in zip(before, result, strict=True):
                self._renew(old, new)
        else:
            self._plans[id(before)] = result


def _new_tensors(result: Any, args: Any, kwargs: Any) -> bool:
    """Whether any tensor of ``result`` has memory of its own."""
    known: set[int] = set()
    found = False

    def learn(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            known.add(x.untyped_storage().data_ptr())

    def look(x: Any) -> None:
        nonlocal found
        if isinstance(x, torch.Tensor):
            found |= x.numel() > 0 and x.untyped_storage().data_ptr() not in known

    tree_map(learn, (args, kwargs))
    tree_map(look, result)
    return found


class _RecordedBackend:
    """An attention backend whose calls are recorded as a whole."""

    def __init__(self, backend: Any, capture: FakeCapture):
        self._backend, self._capture = backend, capture

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in _BACKEND_CALLS:
            return found
        return lambda *args, **kwargs: self._capture.call(found, args, kwargs)


@contextmanager
def _recorded_launches(tape: _Tape) -> Iterator[None]:
    """Launches of kernels in Triton's interpreter, where there is one."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    launch = GridExecutor.__call__

    def recorded(grid: Any, *args: Any, **kwargs: Any) -> None:
        tape.call(lambda *a, **k: launch(grid, *a, **k), args, kwargs)

    GridExecutor.__call__ = recorded
    try:
        yield
    finally:
        GridExecutor.__call__ = launch
