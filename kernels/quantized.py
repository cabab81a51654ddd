"""A quantised side (K or V) of one layer's KV cache, and the torch reference of storing and loading it.

Per value x of a row (the ``dim`` values of one token's KV head), what ``load`` returns differs from x by at most

    int8_per_token_head   absmax(row) / 254             scale = absmax / 127, codes -127..127
    int4_per_token_head   absmax(row) / 14              scale = absmax / 7, codes -7..7
    fp8_e4m3              max(|x| / 16, scale / 1024)   for |x| <= 448 scale
    fp8_e5m2              max(|x| / 8, scale / 131072)  for |x| <= 57344 scale

(half a step between neighbouring codes; float32 rounding adds about 1e-7 |x|, and int8 and int4 flush rows
whose scale is under 2**-126 to zero). Ties round to even everywhere. fp8 values beyond the range, infinities
included, become the largest finite code of their sign. NaN stays NaN, and a row with NaN or infinity loads
as NaN in the integer formats: what a model got wrong stays visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kvbench_kernels.cpu_memory import cache_zeros
from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KVFormat

MAX_CODE = {INT8: 127, INT4: 7}
FP8_DTYPE = {FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}
FP8_MAX = {FP8_E4M3: 448.0, FP8_E5M2: 57344.0}  # largest finite value
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; under it x / scale may lose all its precision


@dataclass(frozen=True)
class QuantizedKV:
    """One side of one layer: ``shape`` (slots, heads, dim) values, stored as codes and scales.

    ``codes [slots, heads, format.code_bytes(dim)]``: int8, or uint8 with fp8 bits or packed int4. A byte of int4
    has value i in its low four bits and value ``i + ceil(dim / 2)`` in its high four, two's complement.
    ``scales [slots, heads]`` float32 (int8, int4), or None and ``scale`` for the whole tensor (fp8; else 1.0).
    """

    format: KVFormat
    codes: torch.Tensor
    scales: torch.Tensor | None
    scale: float
    dim: int

    @classmethod
    def zeros(
        cls,
        format: KVFormat,
        slots: int,
        heads: int,
        dim: int,
        device: torch.device | str,
        scale: float | None = None,
    ) -> QuantizedKV:
        """A cache of zeros whose memory is touched. fp8 needs its ``scale``: there is no safe default.

        Raises:
            ValueError: the scale is missing, not positive and finite, or given to a format that finds its own.
        """
        code_dtype = torch.int8 if format == INT8 else torch.uint8
        codes = cache_zeros((slots, heads, format.code_bytes(dim)), code_dtype, device)
        if format not in FP8_DTYPE:
            if scale is not None:
                raise ValueError(f"{format.name} finds a scale per token and head: leave out scale={scale}")
            return cls(format, codes, cache_zeros((slots, heads), torch.float32, device), 1.0, dim)
        return cls(format, codes, None, 1.0, dim).with_scale(scale)

    def with_scale(self, scale: float | None) -> QuantizedKV:
        """The same memory, as fp8 of another scale. Raises ValueError for one that is missing or unusable."""
        if scale is None or not SMALLEST_SCALE <= scale < math.inf:
            raise ValueError(
                f"{self.format.name} needs a positive, finite scale per layer and side, not {scale}: calibrate one "
                "(largest absolute value / largest finite code, with a margin)"
            )
        # as float32, so that every backend computes with the very same number
        return replace(self, scale=torch.tensor(scale, dtype=torch.float32).item())

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (slots, heads, dim) of the plain tensor that this stands for."""
        return (self.codes.shape[0], self.codes.shape[1], self.dim)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def store(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Quantise ``x [n, heads, dim]`` (any float dtype) into ``slots [n] int64``, all >= 0."""
        x = x.to(torch.float32)
        if self.scales is None:
            limit = FP8_MAX[self.format]
            # a tensor divisor: by a Python number CUDA multiplies with the reciprocal, which rounds differently
            y = (x / torch.tensor(self.scale, device=x.device)).clamp(-limit, limit)
            self.codes[slots] = y.to(FP8_DTYPE[self.format]).view(torch.uint8)
            return
        limit = MAX_CODE[self.format]
        scales = x.abs().amax(-1) / torch.tensor(float(limit), device=x.device)
        scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
        usable = (scales > 0) & scales.isfinite()
        y = (x / torch.where(usable, scales, 1.0)[..., None]).round().clamp(-limit, limit)
        codes = torch.where(usable[..., None], y, 0.0).to(torch.int8)
        self.codes[slots] = _pack(codes) if self.format == INT4 else codes
        self.scales[slots] = torch.where(scales.isfinite(), scales, math.nan)

    def load(self, slots: torch.Tensor | slice, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Load ``[n, heads, dim]`` of ``dtype``: code x scale, multiplied in float32."""
        codes = self.codes[slots]
        if self.scales is None:
            return (codes.view(FP8_DTYPE[self.format]).to(torch.float32) * self.scale).to(dtype)
        if self.format == INT4:
            codes = _unpack(codes, self.dim)
        return (codes.to(torch.float32) * self.scales[slots][..., None]).to(dtype)


def count_saturated(cache: QuantizedKV, slots: torch.Tensor) -> torch.Tensor:
    """The number of values of an fp8 cache at ``slots [n]`` that have its largest code, an int64 scalar.

    Values beyond the range get that code, and those within half a step of it.
    """
    largest = {FP8_E4M3: 0x7E, FP8_E5M2: 0x7B}[cache.format]
    return ((cache.codes[slots] & 0x7F) == largest).sum()


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack ``[..., dim] int8`` in -8..7 into ``[..., ceil(dim / 2)] uint8``.

    The last high half of an odd dim is 0.
    """
    half = (codes.shape[-1] + 1) // 2
    low = codes[..., :half] & 15
    high = torch.zeros_like(low)
    high[..., : codes.shape[-1] - half] = codes[..., half:] & 15
    return (high.to(torch.uint8) << 4) | low.to(torch.uint8)


def _unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo ``_pack``: ``[..., dim] int8``."""
    signed = packed.view(torch.int8)
    return torch.cat([(signed << 4) >> 4, signed >> 4], -1)[..., :dim]


def shares_rows(k: torch.Tensor | QuantizedKV, v: torch.Tensor | QuantizedKV) -> bool:
    """Tests whether V is the first values of K, in its memory, as in latent rows (MLA). Those have one head.

    In int4 V is all values, see ``first_values``.
    """
    shorter = v.shape[2] < k.shape[2] or (isinstance(k, QuantizedKV) and k.format == INT4)
    return k.shape[1] == 1 and shorter and raw_tensors(k)[0].data_ptr() == raw_tensors(v)[0].data_ptr()


def first_values(cache: torch.Tensor | QuantizedKV, count: int) -> torch.Tensor | QuantizedKV:
    """Returns the first ``count`` values of each row of ``cache``, in its memory.

    int4 packs the values i and i + dim / 2 into a byte: there it is the whole row.
    """
    if isinstance(cache, torch.Tensor):
        return cache[..., :count]
    if cache.format == INT4:
        return cache
    return replace(cache, codes=cache.codes[..., : cache.format.code_bytes(count)], dim=count)


def raw_tensors(cache: torch.Tensor | QuantizedKV) -> tuple[torch.Tensor, ...]:
    """The slot-major tensors (first dimension: slots) whose rows move together when a page is copied or swapped."""
    if isinstance(cache, torch.Tensor):
        return (cache,)
    return (cache.codes,) if cache.scales is None else (cache.codes, cache.scales)
