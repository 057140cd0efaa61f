"""Temporary."""

import jax.numpy as jnp


def fetch_pages(pool, layer, pages):
    return pool[layer, jnp.maximum(pages, 0)]


def store_pages(pool, layer, pages, values):
    return pool.at[layer, jnp.where(pages < 0, pool.shape[1], pages)].set(values.astype(pool.dtype), mode="drop")


def add_pages(pool, layer, pages, values, fresh, *, rounding_key=None):
    safe = jnp.maximum(pages, 0)
    old = jnp.where(fresh[:, None, None, None], 0, pool[layer, safe].astype(values.dtype))
    return store_pages(pool, layer, pages, old + values)
