"""The operations as users call them: arguments, checks and the choice of an implementation."""

import functools
import logging
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from oomb_jax.pallas_kernels import rounding
from oomb_jax.pallas_kernels.page_move import reference
from oomb_jax.pallas_kernels.page_move.config import PROGRAMS, unsupported_triton
from oomb_jax.pallas_kernels.triton_call import device_capability, in_host_memory
from oomb_jax.shapes import Pool, accumulator

Implementation = Literal["reference", "triton"]
"""`triton` needs an NVIDIA GPU of compute capability 8.0 or higher and jax-triton."""

Staged = Float[Array, "U M S H"]
Pages = Int[Array, " U"]
Layer = Int[Array, ""] | int

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)


def fetch_pages(
    pool: Pool,
    layer: Layer,
    pages: Pages,
    *,
    scales: Float32[Array, "L P M"] | None = None,
    dtype: DTypeLike | None = None,
    at_hand: tuple[Float[Array, "near M S H"], Pages] | None = None,
    programs: int = PROGRAMS,
    implementation: Implementation | None = None,
) -> Staged:
    """Pages of one layer of a pool, in a buffer on the device: entry u is pool[layer, pages[u]], in `dtype`.

    Args:
      pool: all layers' pages, on the device or in pinned host memory, which `"triton"` reads in place.
      layer: int32, which layer of the pool.
      pages: int32 page ids. Where one is -1, which may be anywhere, the entry of the result holds anything.
      scales: of float8_e4m3fn pools, one for each page and head, a power of two; see `quantise`.
      dtype: one that holds every value of the pool exactly, so that widening rounds nothing. None: that of the pool,
        and bfloat16 where there are scales.
      at_hand: pages of this layer that are on the device already, as an earlier fetch returned them, and of each page
        asked for the entry there; int32, -1 where it is none. Those come from there. Of pools that are fetched as they
        are, without scales and in their own dtype. None: all come from the pool.
      programs: of the GPU that work at it. Each takes a multiprocessor away from what runs beside it.
      implementation: `"triton"` or `"reference"`, plain JAX for pools on the device; a name is taken at its word. None:
        `"triton"` where it can run, else the reference; on an NVIDIA GPU it says once why.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
      NotImplementedError: the implementation does not exist for this input.
    """
    _check(pool, programs)
    dtype = jnp.dtype(dtype or (pool.dtype if scales is None else jnp.bfloat16))
    if scales is not None and (pool.dtype != FLOAT8 or dtype == FLOAT8):
        raise ValueError(f"scales for {pool.dtype} pages as {dtype}: they are for widening float8_e4m3fn")
    if scales is None and pool.dtype == FLOAT8 != dtype:
        raise ValueError(f"{pool.dtype} pages as {dtype} without scales: give the scales of the pool")
    if not _holds(dtype, pool.dtype):
        raise ValueError(f"{pool.dtype} pages as {dtype}: fetching only widens; convert what it returns")
    if at_hand is not None and (at_hand[0].shape[1:] != pool.shape[2:] or at_hand[1].shape != pages.shape):
        raise ValueError(
            f"at_hand: {at_hand[0].shape[1:]} [M, S, H] a page and {at_hand[1].shape} entries, for a pool of "
            f"{pool.shape[2:]} and {pages.shape} pages to fetch: these must be the same"
        )
    if at_hand is not None and (scales is not None or not dtype == pool.dtype == at_hand[0].dtype):
        raise ValueError(f"{at_hand[0].dtype} pages at hand, {pool.dtype} as {dtype} to fetch: one dtype, no scales")
    if _choose(implementation, "fetch_pages", pool, pages, dtype) == "triton":
        from oomb_jax.pallas_kernels.page_move import triton  # an optional package

        return triton.fetch_pages(pool, _scalar(layer), pages, scales, dtype, at_hand, programs=programs)
    return reference.fetch_pages(pool, _scalar(layer), pages, scales, dtype, at_hand)


def store_pages(
    pool: Pool,
    layer: Layer,
    pages: Pages,
    values: Staged,
    *,
    programs: int = PROGRAMS,
    implementation: Implementation | None = None,
) -> Pool:
    """The pool with pool[layer, pages[u]] = values[u], in place if it is donated; entries of page -1 are skipped.

    Args:
      pool, layer, programs, implementation: as for `fetch_pages`.
      pages: int32 page ids, distinct but for -1.
      values: in the pool's dtype, or a wider one, which is rounded to nearest. For float8 pools use `quantise`.
    """
    _check(pool, programs)
    if pool.dtype == FLOAT8 != values.dtype:
        raise ValueError(f"values of {values.dtype} for a pool of {pool.dtype}: quantise gives pages and their scales")
    if not _holds(values.dtype, pool.dtype):
        raise ValueError(f"values of {values.dtype} for a pool of {pool.dtype}: the same dtype or a wider one")
    values = values.astype(pool.dtype)
    if _choose(implementation, "store_pages", pool, pages, pool.dtype) == "triton":
        from oomb_jax.pallas_kernels.page_move import triton

        return triton.store_pages(pool, _scalar(layer), pages, values, programs=programs)
    return reference.store_pages(pool, _scalar(layer), pages, values)


def add_pages(
    pool: Pool,
    layer: Layer,
    pages: Pages,
    values: Staged,
    fresh: Bool[Array, " U"],
    names: Pages | None = None,
    *,
    rounding_key: PRNGKeyArray | None = None,
    word: int = 0,
    programs: int = PROGRAMS,
    implementation: Implementation | None = None,
) -> Pool:
    """The pool with pool[layer, pages[u]] += values[u], in place if it is donated; entries of page -1 are skipped.

    Sums are in float32 (float64 for float64 pools), rounded once to the pool's dtype.

    Args:
      pool, layer, programs, implementation: as for `fetch_pages`.
      pages: int32 page ids, distinct but for -1.
      values: float32, or narrower.
      fresh: pages that are not read, but count as 0, so that a pool need not be cleared.
      names: int32, the numbers that stochastic rounding knows the pages by, where they lie elsewhere. None: `pages`.
      rounding_key: rounds stochastically where the pool is bfloat16, with a mean of the sum, and with the bits that
        `paged_attention_vjp` draws for the same key, so that it does not matter who adds. None: to nearest.
      word: which of its two gradient pools this is: 0 for keys, 1 for values.
    """
    _check(pool, programs)
    if not _holds(accumulator(pool.dtype), values.dtype):
        raise ValueError(f"values of {values.dtype}: sums for a pool of {pool.dtype} are {accumulator(pool.dtype)}")
    if not jnp.issubdtype(pool.dtype, jnp.floating) or pool.dtype.itemsize == 1:
        raise ValueError(f"a pool of {pool.dtype}: pages are added to bfloat16 or wider")
    bits, names = None, pages if names is None else names
    if rounding_key is not None and pool.dtype == jnp.bfloat16:
        bits = rounding.words(rounding_key)[word]
    if _choose(implementation, "add_pages", pool, pages, values.dtype) == "triton":
        from oomb_jax.pallas_kernels.page_move import triton

        return triton.add_pages(pool, _scalar(layer), pages, values, fresh, names, bits, programs=programs)
    return reference.add_pages(pool, _scalar(layer), pages, values, fresh, names, bits)


def _check(pool, programs: int) -> None:
    if pool.shape[0] * pool.shape[1] * pool.shape[2] >= 2**31:
        raise ValueError(f"pool {pool.shape} [L, P, M, S, H]: L * P * M must be less than 2^31")
    if programs < 1:
        raise ValueError(f"programs={programs}: at least 1")


def _scalar(layer: Layer) -> Int[Array, ""]:
    return jnp.asarray(layer, jnp.int32)


def _holds(wide, narrow) -> bool:
    """Whether every value of one dtype is one of the other, for float8 also after scaling by a power of two."""
    if wide == narrow:
        return True
    if narrow == FLOAT8:
        return wide in (jnp.bfloat16, jnp.float32)
    wide, narrow = jnp.finfo(wide), jnp.finfo(narrow)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp


def _choose(implementation: Implementation | None, operation: str, pool, pages, dtype) -> Implementation:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation={implementation!r}: None, or one of {get_args(Implementation)}")
    reason = None if implementation == "reference" else unsupported_triton(pool, pages, dtype)
    if implementation == "triton" and reason:
        raise NotImplementedError(f"implementation='triton': {reason}; pass 'reference' or None")
    if implementation == "reference" or reason:
        if in_host_memory(pool):
            raise NotImplementedError(
                f"{operation} with a pool in host memory: only implementation='triton' moves its pages"
                + (f"; here: {reason}" if reason else "")
            )
        if reason and device_capability():
            _say_once(operation, reason)
        return "reference"
    return "triton"


@functools.cache
def _say_once(operation: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s: reference, because: %s", operation, reason)
