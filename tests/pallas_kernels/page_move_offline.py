"""The movers in Triton without a GPU: run in Triton's interpreter, or compiled for a GPU that is not here.

    TRITON_INTERPRET=1 python -m tests.pallas_kernels.page_move_offline interpret
    JAX_TRITON_DUMP_DIR=DIR python -m tests.pallas_kernels.page_move_offline compile 80

Each needs its environment before Triton is imported, so each is a process of its own.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime import interpreter

from oomb_jax.pallas_kernels.page_move import api, triton
from tests.pallas_kernels.test_page_move import CASES, check

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"} | {
    "int32": "i32",
    "uint32": "u32",
    "uint8": "u8",
}


class Host:
    """A numpy array, with what the interpreter asks a tensor for."""

    def __init__(self, array):
        self.array = np.array(array)
        self.dtype = TYPES[self.array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = storage_offset = size = stride = untyped_storage

    def new_empty(self, *_, **__):
        return self

    set_ = copy_ = new_empty


def interpreted_call(kernel, *inputs, in_place=(), out_type=(), grid, name, num_warps, num_stages, **constants):
    """`triton_call` in the interpreter. Outputs begin as NaN, 255 in float8, so what is not written shows."""
    del name, num_warps, num_stages, constants["compute_capability"]
    inputs, pools = [Host(x) for x in inputs], [Host(x) for x in in_place]
    outputs = [Host(np.full(out.shape, 255 if out.dtype == np.uint8 else np.nan, out.dtype)) for out in out_type]
    kernel[grid](*inputs, *pools, *outputs, *pools, **constants)
    return [jnp.asarray(x.array) for x in outputs], [jnp.asarray(x.array) for x in pools]


def interpret():
    """Checks every case against the reference, with blocks that a page fills, exceeds and does not divide."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        # Triton asks numpy for int(array), which since 2.5 takes no array with axes.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    convert = interpreter._convert_float

    def nearest(x, input_dtype, output_dtype, mode):
        # Triton's cuts a float32 to bfloat16, where a GPU rounds to nearest.
        if (input_dtype.name, output_dtype.name) == ("fp32", "bf16"):
            return x.astype(jnp.bfloat16).view(np.uint16)
        return convert(x, input_dtype, output_dtype, mode)

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, nearest
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
    """Compiles every kernel for every dtype; prints of each its name, bytes spilled and widest access to memory."""
    import nvidia  # from the packages of the CUDA compiler

    L, P, M, S, H, U = 2, 4096, 4, 128, 128, 100
    array = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    pool, staged = (lambda dtype: array(L, P, M, S, H, dtype=dtype)), (lambda dtype: array(U, M, S, H, dtype=dtype))
    layer, pages, fresh = array(dtype="int32"), array(U, dtype="int32"), array(U, dtype="bool")
    scales, word = array(L, P, M, dtype="float32"), array(dtype="uint32")
    fetch = lambda dtype: (
        lambda pool, layer, pages, scales: triton.fetch_pages(
            pool, layer, pages, scales, jnp.dtype(dtype), programs=16, compute_capability=capability
        )
    )
    moved = lambda function: partial(function, programs=16, compute_capability=capability)
    for dtype in "bfloat16", "float32", "float8_e4m3fn":
        calls = [
            (fetch(dtype), (pool(dtype), layer, pages, None)),
            (moved(triton.store_pages), (pool(dtype), layer, pages, staged(dtype))),
        ]
        if dtype == "float8_e4m3fn":
            calls += [(fetch(wide), (pool(dtype), layer, pages, scales)) for wide in ("bfloat16", "float32")]
        else:
            add = moved(triton.add_pages)
            arguments = pool(dtype), layer, pages, staged("float32"), fresh
            calls += [(add, (*arguments, None)), *([(add, (*arguments, word))] if dtype == "bfloat16" else [])]
        for function, arguments in calls:
            jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assembler = Path(nvidia.__path__[0]) / "cu13/bin/ptxas"  # as XLA finds it
    architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
    for ptx in sorted(Path(os.environ["JAX_TRITON_DUMP_DIR"]).glob("*/*.ptx")):
        command = [assembler, "-v", f"-arch={architecture}", ptx, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
        said = report.stdout + report.stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        accesses = sorted(set(re.findall(r"(?:ld|st)\.global\S*", ptx.read_text())))
        print(f"kernel: {ptx.stem} {spilled} {' '.join(accesses)}")


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        interpret()
    else:
        compile_for(int(sys.argv[2]))
