"""Calls of Triton kernels, over both ways in which jax-triton takes them.

jax-triton 0.3 hands a kernel every output, also one that shares its memory with an input; 0.4 does not, and takes what
is updated in place as a reference. So that one kernel serves both, its parameters are, in this order: inputs, arrays
updated in place, outputs, the arrays updated in place once more, constants. It leaves the second mention alone.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from oomb_jax.pallas_kernels.device import current_device

INSTALL = "pip install 'jax-triton>=0.3.1,<0.5'"


def missing() -> str | None:
    """Why no Triton kernel can be called; None if one can."""
    for name in "triton", "jax_triton":
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed ({INSTALL})"
    return None


def device_capability() -> int:
    """Compute capability of the NVIDIA GPU that is computed on, 80 for 8.0; 0 where there is none."""
    device = current_device()
    if "NVIDIA" not in device.device_kind:
        return 0
    return round(10 * float(device.compute_capability))


def triton_call(
    kernel: Any,
    *inputs: jax.Array,
    in_place: Sequence[jax.Array] = (),
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    grid: tuple[int, ...],
    **options: Any,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Outputs of a kernel, and the arrays of `in_place` as it left them.

    An array of `in_place` is copied unless this is its last use (in a jitted function: unless it is donated).

    Args:
      kernel: a function under `triton.jit`; see above for its parameters.
      inputs: arrays that it reads.
      in_place: arrays that it reads and writes.
      out_type: shapes and dtypes of the outputs.
      grid: number of programs along up to three axes.
      options: `num_warps`, `num_stages`, `name`, `compute_capability` (None: that of the GPU), and the constants.
    """
    import jax_triton

    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        refs = [jax.new_ref(array) for array in in_place]
        first = len(inputs) + len(in_place) + len(out_type)
        again = dict.fromkeys(kernel.arg_names[first : first + len(in_place)], 0)
        outputs = jax_triton.triton_call(
            *(*inputs, *refs),
            kernel=kernel,
            out_type=list(out_type),
            grid=grid,
            backend_options={"enable_fp_fusion": True},  # the default of 0.3, and a warning where it is not said
            **again,
            **options,
        )
        return outputs, [jax.freeze(ref) for ref in refs]
    outputs = jax_triton.triton_call(
        *(*inputs, *in_place),
        kernel=kernel,
        out_shape=[*out_type, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in in_place)],
        grid=grid,
        input_output_aliases={len(inputs) + i: len(out_type) + i for i in range(len(in_place))},
        **options,
    )
    return outputs[: len(out_type)], outputs[len(out_type) :]
