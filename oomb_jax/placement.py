"""Where the pools of a layer lie, and how the kernels get at their pages.

Pools in HBM are read and added to where they are. Of *staged* layers, whose pools are in host memory or in float8, only
the pages that a chunk attends to are fetched, each into a slot of a buffer in HBM; the kernels work on the buffer, and
what they add to its gradients is then added to the pages of the pool. The kernels give the same bits both ways; plain
JAX adds staged pages in another order.

Pages in float8 are what `quantise` makes of a chunk's keys and values, and are widened to bfloat16, which is exact,
whatever the model's dtype. The gradient of a widened page is taken for that of the keys and values that were rounded.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.chunk import Chunk
from oomb_jax.config import Config
from oomb_jax.gradient_slots import Turnover, most_at_once, turn_over
from oomb_jax.pallas_kernels.device import no_hopper
from oomb_jax.pallas_kernels.matmul import products
from oomb_jax.pallas_kernels.page_move import add_pages, fetch_pages, on_copy_stream, quantise, store_pages
from oomb_jax.pallas_kernels.page_move.config import LINK_ADDERS, LINK_FETCHERS, PROGRAMS
from oomb_jax.pallas_kernels.paged_attention import ByPage, by_page, paged_attention, paged_attention_vjp
from oomb_jax.pools import LayerPools, Pools
from oomb_jax.selection import Staging, attention_mass, stage
from oomb_jax.sequence import Sequence, top_k
from oomb_jax.shapes import Keys, Pool, Queries, Values, accumulator, iota

Table = Int[Array, "R *M K"]

fetch, store = on_copy_stream(fetch_pages), on_copy_stream(store_pages)
# Gradients travel beside the pages of the next layer, not behind them.
fetch_gradients, add = (on_copy_stream(move, stream=2) for move in (fetch_pages, add_pages))


class Pages(NamedTuple):
    """The earlier pages that a chunk attends to in one layer, as the kernels read them."""

    k: Pool
    v: Pool
    layer: Int[Array, ""]
    """Where in the two."""
    table: Table
    """The pages of each query page among theirs, -1 where there is none."""
    ids: Int[Array, " U"] | None
    """The page of the sequence that each of them is, -1 for none. None: they are numbered as in the sequence."""

    def segments(self, chunk: Chunk) -> dict[str, Any]:
        """The document ids that the kernels take."""
        if self.ids is None or not chunk.segments:
            return chunk.segments
        return chunk.segments | {"pool_segments": chunk.segments["pool_segments"][jnp.maximum(self.ids, 0)]}


class KeyGradients(NamedTuple):
    """Gradients of a chunk's own keys and values in a layer."""

    dk: Float[Array, "C M H"]
    dv: Float[Array, "C M H"]


class Adding(NamedTuple):
    """What the backward pass needs to know of the pages that a layer fetches; or, stacked, that many layers fetch."""

    slots: Turnover
    """Where the gradients lie."""
    by_page: ByPage
    """Which rows of queries chose each page."""


class Movers(NamedTuple):
    """Multiprocessors that move the pages of a layer."""

    fetch: int
    add: int
    spared: bool
    """Whether products leave them these."""


class Group(NamedTuple):
    """A contiguous group of layers whose pools lie in the same memory. Layers are numbered as in the model."""

    memory: Literal["hbm", "host"]
    start: int
    stop: int
    staged: bool
    """`LayerPools.staged`: whether pages must be fetched."""
    movers: Movers

    def products(self, config: Config, *, adding: bool = False) -> AbstractContextManager[None]:
        """Inside, the products of its layers leave movers their multiprocessors. adding: those that add, too."""
        spare = self.movers.fetch + (self.movers.add if adding else 0)
        return products(config.matmul, spare=spare if self.movers.spared else 0)

    def held(self, pools: Pools) -> LayerPools:
        """The pools of its layers."""
        return getattr(pools, self.memory)

    def update(self, pools: Pools, **arrays: Any) -> Pools:
        """`pools` with some arrays of its layers replaced."""
        return pools._replace(**{self.memory: self.held(pools)._replace(**arrays)})


def groups(pools: Pools, config: Config) -> list[Group]:
    """The groups of layers, from the first layer on."""
    found, resident = [], 0
    # Beside cuBLAS, which waits for any mover, the sooner a mover ends the better. Pages that come from the GPU's own
    # memory are under way for a moment.
    spared = no_hopper() is None and config.matmul != "reference"
    if pools.hbm is not None:
        resident = pools.hbm.k.shape[0]
        found.append(Group("hbm", 0, resident, pools.hbm.staged, Movers(PROGRAMS, PROGRAMS, False)))
    if pools.host is not None:
        movers = Movers(LINK_FETCHERS, LINK_ADDERS, True) if spared else Movers(PROGRAMS, PROGRAMS, False)
        found.append(Group("host", resident, resident + pools.host.k.shape[0], pools.host.staged, movers))
    return found


def pages(pools: Pools, group: Group, l: Int[Array, ""], table: Table, at_hand: Pages | None = None) -> Pages:
    """The pages of a table, fetched if the layer is staged. at_hand: pages of the same layer that were fetched before;
    those among them need not come over the link again."""
    held = group.held(pools)
    if group.staged:
        return fetched(pools, group, l, stage(table, held.k.shape[1]), at_hand)
    return Pages(held.k, held.v, l - group.start, table, None)


def fetched(pools: Pools, group: Group, l: Int[Array, ""], slots: Staging, at_hand: Pages | None = None) -> Pages:
    """Pages of a staged layer, each in its slot. at_hand: as for `pages`."""
    held, layer = group.held(pools), l - group.start
    move = functools.partial(fetch, programs=group.movers.fetch)
    if at_hand is None or held.k_scale is not None:  # what float8 pages are widened to is no copy of them
        both = (held.k, {"scales": held.k_scale}), (held.v, {"scales": held.v_scale})
    else:
        entries = _among(at_hand, slots.pages, held.k.shape[1])
        both = (held.k, {"at_hand": (at_hand.k[0], entries)}), (held.v, {"at_hand": (at_hand.v[0], entries)})
    k, v = (move(pool, layer, slots.pages, **more)[None] for pool, more in both)
    return Pages(k, v, jnp.int32(0), slots.table, slots.pages)


def _among(at_hand: Pages, wanted: Int[Array, " U"], pages: int) -> Int[Array, " U"]:
    """Of each wanted page the entry that it has there, -1 for none. pages: of the pool."""
    assert at_hand.ids is not None
    there = jnp.where(at_hand.ids < 0, pages, at_hand.ids)
    entry = jnp.full(pages, -1, jnp.int32).at[there].set(iota(len(there)), mode="drop")
    return jnp.where(wanted < 0, -1, entry[jnp.maximum(wanted, 0)])


def write(pools: Pools, group: Group, l: Int[Array, ""], chunk: Chunk, k: Keys, v: Values) -> Pools:
    """Writes the chunk's own keys and values."""
    held, layer, zero = group.held(pools), l - group.start, jnp.int32(0)

    def put(pool, scales, own):
        C, M, H = own.shape
        S = C // chunk.rows
        own = own.reshape(chunk.rows, S, M, H).swapaxes(1, 2)
        if scales is None:
            own = own.astype(pool.dtype)
        else:
            own, made = quantise(own, jnp.clip(chunk.tokens - S * iota(chunk.rows), 0, S))
            scales = lax.dynamic_update_slice(scales, made[None], (layer, chunk.first_page, zero))
        if group.staged:
            return store(pool, layer, chunk.own_pages, own, programs=group.movers.fetch), scales
        return lax.dynamic_update_slice(pool, own[None], (layer, chunk.first_page, zero, zero, zero)), scales

    (k_pool, k_scale), (v_pool, v_scale) = put(held.k, held.k_scale, k), put(held.v, held.v_scale, v)
    return group.update(pools, k=k_pool, v=v_pool, k_scale=k_scale, v_scale=v_scale)


def attention(chunk: Chunk, pages: Pages, q: Queries, k: Keys, v: Values) -> tuple[Queries, Float[Array, "N C"]]:
    """`paged_attention` of a chunk: out and lse."""
    implementation = chunk.config.implementation
    arguments = q, k, v, pages.k, pages.v, pages.layer, pages.table
    return paged_attention(*arguments, implementation=implementation, **pages.segments(chunk))


def for_adding(pools: Pools, group: Group, chunk: Chunk, slots: Staging) -> tuple[Adding, Pools]:
    """For all layers of a group whose pages are fetched, before the first of them goes back: small kernels, which would
    hold up each layer as long as they hold up all together.

    Args:
      pools: what the chunk after this one left.
      group: the layers.
      chunk: which one.
      slots: what the layers fetch, stacked.

    Returns:
      What they need to know, stacked; and the pools, in which the slots are those after this chunk.
    """
    held = group.held(pools)
    assert held.slots is not None
    turnover, after = turn_over(held.slots, chunk.first_page, chunk.rows, slots.pages)
    lists = functools.partial(by_page, P=slots.pages.shape[1], own=chunk.rows, heads=held.dk.shape[2])
    return Adding(turnover, jax.vmap(lists)(slots.table)), group.update(pools, slots=after)


def attention_vjp(
    pools: Pools,
    group: Group,
    l: Int[Array, ""],
    chunk: Chunk,
    pages: Pages,
    adding: Adding | None,
    saved: tuple,
    do: Queries,
) -> tuple[Queries, KeyGradients, Pools]:
    """Gradients of a chunk's queries and of its own keys and values, to which later chunks have added theirs, and the
    pools with those of earlier pages added. adding: of the layer, where its pages were fetched. saved: q, k, v, o and
    lse."""
    held, layer = group.held(pools), l - group.start
    key = None if chunk.rounding is None else jax.random.fold_in(chunk.rounding, l)
    own_slots, later = None, None
    if adding is not None:
        # Asked for beside the kernel, when nothing else is on its way.
        own_slots, do = lax.optimization_barrier((adding.slots.own, do))
        later = [fetch_gradients(pool, layer, own_slots, programs=group.movers.add) for pool in (held.dk, held.dv)]
    q, k, v, o, lse = saved
    dk_pool, dv_pool = (None, None) if group.staged else (held.dk, held.dv)
    dq, dk, dv, *gradients = paged_attention_vjp(
        *(q, k, v, pages.k, pages.v, dk_pool, dv_pool, pages.layer, pages.table, o, lse, do),
        by_page=None if adding is None else adding.by_page,
        rounding_key=None if group.staged else key,
        implementation=chunk.config.implementation,
        **pages.segments(chunk),
    )
    if adding is None:
        pools = group.update(pools, dk=gradients[0], dv=gradients[1])
        # Read from the updated pools: a read of the old ones after the update would make XLA keep a copy of them.
        where = layer, chunk.first_page, *[jnp.int32(0)] * 3
        sizes = 1, chunk.rows, *gradients[0].shape[2:]
        later = [lax.dynamic_slice(pool, where, sizes)[0] for pool in gradients]
    else:
        # Read before the update, which may write to the slots that it read: the barrier keeps XLA from copying the
        # pool for that.
        later, gradients = lax.optimization_barrier((later, gradients))
        add_to = functools.partial(add, programs=group.movers.add, rounding_key=key)
        taken, fresh = adding.slots.taken, adding.slots.fresh
        dk_pool, dv_pool = (
            add_to(pool, layer, taken, more[0].astype(accumulator(pool.dtype)), fresh, pages.ids, word=word)
            for word, (pool, more) in enumerate(((held.dk, gradients[0]), (held.dv, gradients[1])))
        )
        pools = group.update(pools, dk=dk_pool, dv=dv_pool)
    total = (own + _by_token(pages, own_slots).astype(own.dtype) for own, pages in zip((dk, dv), later, strict=True))
    return dq, KeyGradients(*total), pools


def _by_token(pages: Float[Array, "R M S H"], slots: Int[Array, " R"] | None) -> Float[Array, "C M H"]:
    """Pages of a chunk as its keys are; 0 for those that hold anything, because nobody added to them."""
    if slots is not None:
        pages = jnp.where((slots >= 0)[:, None, None, None], pages, 0)
    R, M, S, H = pages.shape
    return pages.swapaxes(1, 2).reshape(R * S, M, H)


def missing_slots(pools: Pools, sequence: Sequence, config: Config) -> Int[Array, ""] | None:
    """After the fill pass, the slots for gradients that a layer lacks, 0 where they suffice; None where there is one
    for every page."""
    few = [g for g in groups(pools, config) if (slots := g.held(pools).slots) is not None and slots.free is not None]
    if not few:
        return None
    n, rows, room = sequence.chunks, sequence.chunk // config.page, few[0].held(pools).dk.shape[1]
    if top_k(n * sequence.chunk, config) is None:  # the last chunk chose every page before it
        most = jnp.int32((n - 1) * rows)
    else:
        assert pools.selection is not None
        most = most_at_once(pools.selection[:n])[few[0].start :].max()
    return jnp.maximum(most - room, 0)


def mass(
    pools: Pools, group: Group, l: Int[Array, ""], chunk: Chunk, table: Table, q: Queries, k: Keys
) -> Float[Array, "2"]:
    """See `Pools.mass`; of the first and the middle query page of the last chunk, and 0 of other chunks."""
    held, sample = group.held(pools), iota(2) * (table.shape[0] // 2)
    arguments = q, k, held.k, l - group.start, chunk.first_page, table, sample
    read = functools.partial(fetch, scales=held.k_scale, programs=group.movers.fetch) if group.staged else None
    measure = lambda: jnp.stack(attention_mass(*arguments, **chunk.segments, fetch=read))
    return lax.cond(chunk.last, measure, lambda: jnp.zeros(2, accumulator(q.dtype)))
