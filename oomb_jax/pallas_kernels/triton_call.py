"""Calls of Triton kernels, over both ways in which jax-triton takes them.

jax-triton 0.3 hands a kernel every output, also one that shares its memory with an input; 0.4 does not. So that one
kernel serves both, its parameters are, in this order: inputs, arrays updated in place, outputs, the arrays updated in
place once more, constants. It leaves the second mention alone.
"""

import importlib.util
import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from oomb_jax.pallas_kernels.device import current_device

INSTALL = "pip install 'jax-triton>=0.3.1,<0.5'"

CAPABILITIES = {r"\bA(100|800)\b": 80, r"\bRTX 40\d0\b": 89, r"\bG?H(100|200|20|800)\b": 90}
"""By the kind of a device that is only described; it does not tell more."""


def missing() -> str | None:
    """Why no Triton kernel can be called; None if one can."""
    for name in "triton", "jax_triton":
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed ({INSTALL})"
    return None


def device_capability() -> int:
    """Compute capability of the NVIDIA GPU that is compiled for, 80 for 8.0; 0 where there is none."""
    described = jax.sharding.get_abstract_mesh().abstract_device  # compiling for a device that is not here
    if described is not None:
        return next((number for name, number in CAPABILITIES.items() if re.search(name, described.device_kind)), 0)
    device = current_device()
    if "NVIDIA" not in device.device_kind:
        return 0
    return round(10 * float(device.compute_capability))


def in_host_memory(array: jax.Array) -> bool:
    """Whether an array, traced or not, lies in pinned host memory."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


def triton_call(
    kernel: Any,
    *inputs: jax.Array,
    in_place: Sequence[jax.Array] = (),
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    grid: tuple[int, ...],
    **options: Any,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Outputs of a kernel, and the arrays of `in_place` as it left them.

    An array of `in_place` is copied unless this is its last use (in a jitted function: unless it is donated). It may
    lie in pinned host memory, and stays there. Then it is the only result: XLA puts all results of a call where one is.

    Args:
      kernel: a function under `triton.jit`; see above for its parameters.
      inputs: arrays that it reads.
      in_place: arrays that it reads and writes.
      out_type: shapes and dtypes of the outputs.
      grid: number of programs along up to three axes.
      options: `num_warps`, `num_stages`, `name`, `compute_capability` (None: that of the GPU), and the constants.
    """
    if any(map(in_host_memory, in_place)) and (out_type or len(in_place) > 1):
        raise ValueError("a kernel that updates an array in host memory has no other result")
    import jax_triton

    updated = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in in_place]
    aliases = {len(inputs) + i: len(out_type) + i for i in range(len(in_place))}
    parameters = inspect.signature(jax_triton.triton_call).parameters
    if "out_type" in parameters:
        first = len(inputs) + len(in_place) + len(out_type)
        options |= dict.fromkeys(kernel.arg_names[first : first + len(in_place)], 0)
        # The default of 0.3, and a warning where it is not said.
        options["backend_options"] = {"enable_fp_fusion": True}
    with warnings.catch_warnings():
        # 0.4 would rather have references, which JAX does not know how to take into `compute_on`.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        outputs = jax_triton.triton_call(
            *(*inputs, *in_place),
            kernel=kernel,
            grid=grid,
            input_output_aliases=aliases,
            **{"out_type" if "out_type" in parameters else "out_shape": [*out_type, *updated]},
            **options,
        )
    outputs, changed = outputs[: len(out_type)], outputs[len(out_type) :]
    return outputs, [_placed(new, array) for new, array in zip(changed, in_place, strict=True)]


def _placed(new, array):
    """A kernel's result where the array that it was made from lies; JAX takes it for one on the device."""
    return jax.device_put(new, jax.memory.Space.Host) if in_host_memory(array) else new
