"""Triton's interpreter on numpy arrays: `triton_call` without a GPU and without jax-triton."""

import jax.numpy as jnp
import numpy as np
from triton.runtime import interpreter

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


def repair_interpreter():
    """Replaces what in Triton's interpreter fails with a new numpy or differs from a GPU."""
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patched(tensor, scope):
        patch(tensor, scope)
        # Triton asks numpy for int(array), which since 2.5 takes no array with axes.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def nearest(x, input_dtype, output_dtype, mode):
        # Triton's cuts a float32 to bfloat16, where a GPU rounds to nearest.
        if (input_dtype.name, output_dtype.name) == ("fp32", "bf16"):
            return x.astype(jnp.bfloat16).view(np.uint16)
        return convert(x, input_dtype, output_dtype, mode)

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, nearest
