"""The operation as users call it: arguments, checks and the choice of an implementation."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from oomb_jax.pallas_kernels.device import choose, no_hopper
from oomb_jax.pallas_kernels.paged_attention import reference
from oomb_jax.pallas_kernels.paged_attention.config import unsupported, unsupported_gradients
from oomb_jax.pallas_kernels.paged_attention.page_lists import ByPage
from oomb_jax.pallas_kernels.paged_attention.page_lists import by_page as by_page_of
from oomb_jax.pallas_kernels.paged_attention.triton_config import unsupported_triton
from oomb_jax.shapes import accumulator, iota

Implementation = Literal["reference", "mosaic", "triton"]
"""`mosaic` needs a Hopper GPU, `triton` an NVIDIA GPU of compute capability 8.0 or higher and jax-triton."""

Chunk = Float[Array, "C N H"]
ChunkKV = Float[Array, "C M H"]
Pool = Float[Array, "L P M S H"]
Statistics = Float[Array, "N C"]
Table = Int[Array, "R *M K"]
ChunkSegments = Int[Array, " C"]
PoolSegments = Int[Array, "pages S"]
PageLengths = Int[Array, " pages"]
Sinks = Float[Array, " N"]


class Window(NamedTuple):
    """A sliding window: a query attends only to keys less than `size` tokens before it."""

    size: Int[Array, ""] | int
    """At least 1, a query's own key. As an array, layers of one scan may differ in it."""
    q_start: Int[Array, ""] | int
    """Position of the chunk's first token."""
    page_starts: Int[Array, " pages"]
    """By page id, the position of the page's first token."""


def paged_attention(
    q: Chunk,
    k_new: ChunkKV,
    v_new: ChunkKV,
    k_pool: Pool,
    v_pool: Pool,
    layer: Int[Array, ""],
    table: Table,
    *,
    q_segments: ChunkSegments | None = None,
    pool_segments: PoolSegments | None = None,
    page_lengths: PageLengths | None = None,
    window: Window | None = None,
    sinks: Sinks | None = None,
    implementation: Implementation | None = None,
) -> tuple[Chunk, Statistics]:
    """Attention of a chunk of C queries to its own keys, causally, and to the pages that a table names.

    With j running over the own tokens up to i and all tokens of the pages in i's row of the table,

        out_i = sum_j softmax_j(q_i · k_j / sqrt(H)) v_j        lse_i = log sum_j exp(q_i · k_j / sqrt(H))

    Args:
      q: queries after RoPE. Query head n reads key/value head n // (N / M).
      k_new, v_new: the chunk's own keys and values, not read from the pool.
      k_pool, v_pool: all layers' pages, possibly of a narrower dtype; only pages named in the table are read.
      layer: int32 scalar, which layer of the pools.
      table: int32 page ids, a list [R, K] for each row, or [R, M, K] for each row and key/value head. R = 1: one row
        for all queries; R > 1: row r serves the r-th C/R queries. Every page holds tokens before the chunk. Ids of a
        list are distinct; negative entries are padding and end the list.
      q_segments, pool_segments: document ids of the chunk's tokens and, by page id, of the pages' tokens; both or
        neither. A query attends only to keys of its own document.
      page_lengths: by page id, how many tokens the page holds. What follows them does not count, but must be finite.
      window: a sliding window. Pages that it does not reach need not be in the table.
      sinks: a logit for each query head that joins its softmax as a key without a value, and lse with it. Its gradient
        is `sinks_gradient`.
      implementation: `"mosaic"`, the kernels for Hopper GPUs, `"triton"`, those for GPUs from Ampere on, or
        `"reference"`; a name is taken at its word. None: the first of them that can take the input on the device; on a
        GPU it logs once which and why.

    Returns:
      out in q's dtype, and lse in float32 (float64 for float64 queries).

    Raises:
      ValueError: the shapes do not fit together.
      NotImplementedError: the named implementation does not exist for this input.
    """
    _check(q, k_new, k_pool, table, q_segments, pool_segments, window)
    tensors = q, k_new, v_new, k_pool, v_pool
    refusals = {
        "mosaic": unsupported(*tensors, table, window) or no_hopper(),
        "triton": unsupported_triton(*tensors, table=table, window=window),
    }
    chosen = choose("paged attention, forward", implementation, refusals)
    arguments = q, k_new, v_new, k_pool, v_pool, layer, table
    segments = _segments(q, k_pool, q_segments, pool_segments, page_lengths)
    if chosen == "mosaic":
        from oomb_jax.pallas_kernels.paged_attention import mosaic  # not every platform's jaxlib can import it

        out, lse = mosaic.forward(*arguments, **segments)
    elif chosen == "triton":
        from oomb_jax.pallas_kernels.paged_attention import triton  # an optional package

        out, lse = triton.forward(*arguments, **segments)
    else:
        out, lse = reference.forward(*arguments, **segments, window=window)
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def paged_attention_vjp(
    q: Chunk,
    k_new: ChunkKV,
    v_new: ChunkKV,
    k_pool: Pool,
    v_pool: Pool,
    dk_pool: Pool | None,
    dv_pool: Pool | None,
    layer: Int[Array, ""],
    table: Table,
    out: Chunk,
    lse: Statistics,
    d_out: Chunk,
    *,
    q_segments: ChunkSegments | None = None,
    pool_segments: PoolSegments | None = None,
    page_lengths: PageLengths | None = None,
    window: Window | None = None,
    by_page: ByPage | None = None,
    rounding_key: PRNGKeyArray | None = None,
    implementation: Implementation | None = None,
) -> tuple[Chunk, ChunkKV, ChunkKV, Pool, Pool]:
    """Gradient of `paged_attention`: the arguments of the forward call, its results, and the gradient of `out`.

    Sinks are not needed again: out and lse hold what they do to it.

    Args:
      dk_pool, dv_pool: gradient pools. The pages in the table have this chunk's share added: in float32 (float64),
        then rounded once to the pool's dtype. No other page, nor other head of a page, is written. None, both: the
        results are new, float32 (float64), with this chunk's share alone where the table names a page, and anything
        elsewhere, and there is no rounding.
      out, lse: results of `paged_attention` for the same arguments.
      d_out: gradient of out.
      by_page: `by_page(table, P, own=pages of the chunk, heads=M)`, where it was made before; None: made here.
      rounding_key: rounds stochastically where the gradient pools are bfloat16, with a mean of the sum; each
        implementation draws bits of its own. None: to nearest.

    Returns:
      dq in q's dtype; dk_new and dv_new, what the chunk's own queries give to its own keys and values, in float32
      (float64); the two gradient pools.
    """
    _check(q, k_new, k_pool, table, q_segments, pool_segments, window)
    if by_page is not None and (expected := _shapes(table, k_pool, k_new)) != jax.tree.map(jnp.shape, by_page):
        pages, order = by_page.queries.pages.shape, by_page.order.shape
        places, programs = expected.queries.pages, expected.order
        raise ValueError(
            f"by_page: {pages} pages and {order} pieces of work, the table's are {places} and {programs}: use "
            f"by_page(table, P, own=pages of the chunk, heads=M)"
        )
    if (dk_pool is None) != (dv_pool is None):
        raise ValueError("dk_pool and dv_pool go together: give both, or None for both")
    tensors = q, k_new, v_new, k_pool, v_pool
    options = {"table": table, "window": window, "rounding_key": rounding_key}
    refusals = {
        "mosaic": unsupported(*tensors, table, window) or unsupported_gradients(dk_pool, dv_pool) or no_hopper(),
        "triton": unsupported_triton(*tensors, dk_pool, dv_pool, **options),
    }
    chosen = choose("paged attention, backward", implementation, refusals)
    if dk_pool is None and chosen != "mosaic":  # those kernels make the two themselves
        dk_pool, dv_pool = (jnp.zeros(k_pool.shape, accumulator(q.dtype)) for _ in range(2))
    arguments = q, k_new, v_new, k_pool, v_pool, dk_pool, dv_pool, layer, table, out, lse, d_out
    segments = _segments(q, k_pool, q_segments, pool_segments, page_lengths)
    if chosen == "mosaic":
        from oomb_jax.pallas_kernels.paged_attention import mosaic_vjp

        return mosaic_vjp.backward(*arguments, **segments, by_page=by_page, rounding_key=rounding_key)
    if chosen == "triton":
        from oomb_jax.pallas_kernels.paged_attention import triton_vjp

        return triton_vjp.backward(*arguments, **segments, by_page=by_page)
    return reference.backward(*arguments, **segments, window=window, rounding_key=rounding_key)


def sinks_gradient(sinks: Sinks, out: Chunk, lse: Statistics, d_out: Chunk) -> Sinks:
    """Gradient of the sinks of `paged_attention`, in lse's dtype: - sum_i exp(sink - lse_i) out_i · d_out_i."""
    delta = jnp.einsum("cnh,cnh->nc", out.astype(lse.dtype), d_out.astype(lse.dtype))
    return -jnp.sum(jnp.exp(sinks.astype(lse.dtype)[:, None] - lse) * delta, axis=1)


def _with_sinks(out, lse, sinks):
    """A sink only scales a softmax, so it can join when the sum over keys is done, whoever did it."""
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    share = jnp.exp(lse - total).T[:, :, None]
    return (out.astype(lse.dtype) * share).astype(out.dtype), total


def _segments(q, k_pool, q_segments, pool_segments, page_lengths):
    """The two arguments, with what follows the tokens of a page in a document of its own."""
    if page_lengths is not None:
        P, S = k_pool.shape[1], k_pool.shape[3]
        if pool_segments is None:
            q_segments, pool_segments = jnp.zeros(q.shape[0], jnp.int32), jnp.zeros((P, S), jnp.int32)
        nobody = jnp.iinfo(pool_segments.dtype).min
        pool_segments = jnp.where(iota(S)[None] < page_lengths[:, None], pool_segments, nobody)
    return {"q_segments": q_segments, "pool_segments": pool_segments}


def _shapes(table, k_pool, k_new) -> ByPage:
    """Those of what `by_page` makes."""
    _, P, M, S, _ = k_pool.shape
    make = functools.partial(by_page_of, P=P, own=-(-len(k_new) // S), heads=M)
    return jax.tree.map(jnp.shape, jax.eval_shape(make, table))


def _check(q, k_new, k_pool, table, q_segments, pool_segments, window) -> None:
    C, N, H = q.shape
    _, M, _ = k_new.shape
    if N % M:
        raise ValueError(f"{N} query heads over {M} key/value heads: the first must be a multiple of the second")
    if k_pool.shape[2] != M or k_pool.shape[4] != H:
        raise ValueError(f"pool {k_pool.shape} [L, P, M, S, H] does not hold {M} heads of width {H}")
    if table.ndim > 3 or (table.ndim == 3 and table.shape[1] != M):
        raise ValueError(f"table {table.shape} for {M} key/value heads: [R, K], or [R, {M}, K] with lists of their own")
    if C % table.shape[0]:
        raise ValueError(f"table of {table.shape[0]} rows for {C} queries: each row serves the same number of queries")
    if (q_segments is None) != (pool_segments is None):
        raise ValueError("q_segments and pool_segments go together: give both or neither")
    if window is not None and isinstance(window.size, int) and window.size < 1:
        raise ValueError(f"window of {window.size} tokens: at least 1, a query's own key")
