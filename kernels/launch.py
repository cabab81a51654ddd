"""Launch parameters of the Triton kernels: small pure functions, testable without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvbench_kernels.kv_formats import find_format

MIN_DOT = 16  # tl.dot takes no dimension under 16
WORD_BITS = 16  # a quantised cache is read in words of this size: see kernels/triton_codes.py
SHARED_BYTES = 64 * 1024  # K and V tiles in flight; fits the smallest block limit, 99 KiB of sm_86, 89 and 120
MAX_STAGES = 4
MIN_SPLIT_TOKENS = 256  # a shorter split gains less than adding up costs
MAX_SPLITS = 64
PROGRAMS_PER_SM = 2  # the least that run at a time: one computes while another waits for its loads
WARPS_PER_SM = 8  # warps that attention keeps busy; on an H200, programs of 2 warps were fastest four at a time
PROGRAM_TOKENS = 64  # cost of a decode program beside its own tokens: its start and its part in adding up
EXTRA_WAVES = 4  # waves of programs that cutting long sequences may add to a decode step
GOOD_FILL = 0.85  # share of the best fill of the last wave; more splits only cost time
LATENT_ROWS = 32  # query rows over a latent row: twice as many spill, half as many read the rows twice as often
SHORT_QUERIES = 8  # chunks up to here (speculation, the tail of a prompt) take tiles of their own
FP8_HARDWARE_ARCH = 89  # the first architecture that converts e4m3
ONE_PAGE = 1 << 30  # stands for any page size where a sequence has one page
LARGEST_PAGE = 256  # largest page of a paged cache; a larger one is a contiguous reservation
# Shared memory a thread block may have, by compute capability (90 for sm_90): CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_SHARED_KIB = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_SMALLEST_SHARED_KIB = 99  # the smallest limit of the chips from sm_80 on


def shared_bytes_limit(arch: int) -> int:
    """Bytes of shared memory that one block may have on sm_``arch``; of an unknown chip, the smallest since sm_80."""
    return _SHARED_KIB.get(arch, _SMALLEST_SHARED_KIB) * 1024


class Tiles(NamedTuple):
    """The tiles of a kernel: ``block_m`` query rows, ``block_n`` tokens, padded head dims, stages, warps."""

    block_m: int
    block_n: int
    d_pad: int
    v_pad: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True)
class KernelShape:
    """The shape that an attention kernel is compiled for, apart from its tiles.

    ``itemsize``: bytes of a value of q; ``page_size``: see ``kernel_page_size``; ``kind``: "auto" or the name of a
    KV format; ``arch``: 10 x major + minor compute capability; ``tiles``: these, whatever would be chosen. ``latent``:
    one row of ``head_dim`` values serves all query heads, and V is its first ``v_head_dim``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    page_size: int
    kind: str = "auto"
    arch: int = 80
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    tiles: Tiles | None = None
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads that a program serves: all of a KV head, or some of those of a latent row."""
        if self.latent:
            return min(MIN_DOT if self.itemsize > 2 else LATENT_ROWS, next_power_of_two(self.num_heads))
        return self.num_heads // self.num_kv_heads

    @property
    def num_groups(self) -> int:
        """The number of programs that share a token's place: one a KV head, or one a group of a latent row's heads."""
        return cdiv(self.num_heads, self.group)

    @property
    def tuning_key(self) -> tuple[int, str, int, int, int, int, int]:
        """The key by which ``kvbench_kernels.tuning`` chooses tiles."""
        return (
            self.arch, self.kind, self.group, self.head_dim, self.v_head_dim, self.itemsize, self.page_size
        )  # fmt: skip


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Divide a by b, rounded up."""
    return -(-a // b)


def padded_dim(dim: int, kind: str = "auto") -> int:
    """Pad a head dim for tl.dot. With a quantised cache as many dots as a word has values share it."""
    kv_format = find_format(kind)
    dots = 1 if kv_format is None else WORD_BITS // kv_format.code_bits
    return max(MIN_DOT * dots, next_power_of_two(dim))


def kernel_page_size(page_size: int, pages: int) -> int:
    """The page size to compile for, of a page table with ``pages`` columns.

    A contiguous reservation is one page of any length: one kernel serves all lengths, and no tile of it crosses a page.
    """
    return ONE_PAGE if pages == 1 and page_size > LARGEST_PAGE else page_size


def fp8_hardware(kind: str, arch: int) -> bool:
    """Tests whether the chip itself converts the cache's e4m3 values."""
    return kind == "fp8_e4m3" and arch >= FP8_HARDWARE_ARCH


def shape_constants(shape: KernelShape, tiles: Tiles) -> dict[str, Any]:
    """The compile-time arguments that both attention kernels have, with num_warps and num_stages."""
    rope = shape.head_dim - shape.v_head_dim if shape.latent else 0
    return {
        "PAGE_SIZE": shape.page_size, "WINDOW": shape.window or 0, "HEADS": shape.num_heads, "GROUP": shape.group,
        "D": shape.v_head_dim if shape.latent else shape.head_dim, "DV": shape.v_head_dim,
        "D_PAD": tiles.d_pad, "DV_PAD": tiles.v_pad,
        "ROPE": rope, "ROPE_PAD": padded_dim(rope, shape.kind) if rope else 0,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "HAS_SOFTCAP": shape.softcap, "HAS_SINKS": shape.sinks,
        "KIND": shape.kind, "FP8_HARDWARE": fp8_hardware(shape.kind, shape.arch),
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def _tokens_and_stages(d_pad: int, v_pad: int, itemsize: int, kind: str, longest: int = 64) -> tuple[int, int]:
    """The longest token tile of at most ``longest``, then the deepest pipeline, that fit SHARED_BYTES.

    A pipeline of n stages keeps n - 1 tiles in flight, as the cache stores them; of a quantised cache one more tile
    lies there as the dot takes it.
    """
    kv_format = find_format(kind)
    bits = 8 * itemsize if kv_format is None else kv_format.code_bits

    def in_flight(block_n: int, stages: int) -> int:
        values = block_n * (d_pad + v_pad)
        return values * bits // 8 * (stages - 1) + (0 if kv_format is None else values * itemsize)

    block_n = longest
    while block_n > MIN_DOT and in_flight(block_n, 2) > SHARED_BYTES:
        block_n //= 2
    stages = max(s for s in range(1, MAX_STAGES + 1) if s == 1 or in_flight(block_n, s) <= SHARED_BYTES)
    return block_n, stages


def _wide_float32(d_pad: int, v_pad: int, itemsize: int) -> bool:
    """Tests whether exact dots fill the registers: only the smallest tile, over more warps, does not spill."""
    return itemsize > 2 and max(d_pad, v_pad) >= 128


def _wide_float32_tiles(block_m: int, d_pad: int, v_pad: int) -> Tiles:
    """Tiles of ``block_m`` rows, without a pipeline where the queries alone are 32 KiB.

    A pipeline would spill there, and sm_89 has no room.
    """
    return Tiles(block_m, MIN_DOT, d_pad, v_pad, 1 if block_m * d_pad >= 32 * 256 else 2, 8)


def _few_rows(block_m: int, d_pad: int, v_pad: int, itemsize: int, kind: str) -> Tiles:
    """Tiles of decode and of short chunks, for ``block_m`` rows."""
    if _wide_float32(d_pad, v_pad, itemsize) or (itemsize > 2 and block_m >= 64):
        return _wide_float32_tiles(block_m, d_pad, v_pad)
    if block_m >= 32 and max(d_pad, v_pad) > 128:  # as prefill's: with longer tiles it spills, and sm_89 has no room
        return Tiles(block_m, 32, d_pad, v_pad, 2, 8)
    block_n, stages = _tokens_and_stages(d_pad, v_pad, itemsize, kind)
    return Tiles(block_m, block_n, d_pad, v_pad, stages, 4)


def decode_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int, kind: str = "auto") -> Tiles:
    """Tiles of the decode kernel: all query heads of a KV head are its rows."""
    block_m = max(MIN_DOT, next_power_of_two(group))
    return _few_rows(block_m, padded_dim(head_dim, kind), padded_dim(v_head_dim, kind), itemsize, kind)


def prefill_tiles(
    group: int, head_dim: int, v_head_dim: int, itemsize: int, kind: str = "auto", arch: int = 80
) -> Tiles:
    """Tiles of the prefill kernel: its rows are query tokens x the query heads of one KV head.

    Before sm_90 every warp holds the whole tile of K or V in registers, and unpacks it on its own: shorter tiles, and
    fewer warps for a quantised cache. From sm_90 on the tensor cores read it from shared memory.
    ``ci/kernel_resources.json`` lists the kernels that spill a few registers all the same.
    """
    d_pad, v_pad = padded_dim(head_dim, kind), padded_dim(v_head_dim, kind)
    if _wide_float32(d_pad, v_pad, itemsize):
        return _wide_float32_tiles(max(MIN_DOT, next_power_of_two(group)), d_pad, v_pad)
    wide, kv_format = max(d_pad, v_pad) > 128, find_format(kind)
    scaled = kv_format is not None and kv_format.scale_bytes > 0  # scales take registers of their own
    longest = 64 if arch >= 90 and not (scaled or wide) else 32
    block_n, stages = _tokens_and_stages(d_pad, v_pad, itemsize, kind, longest)
    many = kind == "auto" or (
        arch >= 90 and kind != "int4_per_token_head"
    )  # int4 has four accumulators: it would spill
    rows = 128 if many and not wide and itemsize <= 2 else 64
    block_m = max(rows, next_power_of_two(group))
    return Tiles(block_m, block_n, d_pad, v_pad, min(stages, 2 if wide else 3), 8 if wide or block_m >= 128 else 4)


def short_tiles(group: int, head_dim: int, v_head_dim: int, itemsize: int, kind: str = "auto") -> Tiles:
    """Tiles of the prefill kernel for sequences of up to SHORT_QUERIES queries: decode's, with more rows."""
    block_m = max(MIN_DOT, min(64, next_power_of_two(group * SHORT_QUERIES)), next_power_of_two(group))
    return _few_rows(block_m, padded_dim(head_dim, kind), padded_dim(v_head_dim, kind), itemsize, kind)


def latent_tiles(shape: KernelShape, prefill: bool) -> Tiles:
    """Tiles of decode and prefill over latent rows, whose first values are loaded once as K and V."""
    pad = padded_dim(shape.v_head_dim, shape.kind)
    if shape.itemsize > 2:
        return Tiles(MIN_DOT, MIN_DOT, pad, pad, 1, 8)
    block_m = LATENT_ROWS if prefill else max(MIN_DOT, shape.group)
    if block_m == MIN_DOT:
        return Tiles(block_m, 32, pad, pad, 2, 4)
    block_n = 32 if shape.kind != "auto" or shared_bytes_limit(shape.arch) >= 128 * 1024 else 16
    return Tiles(block_m, block_n, pad, pad, 2, 8)


def prefill_blocks(queries: int, batch: int, max_queries: int, block_q: int) -> int:
    """The most blocks of ``block_q`` queries that ``batch`` sequences can have.

    ``queries``: of all sequences together. ``max_queries``: no sequence has more.
    """
    return min(queries // block_q + batch, batch * cdiv(max_queries, block_q))


def programs_at_a_time(num_warps: int, num_sms: int) -> int:
    """The number of programs of ``num_warps`` warps that a decode is planned for."""
    return max(PROGRAMS_PER_SM, WARPS_PER_SM // num_warps) * num_sms


def most_decode_items(batch: int, kv_heads: int, max_tokens: int, places: int) -> int:
    """The most pieces that ``batch`` sequences of at most ``max_tokens`` are cut into, whatever their lengths.

    Programs without a piece end at once, so it allows for what fills the chip a few times, and no more.
    """
    waves = cdiv(batch * kv_heads, places) + EXTRA_WAVES
    return min(waves * places // kv_heads, batch * max(1, cdiv(max_tokens, MIN_SPLIT_TOKENS)))


def num_kv_splits(programs: int, max_tokens: int, num_sms: int) -> int:
    """The pieces into which each of ``programs`` of prefill (query blocks x KV heads) cuts its keys.

    One where the programs alone fill the GPU several times, or nothing is long enough to share. Else the fewest whose
    last wave is filled almost as well as that of the best number: every split more costs a part to add up.
    """
    most = max(1, min(cdiv(max_tokens, MIN_SPLIT_TOKENS), MAX_SPLITS))
    at_a_time = PROGRAMS_PER_SM * num_sms

    def fill(splits: int) -> float:
        waves = max(1, programs) * splits / at_a_time
        return waves / -(-waves // 1)

    fills = [fill(splits) for splits in range(1, most + 1)]
    return 1 + next(i for i, value in enumerate(fills) if value >= GOOD_FILL * max(fills))
