"""Where the gradients of pages lie in the pools of staged layers, which may have room for fewer than all pages.

A page holds a gradient only from the last chunk that chose it to its own chunk, so that at any time of the reverse pass
fewer pages hold one than there are. Each takes a slot when its first gradient comes and gives it back in its own chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from oomb_jax.shapes import iota


class FreeSlots(NamedTuple):
    """Those of some layers that hold no gradient, as stacks."""

    stack: Int32[Array, "layers G"]
    height: Int32[Array, " layers"]
    """How many of the stack are free, from the first; the others hold anything."""


class GradientSlots(NamedTuple):
    """The slots of some layers."""

    of_page: Int32[Array, "layers P"]
    """-1: the page has no gradient yet. Of a page whose own chunk is done, anything."""
    free: FreeSlots | None
    """None: there is a slot for every page, of its number."""


def all_free(layers: int, pages: int, room: int) -> GradientSlots:
    """No page of some layers has a gradient; `room`: slots of a layer, `pages` or fewer."""
    of_page = jnp.full((layers, pages), -1, jnp.int32)
    if room == pages:
        return GradientSlots(of_page, None)
    stack = jnp.broadcast_to(iota(room), (layers, room))
    return GradientSlots(of_page, FreeSlots(stack, jnp.full((layers,), room, jnp.int32)))


class Turnover(NamedTuple):
    """The slots that a chunk needs in some layers."""

    own: Int[Array, "layers R"]
    """Of its own pages; -1 for those to which nobody added. They are free for others now."""
    taken: Int[Array, "layers U"]
    """Of the pages that it adds to; -1 for no page and where none was free."""
    fresh: Bool[Array, "layers U"]
    """Which of these had no gradient yet."""


@jax.named_scope("slots")
def turn_over(
    slots: GradientSlots, first: Int[Array, ""], rows: int, pages: Int[Array, "layers U"]
) -> tuple[Turnover, GradientSlots]:
    """A chunk's own pages, `rows` from the page `first`, give their slots back; then the `pages` that it adds to,
    distinct in each layer and -1 for none, take theirs."""

    def layer(slots, pages):
        own = lax.dynamic_slice_in_dim(slots.of_page, first, rows)
        taken, fresh, slots = _take(_give_back(slots, own), pages)
        return Turnover(own, taken, fresh), slots

    return jax.vmap(layer)(slots, pages)


def _give_back(slots, own):
    """Of one layer, as what follows."""
    if slots.free is None:
        return slots
    stack, height = slots.free
    held = own >= 0
    at = jnp.where(held, height + jnp.cumsum(held) - 1, len(stack))
    free = FreeSlots(stack.at[at].set(own, mode="drop"), height + held.sum(dtype=jnp.int32))
    return slots._replace(free=free)


def _take(slots, pages):
    none = pages < 0
    now = before = slots.of_page[jnp.maximum(pages, 0)]
    fresh = before < 0
    if slots.free is None:
        now = pages
    else:
        stack, height = slots.free
        left = height - jnp.cumsum(fresh & ~none)
        now = jnp.where(fresh, jnp.where(left >= 0, stack[jnp.maximum(left, 0)], -1), before)
        slots = slots._replace(free=FreeSlots(stack, jnp.maximum(left[-1], 0).astype(jnp.int32)))
    now = jnp.where(none, -1, now)
    of_page = slots.of_page.at[jnp.where(none, len(slots.of_page), pages)].set(now, mode="drop")
    return now, fresh, slots._replace(of_page=of_page)


def most_at_once(selection: Int[Array, "n L R *M K"]) -> Int[Array, " L"]:
    """The most pages of each layer that hold a gradient at one time of the reverse pass, by what all chunks chose."""
    n, L, rows = selection.shape[:3]
    pages = n * rows

    def layer(l):
        tables = selection[:, l].reshape(n, -1)
        chunks = jnp.broadcast_to(iota(n)[:, None], tables.shape)
        last = jnp.full(pages, -1, jnp.int32).at[jnp.where(tables < 0, pages, tables)].max(chunks, mode="drop")
        own = iota(pages) // rows
        # Held in chunks own < c <= last: in its own chunk a page gives its slot back before others take any.
        held = (last > own).astype(jnp.int32)
        change = jnp.zeros(n + 1, jnp.int32).at[own + 1].add(held).at[last + 1].add(-held)
        return jnp.cumsum(change).max()

    return lax.map(layer, iota(L))
