"""Compiles `paged_attention_vjp` for an H200 in a loop that gives it slices of stacks and two gradient pools of zeros.

    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m tests.aot.h200_zero_pools mosaic

Prints how many calls update pools in place, and the fusions that hold one: there XLA takes equal operands for one.
"""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oomb_jax.pallas_kernels.paged_attention import paged_attention_vjp
from tests.aot.h200 import array, compiled


def main(implementation: Any) -> None:
    L, C, M, N, H, S, P = 3, 512, 2, 14, 128, 128, 28

    def loop(q, k, v, do, lse, k_pool, v_pool, table):
        def body(total, stacks):
            q, k, v, do, lse = stacks
            zeros = jnp.zeros(k_pool.shape, jnp.float32)
            arguments = q, k, v, k_pool, v_pool, zeros, zeros, jnp.int32(0), table, do, lse, do
            *_, dk, dv = paged_attention_vjp(*arguments, implementation=implementation)
            return (total[0] + dk, total[1] + dv), None

        total = jnp.zeros(k_pool.shape, jnp.float32)
        return lax.scan(body, (total, total), (q, k, v, do, lse))[0]

    query, key, pool = array(L, C, N, H), array(L, C, M, H), array(1, P, M, S, H)
    lse, table = array(L, N, C, dtype="float32"), array(1, P, dtype="int32")
    text = compiled(jax.jit(loop), query, key, key, query, lse, pool, pool, table).as_text()
    within, calls, fused = "", [], []
    for line in text.splitlines():
        if line.endswith("{"):
            within = line.split()[0]
        if re.search(r'custom_call_target="(mosaic_gpu|triton).*output_to_operand_aliasing', line):
            calls.append(line.split()[0])
            fused += [within] if re.search(rf"fusion\(.*calls={re.escape(within)}\b", text) else []
    print("in place:", len(calls))
    print("fused:", fused)


if __name__ == "__main__":
    main(sys.argv[1])
