"""What the layers of the reverse pass fetch: each, while it computes, the pages of the one that comes after it.

up      fetch 0;  layer 0, fetch 1;  layer 1, fetch 2;  ...  the last layer fetches its own again
down    the last layer, fetch the one below;  ...  layer 1, fetch 0;  layer 0
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from oomb_jax.chunk import Chunk
from oomb_jax.placement import Adding, Group, Pages, fetched, for_adding, pages
from oomb_jax.pools import Pools
from oomb_jax.selection import Staging, stage
from oomb_jax.shapes import Pool, iota


class Wanted(NamedTuple):
    """The pages that a layer fetches, in their slots; or, stacked in rising order, those of many layers."""

    l: Int[Array, "*L"]
    slots: Staging

    @classmethod
    def of(cls, pools: Pools, group: Group, chunk: Chunk) -> "Wanted | None":
        """What the layers of a group fetch for a chunk; None where pages are at hand.

        All slots are made before the loops over layers, and the layers' index comes with them: XLA lets an index that a
        loop counts up wait for everything that reads the old one, and so would the fetch.
        """
        if not group.staged:
            return None
        layers, P = group.start + iota(group.stop - group.start), group.held(pools).k.shape[1]
        return cls(layers, jax.vmap(lambda l: stage(_chosen(pools, chunk, l), P))(layers))

    def at(self, index: int | slice) -> "Wanted":
        """Of one layer, or of some."""
        return jax.tree.map(lambda x: x[index], self)

    def and_then(self, other: "Wanted") -> "Wanted":
        """Those of some layers and of others, stacked."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), self, other)

    def no_pages(self) -> "Wanted":
        """Of the same layers no page."""
        return self._replace(slots=self.slots._replace(pages=jnp.full_like(self.slots.pages, -1)))


class Turn(NamedTuple):
    """What a layer attends to, and what is fetched while it computes; or, stacked in rising order, of many layers."""

    here: Wanted
    ahead: Wanted
    adding: Adding | None = None
    """On the way down."""


class Fetched(NamedTuple):
    """Keys and values in their slots, which go from layer to layer. The slots' page numbers do not: the next ones would
    wait for the last mover that reads these."""

    k: Pool
    v: Pool


def upwards(wanted: Wanted | None, *, again: bool) -> tuple[Wanted | None, Turn | None]:
    """What is fetched before the first layer, and the turns. again: the last layer fetches its own pages again, with
    which the way down begins; else nothing."""
    if wanted is None:
        return None, None
    last = wanted.at(slice(-1, None))
    return wanted.at(0), Turn(wanted, wanted.at(slice(1, None)).and_then(last if again else last.no_pages()))


def downwards(
    pools: Pools, group: Group, chunk: Chunk, wanted: Wanted | None
) -> tuple[Wanted | None, Turn | None, Pools]:
    """What is fetched before the last layer, the turns, and the pools, in which gradients have their slots."""
    if wanted is None:
        return None, None, pools
    adding, pools = for_adding(pools, group, chunk, wanted.slots)
    ahead = wanted.at(slice(0, 1)).no_pages().and_then(wanted.at(slice(0, -1)))
    return wanted.at(-1), Turn(wanted, ahead, adding), pools


def fetch(pools: Pools, group: Group, wanted: Wanted | None) -> Fetched | None:
    """The pages of one layer, if they are to be fetched."""
    if wanted is None:
        return None
    pages = fetched(pools, group, *wanted)
    return Fetched(pages.k, pages.v)


def here_and_ahead(
    pools: Pools, group: Group, chunk: Chunk, l: Int[Array, ""], came: Fetched | None, turn: Turn | None
) -> tuple[Pages, Fetched | None]:
    """The pages of layer l, which were fetched before or are at hand, and those that are fetched while it computes."""
    if came is None or turn is None:
        return pages(pools, group, l, _chosen(pools, chunk, l)), None
    slots = turn.here.slots
    return Pages(*came, jnp.int32(0), slots.table, slots.pages), fetch(pools, group, turn.ahead)


def _chosen(pools: Pools, chunk: Chunk, l: Int[Array, ""]) -> Int[Array, "R *M K"]:
    """The pages that the chunk attends to in layer l, chosen in the fill pass."""
    if chunk.top_k is None:
        return chunk.all_pages()
    assert pools.selection is not None  # check_pools
    return pools.selection[chunk.number, l]
