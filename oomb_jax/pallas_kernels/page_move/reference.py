"""The movers in plain JAX: the definition that the kernels are tested against. Pools are on the device."""

import jax.numpy as jnp

from oomb_jax.pallas_kernels.rounding import random_bits, stochastic_round
from oomb_jax.shapes import accumulator, iota


def fetch_pages(pool, layer, pages, scales, dtype, at_hand):
    """See `api.fetch_pages`. Entries without a page are NaN."""
    fetched = _at(pool, layer, pages).get(mode="fill", fill_value=jnp.nan)
    if at_hand is not None:
        here, entries = at_hand
        near = (entries >= 0) & (pages >= 0)
        fetched = jnp.where(near[:, None, None, None], here[jnp.maximum(entries, 0)], fetched)
    if scales is None:
        return fetched.astype(dtype)
    factor = _at(scales, layer, pages).get(mode="fill", fill_value=1)
    return (fetched.astype(jnp.float32) * factor[:, :, None, None]).astype(dtype)


def store_pages(pool, layer, pages, values):
    """See `api.store_pages`."""
    return _at(pool, layer, pages).set(values, mode="drop", unique_indices=True)


def add_pages(pool, layer, pages, values, fresh, names, word):
    """See `api.add_pages`; word: uint32 of `rounding.words`, None to round to nearest."""
    _, _, M, S, H = pool.shape
    dtype = accumulator(pool.dtype)
    at = _at(pool, layer, pages)
    before = at.get(mode="fill", fill_value=0).astype(dtype)
    total = jnp.where(fresh[:, None, None, None], 0, before) + values.astype(dtype)
    if word is not None:
        tile = (names[:, None] * M + iota(M)[None])[:, :, None, None]
        total = stochastic_round(total, random_bits(word, tile, iota(S * H).reshape(1, 1, S, H)))
    return at.set(total.astype(pool.dtype), mode="drop", unique_indices=True)


def _at(pool, layer, pages):
    """The listed pages; where there is none, a place past the end, each a different one."""
    return pool.at[layer, jnp.where(pages < 0, pool.shape[1] + iota(len(pages)), pages)]
