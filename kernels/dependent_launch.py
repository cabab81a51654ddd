"""Starts a kernel before the one ahead of it on the stream has ended: programmatic dependent launch, from sm_90 on.

Behind another kernel that is launched so, the next one's programs are set up while the last programs of the first run;
behind any other kernel, once its last program has ended. Then they wait until its results are in memory. A kernel that
is launched so calls ``wait_for_earlier`` first. Its end then means the end of all kernels before it, so that the order
of a stream holds whatever is launched, in whatever way, before or after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

PDL_ARCH = 90


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait for the end of all kernels before this one; then let the next one be set up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """The arguments of a launch on ``device`` of a kernel that calls ``wait_for_earlier``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < divmod(PDL_ARCH, 10):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
