"""Product for Hopper GPUs, in Pallas Mosaic.

As many programs as are asked for stay for the whole call and share the tiles of the result. In each, one warpgroup
moves tiles of the inputs to shared memory, all the time; two multiply, each half of a tile's rows, and send their sums
off in pieces while the first inputs of the next tile come. A product waits for the one before the last, so that the
matrix unit always has another. Sums run along the axis in order, whatever the tiles are.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels.device import ROWS
from oomb_jax.pallas_kernels.matmul.config import DEPTH, tiles
from oomb_jax.pallas_kernels.mosaic_tools import Accumulator, drain, move, smem_tile

WARPGROUPS = 2
"""That compute."""

PIECE = 64
"""Columns of a result that are sent off at once."""

BAND = 8
"""Tiles of rows that programs go through before the next columns, so that they share inputs in the L2 cache."""


# A function that JAX knows: products of the same shapes, of which a step has many, are lowered once.
@functools.partial(jax.jit, static_argnames=("transpose_a", "transpose_b", "programs", "interpret"))
def product(a, b, *, transpose_a=False, transpose_b=False, programs: int, interpret=None):
    """a @ b, with float32 sums, rounded once.

    Args:
      a: [M, K], or [K, M] with transpose_a, in bfloat16 or float16.
      b: [K, N], or [N, K] with transpose_b, in the dtype of a.
      transpose_a, transpose_b: whether the operand is multiplied as its transpose, which moves nothing.
      programs: that run, each on a multiprocessor of its own.
      interpret: parameters of Pallas's interpreter, to run on a CPU.
    """
    K, M = a.shape if transpose_a else a.shape[::-1]
    N = b.shape[0] if transpose_b else b.shape[1]
    tile = tiles(M, N, programs)
    stages, rows = tile.stages, tile.rows // WARPGROUPS
    grid, steps = (pl.cdiv(M, tile.rows), pl.cdiv(N, tile.width)), pl.cdiv(K, DEPTH)
    programs = min(programs, grid[0] * grid[1])
    firsts = [sum(tile.columns[:i]) for i in range(len(tile.columns))]

    def kernel(a_ref, b_ref, out_ref, *, a_smem, b_smem, out_smem, ready, free):
        warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        count = lax.div(grid[0] * grid[1] - program + programs - 1, programs)

        def corner(i):
            """First row and column of the program's tile i."""
            m, n = plgpu.planar_snake(i * programs + program, grid, 0, BAND)
            return m * tile.rows, n * tile.width

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(warpgroup * rows, rows)

            def multiply(i, *accumulators):
                """Sums of the program's tile i."""

                def step(k, _):
                    t = i * steps + k
                    slot = lax.rem(t, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    left = a_smem.at[slot, :, mine].T if transpose_a else a_smem.at[slot, mine]
                    for acc_ref, first, width in zip(accumulators, firsts, tile.columns, strict=True):
                        columns = pl.ds(first, width)
                        right = b_smem.at[slot, columns].T if transpose_b else b_smem.at[slot, :, columns]
                        plgpu.wgmma(acc_ref, left, right)
                    plgpu.wgmma_wait(len(accumulators))
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(t - 1, stages)]))

                lax.fori_loop(0, steps, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem((i + 1) * steps - 1, stages)])
                return tuple(acc_ref[...] for acc_ref in accumulators)

            def send(i, sums):
                m, n = corner(i)
                pieces = [
                    (r, first + c, acc[r : r + ROWS, c : c + PIECE])
                    for r in range(0, rows, ROWS)
                    for acc, first, width in zip(sums, firsts, tile.columns, strict=True)
                    for c in range(0, width, PIECE)
                ]
                for j, (r, c, piece) in enumerate(pieces):
                    # Buffers take turns from tile to tile too: one copy of a warpgroup may still read the other.
                    buffer = out_smem.at[warpgroup, lax.rem(i * len(pieces) + j, 2)]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    buffer[...] = piece.astype(out_ref.dtype)
                    plgpu.commit_smem()
                    target = out_ref.at[pl.ds(m + warpgroup * rows + r, ROWS), pl.ds(n + c, PIECE)]
                    plgpu.copy_smem_to_gmem(buffer, target)

            @pl.loop(0, count)
            def _tile(i):
                registers = (Accumulator((rows, width), jnp.float32) for width in tile.columns)
                send(i, pl.run_scoped(lambda *refs: multiply(i, *refs), *registers))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _move():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _tile(i):
                m, n = corner(i)
                of_a, of_b = pl.ds(m, tile.rows), pl.ds(n, tile.width)

                def source(t):
                    along = pl.ds((t - i * steps) * DEPTH, DEPTH)
                    left = a_ref.at[along, of_a] if transpose_a else a_ref.at[of_a, along]
                    right = b_ref.at[of_b, along] if transpose_b else b_ref.at[along, of_b]
                    return left, right

                move(i * steps, (i + 1) * steps, source, [a_smem, b_smem], [ready, ready], [free, None])

            drain(count * steps, [free])

    left, right = (tile.rows, DEPTH), (DEPTH, tile.width)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), a.dtype),
        scratch_types={
            "a_smem": smem_tile((stages, *(left[::-1] if transpose_a else left)), a.dtype),
            "b_smem": smem_tile((stages, *(right[::-1] if transpose_b else right)), b.dtype),
            "out_smem": smem_tile((WARPGROUPS, 2, ROWS, PIECE), a.dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        },
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="matmul",
        interpret=interpret,
    )(a, b)
