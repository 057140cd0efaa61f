"""Forward kernel for Hopper GPUs, in Pallas Mosaic.

A program owns 64 queries of one head per computing warpgroup and walks over its keys: the pages of its row of the
table, then the chunk's own keys up to the diagonal. One more warpgroup moves data: it reads the page ids and asks the
copy engine (TMA) for each page, which is one key tile. A warpgroup asks for the scores of a tile and the values of the
tile before at once, and takes the exponentials of the one while the other is computed (FlashAttention-3, arXiv
2407.08608). With two warpgroups a program, and no order forced on them, the matrix unit hardly rests.

Pools enter whole, seen as [L * P * M, S, H]: a slice of one layer would be copied before the call.
"""

import functools
from typing import Any, NamedTuple

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
from oomb_jax.pallas_kernels.paged_attention.page_lists import by_head


def forward(q, k_new, v_new, k_pool, v_pool, layer, table, *, q_segments, pool_segments, interpret=None):
    """See `api.paged_attention`; inputs for which `config.unsupported` gives a reason do not compile.

    interpret: parameters of Pallas's interpreter, to run on a CPU.
    """
    _, _, M, S, _ = k_pool.shape
    queries = q.shape[0]
    q, k_new, v_new, q_segments = fill_page(S, q, k_new, v_new, q_segments)
    C, N, H = q.shape
    R = table.shape[0]
    tile = tiles(queries=C // R, H=H, S=S)
    warpgroups, stages = tile.warpgroups, tile.stages
    block = warpgroups * ROWS
    scale = H**-0.5 * LOG2E  # the softmax runs in powers of two
    segmented = q_segments is not None

    def kernel(*refs, q_smem, k_smem, v_smem, q_ready, key_barriers, ids_smem: Any = None, spare: Any = None):
        q_ref, *key_refs, pages_ref, out_ref, lse_ref = refs
        k_ready, v_ready, k_free, v_free = key_barriers
        place = place_of_program(C=C, N=N, M=M, R=R, S=S, block=block, pages_ref=pages_ref)
        head, start, pages, steps = place.head, place.start, place.pages, place.steps
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(240, action="increase")
            q_tile = q_smem.at[warpgroup]
            first = start + warpgroup * ROWS
            mine = pl.ds(first, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[mine, head], q_tile, q_ready.at[warpgroup])
            q_ids: Any = plgpu.load(key_refs[-1].at[mine], layout=BY_ROW, optimized=False) if segmented else None
            plgpu.barrier_wait(q_ready.at[warpgroup])

            def weigh(t, s, maximum, total, *, causal):
                """Weights of tile t, the maximum and total with it, and the factor that earlier sums shrink by."""
                if segmented:
                    k_ids = plgpu.load(ids_smem.at[lax.rem(t, stages)], layout=BY_COLUMN)
                    plgpu.commit_smem()  # read before the copy engine may write there again
                    same = lax.broadcast_in_dim(q_ids, s.shape, [0]) == lax.broadcast_in_dim(k_ids, s.shape, [1])
                    s = jnp.where(same, s, -jnp.inf)
                plgpu.barrier_arrive(k_free.at[lax.rem(t, stages)])
                if causal:
                    s = jnp.where(first + position(s, 0) >= (t - pages) * S + position(s, 1), s, -jnp.inf)
                larger = jnp.maximum(maximum, s.max(axis=1) * scale)
                # Without segments the first tile of a row has a key that the row sees, so `larger` is finite.
                base = jnp.where(larger == -jnp.inf, 0.0, larger) if segmented else larger
                p = jnp.exp2(s * scale - lax.broadcast_in_dim(base, s.shape, [0]))
                decay = jnp.exp2(maximum - base)
                return p, larger, total * decay + p.sum(axis=1), decay

            def begin():
                plgpu.barrier_wait(k_ready.at[0])

                def multiply(s_ref):
                    plgpu.wgmma(s_ref, q_tile, k_smem.at[0].T)
                    return s_ref[...]

                s = pl.run_scoped(multiply, Accumulator((ROWS, S), jnp.float32))
                maximum = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), BY_ROW)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
                acc = plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), plgpu.Layout.WGMMA)
                # The mask of the diagonal lets all of a page pass.
                p, maximum, total, _ = weigh(0, s, maximum, total, causal=True)
                return acc, p.astype(q.dtype), maximum, total

            def advance(t, carry, *, causal):
                """Scores of tile t and values of tile t - 1, asked for at once: weighs the one during the other."""
                acc, p, maximum, total = carry
                slot, before = lax.rem(t, stages), lax.rem(t - 1, stages)
                plgpu.barrier_wait(k_ready.at[slot])
                plgpu.barrier_wait(v_ready.at[before])

                def products(acc_ref, *others):
                    def multiply(s_ref):
                        plgpu.wgmma(s_ref, q_tile, k_smem.at[slot].T)
                        add_product(acc_ref, p, v_smem.at[before], left)
                        return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)

                    s = pl.run_scoped(multiply, Accumulator((ROWS, S), jnp.float32))
                    results = weigh(t, s, maximum, total, causal=causal)
                    for ref, result in zip(others, results, strict=False):
                        ref[...] = result
                    return (acc_ref[...], results) if interpret else None

                def in_place(refs):
                    products(*refs)

                if interpret:  # it has no run_state, so it adds outside
                    more, (p, maximum, total, decay) = pl.run_scoped(products, Accumulator(acc.shape, acc.dtype))
                    acc += more
                else:
                    zeros = plgpu.layout_cast(jnp.zeros((ROWS, S), jnp.float32), plgpu.Layout.WGMMA)
                    state = Accumulator.init(acc), zeros, maximum, total, maximum
                    acc, p, maximum, total, decay = pl.run_state(in_place)(state)
                plgpu.barrier_arrive(v_free.at[before])
                acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
                # Narrowed only now: the product before reads the old weights to its end, and a compiler that finds
                # their registers written to earlier makes every product wait for the last.
                return lax.optimization_barrier((acc, p.astype(q.dtype), maximum, total))

            def finish(acc, p):
                last = lax.rem(steps - 1, stages)
                plgpu.barrier_wait(v_ready.at[last])

                def accumulate(acc_ref):
                    add_product(acc_ref, p, v_smem.at[last], left)
                    return acc_ref[...] if interpret else None

                if interpret:
                    acc += pl.run_scoped(accumulate, Accumulator(acc.shape, acc.dtype))
                else:
                    acc = pl.run_state(accumulate)(Accumulator.init(acc))
                plgpu.barrier_arrive(v_free.at[last])
                return acc

            left = None if spare is None else spare.at[warpgroup]
            carry = lax.fori_loop(1, place.unmasked, functools.partial(advance, causal=False), begin())
            carry = lax.fori_loop(lax.max(1, place.unmasked), steps, functools.partial(advance, causal=True), carry)
            acc, p, maximum, total = carry
            acc = finish(acc, p)
            # A query sees its own key, so total > 0.
            lse_ref.at[head, mine][...] = (maximum + jnp.log2(total)) * (1 / LOG2E)
            q_tile[...] = (acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_ref.at[mine, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _move():
            plgpu.set_max_registers(24, action="decrease")
            move_keys(place, k_pool.shape, key_refs, (k_smem, v_smem, ids_smem), key_barriers)

    out, lse = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((N, C), jnp.float32)),
        scratch_types={
            "q_smem": smem_tile((warpgroups, ROWS, H), q.dtype),
            "q_ready": plgpu.Barrier(num_barriers=warpgroups),
            **key_scratch(stages, S, H, q.dtype, warpgroups=warpgroups, segmented=segmented),
            **({"spare": smem_tile((warpgroups, ROWS, S), q.dtype)} if interpret else {}),
        },
        grid=(N * C // block,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_attention",
        interpret=interpret,
    )(q, *key_arguments(k_new, v_new, k_pool, v_pool, layer, table, q_segments, pool_segments))
    return out[:queries], lse[:, :queries]


def fill_page(S: int, *arrays: Any, axis: int = 0) -> tuple[Any, ...]:
    """The arrays with zeros after the chunk's tokens, up to whole pages. No query of the chunk sees what follows it."""

    def fill(x):
        if x is None or x.shape[axis] % S == 0:
            return x
        return jnp.pad(x, [(0, -n % S if i == axis else 0) for i, n in enumerate(x.shape)])

    return tuple(map(fill, arrays))


class Place(NamedTuple):
    """The queries that a program owns, and the key tiles that they see: pages, then the chunk's own."""

    head: jax.Array
    kv_head: jax.Array
    start: jax.Array
    """The first query."""
    list: jax.Array
    """The list of pages."""
    pages: jax.Array
    """Pages in the list."""
    unmasked: jax.Array
    """Tiles that every query sees whole."""
    steps: jax.Array
    """All tiles."""


def place_of_program(*, C: int, N: int, M: int, R: int, S: int, block: int, pages_ref) -> Place:
    """Neighbours share keys: the heads of a group, then the query tiles, the ones with most own keys first."""
    others, g = divide(lax.axis_index("program"), N // M)
    kv_head, i = divide(others, C // block)
    start = (C // block - 1 - i) * block
    row = lax.div(start, C // R)
    of_row = row if pages_ref.shape[0] == R else row * M + kv_head
    pages = pages_ref[of_row]
    steps = pages + lax.div(start + block + S - 1, S)
    return Place(kv_head * (N // M) + g, kv_head, start, of_row, pages, pages + lax.div(start, S), steps)


def key_arguments(k_new, v_new, k_pool, v_pool, layer, table, q_segments, pool_segments):
    """What `move_keys` reads, and after it the number of pages of each list."""
    lists = by_head(table)
    segments = () if q_segments is None else (pool_segments, q_segments)
    pages = jnp.sum(lists >= 0, axis=2, dtype=jnp.int32).reshape(-1)
    lists = lists.reshape(-1, lists.shape[2])
    return k_new, v_new, flat(k_pool), flat(v_pool), layer.reshape(1), lists, *segments, pages


def key_scratch(stages: int, S: int, H: int, dtype, *, warpgroups: int, segmented: bool):
    """Shared memory and barriers for keys and values on their way."""
    barrier = functools.partial(plgpu.Barrier, num_barriers=stages)
    return {
        "k_smem": smem_tile((stages, S, H), dtype),
        "v_smem": smem_tile((stages, S, H), dtype),
        **({"ids_smem": plgpu.SMEM((stages, S), jnp.int32)} if segmented else {}),
        "key_barriers": (
            barrier(num_arrivals=2 if segmented else 1),  # keys ready, document ids with them
            barrier(),  # values ready
            barrier(num_arrivals=warpgroups),  # keys free
            barrier(num_arrivals=warpgroups),  # values free
        ),
    }


def move_keys(place: Place, pool_shape, key_refs, buffers, barriers):
    """Brings the key tiles of `place` to shared memory, page ids read on the way."""
    _, P, M, S, _ = pool_shape
    k_new_ref, v_new_ref, k_ref, v_ref, layer_ref, lists_ref, *ids_refs = key_refs
    k_smem, v_smem, ids_smem = buffers
    k_ready, v_ready, k_free, v_free = barriers
    layer_start = layer_ref[0] * P
    buffers, ready, free = [k_smem, v_smem], [k_ready, v_ready], [k_free, v_free]
    if ids_refs:
        # Before the values: they come with the keys.
        buffers, ready, free = [k_smem, ids_smem, v_smem], [k_ready, k_ready, v_ready], [k_free, None, v_free]

    def of_page(t):
        page = lists_ref[place.list, t]
        at = (layer_start + page) * M + place.kv_head
        return [k_ref.at[at], *(ids_ref.at[page] for ids_ref in ids_refs[:1]), v_ref.at[at]]

    def of_chunk(t):
        at = pl.ds((t - place.pages) * S, S)
        ids = (ids_ref.at[at] for ids_ref in ids_refs[1:])
        return [k_new_ref.at[at, place.kv_head], *ids, v_new_ref.at[at, place.kv_head]]

    move(0, place.pages, of_page, buffers, ready, free)
    move(place.pages, place.steps, of_chunk, buffers, ready, free)
    drain(place.steps, [k_free, v_free])


def flat(pool):
    """[L, P, M, S, H] -> [L * P * M, S, H], no copy."""
    return pool.reshape(-1, *pool.shape[3:])
