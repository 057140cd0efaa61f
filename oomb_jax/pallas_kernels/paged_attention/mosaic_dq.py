"""Backward kernel that owns queries, for Hopper GPUs; see `mosaic_vjp`. It walks over keys as the forward one does."""

import functools
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
    position,
    smem_tile,
)
from oomb_jax.pallas_kernels.paged_attention.config import tiles
from oomb_jax.pallas_kernels.paged_attention.mosaic import key_scratch, move_keys, place_of_program


def query_gradient(pool_shape, q, d_out, lse2, delta, *keys, rows, interpret):
    """dq; keys: those of `key_arguments`; rows: R."""
    _, _, M, S, H = pool_shape
    C, N, _ = q.shape
    tile = tiles(queries=C // rows, H=H, S=S)
    warpgroups, stages = tile.warpgroups, tile.dq_stages
    block = warpgroups * ROWS
    segmented = len(keys) > 7

    def kernel(
        *refs, q_smem, d_out_smem, k_smem, v_smem, q_ready, key_barriers, ids_smem: Any = None, spare: Any = None
    ):
        q_ref, d_out_ref, lse_ref, delta_ref, *key_refs, pages_ref, dq_ref = refs
        k_ready, v_ready, k_free, v_free = key_barriers
        place = place_of_program(C=C, N=N, M=M, R=rows, S=S, block=block, pages_ref=pages_ref)
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
