"""All layers over a chunk, without gradients: what the fill pass and evaluations do.

    one chunk     layer 0: choose pages, [fetch them,] attend, write the own pages;  layer 1: ...
    two chunks    a0  b0  a1  b1  a2 ...: while a computes layer l, the pages that b attends to there are fetched

A chunk's queries choose its pages, so a fetch cannot begin before the layer does. With one chunk after the other the
device would wait for it; with two in turns one computes meanwhile. The second chunk may attend to pages of the first:
they are written before it chooses. What both chose comes for the first, and is copied on the device for the second.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.chunk import Chunk
from oomb_jax.config import Config
from oomb_jax.parts import layer_at
from oomb_jax.placement import Group, Pages, attention, groups, mass, pages, write
from oomb_jax.pools import Pools
from oomb_jax.selection import representatives
from oomb_jax.shapes import Hidden, Keys, Queries, Values, iota


class Filling(NamedTuple):
    """What the fill pass hands on from a chunk to the next."""

    pools: Pools
    representatives: Float[Array, "L P M H"] | None
    """What Top-K attention scores the pages by; the reverse pass does not need it."""


class _Begun(NamedTuple):
    """A chunk in a layer, before its attention."""

    h: Hidden
    q: Queries
    k: Keys
    v: Values
    table: Int[Array, "R *M K"]


def together(pools: Pools, config: Config) -> int:
    """How many chunks the fill pass takes at once: two where pages are fetched, so that one hides the other's fetch."""
    return 2 if any(group.staged for group in groups(pools, config)) else 1


def forward(
    layers: Any, chunks: list[Chunk], filling: Filling, h: list[Hidden], *, last_output: bool
) -> tuple[list[Hidden], Filling]:
    """All layers over one chunk, or over two that follow each other.

    Args:
      layers: of the model.
      chunks: one or two.
      filling: pools that hold the chunks before these.
      h: the chunks' embeddings.
      last_output: False: the last layer stops at its keys and values and, with Top-K attention, its choice.

    Returns:
      Hidden states of the chunks; and the pools with their keys, values and choices.
    """
    h, found = list(h), groups(filling.pools, chunks[0].config)
    for group in found:
        finish = last_output or group is not found[-1]
        with group.products(chunks[0].config):
            if group.staged and len(chunks) == 2:
                h, filling = _in_turns(layers, group, chunks, filling, h, finish)
            else:
                for i, chunk in enumerate(chunks):
                    h[i], filling = _one(layers, group, chunk, filling, h[i], finish)
    return h, filling


def _one(layers: Any, group: Group, chunk: Chunk, filling: Filling, h: Hidden, finish: bool):
    """One chunk through a group of layers. finish: also through the attention of the last.

    The layers are looped over by an index that is carried: a scan over some of them would copy their weights.
    """

    def body(carry, _):
        l, h, filling = carry
        begun, filling = _begin(layer_at(layers, l), group, chunk, l, filling, h)
        here = pages(filling.pools, group, l, begun.table)
        h = _end(layers, chunk, l, begun, here)
        # Written when the kernel has read: else XLA would keep a copy of the pools for it.
        k, v, h = lax.optimization_barrier((begun.k, begun.v, h))
        return (l + 1, h, filling._replace(pools=write(filling.pools, group, l, chunk, k, v))), None

    last = group.stop - group.start - (not finish)
    (l, h, filling), _ = lax.scan(body, (jnp.int32(group.start), h, filling), None, length=last)
    if not finish:
        begun, filling = _begin(layer_at(layers, l), group, chunk, l, filling, h)
        filling = filling._replace(pools=write(filling.pools, group, l, chunk, begun.k, begun.v))
    return h, filling


def _in_turns(layers: Any, group: Group, chunks: list[Chunk], filling: Filling, h: list[Hidden], finish: bool):
    """Two chunks, the second half a layer behind the first, through layers whose pages are fetched."""
    first, second = chunks
    # XLA lets `l + 1` wait for all that reads l, so that the loop can count in place, and with it would wait whatever
    # begins the next layer. So that layer's number comes from a list, and its weights from a stack without the first:
    # of those that come before attention, which XLA copies for it.
    following = jax.tree.map(lambda x: x[1:], layers)

    def begin(chunk, layer, l, filling, h):
        begun, filling = _begin(layer, group, chunk, l, filling, h)
        return begun, filling._replace(pools=write(filling.pools, group, l, chunk, begun.k, begun.v))

    def fetch(filling, l, begun, at_hand=None):
        return pages(filling.pools, group, l, begun.table, at_hand)

    def end(chunk, l, begun, here, other: Pages):
        """The chunk's hidden states after the layer; what comes then waits for the pages of the other."""
        return lax.optimization_barrier((_end(layers, chunk, l, begun, here), other))

    def body(carry, after):
        l, a, here, b, filling = carry
        h, there = end(first, l, a, here, fetch(filling, after - 1, b, at_hand=here))
        a, filling = begin(first, layer_at(following, l), after, filling, h)
        h, here = end(second, l, b, there, fetch(filling, after, a))
        b, filling = begin(second, layer_at(following, l), after, filling, h)
        return (l + 1, a, here, b, filling), None

    l = jnp.int32(group.start)
    a, filling = begin(first, layer_at(layers, l), l, filling, h[0])
    here = fetch(filling, l, a)
    # Its own pages are written after that read.
    before, here = lax.optimization_barrier((h[1], here))
    b, filling = begin(second, layer_at(layers, l), l, filling, before)
    carry = l, a, here, b, filling
    if group.stop - group.start > 1:  # of a single layer there is no stack without the first
        carry, _ = lax.scan(body, carry, 1 + group.start + iota(group.stop - group.start - 1))
    l, a, here, b, filling = carry
    if not finish:
        return [a.h, b.h], filling
    h_first, there = end(first, l, a, here, fetch(filling, l, b, at_hand=here))
    return [h_first, _end(layers, second, l, b, there)], filling


def _begin(layer: Any, group: Group, chunk: Chunk, l: Int[Array, ""], filling: Filling, h: Hidden):
    """Layer l up to its attention: what that takes, and what is kept of the keys and the choice."""
    q, k, v = _alone(layer.attention_inputs, h, chunk.positions)
    means = filling.representatives
    table = chunk.choose(None if means is None else means[l], q)
    if means is not None:
        own, zero = representatives(k, chunk.config.page)[None], jnp.int32(0)
        means = lax.dynamic_update_slice(means, own, (l, chunk.first_page, zero, zero))
    pools = filling.pools
    if chunk.top_k is not None and pools.selection is not None and pools.mass is not None:
        # What is written waits for what was read to measure the mass: else XLA would copy the pools for it.
        found, k, v = lax.optimization_barrier((mass(pools, group, l, chunk, table, q, k), k, v))
        pools = pools._replace(
            selection=pools.selection.at[chunk.number, l].set(table), mass=pools.mass.at[l].set(found)
        )
    return _Begun(h, q, k, v, table), Filling(pools, means)


def _end(layers: Any, chunk: Chunk, l: Int[Array, ""], begun: _Begun, here: Pages) -> Hidden:
    """The rest of the layer."""
    o, _ = attention(chunk, here, begun.q, begun.k, begun.v)
    return _alone(layer_at(layers, l).attention_output, begun.h, o)


def _alone(part: Callable[..., Any], *arrays: Array) -> Any:
    """What a part of a layer makes of the arrays, compiled the same wherever it stands: XLA joins matrix products and
    sums in other orders by what is around them, and two chunks in turns would not give the bits of one by one."""
    return lax.optimization_barrier(part(*lax.optimization_barrier(arrays)))
