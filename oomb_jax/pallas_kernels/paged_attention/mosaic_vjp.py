"""Backward kernels for Hopper GPUs, in Pallas Mosaic.

With scores s, weights p = exp(s - lse), and the incoming gradient do (FlashAttention-2, arXiv 2307.08691):

    dv = p^T do    dp = do v^T    ds = p (dp - delta)    dq = ds k / sqrt(H)    dk = ds^T q / sqrt(H)

Two kernels, and no atomics, so that results repeat bit for bit. One owns queries and walks over their keys, as the
forward kernel does. The other owns a page, or a page's worth of the chunk's own keys, and walks over the queries that
attend to it: every row of the table that names it, all heads of the group. It adds to the gradient pools in place, so
a page that no row names is neither read nor written.
"""

import jax
import jax.numpy as jnp
from jax import lax

from oomb_jax.pallas_kernels import rounding
from oomb_jax.pallas_kernels.mosaic_tools import LOG2E
from oomb_jax.pallas_kernels.paged_attention.mosaic import fill_page, flat, key_arguments
from oomb_jax.pallas_kernels.paged_attention.mosaic_dkv import key_gradients
from oomb_jax.pallas_kernels.paged_attention.mosaic_dq import query_gradient
from oomb_jax.pallas_kernels.paged_attention.page_lists import by_page as by_page_of


def backward(
    q,
    k_new,
    v_new,
    k_pool,
    v_pool,
    dk_pool,
    dv_pool,
    layer,
    table,
    out,
    lse,
    d_out,
    *,
    q_segments,
    pool_segments,
    by_page=None,
    rounding_key=None,
    interpret=None,
):
    """See `api.paged_attention_vjp`; interpret as in `mosaic.forward`."""
    S, queries = k_pool.shape[3], q.shape[0]
    # Zeros of d_out keep what fills the last page out of every gradient.
    q, k_new, v_new, out, d_out, q_segments = fill_page(S, q, k_new, v_new, out, d_out, q_segments)
    # In powers of two, as the kernels' exponentials are.
    (lse2,) = fill_page(S, lse * LOG2E, axis=1)
    delta = jnp.einsum("cnh,cnh->nc", out, d_out, preferred_element_type=jnp.float32)
    keys = key_arguments(k_new, v_new, k_pool, v_pool, layer, table, q_segments, pool_segments)
    dq = query_gradient(k_pool.shape, q, d_out, lse2, delta, *keys, rows=table.shape[0], interpret=interpret)
    tensors = q, d_out, lse2, delta, k_new, v_new
    if by_page is None:
        by_page = by_page_of(table, k_pool.shape[1], own=len(k_new) // S, heads=k_pool.shape[2])
    rest = k_pool, v_pool, layer, by_page
    options = {"q_segments": q_segments, "pool_segments": pool_segments, "R": table.shape[0], "interpret": interpret}
    if dk_pool is None:
        dk_new, dv_new, dk_pool, dv_pool = key_gradients(*tensors, *rest, None, None, words=None, **options)
    else:
        words = None if rounding_key is None else rounding.words(rounding_key)
        # XLA puts a call together with the slices of stacks that it reads in a loop, and then takes two equal pools,
        # zeros both, for one: the call would add to memory that holds anything. So it gets no slices.
        tensors = lax.optimization_barrier(tensors)
        refs = jax.new_ref(flat(dk_pool)), jax.new_ref(flat(dv_pool))
        dk_new, dv_new = key_gradients(*tensors, *rest, *refs, words=words, **options)
        dk_pool, dv_pool = map(jax.freeze, refs)
    dk_pool, dv_pool = (pool.reshape(k_pool.shape) for pool in (dk_pool, dv_pool))
    return *(x[:queries] for x in (dq, dk_new, dv_new)), dk_pool, dv_pool
