"""Backward kernel that owns keys, for Hopper GPUs; see `mosaic_vjp`.

A program owns a page and a key/value head, or as many of the chunk's own keys, and walks over the queries that see
them: 64 queries of a head at a step. Its steps are known before, so the longest programs go first and the shortest
fill the end, where pages that nobody named cost least: 32 rows that choose the same 64 of 8,192 pages make 384 programs
with work and 7,936 without.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels.device import ROWS
from oomb_jax.pallas_kernels.mosaic_tools import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    Accumulator,
    add_product,
    divide,
    drain,
    move,
    position,
    smem_tile,
)
from oomb_jax.pallas_kernels.paged_attention.config import tiles
from oomb_jax.pallas_kernels.paged_attention.mosaic import flat
from oomb_jax.pallas_kernels.paged_attention.page_lists import ByPage
from oomb_jax.pallas_kernels.rounding import random_bits, stochastic_round
from oomb_jax.shapes import iota


def key_gradients(
    q,
    d_out,
    lse2,
    delta,
    k_new,
    v_new,
    k_pool,
    v_pool,
    layer,
    by_page: ByPage,
    dk_pool,
    dv_pool,
    *,
    R: int,
    q_segments,
    pool_segments,
    words,
    interpret,
):
    """dk_new and dv_new; adds to dk_pool and dv_pool, references to flat pools. Where these are None, they are results
    too: float32, flat, with nothing but this chunk's share.

    by_page: the table seen from the pages. R: its rows. words: a random uint32 for each of the pools, where bfloat16
    is rounded to stochastically.
    """
    inverted, order = by_page
    _, P, M, S, H = k_pool.shape
    C, N, _ = q.shape
    G, (m, U) = N // M, inverted.pages.shape
    Q = C // R
    warpgroups, stages = S // ROWS, tiles(queries=Q, H=H, S=S).dkv_stages
    per_row = Q // ROWS * G
    own = C // S
    own_steps = lambda page: (C // ROWS - page * (S // ROWS)) * G
    segmented, fresh = q_segments is not None, dk_pool is None

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
        places_ref, order_ref, page_ref, first_ref, number_ref, row_ref, *refs = refs
        if fresh:
            *refs, dk_new_ref, dv_new_ref, dk_ref, dv_ref = refs
        else:
            *refs, dk_ref, dv_ref, dk_new_ref, dv_new_ref = refs
        words_ref: Any = None if words is None else refs.pop()
        ids: Any = refs or (None, None)
        page_ids_ref, q_ids_ref = ids
        kv_ready, q_ready, d_out_ready, q_free, d_out_free = barriers
        warpgroup = lax.axis_index("warpgroup")

        def work():
            """Of this program: the head, the page of the chunk or else of the list, its number of steps."""
            # The number of the program comes from memory, so that it can be asked for anew after the loops: kept in
            # registers over them, the answers would spill.
            kv_head, item = divide(order_ref[lax.axis_index("program")], U + own)
            is_own, own_page, listed = item >= U, item - U, lax.min(item, U - 1)
            if m > 1:
                listed += kv_head * U
            steps = lax.select(is_own, own_steps(own_page), number_ref[listed] * per_row)
            return kv_head, own_page, is_own, listed, steps

        def gradients(kv_head, own_page, is_own, listed, steps):
            masked = lax.select(is_own, jnp.int32(S // ROWS * G), jnp.int32(0))
            k_tile, v_tile = k_smem.at[warpgroup], v_smem.at[warpgroup]
            inside = pl.ds(warpgroup * ROWS, ROWS)

            def load_keys(*sources):
                buffers = (k_smem, v_smem, places_smem, *([k_ids_smem] if segmented else []))
                for source, buffer in zip(sources, buffers, strict=True):
                    plgpu.copy_gmem_to_smem(source, buffer.at[warpgroup], kv_ready.at[warpgroup])

            @pl.when(is_own)
            def _():
                mine = pl.ds(own_page * S + warpgroup * ROWS, ROWS)
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
            kv_head, own_page, is_own, listed = work()[:4]
            inside = pl.ds(warpgroup * ROWS, ROWS)

            @pl.when(is_own)
            def _():
                mine = pl.ds(own_page * S + warpgroup * ROWS, ROWS)
                dk_new_ref.at[mine, kv_head][...] = dk
                dv_new_ref.at[mine, kv_head][...] = dv

            @pl.when(~is_own)
            def _():
                head_of_page = page_ref[listed] * M + kv_head
                at = layer_ref[0] * P * M + head_of_page
                for pool, (ref, gradient) in enumerate(((dk_ref, dk), (dv_ref, dv))):
                    total = gradient
                    if not fresh:
                        before = plgpu.load(ref.at[at, inside], layout=plgpu.Layout.WGMMA, optimized=False)
                        total = before.astype(jnp.float32) + gradient
                    if words is not None and ref.dtype == jnp.bfloat16:
                        element = (warpgroup * ROWS + position(total, 0)) * H + position(total, 1)
                        total = stochastic_round(total, random_bits(words_ref[pool], head_of_page, element))
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
            kv_head, own_page, is_own, listed, steps = work()  # no steps: the loops below are empty
            buffers = [q_smem, lse_smem, d_out_smem, delta_smem]
            ready = [q_ready, q_ready, d_out_ready, d_out_ready]
            free = [q_free, None, d_out_free, None]
            first = first_ref[listed]

            def of_queries(t):
                nth = lax.select(is_own, 0, lax.div(t, per_row))
                inside, g = divide(t - nth * per_row, G)
                base = lax.select(is_own, own_page * S, row_ref[first + nth] * Q)
                queries, head = pl.ds(base + inside * ROWS, ROWS), kv_head * G + g
                ids = [q_ids_ref.at[queries]] if segmented else []
                of_head = lse_ref.at[head, queries], d_out_ref.at[queries, head], delta_ref.at[head, queries]
                return [q_ref.at[queries, head], *of_head, *ids]

            if segmented:
                buffers, ready, free = [*buffers, ids_smem], [*ready, q_ready], [*free, None]
            move(0, steps, of_queries, buffers, ready, free)
            drain(steps, [q_free, d_out_free])

    gradient, pages = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_new, flat(k_pool)))
    return plgpu.kernel(
        kernel,
        out_type=(gradient, gradient) + (pages, pages) * fresh,
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
        *(q, d_out, lse2, delta, k_new, v_new, flat(k_pool), flat(v_pool), layer.reshape(1)),
        *(iota(ROWS), order),
        *(inverted.pages.reshape(-1), inverted.first.reshape(-1), inverted.number.reshape(-1), inverted.rows),
        *((pool_segments, q_segments) if segmented else ()),
        *([] if words is None else [words]),
        *(() if fresh else (dk_pool, dv_pool)),
    )
