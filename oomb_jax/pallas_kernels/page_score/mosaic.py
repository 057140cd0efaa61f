"""Page scores for Hopper GPUs, in Pallas Mosaic: logits stay in registers.

A program owns the queries of one page and one key/value head, and walks twice over the candidates, a tile of
representatives at a time. The first time, the queries are rows of the tile of logits, and each row keeps its running
maximum and total (arXiv 1805.02867). The second time the product is the other way round: pages are rows, and the
weights of a row sum to the score of its page. Nothing is added across programs, so that results repeat bit for bit.

One more warpgroup moves the representatives to shared memory, as in the attention kernels.
"""

import functools

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
    divide,
    drain,
    move,
    position,
    smem_tile,
)
from oomb_jax.pallas_kernels.page_score.reference import candidates, group

STAGES = 4
"""Tiles of representatives in flight: 128 KiB at most."""


def page_scores(q, representatives, start, end, votes, *, scaled, interpret=None):
    """See `api.page_scores`; inputs for which `config.unsupported` gives a reason do not compile.

    interpret: parameters of Pallas's interpreter, to run on a CPU.
    """
    C, _, H = q.shape
    P, M, _ = representatives.shape
    R = start.shape[0]
    S = C // R  # also the pages of a tile, so that both products have the same shape
    warpgroups = S // ROWS
    scale = LOG2E * (H**-0.5 if scaled else 1.0)  # the softmax runs in powers of two

    def kernel(*refs, q_smem, pages_smem, lse_smem, q_ready, pages_ready, pages_free, lse_ready):
        q_ref, pages_ref, start_ref, end_ref, silent_ref, scores_ref = refs
        head, row = divide(lax.axis_index("program"), R)
        start, end = start_ref[row], end_ref[0]
        first = lax.div(start, S)
        steps = lax.max(0, lax.div(end + S - 1, S) - first)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            mine = pl.ds(warpgroup * ROWS, ROWS)
            silent = plgpu.load(silent_ref.at[pl.ds(row * S + warpgroup * ROWS, ROWS)], layout=BY_ROW, optimized=False)
            plgpu.barrier_wait(q_ready)

            def product(slot, a, b):
                plgpu.barrier_wait(pages_ready.at[slot])

                def multiply(acc):
                    plgpu.wgmma(acc, a, b)
                    return acc[...]

                result = pl.run_scoped(multiply, Accumulator((ROWS, S), jnp.float32))
                plgpu.barrier_arrive(pages_free.at[slot])
                return result

            def normalise(t, carry, *, masked):
                maximum, total = carry
                slot = lax.rem(t, STAGES)
                logits = product(slot, q_smem.at[mine], pages_smem.at[slot].T)
                if masked:
                    page = (first + t) * S + position(logits, 1)
                    logits = jnp.where((page >= start) & (page < end), logits, -jnp.inf)
                larger = jnp.maximum(maximum, logits.max(axis=1) * scale)
                weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(larger, logits.shape, [0]))
                return larger, total * jnp.exp2(maximum - larger) + weights.sum(axis=1)

            fill = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), BY_ROW)
            # Only the first and the last tile may hold pages that are no candidates, and each holds one that is.
            masked = functools.partial(normalise, masked=True)
            carry = lax.fori_loop(0, lax.min(1, steps), masked, (fill(-jnp.inf), fill(0.0)))
            carry = lax.fori_loop(1, steps - 1, functools.partial(normalise, masked=False), carry)
            maximum, total = lax.fori_loop(lax.max(1, steps - 1), steps, masked, carry)
            lse_smem[mine] = maximum + jnp.log2(total) + silent
            plgpu.commit_smem()
            plgpu.barrier_arrive(lse_ready)
            plgpu.barrier_wait(lse_ready)
            lse = plgpu.load(lse_smem, layout=BY_COLUMN)

            @pl.loop(steps, 2 * steps)
            def _(t):
                slot = lax.rem(t, STAGES)
                logits = product(slot, pages_smem.at[slot, mine], q_smem.T)
                weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(lse, logits.shape, [1]))
                here = pl.ds((first + t - steps) * S + warpgroup * ROWS, ROWS)
                scores_ref.at[row, head, here][...] = weights.sum(axis=1)

        @pl.when(warpgroup == warpgroups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(row * S, S), head], q_smem, q_ready)

            def tile(t):
                again = jnp.where(t < steps, 0, steps)
                return [pages_ref.at[pl.ds((first + t - again) * S, S), head]]

            move(0, 2 * steps, tile, [pages_smem], [pages_ready], [pages_free])
            drain(2 * steps, [pages_free])

    whole = -(-P // S) * S
    scores = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((R, M, whole), jnp.float32),
        scratch_types={
            "q_smem": smem_tile((S, H), q.dtype),
            "pages_smem": smem_tile((STAGES, S, H), q.dtype),
            "lse_smem": plgpu.SMEM((S,), jnp.float32),
            "q_ready": plgpu.Barrier(),
            "pages_ready": plgpu.Barrier(num_barriers=STAGES),
            "pages_free": plgpu.Barrier(num_barriers=STAGES, num_arrivals=warpgroups),
            "lse_ready": plgpu.Barrier(num_arrivals=warpgroups),
        },
        grid=(M * R,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="page_scores",
        interpret=interpret,
    )(
        group(q, M),
        jnp.pad(representatives, ((0, whole - P), (0, 0), (0, 0))),
        start,
        end.reshape(1),
        # Added to the logarithm of a row's total: its weights become 0.
        jnp.where(votes, 0, jnp.inf).astype(jnp.float32),
    )
    return jnp.where(candidates(start, end, P)[:, None], scores[:, :, :P], 0)
