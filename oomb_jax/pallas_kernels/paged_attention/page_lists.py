"""Lists of pages, and the same seen from the pages.

A table has one list for each of its R rows, [R, K], or one for each row and key/value head, [R, M, K]. In here it is
[R, m, K], with m = 1 or M. -1 stands for no page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from oomb_jax.shapes import iota


def by_head(table: Int[Array, "R *M K"]) -> Int[Array, "R m K"]:
    """The table with an axis for key/value heads, of length 1 where they share their lists; K >= 1."""
    if table.size == 0:
        return jnp.full((len(table), 1, 1), -1, table.dtype)
    return table.reshape(len(table), -1, table.shape[-1])


class Distinct(NamedTuple):
    """The pages that any row names, without repetition."""

    pages: Int[Array, "m U"]
    """Rising, then -1."""
    places: Int[Array, "R m K"]
    """Where among them each entry of the table is; -1 where the table has -1."""


def distinct(lists: Int[Array, "R m K"], P: int) -> Distinct:
    """U = min(R K, P) places for the distinct pages of each head, of P pages."""
    R, m, K = lists.shape
    head, end = iota(m)[:, None], min(R * K, P)
    ids = jnp.where(lists < 0, P, lists).swapaxes(0, 1).reshape(m, R * K)
    named = jnp.zeros((m, P), bool).at[head, ids].set(True, mode="drop")
    place = jnp.cumsum(named, axis=1, dtype=jnp.int32) - 1
    pages = jnp.full((m, end), -1, jnp.int32).at[head, jnp.where(named, place, end)].set(iota(P)[None], mode="drop")
    places = place[iota(m)[None, :, None], jnp.maximum(lists, 0)]
    return Distinct(pages, jnp.where(lists < 0, -1, places))


class Inverted(NamedTuple):
    """Distinct pages, and of each the rows that name it: `rows[first : first + number]`."""

    pages: Int[Array, "m U"]
    """Rising, with one row in its order; -1 where there is no page."""
    first: Int[Array, "m U"]
    number: Int[Array, "m U"]
    """0 where there is no page."""
    rows: Int[Array, " rows"]
    """Rising for each page, which fixes the order of every sum."""


def invert(lists: Int[Array, "R m K"], P: int) -> Inverted:
    """Which rows name a page, for each head, of P pages."""
    R, m, K = lists.shape
    if R == 1:
        number = (lists[0] >= 0).astype(jnp.int32)
        return Inverted(lists[0], jnp.zeros_like(number), number, jnp.zeros(1, jnp.int32))
    U = min(R * K, P)

    def one(lists: Int[Array, "R K"]):
        ids = lists.reshape(-1)
        order = jnp.argsort(jnp.where(ids < 0, P, ids), stable=True).astype(jnp.int32)
        ids = ids[order]
        is_first = (ids >= 0) & jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
        nth = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        put = lambda start, where, x: jnp.full(U, start, jnp.int32).at[jnp.where(where, nth, U)].add(x, mode="drop")
        return put(-1, is_first, ids + 1), put(0, is_first, iota(R * K)), put(0, ids >= 0, 1), order // K

    pages, first, number, rows = jax.vmap(one, in_axes=1)(lists)
    return Inverted(pages, first + R * K * iota(m)[:, None], number, rows.reshape(-1))


class ByPage(NamedTuple):
    """What is made of a table alone and the backward pass needs."""

    queries: Inverted
    order: Int[Array, " M*(U+own)"]
    """Pieces of work on keys, the largest first: head * (U + own) + i is that on entry i of `queries.pages`, then come
    the chunk's own pages."""


@jax.named_scope("slots")
def by_page(table: Int[Array, "R *M K"], P: int, *, own: int, heads: int) -> ByPage:
    """The rows of a table by the pages that they name.

    Args:
      table: of a chunk.
      P: pages of the pool.
      own: pages of the chunk.
      heads: M, key/value heads.
    """
    queries, R = invert(by_head(table), P), len(table)
    # Rows that see a page, each as many queries as `own` R-ths of a page has: all that name it; of the chunk's own
    # pages those from it on.
    rows = jnp.broadcast_to(queries.number * own, (heads, queries.number.shape[1]))
    own_rows = jnp.broadcast_to(R * (own - iota(own)), (heads, own))
    # Of equals those of one head come together: its queries stay in the cache.
    work = jnp.concatenate([rows, own_rows], axis=1).reshape(-1)
    return ByPage(queries, jnp.argsort(work, stable=True, descending=True).astype(jnp.int32))
