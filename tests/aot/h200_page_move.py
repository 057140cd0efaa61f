"""Compiles a step like the engine's, with movers on a stream of their own, for an H200; no GPU is needed.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m tests.aot.h200_page_move "dict(host=True)"

Prints the bytes of temporaries, what else touches the pools in host memory, and how many matrix products run while each
mover does.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp
from jax import lax

from oomb_jax.pallas_kernels.page_move import add_pages, fetch_pages, on_copy_stream, store_pages
from oomb_jax.shapes import iota
from tests.aot.h200 import GPU, array, compiled


def step(pools, scales, weights, h, tables, key, *, chunks, own):
    """Two passes over chunks, each over layers. Layer l of a chunk attends to the pages of its table, which are on
    their way while it multiplies matrices; then it writes its own pages, or adds gradients to those of the table."""
    k_pool, dk_pool = pools
    L, U = tables.shape[1:]
    M, S, H = k_pool.shape[2:]
    pages_of = lambda x, n: x[:, : H * M].reshape(n, S, M, H).swapaxes(1, 2)

    def layer(h, k_pool, l, pages):
        wanted = on_copy_stream(fetch_pages)(k_pool, l, pages, scales=scales, dtype=jnp.bfloat16)
        h = jnp.tanh(h @ weights[l] @ weights[l])
        # The pages are there when the matmuls are done, and not before: so the copy runs under them.
        h, wanted = lax.optimization_barrier((h, wanted))
        return h, h + jnp.sum(wanted, dtype=jnp.float32).astype(h.dtype)

    def fill(carry, c):
        def body(carry, l):
            h, k_pool = carry
            made, h = layer(h, k_pool, l, tables[c, l])
            pages = pages_of(made, own).astype(k_pool.dtype)
            k_pool = on_copy_stream(store_pages)(k_pool, l, c * own + iota(own), pages)
            h = jnp.tanh(h @ weights[l])
            return (h, k_pool), None

        return lax.scan(body, carry, iota(L))[0], None

    def reverse(carry, c):
        def body(carry, l):
            h, k_pool, dk_pool = carry
            made, h = layer(h, k_pool, l, tables[c, l])
            values = jnp.repeat(pages_of(made, own), U // own, axis=0).astype(jnp.float32)
            own_gradient = on_copy_stream(fetch_pages)(dk_pool, l, c * own + iota(own))
            # Read before anything is added: else XLA keeps a copy of the pool for the reader.
            own_gradient, values = lax.optimization_barrier((own_gradient, values))
            fresh = tables[c, l] >= c * own
            dk_pool = on_copy_stream(add_pages)(dk_pool, l, tables[c, l], values, fresh, rounding_key=key)
            h = jnp.tanh(h @ weights[l]) + jnp.sum(own_gradient, dtype=jnp.float32).astype(h.dtype)
            return (h, k_pool, dk_pool), None

        return lax.scan(body, carry, iota(L), reverse=True)[0], None

    (h, k_pool), _ = lax.scan(fill, (h, k_pool), iota(chunks))
    (h, k_pool, dk_pool), _ = lax.scan(reverse, (h, k_pool, dk_pool), iota(chunks), reverse=True)
    return h, (k_pool, dk_pool)


def main(*, host=True, float8=False, gradient_dtype="bfloat16", L=3, P=512, M=4, S=128, H=128, U=64, chunks=16, D=2048):
    """Compiles it, the pools donated."""
    memory = "pinned_host" if host else None
    own = P // chunks
    pools = tuple(
        array(L, P, M, S, H, dtype=dtype, memory=memory)
        for dtype in ("float8_e4m3fn" if float8 else "bfloat16", gradient_dtype)
    )
    arguments = (
        pools,
        array(L, P, M, dtype="float32") if float8 else None,
        array(L, D, D),
        array(own * S, D),
        array(chunks, L, U, dtype="int32"),
        array(dtype=jax.random.key(0).dtype),
    )
    executable = compiled(
        functools.partial(step, chunks=chunks, own=own),
        *arguments,
        donate_argnums=0,
        out_shardings=(GPU.sharding(), (GPU.sharding(memory), GPU.sharding(memory))),
    )
    statistics, program = executable.memory_analysis(), executable.as_text()
    print("temporaries on the host:", statistics.host_temp_size_in_bytes)
    print("temporaries:", statistics.temp_size_in_bytes)
    print("not updated in place:", statistics.host_argument_size_in_bytes - statistics.host_alias_size_in_bytes)
    print("on the host:", [line.strip()[:200] for line in program.splitlines() if touches_host(line)])
    print("hidden:", hidden(program))


def touches_host(line: str) -> bool:
    """Whether an instruction makes an array in host memory, and is neither a mover nor only passes it on."""
    made = re.search(r"= \S*:S\(5\)\S* ([\w-]+)\(", line)
    passed_on = {"parameter", "get-tuple-element", "bitcast", "call-start", "call-done", "optimization-barrier"}
    if made is None or made[1] in passed_on:
        return False
    return not (made[1] == "custom-call" and 'custom_call_target="triton_kernel_call' in line)


def hidden(program: str) -> list[int]:
    """How many matrix products lie between the begin and the end of each call on the copy stream."""
    products, begun, between = 0, {}, []
    for line in program.splitlines():
        name, _, call = line.strip().removeprefix("ROOT ").partition(" = ")
        if " call-start(" in call:
            begun[name] = products
        elif done := re.search(r" call-done\((%[\w.-]+)\)", call):
            between.append(products - begun[done[1]])
        elif re.search(r"^%gemm_fusion\S* = .* fusion\(|__cublas\$", line.strip()):
            products += 1
    return between


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
