"""Selections that the model did not make, for benchmarks: what they cost and what they are worth.

    with forced("random"):
        step = jax.jit(oomb_jax.value_and_grad, ...).lower(...).compile()

The engine is traced with another `select`. Its own still runs, so that a step scores pages as always and only what it
attends to differs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Integer

from oomb_jax import selection
from oomb_jax.shapes import iota

Choice = Literal["model", "random", "same", "none"]
"""`model`: the rule. `random`: other pages for every query page, drawn from all earlier ones, and for many pages nearly
disjoint. `same`: all query pages of a chunk choose the same ones. `none`: only the own chunk is attended to."""


@contextlib.contextmanager
def forced(choice: Choice, *, repeated: bool = False) -> Iterator[None]:
    """What is traced inside chooses its pages so, in the fill pass and in evaluations. `repeated`: each chunk the same
    ones in all layers and whatever the queries, so that settings of different rounding choose alike."""
    if choice == "model":
        yield
        return

    def select(attention, q, representatives, first_page, **settings):
        table = selection.select(attention, q, representatives, first_page, **settings)
        # From the queries' bits, so that chunks, layers and steps differ.
        bits = first_page if repeated else lax.bitcast_convert_type(jnp.sum(q.astype(jnp.float32)), jnp.uint32)
        other = _pages(choice, table, len(representatives), first_page, bits)
        # Never true, which the compiler cannot know: it would leave out the scores of a table that nobody reads.
        return jnp.where(jnp.any(table < -1), table, other)

    # The engine has no hook for this, and needs none outside benchmarks.
    with mock.patch("oomb_jax.chunk.select", select):
        yield


def _pages(
    choice: Choice, table: Int[Array, "R *M K"], pages: int, first_page: Int[Array, ""], bits: Integer[Array, ""]
) -> Int[Array, "R *M K"]:
    if choice == "none":
        return jnp.full_like(table, -1)
    shape = (*table.shape[:-1], pages) if choice == "random" else (pages,)
    scores = jax.random.uniform(jax.random.fold_in(jax.random.key(0), bits), shape)
    scores = jnp.where(jnp.broadcast_to(iota(pages) < first_page, shape), scores, -1.0)
    values, ids = lax.top_k(scores, table.shape[-1])
    ids = jnp.sort(jnp.where(values < 0, pages, ids))
    return jnp.broadcast_to(jnp.where(ids == pages, -1, ids), table.shape)


def page_traffic(
    tables: Int[Array, "n L R *M K"], *, kv_page: int, gradient_page: int, together: int = 1
) -> dict[str, Any]:
    """Distinct pages of a step by chunk and layer, and the bytes that must move if each is moved once a pass.

    Args:
      tables: what every chunk and layer chose.
      kv_page: bytes of one page's keys and values in one layer.
      gradient_page: bytes of their gradients.
      together: how many chunks the fill pass takes at once; a page that several of them chose moves once.

    Returns:
      distinct_pages, the mean over chunks and layers, and gigabytes: of keys and values read in the fill pass (whose
      last layer attends to nothing), the recomputation and the backward pass, and of gradients, read and written.
      gradient_pages, the share of all pages that get a gradient from a later chunk, and that hold one at once.
    """
    n, L = tables.shape[:2]

    def count(tables):
        counts = lax.map(selection.distinct_pages, tables.reshape(-1, *tables.shape[2:]))
        return jax.device_get(counts).astype(float).reshape(-1, L)

    counts = count(tables)
    taken = n // together * together
    groups = tables[:taken].reshape(-1, together, *tables.shape[1:]).swapaxes(1, 2)
    groups = groups.reshape(-1, L, together * tables.shape[2], *tables.shape[3:])
    every, filled = counts.sum(), count(groups)[:, :-1].sum() + counts[taken:, :-1].sum()
    kinds = {
        "fill": filled * kv_page,
        "recompute": every * kv_page,
        "backward": every * kv_page,
        "gradients": 2 * every * gradient_page,
    }
    return {
        "distinct_pages": round(float(counts.mean()), 1),
        "gigabytes": {name: round(value / 1e9, 3) for name, value in kinds.items()},
        "gradient_pages": _gradient_pages(np.asarray(tables)),
    }


def _gradient_pages(tables: np.ndarray) -> dict[str, float]:
    """Of a sequence's pages: the share that any chunk chose, and the largest share that holds a gradient at one time of
    the reverse pass, from the last chunk that chose a page to the page's own chunk."""
    n, L, rows = tables.shape[:3]
    alive = np.zeros((L, n * rows), bool)
    chosen = np.zeros_like(alive)
    most = 0
    for c in reversed(range(n)):
        for layer, table in enumerate(tables[c]):
            alive[layer, table[table >= 0]] = True
        chosen |= alive
        most = max(most, int(alive.sum()))
        alive[:, c * rows :] = False
    return {"chosen": round(float(chosen.mean()), 4), "at_once": round(most / alive.size, 4)}
