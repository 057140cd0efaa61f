"""Page scores in plain JAX: the definition that the kernel is tested against."""

import jax
import jax.numpy as jnp
from jax import lax

from oomb_jax.shapes import accumulator, divisor, iota

BLOCK_BYTES = 2**26
"""Logits that exist at once: a row of 32,768 pages for 128 queries and 4 heads in float32."""


def page_scores(q, representatives, start, end, votes, *, scaled):
    """See `api.page_scores`. Rows go in blocks, so that the logits of a chunk never exist at once."""
    C, _, H = q.shape
    P, M, _ = representatives.shape
    R, dtype = start.shape[0], accumulator(q.dtype)
    grouped = group(q, M)
    representatives = representatives.astype(q.dtype)
    rows = divisor(R, BLOCK_BYTES // (C // R * M * P * dtype.itemsize))

    def block(x):
        q, start, votes = x  # [r, S, M, H], [r], [r, S]
        logits = jnp.einsum(
            "rsmh,pmh->rmsp", q, representatives, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
        )
        mask = candidates(start, end, P)[:, None, None]
        weights = jax.nn.softmax(logits * H**-0.5 if scaled else logits, axis=-1, where=mask)
        return jnp.sum(jnp.where(votes[:, None, :, None], weights, 0), axis=2)

    cut = lambda x, *shape: x.reshape(R // rows, rows, *shape)
    scores = lax.map(block, (cut(grouped, C // R, M, H), cut(start), cut(votes, C // R)))
    return scores.reshape(R, M, P)


def group(q, M):
    """[C, N, H] -> [C, M, H]: the sum of the queries that share a key/value head, rounded once."""
    C, N, H = q.shape
    return jnp.sum(q.reshape(C, M, N // M, H), axis=2, dtype=accumulator(q.dtype)).astype(q.dtype)


def candidates(start, end, P):
    """[R, P]: whether a row's query page may choose a page."""
    ids = iota(P)[None]
    return (ids >= start[:, None]) & (ids < end)
