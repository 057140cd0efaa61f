"""Parts that Mosaic kernels share: layouts, tiles in shared memory and their way there, products."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
Accumulator: Any = plgpu.WGMMAAccumulatorRef
"""Registers that matrix products add to."""
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one value per row of a score tile."""
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""Layout of one value per column."""


def smem_tile(shape, dtype):
    """Shared memory for 16-bit matrices in the order that copy engine and matrix instructions agree on."""
    transforms: Any = plgpu.TilingTransform, plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(transforms[0]((8, 64)), transforms[1](128)))


def move(lower, upper, source, buffers, ready, free):
    """Copies tiles lower .. upper - 1 to shared memory, each into the slot of its number once that is free.

    source(t): where tile t lies in global memory, a reference per buffer. free: None where an earlier buffer's says it.
    """
    stages = buffers[0].shape[0]

    @pl.loop(lower, upper)
    def _(t):
        slot = lax.rem(t, stages)
        for source_ref, buffer, ready_barrier, free_barrier in zip(source(t), buffers, ready, free, strict=True):
            if free_barrier is not None:
                pl.when(t >= stages)(lambda barrier=free_barrier: plgpu.barrier_wait(barrier.at[slot]))
            plgpu.copy_gmem_to_smem(source_ref, buffer.at[slot], ready_barrier.at[slot])


def drain(steps, free):
    """Waits for the arrivals that no further tile waits for, so that a barrier ends as it began."""
    stages = free[0].shape[0]

    @pl.loop(lax.max(0, steps - stages), steps)
    def _(t):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(t, stages)])


def add_product(acc_ref, a, b_ref, spare):
    """acc_ref += a @ b_ref with `a` in registers. The interpreter takes it from shared memory only: from `spare`."""
    if spare is not None:
        spare[...] = a
        a = spare
    plgpu.wgmma(acc_ref, a, b_ref)


def divide(a, b: int):
    """Quotient and remainder of a >= 0."""
    return lax.div(a, b), lax.rem(a, b)


def position(x, axis: int):
    """Of each element of a score tile, its row or column."""
    return plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=plgpu.Layout.WGMMA)
