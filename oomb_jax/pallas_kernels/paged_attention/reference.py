"""Paged attention in plain JAX: the definition that every kernel is tested against.

Blocks of keys are visited one after the other with the running softmax of FlashAttention (arXiv 2205.14135,
algorithm 1; the backward pass is its algorithm 4), all in float32, or float64 for float64 queries. Loops over pages
have a trip count that is known only at run time, so a chunk costs as much as the pages before it.

Inside this file queries are [M, G, R, Q, H] (R table rows of Q queries), keys of a block [R or 1, M, U, H], and the
table is [R, m, K] as in `page_lists`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from oomb_jax.pallas_kernels.paged_attention.page_lists import by_head, distinct
from oomb_jax.rounding import stochastic_round
from oomb_jax.shapes import accumulator, divisor, iota

HIGHEST = lax.Precision.HIGHEST  # the default on a GPU would be TensorFloat-32


class Softmax(NamedTuple):
    """Running softmax of every query over the keys seen so far."""

    maximum: Float[Array, "M G R Q"]
    total: Float[Array, "M G R Q"]
    values: Float[Array, "M G R Q H"]


class Block(NamedTuple):
    """Keys and values of U tokens, and which query may attend to which of them."""

    k: Float[Array, "r M U H"]
    v: Float[Array, "r M U H"]
    mask: Bool[Array, "r m q U"]


def forward(q, k_new, v_new, k_pool, v_pool, layer, table, *, q_segments, pool_segments, window):
    """See `api.paged_attention`."""
    C, N, H = q.shape
    table = by_head(table)
    M, R = k_new.shape[1], table.shape[0]
    dtype = accumulator(q.dtype)
    grouped = _group(q.astype(dtype), M, 1)
    own_blocks, own_block = _own_blocks(k_new, v_new, q_segments, window, dtype, N)
    page_blocks, page_block = _page_blocks(k_pool, v_pool, layer, table, q_segments, pool_segments, window, dtype, C, N)

    start = Softmax(
        jnp.full((M, N // M, 1, C), -jnp.inf, dtype),
        jnp.zeros((M, N // M, 1, C), dtype),
        jnp.zeros((M, N // M, 1, C, H), dtype),
    )
    state = lax.fori_loop(0, own_blocks, lambda j, state: _attend(state, grouped, own_block(j)), start)
    by_row = _regroup((state, grouped), R)
    state, _ = lax.fori_loop(0, page_blocks, lambda j, c: (_attend(c[0], c[1], page_block(j)), c[1]), by_row)

    total = jnp.where(state.total == 0, 1, state.total)
    lse = jnp.where(state.total == 0, -jnp.inf, state.maximum + jnp.log(total))
    out = _ungroup(state.values / total[..., None])
    return out.astype(q.dtype), lse.reshape(N, C)


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
    window,
    rounding_key,
):
    """See `api.paged_attention_vjp`."""
    C, N, _ = q.shape
    table = by_head(table)
    M, R = k_new.shape[1], table.shape[0]
    dtype = accumulator(q.dtype)
    grouped, d_grouped = (_group(x.astype(dtype), M, 1) for x in (q, d_out))
    lse = lse.reshape(M, N // M, 1, C)
    # sum_j p_ij dp_ij = out_i · d_out_i, so the softmax's backward pass needs no second sweep over the keys.
    delta = jnp.sum(_group(out.astype(dtype), M, 1) * d_grouped, axis=-1)
    own_blocks, own_block = _own_blocks(k_new, v_new, q_segments, window, dtype, N)
    page_blocks, page_block = _page_blocks(k_pool, v_pool, layer, table, q_segments, pool_segments, window, dtype, C, N)

    def own(j, carry):
        dq, dk, dv = carry
        block = own_block(j)
        more_dq, block_dk, block_dv = _block_gradient(grouped, lse, delta, d_grouped, block)
        put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part[0], j * part.shape[2], axis=1)
        return dq + more_dq, put(dk, block_dk), put(dv, block_dv)

    zero = jnp.zeros((M, C, q.shape[2]), dtype)
    dq, dk_new, dv_new = lax.fori_loop(0, own_blocks, own, (jnp.zeros_like(grouped), zero, zero))

    grouped, lse, delta, d_grouped = _regroup((grouped, lse, delta, d_grouped), R)
    width = _pages_per_block(k_pool, table, C, N)
    pools = dk_pool, dv_pool
    # A narrow pool is rounded once. Rows that share pages add to a wide copy of them first.
    shared = R > 1 and any(_is_narrow(pool, dtype) for pool in pools)
    pages, places = distinct(table, dk_pool.shape[1]) if shared else (None, table)
    sums = pools if pages is None else [_copy_pages(pool, layer, pages, dtype) for pool in pools]

    def add_block(j, carry):
        dq, *sums = carry
        more_dq, *parts = _block_gradient(grouped, lse, delta, d_grouped, page_block(j))
        ids = lax.dynamic_slice_in_dim(_padded(places, width), j * width, width, axis=2)
        keys = _pool_keys(rounding_key, j)
        where = 0 if shared else layer
        return dq + more_dq, *(_add_pages(sum_, where, ids, *x) for sum_, *x in zip(sums, parts, keys, strict=True))

    dq, *sums = lax.fori_loop(0, page_blocks, add_block, (_regroup(dq, R), *sums))
    if pages is not None:
        keys = _pool_keys(rounding_key, 0)
        totals = (sum_.swapaxes(1, 2) for sum_ in sums)
        sums = (_put_pages(pool, layer, pages[None], *x) for pool, *x in zip(pools, totals, keys, strict=True))
    dk_new, dv_new = (x.swapaxes(0, 1) for x in (dk_new, dv_new))
    return _ungroup(dq).astype(q.dtype), dk_new, dv_new, *sums


def _attend(state: Softmax, q: Float[Array, "M G R Q H"], block: Block) -> Softmax:
    scores = _scores(q, block)
    maximum = jnp.maximum(state.maximum, scores.max(axis=-1))
    # A query that has seen no key yet has maximum -inf; subtracting it would give NaN.
    base = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(scores - base[..., None])
    decay = jnp.exp(state.maximum - base)
    return Softmax(
        maximum,
        state.total * decay + weights.sum(axis=-1),
        state.values * decay[..., None] + _dot("mgrqu,rmuh->mgrqh", weights, block.v),
    )


def _block_gradient(q, lse, delta, d_out, block: Block):
    """Gradients of the queries and of one block's keys and values."""
    scores = _scores(q, block)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    weights = jnp.exp(scores - base[..., None])
    d_weights = _dot("mgrqh,rmuh->mgrqu", d_out, block.v)
    d_scores = weights * (d_weights - delta[..., None]) * q.shape[-1] ** -0.5
    dq = _dot("mgrqu,rmuh->mgrqh", d_scores, block.k)
    dk = _dot("mgrqu,mgrqh->rmuh", d_scores, q)
    dv = _dot("mgrqu,mgrqh->rmuh", weights, d_out)
    return dq, dk, dv


def _scores(q, block: Block):
    scores = _dot("mgrqh,rmuh->mgrqu", q, block.k) * q.shape[-1] ** -0.5
    return jnp.where(block.mask.swapaxes(0, 1)[:, None], scores, -jnp.inf)


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b, precision=HIGHEST)


def _own_blocks(k_new, v_new, q_segments, window, dtype, N):
    """The number of blocks of own keys, and a function from j to the j-th block."""
    C = k_new.shape[0]
    width = divisor(C, _block_budget() // (N * C))
    k, v = (x.astype(dtype).swapaxes(0, 1)[None] for x in (k_new, v_new))

    def block(j):
        cut = lambda x: lax.dynamic_slice_in_dim(x, j * width, width, axis=2)
        distance = iota(C)[:, None] - (j * width + iota(width))[None, :]
        mask = distance >= 0
        if window is not None:
            mask &= distance < window.size
        if q_segments is not None:
            own = lax.dynamic_slice_in_dim(q_segments, j * width, width)
            mask &= q_segments[:, None] == own[None, :]
        return Block(cut(k), cut(v), mask[None, None])

    return C // width, block


def _page_blocks(k_pool, v_pool, layer, table, q_segments, pool_segments, window, dtype, C, N):
    """The number of blocks that hold a page of the table, and a function from j to the j-th block."""
    _, _, M, S, H = k_pool.shape
    R, m, _ = table.shape
    width = _pages_per_block(k_pool, table, C, N)
    padded = _padded(table, width)

    def block(j):
        ids = lax.dynamic_slice_in_dim(padded, j * width, width, axis=2)
        valid = ids >= 0

        def gather(pool):
            # Masked scores do not protect from what an unwritten page may hold: 0 * NaN is NaN.
            pages = jnp.where(valid[..., None, None], _get_pages(pool, layer, ids).astype(dtype), 0)
            return pages.reshape(R, M, width * S, H)

        # [R, m, Q, width * S], from what is [R, m, width, S] and [R, Q].
        by_key = lambda x: x.reshape(R, m, 1, width * S)
        by_query = lambda x: x.reshape(R, 1, C // R, 1)
        mask = jnp.broadcast_to(by_key(jnp.repeat(valid, S, axis=2)), (R, m, C // R, width * S))
        safe = jnp.maximum(ids, 0)
        if pool_segments is not None:
            mask &= by_query(q_segments) == by_key(pool_segments[safe])
        if window is not None:
            keys = window.page_starts[safe][..., None] + iota(S)[None, None, None]
            mask &= by_query(window.q_start + iota(C)) - by_key(keys) < window.size
        return Block(gather(k_pool), gather(v_pool), mask)

    longest = jnp.max(jnp.sum(table >= 0, axis=2, dtype=jnp.int32))
    return (longest + width - 1) // width, block


def _get_pages(pool, layer, ids):
    """[R, M, K, S, H], of a table [R, m, K]. Padding reads page 0."""
    return pool[layer, jnp.maximum(ids, 0), iota(pool.shape[2])[None, :, None]]


def _at_pages(pool, layer, ids):
    """What `_get_pages` reads, to be written. Padding is past the end, where `drop` skips it, and never an alias."""
    where = jnp.where(ids >= 0, ids, pool.shape[1] + iota(ids.shape[2])[None, None])
    return pool.at[layer, where, iota(pool.shape[2])[None, :, None]]


def _copy_pages(pool, layer, pages, dtype):
    """Pages [m, U] of a layer as a pool of their own, [1, U, M, S, H]."""
    return _get_pages(pool, layer, pages[None]).swapaxes(1, 2).astype(dtype)


def _add_pages(pool, layer, ids, part, key):
    """Adds the gradient of one block, [R, M, width * S, H], to its pages; padding is dropped."""
    R, _, width = ids.shape
    part = part.reshape(R, pool.shape[2], width, *pool.shape[3:])
    if _is_narrow(pool, part.dtype):
        return _put_pages(pool, layer, ids, _get_pages(pool, layer, ids).astype(part.dtype) + part, key)
    return _at_pages(pool, layer, ids).add(part.astype(pool.dtype), mode="drop", unique_indices=R == 1)


def _put_pages(pool, layer, ids, total, key):
    """Replaces distinct pages, rounding; padding is dropped."""
    if key is None or pool.dtype.itemsize >= 4:
        total = total.astype(pool.dtype)
    else:
        total = stochastic_round(total.astype(jnp.float32), pool.dtype, key)
    return _at_pages(pool, layer, ids).set(total, mode="drop", unique_indices=True)


def _is_narrow(pool, dtype) -> bool:
    """Whether the pool holds less than sums of `dtype` do."""
    return jnp.finfo(pool.dtype).bits < jnp.finfo(dtype).bits


def _pool_keys(key, j):
    """A key for each of the two gradient pools and block j."""
    return (None, None) if key is None else jax.random.split(jax.random.fold_in(key, j))


def _group(x, M, R):
    """[C, N, H] -> [M, G, R, Q, H]."""
    C, N, H = x.shape
    return x.reshape(R, C // R, M, N // M, H).transpose(2, 3, 0, 1, 4)


def _ungroup(x):
    """[M, G, R, Q, H] -> [C, N, H]."""
    M, G, R, Q, H = x.shape
    return x.transpose(2, 3, 0, 1, 4).reshape(R * Q, M * G, H)


def _regroup(tree, R):
    """Cuts the queries of [M, G, 1, C, ...] into R rows."""
    cut = lambda x: x.reshape(*x.shape[:2], R, x.shape[3] // R, *x.shape[4:])
    return jax.tree.map(cut, tree)


def _padded(table, width):
    return jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[2] % width)), constant_values=-1)


def _pages_per_block(k_pool, table, C, N):
    return max(1, min(table.shape[2], _block_budget() // (N * C * k_pool.shape[3])))


def _block_budget() -> int:
    """Scores of one block: on a CPU they stay in its cache; a GPU wants few, large kernels (256 MiB of float32)."""
    return 2**20 if jax.default_backend() == "cpu" else 2**26
