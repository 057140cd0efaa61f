"""Movers in Triton, for NVIDIA GPUs from Ampere on.

A few programs stay for the whole call and share its work, one block of one head of one page at a time. They read and
write the pool where it lies, over PCIe if that is host memory, so what counts is that enough is on its way: each asks
for some blocks ahead of the one that it works at (`num_stages` of the loops, which Triton turns into asynchronous
copies to shared memory). So a block may be read before an earlier one is written; they are different ones, as pages
are distinct. Copies do not look at what they move and go in words of 4 bytes.
"""
# pyright: reportAttributeAccessIssue=false
# Where Triton is not installed, pyright takes this very file for it.

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from oomb_jax.pallas_kernels.page_move.config import AHEAD, WARPS, block
from oomb_jax.pallas_kernels.rounding import LARGEST
from oomb_jax.pallas_kernels.triton_call import device_capability, triton_call

_LARGEST = tl.constexpr(LARGEST)
IDS = tl.constexpr(1024)
"""Page ids that a program looks at at once, to find the last one."""


def fetch_pages(pool, layer, pages, scales, dtype, at_hand, *, programs, compute_capability=None):
    """See `api.fetch_pages`; inputs for which `config.unsupported_triton` gives a reason do not compile.

    compute_capability: of the GPU to compile for, 80 for 8.0; None: of the GPU that is there.
    """
    staged = jax.ShapeDtypeStruct((len(pages), *pool.shape[2:]), _bytes(dtype))
    options = _options(pool, pages, programs, compute_capability)
    size = pool.shape[3] * pool.shape[4]
    if dtype == pool.dtype and scales is None:
        words = size * pool.dtype.itemsize // 4
        sizes: dict[str, Any] = {"WORDS": words, "BLOCK": block(words, 4), "AT_HAND": at_hand is not None}
        here, entries = (pages, pages) if at_hand is None else (_as_bytes(at_hand[0]), at_hand[1])
        (result,), _ = triton_call(
            _fetch,
            *(_as_bytes(pool), layer.reshape(1), pages, here, entries),
            out_type=(staged,),
            name="fetch_pages",
            **sizes,
            **options,
        )
        return lax.bitcast_convert_type(result, dtype)
    sizes = {"SIZE": size, "BLOCK": block(size, 2), "FLOAT8": scales is not None}
    (result,), _ = triton_call(
        _fetch_wider,
        *(_as_bytes(pool), pages if scales is None else scales, layer.reshape(1), pages),
        out_type=(staged,),
        name="fetch_pages_wider",
        **sizes,
        **options,
    )
    return result


def store_pages(pool, layer, pages, values, *, programs, compute_capability=None):
    """See `api.store_pages`; values have the pool's dtype."""
    words = pool.shape[3] * pool.shape[4] * pool.dtype.itemsize // 4
    _, (updated,) = triton_call(
        _store,
        *(layer.reshape(1), pages, _as_bytes(values)),
        in_place=(_as_bytes(pool),),
        name="store_pages",
        WORDS=words,
        BLOCK=block(words, 4),
        **_options(pool, pages, programs, compute_capability),
    )
    return lax.bitcast_convert_type(updated, pool.dtype)


def add_pages(pool, layer, pages, values, fresh, names, word, *, programs, compute_capability=None):
    """See `api.add_pages`; word: uint32 of `rounding.words`, None to round to nearest."""
    size = pool.shape[3] * pool.shape[4]
    _, (pool,) = triton_call(
        _add,
        *(layer.reshape(1), pages, names, fresh.astype(jnp.int32), pages if word is None else word.reshape(1), values),
        in_place=(pool,),
        name="add_pages",
        SIZE=size,
        BLOCK=block(size, pool.dtype.itemsize + values.dtype.itemsize),
        STOCHASTIC=word is not None,
        **_options(pool, pages, programs, compute_capability),
    )
    return pool


def _bytes(dtype):
    """The dtype, or for float8 that of bytes: for Ampere Triton knows no pointers to float8_e4m3fn."""
    return jnp.dtype(jnp.uint8) if dtype.itemsize == 1 else dtype


def _as_bytes(array):
    return lax.bitcast_convert_type(array, _bytes(array.dtype))


def _options(pool, pages, programs, compute_capability) -> dict[str, Any]:
    """What every kernel here takes, letters of `shapes.py`, and what Triton's compiler takes."""
    _, P, M, _, _ = pool.shape
    capability = compute_capability or device_capability()
    compiler = {"num_warps": WARPS, "num_stages": 1, "compute_capability": capability}
    return {"grid": (programs,), "P": P, "M": M, "U": len(pages), "AHEAD": AHEAD} | compiler


@triton.jit
@no_type_check
def _parts(pages, U: tl.constexpr, M: tl.constexpr):
    """How many parts of pages there are to look at: the heads of all entries up to the last that has a page."""
    end = 0
    for start in tl.range(0, U, IDS):
        entries = start + tl.arange(0, IDS)
        ids = tl.load(pages + entries, mask=entries < U, other=-1)
        end = tl.maximum(end, tl.max(tl.where(ids >= 0, entries + 1, 0), axis=0))
    return end * M


@triton.jit
@no_type_check
def _fetch(
    pool, layer, pages, here, entries, staged,
    U: tl.constexpr, P: tl.constexpr, M: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
    AT_HAND: tl.constexpr,
):  # fmt: skip
    far = pool.to(tl.pointer_type(tl.int32), bitcast=True)
    near = here.to(tl.pointer_type(tl.int32), bitcast=True)
    target = staged.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.load(layer).to(tl.int64) * P
    blocks = tl.cdiv(WORDS, BLOCK)
    for i in tl.range(tl.program_id(0), _parts(pages, U, M) * blocks, tl.num_programs(0), num_stages=AHEAD + 1):
        part = i // blocks
        page = tl.load(pages + part // M)
        inside = i % blocks * BLOCK + tl.arange(0, BLOCK)
        exists = (page >= 0) & (inside < WORDS)
        source = far + ((first + page) * M + part % M) * WORDS
        if AT_HAND:
            entry = tl.load(entries + part // M)
            source = tl.where(entry >= 0, near + (entry.to(tl.int64) * M + part % M) * WORDS, source)
        x = tl.load(source + inside, mask=exists)
        tl.store(target + part * WORDS + inside, x, mask=exists)


@triton.jit
@no_type_check
def _store(
    layer, pages, values, pool, pool_again,
    U: tl.constexpr, P: tl.constexpr, M: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    source = values.to(tl.pointer_type(tl.int32), bitcast=True)
    target = pool.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.load(layer).to(tl.int64) * P
    blocks = tl.cdiv(WORDS, BLOCK)
    for i in tl.range(tl.program_id(0), _parts(pages, U, M) * blocks, tl.num_programs(0), num_stages=AHEAD + 1):
        part = i // blocks
        page = tl.load(pages + part // M)
        inside = i % blocks * BLOCK + tl.arange(0, BLOCK)
        exists = (page >= 0) & (inside < WORDS)
        x = tl.load(source + part * WORDS + inside, mask=exists)
        tl.store(target + ((first + page) * M + part % M) * WORDS + inside, x, mask=exists)


@triton.jit
@no_type_check
def _widen_float8(byte):
    """float32 of 2^-8 times a float8_e4m3fn, by its bits: Ampere cannot convert it.

    With one more bit of exponent it is a float16 that is smaller by 2^8, subnormal where it was.
    """
    magnitude = (byte & 0x7F).to(tl.uint16) << 7
    half = (magnitude | ((byte & 0x80).to(tl.uint16) << 8)).to(tl.float16, bitcast=True)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(tl.float32))


@triton.jit
@no_type_check
def _fetch_wider(
    pool, scales, layer, pages, staged,
    U: tl.constexpr, P: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
    FLOAT8: tl.constexpr,
):  # fmt: skip
    first = tl.load(layer).to(tl.int64) * P
    blocks = tl.cdiv(SIZE, BLOCK)
    for i in tl.range(tl.program_id(0), _parts(pages, U, M) * blocks, tl.num_programs(0), num_stages=AHEAD + 1):
        part = i // blocks
        page = tl.load(pages + part // M)
        at = (first + page) * M + part % M
        inside = i % blocks * BLOCK + tl.arange(0, BLOCK)
        exists = (page >= 0) & (inside < SIZE)
        x = tl.load(pool + at * SIZE + inside, mask=exists)
        if FLOAT8:
            x = _widen_float8(x) * (tl.load(scales + at, mask=page >= 0) * 256.0)
        tl.store(staged + part * SIZE + inside, x.to(staged.dtype.element_ty), mask=exists)


@triton.jit
@no_type_check
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def _round(x, of_tile, element):
    """`stochastic_round` of `rounding.py`, with its `random_bits`."""
    bits = _mix(_mix(element.to(tl.uint32)) ^ of_tile)
    upper = (x.to(tl.uint32, bitcast=True) + (bits >> 16)) & 0xFFFF0000
    rounded = tl.clamp(upper.to(tl.float32, bitcast=True), -_LARGEST, _LARGEST)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
@no_type_check
def _add(
    layer, pages, names, fresh, words, values, pool, pool_again,
    U: tl.constexpr, P: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    first = tl.load(layer).to(tl.int64) * P
    blocks = tl.cdiv(SIZE, BLOCK)
    for i in tl.range(tl.program_id(0), _parts(pages, U, M) * blocks, tl.num_programs(0), num_stages=AHEAD + 1):
        part = i // blocks
        page = tl.load(pages + part // M)
        old = tl.load(fresh + part // M) == 0
        inside = i % blocks * BLOCK + tl.arange(0, BLOCK)
        exists = (page >= 0) & (inside < SIZE)
        target = pool + ((first + page) * M + part % M) * SIZE + inside
        # Added to a zero, as to a pool that was cleared: -0 becomes 0.
        x = tl.load(target, mask=exists & old, other=0.0).to(tl.float32)
        x += tl.load(values + part * SIZE + inside, mask=exists).to(tl.float32)
        if STOCHASTIC:
            name = tl.load(names + part // M)
            x = _round(x, _mix(tl.load(words) ^ _mix((name * M + part % M).to(tl.uint32))), inside)
        tl.store(target, x.to(pool.dtype.element_ty), mask=exists)
