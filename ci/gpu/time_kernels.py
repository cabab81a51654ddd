"""Part ``kernels``: times of every kernel, with achieved bytes/s or FLOP/s, the measured ceiling and the ratio.

Decode reads all KV once: bytes of codes and scales over the time, against the read ceiling. Prefill: FLOP under the
causal mask, beside torch's varlen_attn and SDPA on the same tokens in contiguous KV. Writes and copies count bytes read
and written, against the copy ceiling; swaps the bytes that cross the link, against page-locked copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ci.gpu import kernel_cases as cases
from ci.gpu.check_moves import capacity
from ci.gpu.kernel_cases import AttentionHeads, Decode, Prefill
from ci.gpu.part import Planned, Report, read_ceilings
from ci.gpu.timing import READING, WRITING, Timing, measure
from engine.kv.manager import Move, MoveKind
from engine.kv.mover import KVMover
from kernels import get_backend
from kernels.api import AttentionOptions, PrefillBatch
from kernels.kv_formats import KV_FORMATS
from kernels.quantized import raw_tensors
from tests.benchmarks import bench_bars

LAYERS_MOVED = 32  # a page is scattered over this many layers


class KernelTimes:
    """One method a kind of kernel; each adds rows."""

    workers = 1  # nothing else may run on the device

    def __init__(self, args: Any):
        self.device, self.tiny = args.device, args.tiny
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.heads = AttentionHeads(4, 2, 32) if args.tiny else AttentionHeads(32, 8, 128)
        self.backend = get_backend("triton" if args.device == "cuda" else "numba")
        self.ceilings = read_ceilings(args.facts)
        self.seconds = 0.01 if args.tiny else 0.2 if args.quick else 0.5
        self.report = Report(0.0)
        own = argparse.ArgumentParser()
        own.add_argument("--decode-from", type=int, help="only decodes with a sequence of at least so many tokens")
        own.add_argument("--latent", action="store_true", help="only decodes over latent rows (MLA)")
        options = own.parse_args(args.own)
        if options.latent:
            self._main, self._extreme = self._latent(), {}
        elif options.decode_from is not None:
            self._main, self._extreme = self._long(options.decode_from), {}
        else:
            self._main, self._extreme = self._todo(args.quick)

    def _long(self, least: int) -> dict[str, Callable[[], None]]:
        """Selects the decodes that have a sequence of ``least`` tokens or more, by name; all tiny ones."""
        decodes = cases.tiny_decode_cases() if self.tiny else cases.decode_cases(False)
        return {c.name: partial(self.decode, c) for c in decodes if self.tiny or max(c.lengths) >= least}

    def _latent(self) -> dict[str, Callable[[], None]]:
        """Makes the decodes over latent rows, by name."""
        drawn = cases.latent_cases(self.tiny)
        names = [(f"{case.name}, {heads.query} heads", heads, case) for heads, case in drawn]
        return {name: partial(self.decode, case, heads, name) for name, heads, case in names}

    def _todo(self, quick: bool) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
        """Makes what is timed, by name: for a quick run, and what goes beyond."""
        decodes = cases.tiny_decode_cases() if self.tiny else cases.decode_cases(True)
        prefills = [Prefill(2, 16, 16)] if self.tiny else cases.prefill_cases(True)
        steps: dict[str, Callable[[], None]] = {c.name: partial(self.decode, c) for c in decodes[:9]}
        steps["decode by torch SDPA"] = partial(self.decode_by_sdpa, *((2, 64) if self.tiny else (64, 4096)))
        steps |= {c.name: partial(self.prefill, c) for c in prefills}
        steps |= {f"write {kv}": partial(self.write, kv) for kv in ("auto", *KV_FORMATS)}
        steps |= {f"moves of pages of {size}": partial(self.moves, size) for size in ((16,) if self.tiny else (16, 1))}
        steps |= {c.name: partial(self.decode, c) for c in decodes[9:]}
        if quick or self.tiny:
            return steps, {}
        extreme: dict[str, Callable[[], None]] = {c.name: partial(self.prefill, c) for c in cases.prefill_cases(False)}
        extreme |= {c.name: partial(self.decode, c) for c in cases.decode_cases(False)}
        return steps, {name: run for name, run in extreme.items() if name not in steps}

    def plan(self) -> list[Planned]:
        """Lists the cases; those beyond a quick run get another process."""
        return [*(Planned(name, "main") for name in self._main), *(Planned(name, "extreme") for name in self._extreme)]

    def run(self, name: str, report: Report) -> None:
        """Times one case."""
        self.report = report
        (self._main.get(name) or self._extreme[name])()

    def supports(self, name: str, kv: str, heads: AttentionHeads | None = None) -> bool:
        """Tests whether the backend takes such a cache; if not, the case is skipped with the reason."""
        heads = heads or self.heads
        try:
            self.backend.check_support(
                num_heads=heads.query, num_kv_heads=heads.kv, head_dim=heads.dim,
                v_head_dim=heads.latent_v or heads.dim, dtype=self.dtype, device=self.device, kv_cache_dtype=kv,
                latent=heads.latent_v is not None,
            )  # fmt: skip
        except ValueError as error:
            self.report.skip(name, str(error))
            return False
        return True

    def timed(self, step: Callable[[], object], capture: bool = True, flush: str = READING) -> Timing:
        """Time ``step``, for as long as the run allows."""
        return measure(step, self.device, self.seconds, capture, flush)

    def row(self, name: str, timing: Timing, **values: Any) -> None:
        """Adds a row of one timed case."""
        self.report.row(case=name, **timing.as_dict(), **values)

    def bandwidth(self, name: str, timing: Timing, moved: int, ceiling: str, **values: Any) -> None:
        """Adds a row in GB/s against ``ceiling``, a key of the facts."""
        speed = moved / timing.median / 1e9
        top = self.ceilings.get(ceiling)
        values |= {"gb_per_s": speed, "ceiling_gb_per_s": top, "ratio": speed / top if top else None}
        self.row(name, timing, bytes=moved, ceiling=ceiling, **values)

    def decode(self, case: Decode, heads: AttentionHeads | None = None, name: str = "") -> None:
        """Times one layer's decode step."""
        heads, name = heads or self.heads, name or case.name
        if not self.supports(name, case.kv, heads):
            return
        t = cases.make_decode(case, heads, self.dtype, self.device)
        args = (t.q, t.k, t.v, t.page_starts, t.seq_lens, t.page_size, AttentionOptions(heads.dim**-0.5))
        plan = self.backend.plan_decode(t.page_starts, t.seq_lens, t.page_size, max_tokens=max(case.lengths))
        out = t.q.new_empty(*t.q.shape[:2], t.v.shape[2])
        timing = self.timed(lambda: self.backend.decode_attention(*args, out=out, plan=plan))
        self.bandwidth(
            name, timing, t.kv_bytes, "read_gb_per_s", bar=case.bar, against=case.against, bar_time=case.bar_time
        )

    def decode_by_sdpa(self, batch: int, context: int) -> None:
        """Attends with torch on contiguous KV, the GQA group packed as query rows."""
        shape = (batch, self.heads.kv, context, self.heads.dim)
        k, v = (torch.randn(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        group = self.heads.query // self.heads.kv
        q = torch.randn(batch, self.heads.kv, group, self.heads.dim, dtype=self.dtype, device=self.device)
        timing = self.timed(lambda: F.scaled_dot_product_attention(q, k, v))
        name = f"decode by torch SDPA, {batch} x {context}, contiguous"
        self.bandwidth(name, timing, k.nbytes + v.nbytes, "read_gb_per_s")

    def prefill(self, case: Prefill) -> None:
        """Times one layer's prefill, beside torch's own."""
        if not self.supports(case.name, case.kv):
            return
        total, length, heads = case.batch * case.new, case.context + case.new, self.heads
        t = cases.make_decode(Decode(case.batch, length, 16, case.kv), heads, self.dtype, self.device)
        q = torch.randn(total, heads.query, heads.dim, dtype=self.dtype, device=self.device)
        new_kv = tuple(torch.randn(total, heads.kv, heads.dim, dtype=self.dtype, device=self.device) for _ in "kv")
        starts = torch.arange(0, total + 1, case.new, device=self.device)
        batch = PrefillBatch(t.page_starts, starts, t.seq_lens, t.page_size)
        plan = self.backend.plan_prefill(batch, max_queries=case.new, max_tokens=length)
        options, out = AttentionOptions(heads.dim**-0.5), torch.empty_like(q)
        given = new_kv if case.kv == "auto" else None
        timing = self.timed(
            lambda: self.backend.prefill_attention(q, t.k, t.v, batch, options, out=out, new_kv=given, plan=plan)
        )
        flop = 4 * case.pairs * heads.query * heads.dim
        theirs = self._torch_prefill(case, q)
        top = self.ceilings.get("matmul_bf16_tflop_per_s" if self.device == "cuda" else "matmul_fp32_tflop_per_s")
        speed = flop / timing.median / 1e12
        best = min(theirs.values()) if theirs else None
        self.row(
            case.name, timing, tflop_per_s=speed, ceiling_tflop_per_s=top, ratio=speed / top if top else None,
            torch_us={name: seconds * 1e6 for name, seconds in theirs.items()},
            of_torch_speed=best / timing.median if best else None, bar_torch=bench_bars.PREFILL_SPEED,
        )  # fmt: skip

    def _torch_prefill(self, case: Prefill, q: torch.Tensor) -> dict[str, float]:
        """Times torch on the same tokens in contiguous KV [s].

        Its heads are repeated for varlen_attn, which does not know groups in every version; the repetition is not
        timed. A kernel that this torch or device lacks is skipped.
        """
        heads, length = self.heads, case.context + case.new
        shape = (case.batch * length, heads.kv, heads.dim)
        k, v = (torch.randn(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        group = heads.query // heads.kv
        wide = [x.repeat_interleave(group, dim=1) for x in (k, v)]
        if self.device == "cpu":
            return {}
        starts, ends = (
            torch.arange(0, case.batch * n + 1, n, device=self.device, dtype=torch.int32) for n in (case.new, length)
        )

        def varlen() -> object:
            from torch.nn.attention.varlen import varlen_attn

            return varlen_attn(q, *wide, starts, ends, case.new, length, window_size=(-1, 0))

        def sdpa() -> object:
            rows = q.view(case.batch, case.new, heads.query, heads.dim).transpose(1, 2)
            columns = [x.view(case.batch, length, heads.query, heads.dim).transpose(1, 2) for x in wide]
            return F.scaled_dot_product_attention(rows, *columns, is_causal=True)

        seconds = {}
        for name, step in (("varlen_attn", varlen), ("sdpa", sdpa)):
            if name == "sdpa" and case.context:
                continue  # its causal mask begins at the first key
            try:
                seconds[name] = self.timed(step).median
            except Exception as error:
                self.report.skip(f"torch {name} beside {case.name}", str(error).splitlines()[0][:200])
        return seconds

    def write(self, kv: str) -> None:
        tokens, heads = (64 if self.tiny else 32768), self.heads
        name = f"write {kv}, {tokens} tokens"
        if not self.supports(name, kv):
            return
        k, v = (
            torch.randn(heads.kv, tokens, heads.dim, dtype=self.dtype, device=self.device).transpose(0, 1) for _ in "kv"
        )
        caches = [cases.filled_cache(kv, 2 * tokens, heads, self.dtype, self.device) for _ in "kv"]
        slots = torch.randperm(2 * tokens, device=self.device)[:tokens]
        timing = self.timed(lambda: self.backend.write_kv(k, v, *caches, slots), flush=WRITING)
        moved = k.nbytes + v.nbytes + tokens * cases.row_bytes(kv, heads, self.dtype)
        self.bandwidth(name, timing, moved, "copy_gb_per_s", bar=bench_bars.COPY_SHARE if kv == "auto" else None)

    def moves(self, page_size: int) -> None:
        """Times copies and swaps of pages that are scattered over the layers' tensors, in random order."""
        layers = 2 if self.tiny else LAYERS_MOVED
        heads = self.heads
        slot_bytes = layers * cases.row_bytes("auto", heads, self.dtype)
        pages = 4 if self.tiny else max(1, (256 << 20) // (slot_bytes * page_size))
        slots = 2 * pages * page_size
        caches = [cases.filled_cache("auto", slots, heads, self.dtype, self.device) for _ in range(2 * layers)]
        tensors = [tensor for cache in caches for tensor in raw_tensors(cache)]
        mover = KVMover(tensors, capacity(slots, pages * page_size, page_size), paged=True)
        order = torch.randperm(pages).tolist()
        moved = pages * page_size * slot_bytes
        size = f"page {page_size} ({page_size * slot_bytes / 2**10:,.0f} KiB)"
        copies = [Move(MoveKind.COPY, i * page_size, (pages + order[i]) * page_size, page_size) for i in range(pages)]
        self.bandwidth(f"page copy, {size}", self.timed(lambda: mover.move(copies), False, WRITING), 2 * moved,
                       "copy_gb_per_s", bar=bench_bars.COPY_SHARE if page_size >= 16 else None)  # fmt: skip
        for kind, ceiling in (
            (MoveKind.SWAP_OUT, "device_to_host_gb_per_s"),
            (MoveKind.SWAP_IN, "host_to_device_gb_per_s"),
        ):
            moves = [Move(kind, i * page_size, order[i] * page_size, page_size) for i in range(pages)]
            timing = self.timed(lambda m=moves: mover.move(m), False)
            bar = bench_bars.swap_gb_per_s(page_size * slot_bytes)
            self.bandwidth(f"{kind.value}, {size}", timing, moved, ceiling, bar_gb_per_s=bar)


CASES = KernelTimes
