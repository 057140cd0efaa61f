"""Backward kernels for Hopper GPUs, in Pallas Mosaic.

With scores s, weights p = exp(s - lse), and the incoming gradient do (FlashAttention-2, arXiv 2307.08691):

    dv = p^T do    dp = do v^T    ds = p (dp - delta)    dq = ds k / sqrt(H)    dk = ds^T q / sqrt(H)

Two kernels, and no atomics, so that results repeat bit for bit. One owns queries and walks over their keys, as the
forward kernel does. The other owns a page, or a page's worth of the chunk's own keys, and walks over the queries that
attend to it: every row of the table that names it, all heads of the group. It adds to the gradient pools in place, so
a page that no row names is neither read nor written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels.paged_attention.config import ROWS, tiles
from oomb_jax.pallas_kernels.paged_attention.mosaic import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    Accumulator,
    add_product,
    divide,
    drain,
    fill_page,
    flat,
    key_arguments,
    key_scratch,
    move,
    move_keys,
    place_of_program,
    position,
    smem_tile,
)
from oomb_jax.pallas_kernels.paged_attention.mosaic_rounding import random_bits, stochastic_round
from oomb_jax.shapes import iota


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
    dq = _query_gradient(k_pool.shape, q, d_out, lse2, delta, *keys, interpret=interpret)
    dk_ref, dv_ref = jax.new_ref(flat(dk_pool)), jax.new_ref(flat(dv_pool))
    words = None if rounding_key is None else jax.random.bits(rounding_key, (2,), jnp.uint32)
    dk_new, dv_new = _key_gradients(
        k_pool.shape, q, d_out, lse2, delta, *keys[:-1], dk_ref, dv_ref, words=words, interpret=interpret
    )
    dk_pool, dv_pool = (jax.freeze(ref).reshape(dk_pool.shape) for ref in (dk_ref, dv_ref))
    return *(x[:queries] for x in (dq, dk_new, dv_new)), dk_pool, dv_pool


def _query_gradient(pool_shape, q, d_out, lse2, delta, *keys, interpret):
    """dq; keys: those of `key_arguments`."""
    _, _, M, S, H = pool_shape
    C, N, _ = q.shape
    G, R = N // M, keys[-1].shape[0]
    tile = tiles(queries=C // R, H=H, S=S)
    warpgroups, stages = tile.warpgroups, tile.dq_stages
    block = warpgroups * ROWS
    segmented = len(keys) > 7

    def kernel(
        *refs, q_smem, d_out_smem, k_smem, v_smem, q_ready, key_barriers, ids_smem: Any = None, spare: Any = None
    ):
        q_ref, d_out_ref, lse_ref, delta_ref, *key_refs, pages_ref, dq_ref = refs
        k_ready, v_ready, k_free, v_free = key_barriers
        place = place_of_program(C=C, G=G, R=R, S=S, block=block, pages_ref=pages_ref)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            q_tile, d_out_tile = q_smem.at[warpgroup], d_out_smem.at[warpgroup]
            head, first = place.head, place.start + warpgroup * ROWS
            mine = pl.ds(first, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[mine, head], q_tile, q_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(d_out_ref.at[mine, head], d_out_tile, q_ready.at[warpgroup])
            load = lambda ref: plgpu.load(ref, layout=BY_ROW, optimized=False)
            lse, delta = load(lse_ref.at[head, mine]), load(delta_ref.at[head, mine])
            q_ids = load(key_refs[-1].at[mine]) if segmented else None
            plgpu.barrier_wait(q_ready.at[warpgroup])

            def add_keys(dq_acc, slot, keys, key_start):
                """Adds what the tile's keys `keys` give. key_start: of a diagonal tile, the place of the first."""
                shape = ROWS, keys.size
                spread = lambda x: lax.broadcast_in_dim(x, shape, [0])
                k_tile = k_smem.at[slot, keys]

                def score_gradient(s_acc, dp_acc):
                    plgpu.wgmma(s_acc, q_tile, k_tile.T)
                    plgpu.wgmma(dp_acc, d_out_tile, v_smem.at[slot, keys].T)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    p = jnp.exp2(s * (H**-0.5 * LOG2E) - spread(lse))
                    if key_start is not None:
                        p = jnp.where(first + position(p, 0) >= key_start + position(p, 1), p, 0.0)
                    if segmented:
                        k_ids = plgpu.load(ids_smem.at[slot, keys], layout=BY_COLUMN)
                        plgpu.commit_smem()  # read before the copy engine may write there again
                        p = jnp.where(spread(q_ids) == lax.broadcast_in_dim(k_ids, shape, [1]), p, 0.0)
                    return (p * (dp_acc[...] - spread(delta))).astype(q.dtype)

                ds = pl.run_scoped(score_gradient, *[Accumulator(shape, jnp.float32)] * 2)
                left = None if spare is None else spare.at[warpgroup, :, pl.ds(0, keys.size)]
                add_product(dq_acc, ds, k_tile, left)
                plgpu.wgmma_wait(0)

            def step(t, dq_acc, *, causal):
                slot = lax.rem(t, stages)
                plgpu.barrier_wait(k_ready.at[slot])
                plgpu.barrier_wait(v_ready.at[slot])
                # A mask needs registers, so with one a tile is taken in parts; those beyond the diagonal are skipped.
                width = ROWS if causal or segmented else S
                for part in range(0, S, width):
                    key_start = (t - place.pages) * S + part
                    add = functools.partial(add_keys, dq_acc, slot, pl.ds(part, width))
                    if causal:
                        pl.when(key_start <= first)(functools.partial(add, key_start))
                    else:
                        add(None)
                plgpu.barrier_arrive(v_free.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])

            def walk(dq_acc):
                pl.loop(0, place.unmasked)(lambda t: step(t, dq_acc, causal=False))
                pl.loop(place.unmasked, place.steps)(lambda t: step(t, dq_acc, causal=True))
                return dq_acc[...] * H**-0.5

            dq = pl.run_scoped(walk, Accumulator((ROWS, H), jnp.float32))
            q_tile[...] = dq.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, dq_ref.at[mine, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")
            move_keys(place, pool_shape, key_refs, (k_smem, v_smem, ids_smem), key_barriers)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types={
            "q_smem": smem_tile((warpgroups, ROWS, H), q.dtype),
            "d_out_smem": smem_tile((warpgroups, ROWS, H), q.dtype),
            "q_ready": plgpu.Barrier(num_barriers=warpgroups, num_arrivals=2),
            **key_scratch(stages, S, H, q.dtype, warpgroups=warpgroups, segmented=segmented),
            **({"spare": smem_tile((warpgroups, ROWS, S), q.dtype)} if interpret else {}),
        },
        grid=(N * C // block,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention_dq",
        interpret=interpret,
    )(q, d_out, lse2, delta, *keys)


def _key_gradients(
    pool_shape, q, d_out, lse2, delta, k_new, v_new, k_pool, v_pool, layer, table, *segments_and_pools, words, interpret
):
    """dk_new and dv_new; adds to the two references to gradient pools.

    words: a random uint32 for each of them, where bfloat16 is rounded to stochastically.
    """
    *segments, dk_pool, dv_pool = segments_and_pools
    _, P, M, S, H = pool_shape
    C, N, _ = q.shape
    G, Q = N // M, C // table.shape[0]
    warpgroups, stages = S // ROWS, tiles(queries=Q, H=H, S=S).dkv_stages
    pages, *lists = _pages_to_rows(table, P)
    own, U = C // S, pages.shape[0]
    segmented = bool(segments)

    def kernel(
        *refs,
        k_smem,
        v_smem,
        q_smem,
        d_out_smem,
        places_smem,
        lse_smem,
        delta_smem,
        barriers,
        ids_smem: Any = None,
        k_ids_smem: Any = None,
        spare: Any = None,
    ):
        q_ref, d_out_ref, lse_ref, delta_ref, k_new_ref, v_new_ref, k_ref, v_ref, layer_ref, *refs = refs
        places_ref, page_ref, first_ref, count_ref, row_ref, *refs, dk_ref, dv_ref, dk_new_ref, dv_new_ref = refs
        words_ref: Any = None if words is None else refs.pop()
        ids: Any = refs or (None, None)
        page_ids_ref, q_ids_ref = ids
        kv_ready, q_ready, d_out_ready, q_free, d_out_free = barriers
        per_row = Q // ROWS * G
        warpgroup = lax.axis_index("warpgroup")

        def work():
            """Of this program: the head, the page's worth of own keys or the page of the list, its number of steps."""
            # A head's queries stay in the cache while its keys pass. Own keys first: their work differs most.
            # The number of the program comes from memory, so that it can be asked for anew after the loops: kept in
            # registers over them, the answers would spill.
            kv_head, item = divide(places_ref[lax.axis_index("program")], own + U)
            is_own, listed = item < own, lax.max(item - own, 0)
            own_steps = (C // ROWS - item * (S // ROWS)) * G
            return kv_head, item, is_own, listed, lax.select(is_own, own_steps, count_ref[listed] * per_row)

        def gradients(kv_head, item, is_own, listed, steps):
            masked = lax.select(is_own, jnp.int32(S // ROWS * G), jnp.int32(0))
            k_tile, v_tile = k_smem.at[warpgroup], v_smem.at[warpgroup]
            inside = pl.ds(warpgroup * ROWS, ROWS)

            def load_keys(*sources):
                buffers = (k_smem, v_smem, places_smem, *([k_ids_smem] if segmented else []))
                for source, buffer in zip(sources, buffers, strict=True):
                    plgpu.copy_gmem_to_smem(source, buffer.at[warpgroup], kv_ready.at[warpgroup])

            @pl.when(is_own)
            def _():
                mine = pl.ds(item * S + warpgroup * ROWS, ROWS)
                ids = [q_ids_ref.at[mine]] if segmented else []
                load_keys(k_new_ref.at[mine, kv_head], v_new_ref.at[mine, kv_head], places_ref.at[pl.ds(0, ROWS)], *ids)

            @pl.when(~is_own)
            def _():
                page = page_ref[listed]
                at = (layer_ref[0] * P + page) * M + kv_head
                ids = [page_ids_ref.at[page, inside]] if segmented else []
                load_keys(k_ref.at[at, inside], v_ref.at[at, inside], places_ref.at[pl.ds(0, ROWS)], *ids)

            plgpu.barrier_wait(kv_ready.at[warpgroup])
            spread = lambda x: lax.broadcast_in_dim(x, (ROWS, ROWS), [1])
            acc = Accumulator((ROWS, ROWS), jnp.float32)
            left = None if spare is None else spare.at[warpgroup]

            def step(t, dk_acc, dv_acc, *, causal):
                slot = lax.rem(t, stages)
                plgpu.barrier_wait(q_ready.at[slot])
                of_query = lambda ref: plgpu.load(ref.at[slot], layout=BY_COLUMN)

                def scores(s_acc):
                    plgpu.wgmma(s_acc, k_tile, q_smem.at[slot].T)
                    return s_acc[...]

                s = pl.run_scoped(scores, acc)
                # The scores are there, so what was asked for before them is done: the previous step's dk.
                pl.when(t > 0)(lambda: plgpu.barrier_arrive(q_free.at[lax.rem(t + stages - 1, stages)]))
                if causal:
                    # Steps begin at the first query that sees a key of the tile. Held in registers over the loop, the
                    # places of the columns would spill.
                    queries = plgpu.load(places_smem.at[warpgroup], layout=BY_COLUMN)
                    before = warpgroup * ROWS - lax.div(t, G) * ROWS
                    s = jnp.where(spread(queries) >= before + position(s, 0), s, -jnp.inf)
                if segmented:
                    k_ids = plgpu.load(k_ids_smem.at[warpgroup], layout=BY_ROW)
                    s = jnp.where(lax.broadcast_in_dim(k_ids, s.shape, [0]) == spread(of_query(ids_smem)), s, -jnp.inf)
                p = jnp.exp2(s * (H**-0.5 * LOG2E) - spread(of_query(lse_smem)))
                plgpu.barrier_wait(d_out_ready.at[slot])

                def weight_gradient(dp_acc):
                    plgpu.wgmma(dp_acc, v_tile, d_out_smem.at[slot].T)
                    add_product(dv_acc, p.astype(q.dtype), d_out_smem.at[slot], left)
                    # dp is needed now, dv much later.
                    return plgpu.wgmma_accumulator_load(dp_acc, wait_n=1), of_query(delta_smem)

                dp, delta = pl.run_scoped(weight_gradient, acc)
                add_product(dk_acc, (p * (dp - spread(delta))).astype(q.dtype), q_smem.at[slot], left)
                plgpu.wgmma_wait(1)
                # lse, delta and ids are read before the copy engine may write there again.
                plgpu.commit_smem()
                plgpu.barrier_arrive(d_out_free.at[slot])

            def walk(dk_acc, dv_acc):
                pl.loop(0, masked)(lambda t: step(t, dk_acc, dv_acc, causal=True))
                pl.loop(masked, steps)(lambda t: step(t, dk_acc, dv_acc, causal=False))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_free.at[lax.rem(steps + stages - 1, stages)])
                return dk_acc[...] * H**-0.5, dv_acc[...]

            dk, dv = pl.run_scoped(walk, *[Accumulator((ROWS, H), jnp.float32)] * 2)
            store(dk, dv)

        def store(dk, dv):
            kv_head, item, is_own, listed = work()[:4]
            inside = pl.ds(warpgroup * ROWS, ROWS)

            @pl.when(is_own)
            def _():
                mine = pl.ds(item * S + warpgroup * ROWS, ROWS)
                dk_new_ref.at[mine, kv_head][...] = dk
                dv_new_ref.at[mine, kv_head][...] = dv

            @pl.when(~is_own)
            def _():
                at = (layer_ref[0] * P + page_ref[listed]) * M + kv_head
                for pool, (ref, gradient) in enumerate(((dk_ref, dk), (dv_ref, dv))):
                    before = plgpu.load(ref.at[at, inside], layout=plgpu.Layout.WGMMA, optimized=False)
                    total = before.astype(jnp.float32) + gradient
                    if words is not None and ref.dtype == jnp.bfloat16:
                        element = (warpgroup * ROWS + position(total, 0)) * H + position(total, 1)
                        total = stochastic_round(total, random_bits(words_ref[pool], at, element))
                    ref.at[at, inside][...] = total.astype(ref.dtype)

        # Each role asks for its work itself: shared, the answers would hold registers that the loop needs.
        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            mine = work()
            pl.when(mine[-1] > 0)(lambda: gradients(*mine))

        @pl.when(warpgroup == warpgroups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")
            kv_head, item, is_own, listed, steps = work()  # no steps: the loops below are empty
            buffers = [q_smem, lse_smem, d_out_smem, delta_smem]
            ready = [q_ready, q_ready, d_out_ready, d_out_ready]
            free = [q_free, None, d_out_free, None]
            first = first_ref[listed]

            def of_queries(t):
                nth = lax.select(is_own, 0, lax.div(t, per_row))
                inside, g = divide(t - nth * per_row, G)
                base = lax.select(is_own, item * S, row_ref[first + nth] * Q)
                queries, head = pl.ds(base + inside * ROWS, ROWS), kv_head * G + g
                ids = [q_ids_ref.at[queries]] if segmented else []
                of_head = lse_ref.at[head, queries], d_out_ref.at[queries, head], delta_ref.at[head, queries]
                return [q_ref.at[queries, head], *of_head, *ids]

            if segmented:
                buffers, ready, free = [*buffers, ids_smem], [*ready, q_ready], [*free, None]
            move(0, steps, of_queries, buffers, ready, free)
            drain(steps, [q_free, d_out_free])

    gradient = jax.ShapeDtypeStruct(k_new.shape, jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(gradient, gradient),
        scratch_types={
            "k_smem": smem_tile((warpgroups, ROWS, H), q.dtype),
            "v_smem": smem_tile((warpgroups, ROWS, H), q.dtype),
            "q_smem": smem_tile((stages, ROWS, H), q.dtype),
            "d_out_smem": smem_tile((stages, ROWS, H), q.dtype),
            "places_smem": plgpu.SMEM((warpgroups, ROWS), jnp.int32),
            "lse_smem": plgpu.SMEM((stages, ROWS), jnp.float32),
            "delta_smem": plgpu.SMEM((stages, ROWS), jnp.float32),
            **({"ids_smem": plgpu.SMEM((stages, ROWS), jnp.int32)} if segmented else {}),
            **({"k_ids_smem": plgpu.SMEM((warpgroups, ROWS), jnp.int32)} if segmented else {}),
            **({"spare": smem_tile((warpgroups, ROWS, ROWS), q.dtype)} if interpret else {}),
            "barriers": (
                plgpu.Barrier(num_barriers=warpgroups, num_arrivals=4 if segmented else 3),
                plgpu.Barrier(num_barriers=stages, num_arrivals=3 if segmented else 2),
                plgpu.Barrier(num_barriers=stages, num_arrivals=2),
                plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups),
                plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups),
            ),
        },
        grid=(M * (own + U),),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention_dkv",
        interpret=interpret,
    )(
        *(q, d_out, lse2, delta, k_new, v_new, k_pool, v_pool, layer),
        *(
            iota(max(ROWS, M * (own + U))),
            pages,
            *lists,
            *segments,
            *([] if words is None else [words]),
            dk_pool,
            dv_pool,
        ),
    )


def _pages_to_rows(table, P: int):
    """The table inverted: distinct pages, and of each the first place and the number of its rows in the list of rows.

    Pages rise and so do the rows of a page, which fixes the order of every sum. -1 and 0 rows where there is no page.
    """
    R, K = table.shape
    if R == 1:
        count = (table[0] >= 0).astype(jnp.int32)
        return table[0], jnp.zeros_like(count), count, jnp.zeros(1, jnp.int32)
    U = min(R * K, P)
    ids = table.reshape(-1)
    order = jnp.argsort(jnp.where(ids < 0, P, ids), stable=True).astype(jnp.int32)
    ids = ids[order]
    is_first = (ids >= 0) & jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    nth = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    put = lambda start, where, what: jnp.full(U, start, jnp.int32).at[jnp.where(where, nth, U)].add(what, mode="drop")
    count = put(0, ids >= 0, 1)
    return put(-1, is_first, ids + 1), put(0, is_first, iota(R * K)), count, order // K
