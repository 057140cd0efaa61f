"""The Triton kernels without a GPU: run in Triton's interpreter, or compiled for a GPU that is not here.

    TRITON_INTERPRET=1 python -m tests.pallas_kernels.triton_offline interpret
    JAX_TRITON_DUMP_DIR=DIR python -m tests.pallas_kernels.triton_offline compile 80 "H=256"

Each needs its environment before Triton is imported, so each is a process of its own.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

from oomb_jax.pallas_kernels.paged_attention import api, triton_vjp
from oomb_jax.pallas_kernels.paged_attention import triton as forward_kernels
from oomb_jax.pallas_kernels.paged_attention.cases import Case
from oomb_jax.pallas_kernels.paged_attention.triton_config import KernelTiles, Tiles
from tests.pallas_kernels.assemble import assembled
from tests.pallas_kernels.test_paged_attention import Suite, at_most_plain
from tests.pallas_kernels.triton_interpreter import interpreted_call, repair_interpreter

# float16, as the interpreter multiplies no bfloat16. With the tiles of forward, dq and dk/dv.
f16 = partial(Case, dtype="float16")
INTERPRETED = (
    # A tile of several pages, the last of them past the row's end.
    (f16(C=64, M=2, G=3, H=16, S=16, earlier=5), (32, 64), (32, 64), (16, 16)),
    # Several tiles in a page; rows shorter than a tile; padded width.
    (f16(C=100, M=1, G=2, H=24, S=64, earlier=2, rows=4, segments=True), (32, 16), (16, 32), (16, 32)),
    # A chunk that is no multiple of anything.
    (f16(C=71, M=1, G=2, H=16, S=32, earlier=3, partial=True, sinks=True), (32, 32), (64, 16), (64, 16)),
    # Tiles in which a query sees no key before it sees one.
    (f16(C=32, M=1, G=1, H=16, S=16, earlier=2, segments=True, strangers=True), (16, 16), (16, 16), (16, 16)),
)


class Interpreted(Suite):
    forward = staticmethod(partial(api.paged_attention, implementation="triton"))
    backward = staticmethod(partial(api.paged_attention_vjp, implementation="triton"))


def interpret():
    """Checks every case as the suite does."""
    repair_interpreter()
    api.unsupported_triton = lambda *_, **__: None  # it asks for a GPU
    forward_kernels.triton_call = triton_vjp.triton_call = interpreted_call
    for case, *sizes in INTERPRETED:
        tiles = [Tiles(queries=queries, keys=keys, num_warps=4, num_stages=2) for queries, keys in sizes]

        forward_kernels.tiles = triton_vjp.tiles = lambda tiles=tiles, **_: KernelTiles(*tiles)
        Interpreted().check(case, at_most_plain(case))
        if case.rows > 1:
            Interpreted().check_lists_made_before(case)


def compile_for(
    capability, *, C=4096, M=4, G=7, H=128, S=128, R=1, K=256, P=4096, L=2, segmented=False, gradient_dtype="float32"
):
    """Compiles forward and backward; prints per kernel its name, bytes spilled and bytes of shared memory."""
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    q, own, pool = array(C, M * G, H), array(C, M, H), array(L, P, M, S, H)
    gradients = array(L, P, M, S, H, dtype=gradient_dtype)
    indices = array(dtype="int32"), array(R, K, dtype="int32")
    lse = array(M * G, C, dtype="float32")
    segments = {"q_segments": None, "pool_segments": None}
    if segmented:
        segments = {"q_segments": array(C, dtype="int32"), "pool_segments": array(P, S, dtype="int32")}
    for function, arguments in (
        (forward_kernels.forward, (q, own, own, pool, pool, *indices)),
        (triton_vjp.backward, (q, own, own, pool, pool, gradients, gradients, *indices, q, lse, q)),
    ):
        traced = jax.jit(partial(function, compute_capability=capability)).trace(*arguments, **segments)
        lowered = traced.lower(lowering_platforms=("cuda",))
        print("aliases:", lowered.as_text().count("#stablehlo.output_operand_alias"))
    for ptx, spilled in assembled(capability):
        shared = int(ptx.with_suffix(".compile_info").read_text().split(":")[-1])
        print(f"kernel: {ptx.stem} {spilled} {shared}")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        interpret()
    else:
        compile_for(int(sys.argv[2]), **eval(f"dict({sys.argv[3]})"))
