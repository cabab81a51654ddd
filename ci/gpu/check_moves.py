"""Checks page copies and swaps against plain indexing, and kernels on slots beyond 2^31 bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ci.gpu import kernel_problems as problems
from ci.gpu.kernel_problems import TOLERANCE, DrawnKV, KernelProblem
from engine.kv.budget import KVCapacity
from engine.kv.manager import Move, MoveKind
from engine.kv.mover import KVMover
from kernels import get_backend
from kernels.api import KVCache
from kernels.quantized import QuantizedKV, raw_tensors
from kernels.tune.problems import FAR_OUTSIDE

PAGE, PAGES, HOST_PAGES = 16, 64, 32
ROUNDS = 20


def capacity(slots: int, host_slots: int, page_size: int) -> KVCapacity:
    """The capacity of a cache that is only moved: what a mover does not look at is 0."""
    return KVCapacity(
        budget_bytes=0, bytes_per_slot=0, scale_bytes_per_slot=0, page_size=page_size, num_pages=slots // page_size,
        num_slots=slots, max_pages_per_seq=0, page_table_bytes=0, host_slots=host_slots,
    )  # fmt: skip


class NotHere(ValueError):
    """Raised where this machine lacks what a check needs; the message says what."""


def moves_differ(layout: str, device: str) -> str | None:
    """Compares the caches with a model of torch indexing on the CPU: None, or the round that differs.

    Tensors of several dtypes and row sizes, odd ones among them, as codes and scales of quantised caches are.
    """
    torch.manual_seed(0)
    slots = PAGE * PAGES
    shapes = [((slots, 2, 64), torch.bfloat16), ((slots, 2, 5), torch.uint8), ((slots, 2), torch.float32)]
    caches = [torch.randint(0, 100, shape, device=device).to(dtype) for shape, dtype in shapes]
    expected = [cache.cpu().clone() for cache in caches]
    host = [torch.zeros((PAGE * HOST_PAGES, *cache.shape[1:]), dtype=cache.dtype) for cache in caches]
    mover = KVMover(caches, capacity(slots, PAGE * HOST_PAGES, PAGE), layout == "paged")
    rng = random.Random(0)
    swapped: list[Move] = []  # what lies on the host
    for number in range(ROUNDS):
        moves = _paged_moves(rng, swapped) if layout == "paged" else _range_moves(rng, swapped)
        mover.move(moves)
        for kind, source, target, count in moves:
            sources = host if kind is MoveKind.SWAP_IN else expected
            targets = host if kind is MoveKind.SWAP_OUT else expected
            for a, b in zip(sources, targets, strict=True):
                b[target : target + count] = a[source : source + count].clone()
        for cache, model in zip(caches, expected, strict=True):
            if not torch.equal(cache.cpu(), model):
                return f"{cache.dtype} rows of {cache[0].numel()} differ after round {number}: {moves}"
    return None


def _paged_moves(rng: random.Random, swapped: list[Move]) -> list[Move]:
    """Some copies, some swaps out onto free host pages, some back in, in that order; sources and targets disjoint."""
    pages = rng.sample(range(PAGES), 30)
    copies = [Move(MoveKind.COPY, pages[i] * PAGE, pages[i + 8] * PAGE, PAGE) for i in range(8)]
    used = {move.target for move in swapped}
    free = [page * PAGE for page in range(HOST_PAGES) if page * PAGE not in used]
    outs = [Move(MoveKind.SWAP_OUT, page * PAGE, slot, PAGE) for page, slot in zip(pages[16:22], free, strict=False)]
    back = [swapped.pop(rng.randrange(len(swapped))) for _ in range(min(4, len(swapped)))]
    ins = [Move(MoveKind.SWAP_IN, move.target, pages[22 + i] * PAGE, PAGE) for i, move in enumerate(back)]
    swapped += outs
    return copies + outs + ins


def _range_moves(rng: random.Random, swapped: list[Move]) -> list[Move]:
    """A copy, a swap out and a swap in of ranges that begin and end anywhere."""
    count = rng.randrange(1, 60)
    copy = Move(MoveKind.COPY, rng.randrange(0, 400), rng.randrange(500, 900), count)
    swapped.clear()
    out = Move(MoveKind.SWAP_OUT, rng.randrange(0, 400), rng.randrange(0, 100), count)
    return [copy, out, Move(MoveKind.SWAP_IN, out.target, rng.randrange(500, 900), count)]


def far_cases(tiny: bool) -> dict[str, Callable[[str], str | None]]:
    """Makes checks, by name, of decode, prefill, write and page copy where slot x stride passes 2^31 elements.

    ``tiny``: not as far. Each returns None, or what is wrong, and raises NotHere.
    """
    checks: dict[str, Callable[[str], str | None]] = {}
    for kv in ("auto", "int8_per_token_head"):
        case = KernelProblem(kv=kv, kv_heads=8, tiny=tiny, dtype=torch.float32 if tiny else torch.bfloat16)
        far = 5000 if tiny else 2**31 // (case.kv_heads * case.dim) + 4096
        name = f"slots from {far}, {kv}" if tiny else f"slots beyond 2^31 elements, {kv}"
        checks[name] = partial(_far_case, case, far)
    return checks


def _far_case(case: KernelProblem, far: int, device: str) -> str | None:
    room = 2 * far * case.kv_heads * case.dim * (1 if case.kv != "auto" else case.dtype.itemsize) * 1.2
    if device == "cuda" and torch.cuda.mem_get_info()[0] < room:
        raise NotHere(f"needs {room / 2**30:.0f} GiB of free GPU memory")
    backend = get_backend("triton" if device == "cuda" else "numba")
    try:
        problems.check_support(backend, case, device)
    except ValueError as error:
        raise NotHere(str(error)) from error
    torch.manual_seed(0)
    near = problems.draw(case, device)
    moved = _far_away(near, far)
    limit = TOLERANCE[case.dtype]
    for what, check in (("decode", problems.check_decode), ("prefill", problems.check_prefill)):
        error = check(case, moved, backend, device, reference=near)
        if error > limit:
            return f"{what} is {error:.2g} from float64, limit {limit:g}"
    return _far_write(case, moved, backend, device) or _far_copy(moved, far)


def _far_away(near: DrawnKV, far: int) -> DrawnKV:
    """Moves the same tokens ``far`` slots further on, in caches whose lower part is never written."""
    starts = torch.where(near.page_starts < FAR_OUTSIDE, near.page_starts + far, near.page_starts)
    shifted = [_shifted(cache, far) for cache in (near.k, near.v)]
    return replace(near, k=shifted[0], v=shifted[1], page_starts=starts, slots=[slots + far for slots in near.slots])


def _shifted(cache: KVCache, far: int) -> KVCache:
    def grown(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.new_empty((far + len(tensor) + 2 * PAGE, *tensor.shape[1:]))
        whole[far : far + len(tensor)] = tensor
        return whole

    if not isinstance(cache, QuantizedKV):
        return grown(cache)
    return replace(cache, codes=grown(cache.codes), scales=None if cache.scales is None else grown(cache.scales))


def _far_write(case: KernelProblem, drawn: DrawnKV, backend: object, device: str) -> str | None:
    slots = drawn.slots[0]
    rows = torch.randn(len(slots), case.kv_heads, case.dim, device=device).to(case.dtype)
    backend.write_kv(rows, rows, drawn.k, drawn.v, slots)
    for cache in (drawn.k, drawn.v):
        if wrong := problems.write_error(cache, slots, rows):
            return f"write: {wrong}"
    return None


def _far_copy(drawn: DrawnKV, far: int) -> str | None:
    """Copies a page from the far end to its neighbour, and to the host and back."""
    tensors = [tensor for cache in (drawn.k, drawn.v) for tensor in raw_tensors(cache)]
    first = far // PAGE * PAGE + PAGE
    mover = KVMover(tensors, capacity(len(tensors[0]), 2 * PAGE, PAGE), paged=True)
    wanted = [tensor[first : first + PAGE].clone() for tensor in tensors]
    mover.move([Move(MoveKind.COPY, first, first + PAGE, PAGE), Move(MoveKind.SWAP_OUT, first, PAGE, PAGE)])
    for tensor in tensors:
        tensor[first : first + PAGE].zero_()
    mover.move([Move(MoveKind.SWAP_IN, PAGE, first, PAGE)])
    for tensor, rows in zip(tensors, wanted, strict=True):
        for start in (first, first + PAGE):
            if not torch.equal(_bits(tensor[start : start + PAGE]), _bits(rows)):
                return f"page copy or swap: {tensor.dtype} rows differ"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as bits, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)
