"""Finds the operations of a forward pass whose result the host must know before it can go on.

On a GPU each of them waits for the device, and a CUDA graph cannot hold it: the numbers and shapes that Python made of
the result would be those of the capture. They are recognised on any device by what torch calls and dispatches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Named as in torch's operator schemas: a tensor becomes a Python number, or a shape depends on values.
_WAITING = frozenset((
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "bincount", "_linalg_check_errors",
))  # fmt: skip
_READING = frozenset(("tolist", "numpy"))  # methods of a tensor that dispatch nothing on a CPU

_MAKING = frozenset(("tensor", "as_tensor", "new_tensor"))


class HostWaits(TorchDispatchMode):
    """A context that notes every operation whose result on ``device`` the host waits for.

    Not in inference mode, which hides what some operations are made of. ``found``: their names, in order, each once.
    ``seen``: how many operations were dispatched.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0
        self._device = device.type
        self._methods = _Methods(self)

    def __enter__(self) -> HostWaits:
        assert not torch.is_inference_mode_enabled(), "use torch.no_grad()"
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Note that the operation ``name`` reads ``tensor``."""
        if tensor.device.type == self._device and name not in self.found:
            self.found.append(name)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen += 1
        name = function._schema.name.split("::")[1]
        if (read := _read_by(name, args, kwargs)) is not None:
            self.note(name, read)
        result = function(*args, **kwargs)
        if name in ("_to_copy", "copy_") and _blocks(name, args, kwargs):
            source, target = (args[0], result) if name == "_to_copy" else (args[1], result)
            if source.device.type != target.device.type:
                self.note(name, source if source.device.type == self._device else target)
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READING:
            self._waits.note(name, args[0])
        result = function(*args, **kwargs)
        # Copied from Python's numbers; without a device they stay on the host.
        if name in _MAKING and (kwargs.get("device") is not None or name == "new_tensor"):
            self._waits.note(name, result)
        return result


def _read_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor whose values the host needs to go on after this operation; None for most."""
    if name in _WAITING:
        return args[0]
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return args[0]
    if name in ("index", "index_put", "index_put_"):
        masks = [at for at in args[1] if isinstance(at, torch.Tensor) and at.dtype in (torch.bool, torch.uint8)]
        if masks and (name == "index" or args[2].numel() != 1):  # one value for all of a mask is a masked fill
            return masks[0]
    return None


def _blocks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tests whether a copy ends before the call does."""
    return not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
