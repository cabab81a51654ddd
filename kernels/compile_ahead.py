"""Compiles Triton kernels without a GPU, and reads from the machine code what they take of a chip.

``triton.compile`` needs a target, not a device: what a launch on a machine with that chip would get. The numbers come
from the cubin through the cuobjdump that the Triton wheel carries, the dynamic shared memory from Triton's metadata.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kvbench_kernels.dependent_launch import PDL_ARCH

WARP_SIZE = 32
_LAUNCH = ("num_warps", "num_stages")
_LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True)
class Resources:
    """``registers`` a thread; ``spills``: instructions that load from or store to the thread's local memory;
    ``stack_bytes`` of that memory a thread; ``shared_bytes``: dynamic shared memory a block."""

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int


def compile_for(
    kernel: Any, constants: Mapping[str, Any], arch: int, types: Mapping[str, str], default: str = "bf16"
) -> CompiledKernel:
    """Compile ``kernel`` for sm_``arch`` as a launch on aligned tensors would.

    ``constants``: every constexpr but PDL, with num_warps and num_stages. ``types``: Triton's names of the element
    types of pointers (arguments that end in ``_ptr``; of type ``default`` where it says nothing) and of scalars ("fp32"
    where the name ends in ``scale`` or ``softcap``, else "i32"). Integers that it does not name count as multiples of
    16, as strides of slots and heads are, unless the kernel asks not to be specialised for them.
    """
    constants = dict(constants)
    options = {name: constants.pop(name) for name in _LAUNCH if name in constants}
    if any(parameter.name == "PDL" for parameter in kernel.params):
        constants["PDL"] = options["launch_pdl"] = arch >= PDL_ARCH
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = "*" + types.get(name, default)
        else:
            signature[name] = types.get(name, "fp32" if name.endswith(("scale", "softcap")) else "i32")
        multiple = name.endswith("_ptr") or (name not in types and signature[name] == "i32")
        if multiple and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, WARP_SIZE), options=options)


def read_resources(compiled: CompiledKernel) -> Resources:
    """Reads the resources that ``compiled`` takes.

    Raises:
        RuntimeError: cuobjdump failed, or said nothing of the kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        output = _cuobjdump("--dump-resource-usage", cubin.name)
        usage = re.search(rf"Function {re.escape(compiled.metadata.name)}:\s*(.*)", output)
        if usage is None:
            raise RuntimeError(f"cuobjdump names no function {compiled.metadata.name!r}: {output.strip()[:300]}")
        fields = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.group(1))}
        stack = fields["STACK"] + fields["LOCAL"]
        # Without a stack frame there is nothing to spill to: no need to disassemble.
        spills = len(_LOCAL_ACCESS.findall(read_sass(compiled))) if stack else 0
    return Resources(fields["REG"], spills, stack, compiled.metadata.shared)


def read_sass(compiled: CompiledKernel) -> str:
    """The machine code of ``compiled`` as cuobjdump lists it.

    Raises:
        RuntimeError: cuobjdump failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return _cuobjdump("--dump-sass", cubin.name)


def _cuobjdump(option: str, path: str) -> str:
    tool = knobs.nvidia.cuobjdump.path
    done = subprocess.run([tool, option, path], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{tool} {option} failed: {done.stderr.strip()[:300]}")
    return done.stdout
