"""What NVIDIA's chips allow a kernel, by compute capability (90 for sm_90).

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": maximum amount of shared memory
per thread block.
"""

from __future__ import annotations

_SHARED_KIB = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
SMALLEST_SHARED_KIB = 99  # of the chips from sm_80 on


def shared_bytes_limit(arch: int) -> int:
    """Bytes of shared memory that one block may have on sm_``arch``; of an unknown chip, the smallest since sm_80."""
    return _SHARED_KIB.get(arch, SMALLEST_SHARED_KIB) * 1024
