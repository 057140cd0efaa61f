"""The movers in Triton without a GPU: run in Triton's interpreter, or compiled for a GPU that is not here.

    TRITON_INTERPRET=1 python -m tests.pallas_kernels.page_move_offline interpret
    JAX_TRITON_DUMP_DIR=DIR python -m tests.pallas_kernels.page_move_offline compile 80

Each needs its environment before Triton is imported, so each is a process of its own.
"""

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp

from oomb_jax.pallas_kernels.page_move import api, triton
from tests.pallas_kernels.assemble import assembled
from tests.pallas_kernels.test_page_move import CASES, check
from tests.pallas_kernels.triton_interpreter import interpreted_call, repair_interpreter


def interpret():
    """Checks every case against the reference, with blocks that a page fills, exceeds and does not divide."""
    repair_interpreter()
    api.unsupported_triton = lambda *_, **__: None  # it asks for a GPU
    triton.triton_call = interpreted_call
    triton.device_capability = lambda: 90
    for largest in 64, 2**15:
        triton.block = lambda count, itemsize, largest=largest: min(largest, 1 << (count - 1).bit_length())
        for case in CASES:
            with jax.disable_jit():
                check(case, "triton")
    print("cases:", 2 * len(CASES))


def compile_for(capability):
    """Compiles every kernel for every dtype; prints of each its name, bytes spilled, bytes of shared memory, how many
    asynchronous copies of 16 bytes a thread has in it, and its other accesses to memory."""
    L, P, M, S, H, U = 2, 4096, 4, 128, 128, 100
    array = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    pool, staged = (lambda dtype: array(L, P, M, S, H, dtype=dtype)), (lambda dtype: array(U, M, S, H, dtype=dtype))
    layer, pages, fresh = array(dtype="int32"), array(U, dtype="int32"), array(U, dtype="bool")
    scales, word = array(L, P, M, dtype="float32"), array(dtype="uint32")
    fetch = lambda dtype: (
        lambda pool, layer, pages, scales, at_hand=None: triton.fetch_pages(
            pool, layer, pages, scales, jnp.dtype(dtype), at_hand, programs=16, compute_capability=capability
        )
    )
    moved = lambda function: partial(function, programs=16, compute_capability=capability)
    for dtype in "bfloat16", "float32", "float8_e4m3fn":
        calls = [
            (fetch(dtype), (pool(dtype), layer, pages, None)),
            (fetch(dtype), (pool(dtype), layer, pages, None, (staged(dtype), pages))),
            (moved(triton.store_pages), (pool(dtype), layer, pages, staged(dtype))),
        ]
        if dtype == "float8_e4m3fn":
            calls += [(fetch(wide), (pool(dtype), layer, pages, scales)) for wide in ("bfloat16", "float32")]
        else:
            add = moved(triton.add_pages)
            arguments = pool(dtype), layer, pages, staged("float32"), fresh, pages
            calls += [(add, (*arguments, None)), *([(add, (*arguments, word))] if dtype == "bfloat16" else [])]
        for function, arguments in calls:
            jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    for ptx, spilled in assembled(capability):
        text, about = ptx.read_text(), ptx.with_suffix(".compile_info").read_text()
        shared = re.search(r"shared_mem_bytes: (\d+)", about)
        copies = len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10, ", text))
        accesses = sorted(set(re.findall(r"(?:ld|st)\.global\S*", text)))
        print(f"kernel: {ptx.stem} {spilled} {shared and shared[1]} {copies} {' '.join(accesses)}")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        interpret()
    else:
        compile_for(int(sys.argv[2]))
